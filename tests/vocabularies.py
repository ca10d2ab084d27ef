"""Real tokenizers in the three styles whose decoders treat tokens differently, small enough for random tests."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tiny


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2 style: tokens are bytes; a decoder sees only the bytes joined."""
    return tiny.make_tokenizer()


@functools.cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """Llama-2 style: pieces with ``▁`` for a space, and ``<0x..>`` tokens for bytes no piece covers."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "▁a", "b", "é", "▁the", "中", "▁▁"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "▁")]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    strip = decoders.Strip(" ", 1, 0)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    core.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@functools.cache
def wordpiece() -> PreTrainedTokenizerFast:
    """BERT style: words with a space before each, ``##`` for what continues a word."""
    pieces = ["[UNK]", "[SEP]", "play", "##ing", "##s", "##é", "中", "don", "'", "t", ".", "##."]
    core = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.WordPiece(prefix="##")
    core.add_special_tokens(["[SEP]"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="[SEP]", unk_token="[UNK]")


STYLES: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "wordpiece": wordpiece,
}


def byte_ids(text: str, tokenizer: PreTrainedTokenizerFast | None = None) -> list[int]:
    """The ``<0x..>`` tokens of a text's UTF-8 bytes."""
    tokenizer = tokenizer or sentencepiece()
    return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]
