"""One value from ``load``, the tokenizer from transformers, a plain string as the prompt.

python examples/mlx_string_prompt.py TARGET DRAFT
"""

import sys

from transformers import AutoTokenizer

from dflash.model_mlx import load, load_draft, stream_generate

target, draft_id = sys.argv[1:]

model = load(target)
tokenizer = AutoTokenizer.from_pretrained(target)
draft = load_draft(draft_id)
# A block larger than the one a draft was trained for works; it warns once.
for response in stream_generate(
    model, draft, tokenizer, "How many positive divisors has 196?", block_size=32, max_tokens=128, temperature=0.7
):
    print(response.text, end="")
print()
