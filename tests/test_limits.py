"""Where an answer ends: stop ids, stop strings, the cap; and the figures and text that follow from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
import vocabularies
from dflash.backends.torch.target import TorchTarget
from dflash.errors import RequestError
from dflash.generate import new_output
from dflash.limits import Output
from dflash.sampling import SamplingParams
from dflash.text import text_of

END = 256  # of the byte-level tokenizer, where ids below 256 are bytes
seeded = settings(derandomize=True, deadline=None, max_examples=200)


def output(max_tokens: int = 100, stop: str | Sequence[str] = (), stop_ids: Sequence[int] = (END,)) -> Output:
    return Output(text_of(vocabularies.byte_level()), max_tokens, frozenset(stop_ids), stop)


def ids(text: str) -> list[int]:
    return vocabularies.byte_level().encode(text, add_special_tokens=False)


def run(out: Output, rounds: Sequence[Sequence[int]]) -> str:
    """Feed rounds as the loop does; return the joined text."""
    text = ""
    for new in rounds:
        if out.finish_reason is not None:
            break
        kept, piece = out.take(new)
        assert kept == list(new[: len(kept)])
        text += piece
    return text


# --- stop ids and the cap ---------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(8))
def test_stop_id_at_any_place_of_a_block_ends_the_answer_there(at: int) -> None:
    block = ids("abcdefgh")
    block[at] = END
    out = output()
    assert run(out, [block, ids("more")]) == "abcdefgh"[:at]
    assert out.tokens == block[: at + 1]
    assert (out.finish_reason, out.remaining) == ("stop", 0)


@pytest.mark.parametrize("block", [1, 2, 7, 16])
@pytest.mark.parametrize("cap", [1, 2, 3, 15, 16, 17, 31, 32, 33])
def test_exactly_the_asked_number_of_tokens_is_kept(cap: int, block: int) -> None:
    tokens = (ids("abcdefghij") * 10)[:64]
    out = output(cap)
    text = run(out, [tokens[i : i + block] for i in range(0, 64, block)])
    assert out.tokens == tokens[:cap]
    assert text == ("abcdefghij" * 10)[:cap]
    assert (out.finish_reason, out.remaining) == ("length", 0)


@pytest.mark.parametrize(
    ("before", "block", "cap", "kept", "reason"),
    [
        ("", [10, 11, END, 20, 21, 22], 5, 3, "stop"),
        ("abcdefgh", [END, 1, 2], 10, 9, "stop"),
        ("", [10, 11, 12, END], 4, 4, "stop"),
        ("", [10, 11, 12, 13, END], 4, 4, "length"),
        ("abc", [END], 4, 4, "stop"),
        ("", [END], 1, 1, "stop"),
    ],
)
def test_stop_within_the_cap_wins_and_one_beyond_is_never_reached(
    before: str, block: list[int], cap: int, kept: int, reason: str
) -> None:
    out = output(cap)
    run(out, [ids(before), block] if before else [block])
    assert (len(out.tokens), out.finish_reason) == (kept, reason)


def test_every_stop_id_counts() -> None:
    for end in (5, 106, 248044):
        out = output(stop_ids=[5, 106, 248044])
        run(out, [[64, end, 64]])
        assert (out.tokens, out.finish_reason) == ([64, end], "stop")


def test_a_token_equal_to_the_mask_id_is_an_ordinary_token() -> None:
    tokens = [101, 102, 0, 103, 104, 0, 105]
    out = output(len(tokens))
    run(out, [tokens[:3], tokens[3:]])
    assert out.tokens == tokens


def test_remaining_counts_down_and_the_cap_can_be_lowered() -> None:
    out = output(10)
    out.take([1, 2, 3])
    assert out.remaining == 7
    out.limit(5)
    assert out.remaining == 2
    out.limit(8)
    assert out.remaining == 2
    assert out.take([4, 5, 6])[0] == [4, 5]


def test_nothing_is_added_to_an_answer_that_is_over() -> None:
    out = output()
    out.take([64, END])
    assert out.take([65, 66]) == ([], "")
    assert out.tokens == [64, END]


# --- stop strings -----------------------------------------------------------------------------------


def test_stop_string_inside_a_block_keeps_its_last_token_and_no_text_of_it() -> None:
    out = output(stop="ab")
    assert run(out, [ids("xxab" + "c" * 12)]) == "xx"
    assert out.tokens == ids("xxab")
    assert out.finish_reason == "stop"


def test_stop_string_across_rounds() -> None:
    out = output(stop=["STOP"])
    assert run(out, [ids("go S"), ids("TO"), ids("P!")]) == "go "
    assert out.tokens == ids("go STOP")


def test_stop_string_completed_by_the_last_token_of_the_cap_is_a_stop() -> None:
    out = output(4, stop="cd")
    assert run(out, [ids("abcdef")]) == "ab"
    assert (out.tokens, out.finish_reason) == (ids("abcd"), "stop")


def test_stop_string_beyond_the_cap_is_not_reached_and_its_begin_is_text() -> None:
    out = output(3, stop="cd")
    assert run(out, [ids("abcdef")]) == "abc"
    assert out.finish_reason == "length"


def test_stop_string_before_a_stop_id_in_the_same_block_wins() -> None:
    out = output(stop="b")
    assert run(out, [[*ids("ab"), END]]) == "a"
    assert out.tokens == ids("ab")


def test_begin_of_a_stop_string_before_a_stop_id_is_text() -> None:
    out = output(stop="bcd")
    assert run(out, [[*ids("abc"), END]]) == "abc"


def test_stop_string_whose_last_character_is_cut_off_is_found_when_it_completes() -> None:
    first, second = ids("é")
    out = output(stop="aé")
    assert run(out, [[*ids("xa"), first], [second, *ids("y")]]) == "x"
    assert out.tokens == [*ids("xa"), first, second]


def test_held_back_text_comes_out_at_every_ending() -> None:
    half = ids("中")[:2]
    for ending in ([END], []):
        out = output(4 + len(ending))
        assert run(out, [[*ids("ab"), *half, *ending]]) == "ab\ufffd"


def test_special_tokens_are_no_text() -> None:
    tokenizer = vocabularies.byte_level()
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    out = output()
    assert run(out, [[*ids("a"), user, *ids("b"), END]]) == "ab"


def byte_fallback_answer(tokens: Sequence[int], stop: str | Sequence[str] = ()) -> tuple[Output, list[str]]:
    """An answer of a tokenizer of Mistral's kind, as ``generate`` makes one, and the text each token gave."""
    tokenizer = vocabularies.sentencepiece()
    out = new_output(SimpleNamespace(eos_ids=frozenset()), tokenizer, 10**6, stop)  # type: ignore[arg-type]
    pieces = []
    for token in tokens:
        if out.finish_reason is None:
            pieces.append(out.take([token])[1])
    return out, pieces


@pytest.mark.parametrize(
    ("stop", "kept"),
    [("\n", 2), ("\n\n", 3), ("\né", 5), ("é", 5), ("b", 6), ("a\n", 2), (["é\n", "\n\né"], 5)],
    ids=str,
)
def test_a_stop_string_of_byte_tokens_ends_on_the_token_that_completes_it(stop: Any, kept: int) -> None:
    tokenizer = vocabularies.sentencepiece()
    word, letter = tokenizer.convert_tokens_to_ids(["▁a", "b"])
    tokens = [word, *vocabularies.byte_ids("\n\né"), letter, letter]
    assert tokenizer.encode("\n", add_special_tokens=False)[-1:] == vocabularies.byte_ids("\n")
    out, pieces = byte_fallback_answer(tokens, stop)
    assert (len(out.tokens), out.finish_reason) == (kept, "stop")
    whole = "a\n\néb"
    stops = [stop] if isinstance(stop, str) else stop
    assert "".join(pieces) == whole[: min(whole.index(s) for s in stops if s in whole)]


def test_a_long_run_of_byte_tokens_flows() -> None:
    _, pieces = byte_fallback_answer(vocabularies.byte_ids("\n" * 500 + "é中"))
    assert pieces == ["\n"] * 500 + ["", "é", "", "", "中"]


# --- rounds do not matter ---------------------------------------------------------------------------


@pytest.mark.parametrize("style", vocabularies.STYLES)
@given(data=st.data())
@seeded
def test_rounds_change_neither_tokens_nor_text_nor_reason(style: str, data: st.DataObject) -> None:
    tokenizer = vocabularies.STYLES[style]()
    ordinary = [*tokenizer.encode("ab", add_special_tokens=False), tokenizer.eos_token_id]
    token = st.one_of(st.sampled_from(ordinary), st.integers(0, len(tokenizer) - 1))
    tokens = data.draw(st.lists(token, min_size=1, max_size=40))
    cap = data.draw(st.integers(1, 40))
    stop = data.draw(st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=10)))

    def answer(rounds: Sequence[Sequence[int]]) -> tuple[list[int], str, str | None]:
        out = Output(text_of(tokenizer), cap, frozenset([tokenizer.eos_token_id]), stop)
        return out.tokens, run(out, rounds), out.finish_reason

    rounds = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    assert answer(rounds)[::2] == answer([tokens])[::2]
    if answer([tokens])[2] is not None:  # text still held back comes out when the answer ends
        assert answer(rounds) == answer([tokens]) == answer([[t] for t in tokens])


# --- which ids end an answer ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_config", "of_generation", "expected"),
    [
        (None, None, {END}),
        (7, None, {END, 7}),
        (None, 8, {END, 8}),
        ([7, 9], 8, {END, 7, 8, 9}),
        (7, [8, 7], {END, 7, 8}),
        (0, [], {END, 0}),
    ],
)
def test_eos_ids_are_those_of_tokenizer_config_and_generation_config(
    of_config: Any, of_generation: Any, expected: set[int]
) -> None:
    model = tiny.model("llama", eos_token_id=of_config)
    model.generation_config.eos_token_id = of_generation
    assert TorchTarget(model, tiny.tokenizer(), "llama").eos_ids == expected


def test_no_eos_anywhere_is_no_stop_id() -> None:
    tokenizer = tiny.make_tokenizer()
    tokenizer.eos_token = None
    assert TorchTarget(tiny.model("llama"), tokenizer, "llama").eos_ids == frozenset()


# --- checks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [0, -1, 2.5, 2.0, "5", None, True, math.inf, math.nan, [5], torch.tensor(5)], ids=str)
def test_max_tokens_that_is_no_positive_whole_number_is_refused(cap: Any) -> None:
    with pytest.raises(RequestError, match="max_tokens"):
        output(cap)


def test_huge_max_tokens_costs_nothing() -> None:
    assert output(10**18).remaining == 10**18


@pytest.mark.parametrize("stop", [[""], ["a", ""], "", 5, [5], None], ids=str)
def test_bad_stop_strings_are_refused(stop: Any) -> None:
    with pytest.raises(RequestError, match="stop"):
        output(stop=stop)


def short(value: Any) -> str:
    return str(value)[:20]


NOT_A_NUMBER = [math.nan, math.inf, -math.inf, "1", None, True, [1.0], 10**400]


@pytest.mark.parametrize("value", [*NOT_A_NUMBER, -0.1, 100.1], ids=short)
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_sampling_number_outside_its_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        *(("top_k", value) for value in (-1, 2.5, "5", None, True, math.nan)),
        *(("seed", value) for value in (-1, 2.5, "5", True, 2**63)),
        *(("logit_bias", value) for value in (5, [1], {"1": 1.0}, {-1: 1.0}, {True: 1.0}, {1: math.nan})),
        *(("logit_bias", value) for value in ({1: math.inf}, {1: "1"}, {1: None}, {1: True}, {1: 10**400}, {1: 1e39})),
    ],
    ids=short,
)
def test_sampling_option_outside_its_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0, "top_p": 1, "min_p": 1.0, "top_k": 0},
        {"temperature": 100, "repetition_penalty": 0.5, "seed": 2**63 - 1},
        {"logit_bias": {0: -math.inf, 5: 2, 7: -1.5}},
    ],
    ids=short,
)
def test_values_at_the_ends_of_their_ranges_are_accepted(options: dict[str, Any]) -> None:
    assert SamplingParams(**options).greedy is (options.get("temperature", 0) == 0)
