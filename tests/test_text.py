"""Prompts in, text out: what reaches the target, and what a reader sees of its answer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import dflash
import tiny
import vocabularies
from dflash.errors import RequestError
from dflash.text import (
    REPLACEMENT,
    Detokenizer,
    StopScanner,
    byte_tokens,
    encode_prompt,
    plain_message,
    repair_decoder,
    text_of,
)

BOS = "<|begin|>"
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "héllo"}]
seeded = settings(derandomize=True, deadline=None, max_examples=150)


@pytest.fixture(scope="module")
def with_bos() -> PreTrainedTokenizerFast:
    """Puts a BOS before raw text, and prints one in its chat template."""
    return tiny.make_tokenizer(BOS)


def chat_ids(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Any] = CHAT, **options: Any) -> list[int]:
    encoded = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, **options)
    return list(encoded["input_ids"])


# --- prompts ----------------------------------------------------------------------------------------


def test_rendered_chat_gets_no_second_bos(with_bos: PreTrainedTokenizerFast) -> None:
    rendered = with_bos.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = encode_prompt(with_bos, rendered)
    assert ids == chat_ids(with_bos) == encode_prompt(with_bos, CHAT)
    assert ids.count(with_bos.bos_token_id) == 1


def test_raw_text_keeps_its_one_bos(with_bos: PreTrainedTokenizerFast) -> None:
    ids = encode_prompt(with_bos, "hi")
    assert ids == [with_bos.bos_token_id, *with_bos.encode("hi", add_special_tokens=False)]


def test_rendered_chat_without_bos_gets_none(with_bos: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(with_bos)
    tokenizer.chat_template = tiny.CHAT_TEMPLATE  # prints no BOS, and begins with a role marker
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert encode_prompt(tokenizer, rendered) == chat_ids(tokenizer)


def test_a_marker_that_is_only_marked_special_shows_rendered_text(with_bos: PreTrainedTokenizerFast) -> None:
    undeclared = PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(with_bos).backend_tokenizer, bos_token=BOS, eos_token="<|end|>"
    )
    undeclared.chat_template = tiny.CHAT_TEMPLATE
    assert "<|user|>" not in undeclared.all_special_tokens
    rendered = undeclared.apply_chat_template(CHAT[1:], tokenize=False, add_generation_prompt=True)
    assert encode_prompt(undeclared, rendered) == chat_ids(undeclared, CHAT[1:])


@pytest.mark.parametrize(
    "shape",
    [
        list,
        tuple,
        lambda ids: ids,
        lambda ids: [list(ids)],
        lambda ids: list(np.array(ids)),
        np.array,
        lambda ids: np.array([ids]),
        torch.tensor,
        lambda ids: torch.tensor([list(ids)]),
        lambda ids: [torch.tensor(ids)],
        lambda ids: [np.int64(i) for i in ids],
        lambda ids: tuple(np.uint16(i) for i in ids),
        lambda ids: [torch.tensor(i) for i in ids],
        lambda ids: np.array(ids, dtype=object),
        lambda ids: {"input_ids": list(ids)},
        lambda ids: {"input_ids": torch.tensor([list(ids)]), "attention_mask": torch.ones(1, len(ids))},
    ],
    ids=str,
)
def test_token_ids_are_taken_as_they_are_in_any_container(shape: Callable[[range], Any]) -> None:
    ids = encode_prompt(tiny.tokenizer(), shape(range(3, 6)))
    assert ids == [3, 4, 5]
    assert all(type(token) is int for token in ids)


def test_a_prompt_of_one_token_in_any_number() -> None:
    for one in (5, np.int64(5), np.uint8(5), torch.tensor(5), np.array(5)):
        assert encode_prompt(tiny.tokenizer(), [one]) == [5]
    assert encode_prompt(tiny.tokenizer(), np.array([5])) == encode_prompt(tiny.tokenizer(), torch.tensor([5])) == [5]


def test_what_apply_chat_template_returns_is_a_prompt() -> None:
    tokenizer = tiny.tokenizer()
    for options in ({}, {"return_tensors": "pt"}, {"return_tensors": "np"}, {"return_dict": False}):
        encoded = tokenizer.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True, **options)
        assert encode_prompt(tokenizer, encoded) == chat_ids(tokenizer)


@pytest.mark.parametrize(
    "prompt",
    ["", [], (), {}, [[]], {"input_ids": []}, torch.empty(0, dtype=torch.long), torch.empty(1, 0), np.array([])],
    ids=str,
)
def test_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError):
        encode_prompt(tiny.tokenizer(), prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        2.5,
        b"abc",
        torch.tensor(5),
        [1.0, 2.0],
        [True, False],
        [np.float64(1)],
        [np.bool_(True)],
        [torch.tensor(1.0)],
        [torch.tensor(True)],
        np.array([1.0, 2.0]),
        np.array([True]),
        torch.tensor([True, False]),
        ["a", "b"],
        [np.str_("a")],
        [1, "a"],
        [1, {"role": "user"}],
        [[1, 2], [3, 4]],
        torch.ones(2, 3, dtype=torch.long),
        {"role": "user", "content": "hi"},
        {"input_ids": "hi"},
        {"input_ids": None},
        "half a pair \ud83d",
        [{"role": "user", "content": "\ud83d"}],
    ],
    ids=ascii,
)
def test_malformed_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError):
        encode_prompt(tiny.tokenizer(), prompt)


def test_messages_need_a_template() -> None:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        encode_prompt(tokenizer, CHAT)


def test_text_parts_are_joined_and_null_is_the_empty_string() -> None:
    parts = [{"type": "text", "text": "hé"}, {"type": "text", "text": "llo"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    plain = {**call, "content": ""}
    assert encode_prompt(tiny.tokenizer(), [{"role": "user", "content": parts}, call]) == encode_prompt(
        tiny.tokenizer(), [{"role": "user", "content": "héllo"}, plain]
    )
    assert plain_message(call) == plain
    assert plain_message({"role": "user"})["content"] == ""


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}],
        [{"type": "text", "text": "a"}, {"type": "audio"}],
        [{"type": "text"}],
        [{"type": "text", "text": None}],
        ["text"],
        [None],
        5,
        {"type": "text", "text": "a"},
    ],
    ids=str,
)
def test_content_that_is_no_text_is_refused(content: Any) -> None:
    with pytest.raises(RequestError):
        encode_prompt(tiny.tokenizer(), [{"role": "user", "content": content}])


@pytest.mark.parametrize("role", [None, 5, ["user"]])
def test_message_without_a_role_is_refused(role: Any) -> None:
    with pytest.raises(RequestError, match="role"):
        encode_prompt(tiny.tokenizer(), [{"role": role, "content": "hi"}])


def test_thinking_flag_reaches_the_template() -> None:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = "{% if enable_thinking is defined %}{{ enable_thinking }}{% else %}unset{% endif %}"
    said = {
        flag: tokenizer.decode(encode_prompt(tokenizer, CHAT, enable_thinking=flag)) for flag in (None, True, False)
    }
    assert said == {None: "unset", True: "True", False: "False"}


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content }}",
        "{{ messages[0].content + 1 }}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_template_that_fails_is_a_request_error(template: str) -> None:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(RequestError, match="chat template refuses"):
        encode_prompt(tokenizer, CHAT)


class Answering:
    """A tokenizer whose template, in Python of its own, gives or raises what it likes."""

    chat_template = "its own"

    def __init__(self, given: Any) -> None:
        self._given = given

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        if isinstance(self._given, BaseException):
            raise self._given
        return self._given


@pytest.mark.parametrize("given", [[3, 4], (3, 4), [[3, 4]], np.array([3, 4]), {"input_ids": torch.tensor([[3, 4]])}])
def test_a_template_may_give_its_ids_in_any_container(given: Any) -> None:
    assert encode_prompt(Answering(given), CHAT) == [3, 4]


@pytest.mark.parametrize(
    "given",
    [
        None,
        5,
        "text",
        b"text",
        [],
        {},
        {"input_ids": None},
        {"input_ids": []},
        [None],
        ["a"],
        [1.0],
        [True],
        [[1], [2]],
    ],
    ids=str,
)
def test_a_template_that_gives_no_ids_is_one_sentence(given: Any) -> None:
    with pytest.raises(RequestError, match=r"^the chat template gives no token ids") as caught:
        encode_prompt(Answering(given), CHAT)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        TypeError("a\nb"), KeyError("role"), IndexError(), AttributeError("x"), RecursionError("deep"),
        RuntimeError("x"),
        NotImplementedError(), AssertionError("roles"), UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "half"),
    ],
    ids=repr,
)  # fmt: skip
def test_whatever_a_template_raises_is_one_sentence(error: Exception) -> None:
    with pytest.raises(RequestError, match=r"^the chat template refuses these messages: \S") as caught:
        encode_prompt(Answering(error), CHAT)
    assert "\n" not in str(caught.value)


# --- decoders ---------------------------------------------------------------------------------------


def hybrid(decoder: Any) -> PreTrainedTokenizerFast:
    """Splits into bytes on the way in, whatever its decoder makes of them."""
    core = Tokenizer(models.BPE(vocab={"Ġ": 0, "H": 1, "i": 2, "Ċ": 3}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if decoder is not None:
        core.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize("decoder", [None, decoders.Metaspace(), decoders.Sequence([decoders.Fuse()])])
def test_byte_level_pre_tokenizer_gets_the_byte_level_decoder(decoder: Any) -> None:
    tokenizer = hybrid(decoder)
    ids = tokenizer.encode("Hi Hi\n", add_special_tokens=False)
    assert "Ġ" in tokenizer.decode(ids)
    repair_decoder(tokenizer)
    assert tokenizer.decode(ids) == "Hi Hi\n"


@pytest.mark.parametrize("style", vocabularies.STYLES)
def test_sound_decoder_is_left_alone(style: str) -> None:
    tokenizer = vocabularies.STYLES[style]()
    before = tokenizer.backend_tokenizer.to_str()
    repair_decoder(tokenizer)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_only_byte_fallback_decoders_have_byte_tokens() -> None:
    assert byte_tokens(vocabularies.byte_level()) == byte_tokens(vocabularies.wordpiece()) == {}
    tokenizer = vocabularies.sentencepiece()
    known = byte_tokens(tokenizer)
    assert [known[token] for token in vocabularies.byte_ids("aé\n")] == list("aé\n".encode())
    assert sorted(known.values()) == list(range(256))


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (b"\xe4\xb8\xad\xff", "中\ufffd"),
        (b"\xf0\x9f\x98", "\ufffd" * 3),
        (b"\xe4\xb8\xad\xf0\x9f\x98A", "中\ufffd\ufffd\ufffdA"),
        (b"\xe0\x80\x80", "\ufffd" * 3),
        (b"\xed\xa0\x80", "\ufffd" * 3),
        (b"\xf4\x90\x80\x80", "\ufffd" * 4),
        (b"\xc0\xaf", "\ufffd" * 2),
        (b"\n\n\xff\n", "\n\n\ufffd\n"),
    ],
)
def test_byte_tokens_are_read_as_sentencepiece_reads_them(run: bytes, text: str) -> None:
    """What sentencepiece 0.2 decodes these bytes to; the decoder of ``tokenizers`` makes all of them marks."""
    tokenizer = vocabularies.sentencepiece()
    tokens = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in run]
    word, end = tokenizer.convert_tokens_to_ids(["▁a", "</s>"])
    assert text_of(tokenizer)([word, *tokens, word]) == f"a{text} a"
    for at in range(1, len(tokens)):
        assert text_of(tokenizer)([*tokens[:at], end, *tokens[at:]]) == text, "special tokens do not end a run"


@given(text=st.text("aé中😀 \n\u2028", max_size=30))
@seeded
def test_runs_that_are_whole_are_as_the_decoder_has_them(text: str) -> None:
    tokenizer = vocabularies.sentencepiece()
    for tokens in (vocabularies.byte_ids(text), tokenizer.encode(text, add_special_tokens=False)):
        own = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert text_of(tokenizer)(tokens) == own


# --- streaming --------------------------------------------------------------------------------------


class Counted:
    """A decode function that counts the tokens it was given."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.tokens = 0

    def __call__(self, ids: list[int]) -> str:
        self.tokens += len(ids)
        return self.decode(ids)


def stream(tokenizer: PreTrainedTokenizerFast, rounds: Sequence[Sequence[int]]) -> list[str]:
    detokenizer = Detokenizer(text_of(tokenizer))
    return [*(detokenizer.add(tokens) for tokens in rounds), detokenizer.finish()]


@st.composite
def tokens_in_rounds(draw: st.DrawFn, size: int, prefer: Sequence[int] = ()) -> list[list[int]]:
    """Random tokens, biased to the difficult ones, in rounds of random lengths; and stretches of one token."""
    token = st.one_of(st.integers(0, size - 1), st.sampled_from(prefer or range(size)))
    run = st.one_of(st.lists(token, max_size=20), st.builds(lambda t, n: [t] * n, token, st.integers(1, 70)))
    tokens = [t for part in draw(st.lists(run, max_size=6)) for t in part]
    cuts = sorted(draw(st.sets(st.integers(0, len(tokens)), max_size=30)))
    return [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


DIFFICULT = {
    "byte-level": vocabularies.byte_level().encode("é中😀 a\n", add_special_tokens=False),
    "sentencepiece": vocabularies.byte_ids("é中😀 a\n")
    + vocabularies.sentencepiece().convert_tokens_to_ids(["▁", "<0xFF>"]),
    "wordpiece": vocabularies.wordpiece().convert_tokens_to_ids(["##ing", "##é"]),
}


@pytest.mark.parametrize("style", vocabularies.STYLES)
@given(data=st.data())
@seeded
def test_pieces_are_the_text_whatever_the_rounds(style: str, data: st.DataObject) -> None:
    """And at every moment they begin it: no mark is in them that is not in one decode of all tokens."""
    tokenizer = vocabularies.STYLES[style]()
    rounds = data.draw(tokens_in_rounds(len(tokenizer), DIFFICULT[style]))
    whole = text_of(tokenizer)([token for tokens in rounds for token in tokens])
    so_far = ""
    for piece in stream(tokenizer, rounds):
        so_far += piece
        assert whole.startswith(so_far)
    assert so_far == whole


def one_by_one(tokens: Sequence[int]) -> list[list[int]]:
    return [[token] for token in tokens]


@pytest.mark.parametrize("text", ["ď", "😀", "a😀😀b", "中文中文", "👩\u200d👩\u200d👧", "é中😀é"])
def test_no_half_character_is_given_out(text: str) -> None:
    byte_level = vocabularies.byte_level().encode(text, add_special_tokens=False)
    for tokenizer, tokens in (
        (vocabularies.byte_level(), byte_level),
        (vocabularies.sentencepiece(), vocabularies.byte_ids(text)),
    ):
        for rounds in (one_by_one(tokens), [tokens], [tokens[:5], tokens[5:]]):
            pieces = stream(tokenizer, rounds)
            assert "".join(pieces) == text
            assert REPLACEMENT not in "".join(pieces)


def test_bytes_that_never_complete_come_out_as_the_decoder_prints_them() -> None:
    tokenizer = vocabularies.byte_level()
    lead = tokenizer.encode("中", add_special_tokens=False)[:2]
    pieces = stream(tokenizer, one_by_one([*lead, *tokenizer.encode(" a", add_special_tokens=False)]))
    assert pieces == ["", "", REPLACEMENT + " ", "a", ""]


def test_every_lone_byte_before_a_space_streams_without_an_error() -> None:
    tokenizer = vocabularies.sentencepiece()
    decode = text_of(tokenizer)
    space = tokenizer.convert_tokens_to_ids("▁a")
    for byte in sorted(byte_tokens(tokenizer)):
        assert "".join(stream(tokenizer, [[byte], [space]])) == decode([byte, space])


def test_cut_off_character_is_held_until_it_completes_or_the_answer_ends() -> None:
    tokenizer = vocabularies.byte_level()
    first, second = tokenizer.encode("é", add_special_tokens=False)
    assert stream(tokenizer, [[first], [second]]) == ["", "é", ""]
    assert stream(tokenizer, [[first]]) == ["", REPLACEMENT]


def test_bytes_of_a_character_may_lie_apart() -> None:
    tokenizer = vocabularies.byte_level()
    *begun, last = tokenizer.encode("😀", add_special_tokens=False)
    letters = tokenizer.encode("a" * 45, add_special_tokens=False)
    apart = [begun[0], *[tokenizer.eos_token_id] * 6, *begun[1:]]
    assert stream(tokenizer, [[*letters, *apart], [last], letters]) == ["a" * 45, "😀", "a" * 45, ""]


def test_text_without_spaces_flows() -> None:
    tokenizer = vocabularies.byte_level()
    tokens = tokenizer.encode("中文" * 25, add_special_tokens=False)
    characters = [tokens[i : i + 3] for i in range(0, len(tokens), 3)]
    assert stream(tokenizer, characters) == [*("中文" * 25), ""]


def test_characters_of_byte_tokens_are_given_out_as_they_complete() -> None:
    tokenizer = vocabularies.sentencepiece()
    word = tokenizer.convert_tokens_to_ids("▁a")
    emoji, accented = vocabularies.byte_ids("😀"), vocabularies.byte_ids("é")
    assert stream(tokenizer, [[word], emoji[:3], [*emoji[3:], *accented[:1]], accented[1:], [word]]) == [
        "a",
        "",
        "😀",
        "é",
        " a",
        "",
    ]


def test_pieces_begin_with_their_spaces() -> None:
    tokenizer = vocabularies.sentencepiece()
    tokens = tokenizer.convert_tokens_to_ids(["▁the", "▁a", "b", "▁the"])
    assert stream(tokenizer, one_by_one(tokens)) == ["the", " a", "b", " the", ""]
    tokenizer = vocabularies.wordpiece()
    tokens = tokenizer.convert_tokens_to_ids(["play", "##ing", "don", "##s", "中"])
    assert stream(tokenizer, one_by_one(tokens)) == ["play", "ing", " don", "s", " 中", ""]


def test_streamed_answer_of_byte_tokens_is_one_decode_of_all() -> None:
    tokenizer = vocabularies.sentencepiece()
    target = tiny.TorchTarget(tiny.model("llama", vocab_size=len(tokenizer)), tokenizer, "bytes")
    responses = list(dflash.stream_generate(target, "ngram", tokenizer, [5, 70, 200], max_tokens=100, seed=3))
    decode = text_of(tokenizer)
    assert "".join(r.text for r in responses) == decode([token for r in responses for token in r.tokens])


def long_answers() -> dict[str, tuple[str, list[int]]]:
    chinese, garbage = vocabularies.byte_level().encode("中文", add_special_tokens=False), [255]
    emoji, bad = vocabularies.byte_ids("😀"), vocabularies.sentencepiece().convert_tokens_to_ids("<0xFF>")
    spaced = vocabularies.sentencepiece().convert_tokens_to_ids(["▁the", "b"])
    return {
        "words": ("sentencepiece", spaced),
        "three bytes a character": ("byte-level", chinese),
        "bytes that are no text": ("byte-level", garbage),
        "one run of byte tokens": ("sentencepiece", emoji),
        "newlines": ("sentencepiece", vocabularies.byte_ids("\n")),
        "a run that is no text": ("sentencepiece", [*vocabularies.byte_ids("\n"), bad]),
        "byte tokens and words": ("sentencepiece", [*emoji, *spaced]),
        "special tokens only": ("byte-level", [vocabularies.byte_level().eos_token_id]),
        "special tokens in a run": ("sentencepiece", [vocabularies.sentencepiece().eos_token_id]),
        "one endless word": ("wordpiece", vocabularies.wordpiece().convert_tokens_to_ids(["##ing", "##s"])),
    }


@pytest.mark.parametrize("answer", long_answers())
def test_cost_grows_in_line_with_the_answer(answer: str) -> None:
    style, period = long_answers()[answer]
    tokens = (period * 3000)[:3000]
    tokenizer = vocabularies.STYLES[style]()
    counted = Counted(text_of(tokenizer))
    detokenizer = Detokenizer(counted)
    text = "".join([*(detokenizer.add([token]) for token in tokens), detokenizer.finish()])
    assert text == counted.decode(tokens)
    assert counted.tokens < 60 * len(tokens)


# --- stop strings -----------------------------------------------------------------------------------


def scan(stop: Sequence[str], pieces: Sequence[str]) -> tuple[str, bool]:
    """Text let through until a stop string is found, and whether one was."""
    scanner, text = StopScanner(stop), ""
    for piece in pieces:
        text += scanner.add(piece)
        if scanner.found:
            return text, True
    return text + scanner.finish(), False


@pytest.mark.parametrize(
    ("stop", "pieces", "expected"),
    [
        (["ab"], ["xxab" + "c" * 60], ("xx", True)),
        (["ab"], ["a", "b"], ("", True)),
        (["END"], ["text E", "N", "D more"], ("text ", True)),
        (["END"], ["text E", "N", "E"], ("text ENE", False)),
        (["aab"], ["a", "a", "a", "b"], ("a", True)),
        (["one", "two"], ["it is two or one"], ("it is ", True)),
        (["abcd", "bc"], ["abcd"], ("a", True)),
        (["abcd", "bc"], ["a", "b", "c", "d"], ("a", True)),
        (["abcd", "bc"], ["xabcd"], ("xa", True)),
        (["bc", "abc"], ["abc"], ("", True)),
        (["\n\n"], ["a\n", "\nb"], ("a", True)),
        ("END", ["the END"], ("the ", True)),
        ([], ["anything"], ("anything", False)),
    ],
)
def test_stop_string_ends_the_text_before_it(stop: Any, pieces: list[str], expected: tuple[str, bool]) -> None:
    assert scan(stop, pieces) == expected


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(["<|im_end|>", "stop"])
    assert scanner.add("hi <|im") == "hi "
    assert scanner.add("age") == "<|image"
    assert scanner.add("st") == ""
    assert scanner.finish() == "st"


def first_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """By definition: read character by character until the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("ab", max_size=8), max_size=6),
)
@seeded
def test_stop_strings_do_not_depend_on_the_pieces(stop: list[str], pieces: list[str]) -> None:
    assert scan(stop, pieces) == first_stop("".join(pieces), stop)


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [5], 5, None, [None], {"a": 1}], ids=str)
def test_bad_stop_strings_are_refused(stop: Any) -> None:
    with pytest.raises(RequestError, match="stop"):
        StopScanner(stop)
