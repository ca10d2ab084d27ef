"""The MLX entry points by the names the public examples use: ``load``, ``load_draft``, ``stream_generate``.

    from dflash.model_mlx import load, load_draft, stream_generate

    model, tokenizer = load("<target>")
    draft = load_draft("<draft>")
    for response in stream_generate(model, draft, tokenizer, "<prompt>", block_size=16, max_tokens=128):
        print(response.text, end="")

What they return works with the calls of ``dflash`` too; those choose the backend by the machine.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash import packages

packages.need(packages.BACKENDS["mlx"], "for dflash.model_mlx")

from mlx_lm.sample_utils import make_sampler  # noqa: E402
from mlx_lm.tokenizer_utils import TokenizerWrapper  # noqa: E402

from dflash import stream_generate as _stream_generate  # noqa: E402
from dflash.backends.mlx import load as backend  # noqa: E402
from dflash.backends.mlx.draft import DFlashDraftModel  # noqa: E402
from dflash.backends.mlx.sampler import Processor, Sampler  # noqa: E402
from dflash.backends.mlx.target import MlxTarget  # noqa: E402
from dflash.decode import PREFILL_CHUNK  # noqa: E402
from dflash.errors import RequestError  # noqa: E402
from dflash.generate import DraftLike, Response  # noqa: E402
from dflash.sampling import SamplingParams  # noqa: E402
from dflash.text import Prompt  # noqa: E402

__all__ = ["load", "load_draft", "stream_generate"]


def load(
    model_id: str | Path,
    dtype: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
) -> MlxTarget:
    """Load a target as mlx-lm does, quantized or not. Also unpacks as ``model, tokenizer``.

    Args:
        model_id: a hub id, a local folder, a ``.gguf`` file, or the alias ``smollm2-135m``.
        dtype: "float32", "bfloat16" or "float16"; by default float32 on CPU, elsewhere the checkpoint's own.
        kv_bits: keep keys and values of full attention in 4 or 8 bits; None leaves them as they are.
        kv_group_size: numbers that share a scale then.

    Raises:
        as ``dflash.load``; RequestError too for a cache that cannot be quantized so.
    """
    target = backend.load(model_id, dtype, None, revision, trust_remote_code)
    if kv_bits is not None:
        backend.quantize_cache(target, kv_bits, kv_group_size)
    return target


def load_draft(
    draft_id: str | Path,
    sliding_window_size: int | None = None,
    dtype: Any = None,
    revision: str | None = None,
    *,
    bits: int | None = None,
    min_confidence: float | None = None,
) -> DFlashDraftModel:
    """Load a DFlash draft in the published format. See ``dflash.load_draft``."""
    return backend.load_draft(draft_id, sliding_window_size, dtype, None, revision, bits, min_confidence)


def stream_generate(
    model: MlxTarget,
    draft: DraftLike,
    tokenizer: Any,
    prompt: Prompt,
    block_size: int | None = None,
    max_tokens: int = 256,
    temperature: float = 0.0,
    sampler: Sampler | None = None,
    logits_processors: Sequence[Processor] | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    *,
    enable_thinking: bool | None = None,
    verification: str = "match",
    prefill_chunk: int = PREFILL_CHUNK,
) -> Generator[Response, None, None]:
    """Answer one prompt, round by round. See ``dflash.stream_generate`` for what is not described here.

    Args:
        tokenizer: a transformers tokenizer, mlx-lm's wrapper of one, or None for the target's own.
        sampler: mlx-lm's kind, log-probabilities [1, vocab] -> token [1]; by default as ``temperature`` says. The
            target's own token is drawn with it at every position, and drafts stand while they are what was drawn.
        logits_processors: mlx-lm's kind, (tokens so far [n], scores [1, vocab]) -> scores [1, vocab], called at
            every position with the prefix it would have.

    With either, the answer is the one mlx-lm itself gives with them, seeded with ``mx.random.seed`` or not.

    Raises:
        RequestError: a prompt or an option that cannot be served, a sampler beside sampling options among them.
        IncompatibleDraft: the draft was made for another target.
    """
    if not isinstance(model, MlxTarget):
        raise RequestError(f"model must come from dflash.model_mlx.load, not be a {type(model).__name__}")
    if isinstance(tokenizer, TokenizerWrapper):
        tokenizer = tokenizer._tokenizer
    if sampler is not None or logits_processors:
        options = (top_p != 1.0, top_k, min_p, repetition_penalty != 1.0, logit_bias, seed is not None)
        if any(options) or (sampler is not None and temperature):
            raise RequestError(
                "a sampler or logits processor says how to sample: leave temperature (beside a sampler), top_p, top_k, "
                "min_p, repetition_penalty, logit_bias and seed out, or leave it out"
            )
        checked = SamplingParams(temperature)
        model = model.sampled_by(sampler or make_sampler(checked.temperature), logits_processors or ())
        temperature = 0.0
    return _stream_generate(
        model, draft, tokenizer, prompt, block_size, max_tokens, temperature, top_p, top_k, min_p,
        repetition_penalty, logit_bias, seed, stop,
        enable_thinking=enable_thinking, verification=verification, prefill_chunk=prefill_chunk,
    )  # fmt: skip
