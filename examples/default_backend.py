"""The same calls on the machine's own backend: MLX on Apple silicon, PyTorch elsewhere.

python examples/default_backend.py TARGET DRAFT
"""

import sys

from dflash import load, load_draft, stream_generate

target, draft_id = sys.argv[1:]

model, tokenizer = load(target)
draft = load_draft(draft_id)
messages = [{"role": "user", "content": "How many positive divisors has 196?"}]
for response in stream_generate(model, draft, tokenizer, messages, max_tokens=128):
    print(response.text, end="", flush=True)
print(f"\n{response.generation_tokens} tokens, {response.generation_tps:.1f} a second")
