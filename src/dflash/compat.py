"""Is this draft made for this target? Asked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash import jsontext
from dflash.draft_config import DFlashConfig
from dflash.errors import IncompatibleDraft
from dflash.protocols import Target


def check_fit(name: str, config: DFlashConfig, folder: Path | None, target: Target) -> None:
    """Compare a draft with a target by content, not by name.

    Args:
        name: of the draft, for messages.
        folder: of the draft; a tokenizer lying there is compared too.

    Raises:
        IncompatibleDraft: layer count, width, taps, vocabulary, mask token or tokenizer do not fit.
    """

    def refuse(why: str) -> IncompatibleDraft:
        return misfit(name, target, why)

    if config.hidden_size != target.hidden_size:
        raise refuse(f"it is {config.hidden_size} wide, the target {target.hidden_size}")
    if config.num_target_layers not in (None, target.num_layers):
        raise refuse(f"it was made for {config.num_target_layers} layers, the target has {target.num_layers}")
    if max(config.target_layer_ids) >= target.num_layers:
        raise refuse(
            f"it reads layer {max(config.target_layer_ids)}, but the target's layers are 0 to {target.num_layers - 1}"
        )
    if config.mask_token_id >= target.vocab_size:
        raise refuse(
            f"its mask token {config.mask_token_id} is no row of the target's embedding (0 to {target.vocab_size - 1})"
        )
    used = 1 + max(target.tokenizer.get_vocab().values(), default=0) if target.tokenizer is not None else None
    smaller = min(config.vocab_size, target.vocab_size)
    # Embeddings are padded to round sizes: only ids that text can have must agree.
    if config.vocab_size != target.vocab_size and (used is None or smaller < used):
        raise refuse(f"its vocabulary has {config.vocab_size} tokens, the target's {target.vocab_size}")
    if folder is not None and target.tokenizer is not None:
        _check_tokenizer(folder / "tokenizer.json", target, refuse)


def misfit(name: str, target: Target, why: str) -> IncompatibleDraft:
    """What to raise where a draft of this name does not fit."""
    return IncompatibleDraft(f"draft {name} does not fit target {target.name}: {why}")


def _check_tokenizer(path: Path, target: Target, refuse: Any) -> None:
    """A draft folder need not hold a tokenizer; one that lies there must give every id the same token."""
    if not path.is_file():
        return
    try:
        own = _vocabulary(jsontext.parse(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise refuse(f"its tokenizer.json cannot be read ({error})") from error
    theirs: Mapping[str, int] = target.tokenizer.get_vocab()
    differing = [token for token, index in own.items() if theirs.get(token, index) != index]
    absent = [token for token in own if token not in theirs]
    if differing or len(absent) > len(own) // 100:
        example = (differing or absent)[0]
        raise refuse(
            f"their tokenizers differ: token {example!r} is {own[example]} in the draft's and "
            f"{theirs.get(example, 'absent')} in the target's"
        )


def _vocabulary(spec: Mapping[str, Any]) -> dict[str, int]:
    vocab = spec["model"]["vocab"]
    if isinstance(vocab, list):  # unigram models list [piece, score]
        vocab = {piece: index for index, (piece, _) in enumerate(vocab)}
    return {**vocab, **{token["content"]: token["id"] for token in spec.get("added_tokens", [])}}
