"""Two values from ``load``, an applied chat template as the prompt, the throughput read off the last response.

python examples/mlx_chat.py TARGET DRAFT
"""

import sys

from dflash.model_mlx import load, load_draft, stream_generate

target, draft_id = sys.argv[1:]

model, tokenizer = load(target)
draft = load_draft(draft_id, sliding_window_size=None)
prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": "How many positive divisors has 196?"}], tokenize=False, add_generation_prompt=True
)
for r in stream_generate(model, draft, tokenizer, prompt, block_size=16, max_tokens=2048, temperature=0.6):
    print(r.text, end="", flush=True)
print(f"\n{r.generation_tps:.1f} tokens a second")
