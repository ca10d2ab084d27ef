"""Is this draft made for this target? Each refusal is one sentence that names both sides."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from dflash.compat import check_fit
from dflash.errors import IncompatibleDraft
from dflash.sampling import SamplingParams

TOKENS = 260  # of the byte-level tokenizer: what text can have


def target(**fields: Any) -> Any:
    """What is asked of a target, of one named "big"."""
    sizes = {"hidden_size": 32, "num_layers": 36, "vocab_size": 300}
    return SimpleNamespace(**{"name": "big", "tokenizer": tiny.tokenizer(), **sizes, **fields})


def check(of: Any, folder: Path | None = None, **fields: Any) -> None:
    made_for = {"target_layer_ids": (1, 9, 17, 25, 33), "mask_token_id": 299}
    check_fit("small", tiny.draft_config(of, **{**made_for, **fields}), folder, of)


def refusal(of: Any, folder: Path | None = None, **fields: Any) -> str:
    with pytest.raises(IncompatibleDraft) as caught:
        check(of, folder, **fields)
    sentence = str(caught.value)
    assert sentence.startswith("draft small does not fit target big: ")
    assert "\n" not in sentence
    return sentence


def test_a_draft_made_for_the_target_fits() -> None:
    check(target())
    check(target(), num_target_layers=None)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": 64}, ("64 wide", "the target 32")),
        ({"num_target_layers": 48}, ("48 layers", "the target has 36")),
        ({"num_target_layers": None, "target_layer_ids": (1, 40)}, ("layer 40", "0 to 35")),
        ({"mask_token_id": 300}, ("mask token 300", "0 to 299")),
        ({"vocab_size": 200}, ("200 tokens", "the target's 300")),
    ],
    ids=str,
)
def test_refusal_names_both_sides(fields: dict[str, Any], named: tuple[str, str]) -> None:
    sentence = refusal(target(), **fields)
    assert all(part in sentence for part in named)


def test_taps_beyond_a_shallower_target_are_refused() -> None:
    assert "layer 33" in refusal(target(num_layers=32), num_target_layers=None)


@pytest.mark.parametrize(("of_draft", "of_target"), [(300, 300), (320, 300), (300, 320), (TOKENS, 300), (300, TOKENS)])
def test_vocabularies_that_differ_by_padding_fit(of_draft: int, of_target: int) -> None:
    check(target(vocab_size=of_target), vocab_size=of_draft, mask_token_id=5)


@pytest.mark.parametrize(("of_draft", "of_target"), [(TOKENS - 1, 300), (300, TOKENS - 1), (64, 300), (300, 64)])
def test_vocabularies_that_differ_in_tokens_of_text_do_not_fit(of_draft: int, of_target: int) -> None:
    sentence = refusal(target(vocab_size=of_target), vocab_size=of_draft, mask_token_id=5)
    assert str(of_draft) in sentence and str(of_target) in sentence


def test_without_a_tokenizer_vocabularies_must_be_equal() -> None:
    check(target(tokenizer=None))
    assert "320" in refusal(target(tokenizer=None), vocab_size=320)


# --- the draft's own tokenizer ----------------------------------------------------------------------


def tokenizer_json() -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(tiny.make_tokenizer().backend_tokenizer.to_str())
    return spec


def folder_with(tmp_path: Path, spec: Any, **layout: Any) -> Path:
    (tmp_path / "tokenizer.json").write_text(spec if isinstance(spec, str) else json.dumps(spec, **layout))
    return tmp_path


@pytest.mark.parametrize("layout", [{}, {"indent": 4}, {"sort_keys": True, "ensure_ascii": False}], ids=str)
def test_same_tokenizer_in_another_layout_fits(tmp_path: Path, layout: dict[str, Any]) -> None:
    check(target(), folder_with(tmp_path, tokenizer_json(), **layout))


def test_two_swapped_tokens_are_refused(tmp_path: Path) -> None:
    spec = tokenizer_json()
    vocab = spec["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    sentence = refusal(target(), folder_with(tmp_path, spec))
    assert "tokenizers differ" in sentence and "'a'" in sentence


def test_a_swapped_special_token_is_refused(tmp_path: Path) -> None:
    spec = tokenizer_json()
    for token in spec["added_tokens"]:
        token["id"] = {256: 257, 257: 256}.get(token["id"], token["id"])
    assert "tokenizers differ" in refusal(target(), folder_with(tmp_path, spec))


def test_a_mask_token_of_the_drafts_own_fits(tmp_path: Path) -> None:
    spec = tokenizer_json()
    spec["added_tokens"].append({**spec["added_tokens"][0], "content": "<|mask|>", "id": 299})
    check(target(), folder_with(tmp_path, spec))


def test_a_smaller_part_of_the_same_vocabulary_fits(tmp_path: Path) -> None:
    spec = tokenizer_json()
    spec["added_tokens"] = spec["added_tokens"][:1]
    check(target(), folder_with(tmp_path, spec))


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    spec = tokenizer_json()
    spec["model"]["vocab"] = {f"{token}x": i for token, i in spec["model"]["vocab"].items()}
    assert "absent" in refusal(target(), folder_with(tmp_path, spec))


def test_unigram_pieces_are_compared_too(tmp_path: Path) -> None:
    pieces = [["a", -1.0], ["b", -2.0], ["c", -3.0]]
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1, "c": 2})
    folder = folder_with(tmp_path, {"model": {"type": "Unigram", "vocab": pieces}})
    check(target(tokenizer=tokenizer), folder)
    folder_with(tmp_path, {"model": {"type": "Unigram", "vocab": [pieces[1], pieces[0], pieces[2]]}})
    assert "tokenizers differ" in refusal(target(tokenizer=tokenizer), folder)


@pytest.mark.parametrize("spec", ["", "{", "[]", "5", "{}", '{"model": 5}', '{"model": {"vocab": 5}}', "[" * 100_000])
def test_broken_tokenizer_file_is_refused(tmp_path: Path, spec: str) -> None:
    assert "tokenizer.json cannot be read" in refusal(target(), folder_with(tmp_path, spec))


# --- through the draft ------------------------------------------------------------------------------


def test_a_loaded_draft_refuses_another_target_before_it_drafts(tmp_path: Path) -> None:
    draft = tiny.draft(tiny.target("llama"), num_target_layers=4)
    other = tiny.TorchTarget(tiny.model("llama", num_hidden_layers=3), tiny.tokenizer(), "shallow")
    with pytest.raises(IncompatibleDraft, match=r"DFlashDraftModel .* shallow"):
        draft.start(other, [SamplingParams()], "match", 8)
    draft.start(tiny.target("llama"), [SamplingParams()], "match", 8)
