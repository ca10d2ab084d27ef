"""Answers by the target: the right ones, each once, whatever interrupts the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dflash
import tiny
from dflash.backends.torch.target import TorchTarget
from dflash.cli.prompts import read_file
from dflash.prompts import Conversation, read_prompts, spread
from dflash.sampling import SamplingParams
from dflash.train.data import read_corpus
from dflash.train.regenerate import Progress, Settings, read_answers, regenerate, settings_file, settings_of

TALKS = [
    Conversation(0, "a", ("hello",)),
    Conversation(1, "a", ("one two", "and three")),
    Conversation(3, "b", ("x",)),
    Conversation(7, "b", ("a longer question than the others", "why", "how")),
]


@pytest.fixture(scope="module")
def target() -> TorchTarget:
    return TorchTarget(tiny.model("llama", vocab_size=272), tiny.make_tokenizer(), "tiny llama")


def settings(**options: Any) -> Settings:
    return Settings("tiny llama", **{"max_tokens": 12, **options})


def test_answers_are_the_targets_own_and_turns_build_on_them(target: TorchTarget, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    done = regenerate(target, None, TALKS, file, settings(), batch_size=3)
    records = {record["id"]: record for record in read_answers(file)}
    assert set(records) == {"0.0", "1.0", "1.1", "3.0", "7.0", "7.1", "7.2"}
    assert (done.done, done.total, done.failed) == (7, 7, {})
    for record in records.values():
        own = dflash.generate(target, None, None, record["messages"], max_tokens=12)
        assert record["answer_ids"] == own.tokens
        assert record["answer"] == own.text
        assert record["finish_reason"] == own.finish_reason
        ids = target.tokenizer.apply_chat_template(record["messages"], add_generation_prompt=True, return_dict=True)
        assert record["prompt_ids"] == ids["input_ids"]
    assert records["7.2"]["messages"][3]["content"] == records["7.1"]["answer"]


def test_a_drafter_changes_nothing_but_the_time(target: TorchTarget, tmp_path: Path) -> None:
    regenerate(target, None, TALKS, tmp_path / "a.jsonl", settings())
    regenerate(target, "ngram", TALKS, tmp_path / "b.jsonl", settings())
    by_id = [sorted(read_answers(tmp_path / name), key=lambda r: r["id"]) for name in ("a.jsonl", "b.jsonl")]
    assert by_id[0] == by_id[1]


def test_separators_inside_a_text_do_not_end_its_line(target: TorchTarget, tmp_path: Path) -> None:
    odd = "one\u2028two\u0085three\x0cfour\x1e"
    (tmp_path / "p.jsonl").write_text(json.dumps({"turns": [odd]}, ensure_ascii=False) + "\n", encoding="utf-8")
    prompts = read_prompts(tmp_path / "p.jsonl").conversations
    regenerate(target, None, prompts, tmp_path / "a.jsonl", settings())
    assert [r["messages"][0]["content"] for r in read_answers(tmp_path / "a.jsonl")] == [odd]
    assert read_corpus([tmp_path / "a.jsonl"], 0, 64).train
    assert [q.text for q in read_file(tmp_path / "p.jsonl")] == [odd]


@pytest.mark.parametrize("stop_after", [1, 3, 6])
def test_a_killed_run_goes_on_without_repeating_or_losing(target: TorchTarget, tmp_path: Path, stop_after: int) -> None:
    file = tmp_path / "answers.jsonl"
    options = settings(sampling=SamplingParams(temperature=1.0, seed=5))

    def killed(progress: Progress) -> None:
        if progress.done >= stop_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate(target, None, TALKS, file, options, 2, killed)
    with file.open("a") as torn:
        torn.write('{"id": "9.0", "prompt_ids": [1, 2')  # a line cut off by the kill
    regenerate(target, None, TALKS, file, options, 2)
    regenerate(target, None, TALKS, tmp_path / "whole.jsonl", options, 4)
    ids = [record["id"] for record in read_answers(file)]
    assert len(ids) == len(set(ids)) == 7
    whole = {record["id"]: record for record in read_answers(tmp_path / "whole.jsonl")}
    assert {record["id"]: record for record in read_answers(file)} == whole


def test_no_prompt_is_lost_between_batches(target: TorchTarget, tmp_path: Path) -> None:
    talks = [Conversation(i, "a", (f"question {i}",)) for i in range(19)]
    done = regenerate(target, None, talks, tmp_path / "a.jsonl", settings(max_tokens=2), batch_size=1)
    assert done.done == 19 == len(read_answers(tmp_path / "a.jsonl"))


def test_reading_changes_no_file_and_only_what_was_begun_here_is_appended_to(
    target: TorchTarget, tmp_path: Path
) -> None:
    file = tmp_path / "answers.jsonl"
    regenerate(target, None, TALKS[:2], file, settings())
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])  # as editors leave it: the last answer counts
    assert len(read_answers(file)) == 3 == len(read_corpus([file], 0, 100).train)
    assert file.read_bytes() == whole[:-1]
    regenerate(target, None, TALKS[:2], file, settings())
    assert file.read_bytes() == whole

    for text in ('{"very": "important"}', "a letter", "a letter\n"):
        other = tmp_path / "other.jsonl"
        other.write_text(text)
        with pytest.raises(ValueError, match=r"not an answer|not JSON|was not begun here"):
            regenerate(target, None, TALKS, other, settings())
        assert other.read_text() == text


def test_answers_to_other_prompts_are_not_gone_on_with(target: TorchTarget, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    regenerate(target, None, TALKS[:1], file, settings())
    with pytest.raises(ValueError, match=r"holds an answer to another prompt as 0\.0"):
        regenerate(target, None, [Conversation(0, "a", ("something else",))], file, settings())


OPENED = [
    Conversation(0, "a", ("hello", "and then"), ({"role": "system", "content": "Be brief."},)),
    Conversation(1, "a", ("hello",)),
    Conversation(2, "a", ("hello",), ({"role": "developer", "content": "In verse."},)),
]


def test_how_a_conversation_opens_is_answered_kept_and_learned_from(target: TorchTarget, tmp_path: Path) -> None:
    """The ids that a draft learns from are those that are served."""
    file = tmp_path / "answers.jsonl"
    regenerate(target, None, OPENED, file, settings(system="From the command line."), batch_size=2)
    records = {record["id"]: record for record in read_answers(file)}
    roles = {name: [(m["role"], m["content"]) for m in record["messages"]][:2] for name, record in records.items()}
    assert roles == {
        "0.0": [("system", "Be brief."), ("user", "hello")],
        "0.1": [("system", "Be brief."), ("user", "hello")],
        "1.0": [("system", "From the command line."), ("user", "hello")],
        "2.0": [("developer", "In verse."), ("user", "hello")],
    }
    learned = {s.id.rpartition("/")[2]: s for s in read_corpus([file], 0, 200).train}
    for name, record in records.items():
        ids = target.tokenizer.apply_chat_template(record["messages"], add_generation_prompt=True, return_dict=True)
        assert record["prompt_ids"] == ids["input_ids"] == list(learned[name].ids[: learned[name].prompt])
        assert record["answer_ids"] == dflash.generate(target, None, None, record["messages"], max_tokens=12).tokens
    before = file.read_bytes()
    regenerate(target, None, OPENED, file, settings(system="From the command line."))
    assert file.read_bytes() == before


def test_answers_made_without_the_system_message_are_not_gone_on_with(target: TorchTarget, tmp_path: Path) -> None:
    """Files of earlier versions are, where nothing was dropped."""
    file = tmp_path / "answers.jsonl"
    plain = [Conversation(one.index, one.source, one.turns) for one in OPENED]
    regenerate(target, None, plain, file, settings())
    regenerate(target, None, [*plain, Conversation(3, "a", ("more",))], file, settings())
    assert len(read_answers(file)) == 5
    with pytest.raises(ValueError, match=r"holds an answer to another prompt as 0\.0"):
        regenerate(target, None, OPENED, file, settings())
    lines = [{key: value for key, value in record.items() if key != "messages"} for record in read_answers(file)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(read_corpus([file], 0, 200).train) == 5, "what train needs is there"
    with pytest.raises(ValueError, match=r"holds an answer to another prompt as 0\.0"):
        regenerate(target, None, plain, file, settings())


GOOD = {"id": "0.0", "answer": "x", "prompt_ids": [1, 2, 3], "answer_ids": [4, 5]}


@pytest.mark.parametrize(
    "bad", [{"id": 3}, {"answer": None}, {"answer_ids": [4, "5"]}, {"prompt_ids": [1.5]}, {"answer_ids": [-1, 2]}]
)
def test_what_is_no_answer_is_told_with_its_line(tmp_path: Path, bad: dict[str, Any]) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, **bad}) + "\n")
    with pytest.raises(ValueError, match=r"line 2: (not an answer|prompt_ids and answer_ids must be)"):
        read_answers(file)
    for line in (b"[" * 200_000, b'{"a":' * 200_000):  # whole, and cut off by a kill
        file.write_bytes(json.dumps(GOOD).encode() + b"\n" + line + b"\n")
        with pytest.raises(ValueError, match="line 2: not JSON"):
            read_answers(file)
        file.write_bytes(json.dumps(GOOD).encode() + b"\n" + line)
        assert len(read_answers(file)) == 1
    file.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with pytest.raises(ValueError, match="line 2: not JSON"):
        read_answers(file)


def test_settings_that_cannot_be_read_are_told(target: TorchTarget, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    regenerate(target, None, TALKS[:1], file, settings())
    settings_file(file).write_text('{"model": "ti')
    with pytest.raises(ValueError, match="is not JSON"):
        regenerate(target, None, TALKS, file, settings())
    settings_file(file).write_text("[" * 200_000)
    with pytest.raises(ValueError, match="is not JSON"):
        settings_of(file)


def test_other_settings_are_refused(target: TorchTarget, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    regenerate(target, None, TALKS[:1], file, settings())
    assert settings_of(file)["max_tokens"] == 12
    with pytest.raises(ValueError, match=r"begun with another max_tokens \(12, now 13\)"):
        regenerate(target, None, TALKS, file, settings(max_tokens=13))
    other = SamplingParams(temperature=0.5, seed=3)
    with pytest.raises(ValueError, match="another temperature ") as told:
        regenerate(target, None, TALKS, file, settings(sampling=other))
    assert "top_p" not in str(told.value), "only what differs"


def test_a_prompt_that_does_not_fit_is_counted(target: TorchTarget, tmp_path: Path) -> None:
    talks = [*TALKS[:1], Conversation(9, "c", ("long " * 400, "after"))]
    done = regenerate(target, None, talks, tmp_path / "answers.jsonl", settings())
    assert done.done == 1
    assert done.failed == {"the prompt is longer than the target's context": 1, "an earlier turn failed": 1}


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_a_prompt_without_scores_fails_alone(tmp_path: Path, batch_size: int) -> None:
    """NaN for one letter, in the prompt of some; the later turns of such a conversation cannot be asked."""
    sick = TorchTarget(tiny.model("llama", vocab_size=272), tiny.make_tokenizer(), "sick llama")
    with torch.no_grad():
        sick.model.model.embed_tokens.weight[sick.tokenizer.encode("z")] = torch.nan
        sick.model.lm_head.weight[sick.tokenizer.encode("z")] = 0  # so that no answer has it
    talks = [Conversation(i, "a", (f"question {i}" + "z" * (i in (2, 5)), "and then")) for i in range(8)]
    done = regenerate(sick, None, talks, tmp_path / "a.jsonl", settings(), batch_size)
    reason = "the target's scores are not numbers (NaN): try dtype float32 or bfloat16, and check its weights"
    assert done.failed == {reason: 2, "an earlier turn failed": 2}
    records = {record["id"]: record for record in read_answers(tmp_path / "a.jsonl")}
    assert set(records) == {f"{i}.{turn}" for i in range(8) if i not in (2, 5) for turn in (0, 1)}
    assert done.done == len(records) == 12
    for record in records.values():
        assert record["answer_ids"] == dflash.generate(sick, None, None, record["messages"], max_tokens=12).tokens


def test_a_prompt_with_a_token_the_target_does_not_know_fails_alone(tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens([f"<more{i}>" for i in range(40)])
    target = TorchTarget(tiny.model("llama", vocab_size=272), tokenizer, "tiny llama")
    talks = [Conversation(0, "a", ("hello",)), Conversation(1, "a", ("say <more39>",)), Conversation(2, "a", ("you",))]
    done = regenerate(target, None, talks, tmp_path / "a.jsonl", settings())
    assert done.done == 2
    [(reason, count)] = done.failed.items()
    assert count == 1 and "is outside the vocabulary" in reason


def test_a_second_run_on_one_output_is_refused(target: TorchTarget, tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.jsonl"
    told = []

    def begin_another(progress: Progress) -> None:
        with pytest.raises(
            ValueError, match=r"another run is writing .*a.jsonl: wait until it has ended, or"
        ) as caught:
            regenerate(target, None, TALKS, file.parent / ".." / "new" / "a.jsonl", settings())
        told.append(caught)

    done = regenerate(target, None, TALKS, file, settings(), report=begin_another)
    assert told
    assert done.done == len(read_answers(file)) == 7
    assert regenerate(target, None, TALKS, file, settings()).done == 7, "it is free again"


def test_a_run_that_was_killed_keeps_no_other_from_going_on(target: TorchTarget, tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from dflash.only import only_run
with only_run(Path({str(tmp_path / "a.jsonl")!r})):
    print("writes", flush=True)
    signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        with pytest.raises(ValueError, match="another run is writing"):
            regenerate(target, None, TALKS, tmp_path / "a.jsonl", settings())
        other.kill()
    assert regenerate(target, None, TALKS, tmp_path / "a.jsonl", settings()).done == 7


def test_several_answers_of_one_id_are_told(target: TorchTarget, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    regenerate(target, None, TALKS, file, settings())
    once = file.read_bytes()
    file.write_bytes(once + once.split(b"\n")[0] + b"\n")
    with pytest.raises(ValueError, match=r"has several answers of the id \d\.0, as of two runs at once"):
        regenerate(target, None, TALKS, file, settings())


def test_only_what_is_asked_for_is_counted(target: TorchTarget, tmp_path: Path) -> None:
    regenerate(target, None, TALKS, tmp_path / "a.jsonl", settings())
    done = regenerate(target, None, TALKS[1:2], tmp_path / "a.jsonl", settings())
    assert (done.done, done.total) == (2, 2)


def test_a_file_that_holds_no_answers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"turns": ["hi"]}\n')
    with pytest.raises(ValueError, match="line 1: not an answer"):
        read_answers(tmp_path / "x.jsonl")


# --- prompts ----------------------------------------------------------------------------------------


def test_prompts_in_each_documented_form(tmp_path: Path) -> None:
    rows = [
        {"source": "s", "turns": ["a", "b"]},
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "c"}], "extra": 1},
        {"prompt": "d"},
        {"question": "e"},
    ]
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [c.turns for c in read_prompts(file).conversations] == [("a", "b"), ("c",), ("d",), ("e",)]
    lines = tmp_path / "p.txt"
    lines.write_text("first\nsecond\n")
    assert [c.turns for c in read_prompts(lines).conversations] == [("first",), ("second",)]


BAD = ["[]", '"text"', "{}", '{"turns": []}', '{"turns": [""]}', '{"turns": [3]}', '{"messages": []}', "not json"]


@pytest.mark.parametrize("line", BAD)
def test_a_bad_row_is_skipped_and_counted_and_many_are_fatal(tmp_path: Path, line: str) -> None:
    """R11."""
    file = tmp_path / "p.jsonl"
    file.write_text(f"{line}\n" + '{"prompt": "good"}\n' * 20)
    read = read_prompts(file)
    assert len(read.conversations) == 20
    assert sum(read.skipped.values()) == 1
    assert read.conversations[0].index == 1
    file.write_text(f"{line}\n" * 5 + '{"prompt": "good"}\n' * 20)
    with pytest.raises(ValueError, match="5 of 25 rows cannot be used"):
        read_prompts(file)


def test_a_huge_turn_is_read(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "x" * 1_000_000}) + "\n")
    assert len(read_prompts(file).conversations[0].turns[0]) == 1_000_000


def test_spread_takes_evenly() -> None:
    talks = [Conversation(i, "s", ("x",)) for i in range(10)]
    assert [c.index for c in spread(talks, 5)] == [0, 2, 4, 6, 8]
    assert spread(talks, None) == spread(talks, 50) == talks


# --- what is learned from ---------------------------------------------------------------------------


def test_a_corpus_keeps_whole_conversations_apart(target: TorchTarget, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    regenerate(target, None, TALKS, file, settings())
    corpus = read_corpus([file], held_out=2, max_length=100)
    groups = [{s.conversation for s in part} for part in (corpus.train, corpus.held_out)]
    assert len(groups[1]) == 2
    assert not groups[0] & groups[1]
    assert len(corpus.train) + len(corpus.held_out) == 7
    answered = {token for s in corpus.train for token in s.ids[s.prompt :]}
    assert corpus.vocabulary().tolist() == sorted(answered)


def test_what_was_learned_from_is_not_kept_apart_later(target: TorchTarget, tmp_path: Path) -> None:
    """A corpus that has grown, and a prompt that was answered twice."""
    talks = [Conversation(i, "a", (f"question {i}",)) for i in range(24)]
    files = [tmp_path / f"{i}.jsonl" for i in range(3)]
    regenerate(target, None, talks[:12], files[0], settings())
    regenerate(target, None, talks[12:], files[1], settings())
    regenerate(target, None, talks, files[2], settings(sampling=SamplingParams(temperature=1.0, seed=1)))
    before, after = read_corpus(files[:1], 4, 100), read_corpus(files, 4, 100)
    learned = {s.ids[: s.prompt] for s in before.train}
    apart = {s.ids[: s.prompt] for s in after.held_out}
    assert len(apart) == 4 and len(after.held_out) == 8
    assert not apart & learned
    assert not apart & {s.ids[: s.prompt] for s in after.train}


def test_names_of_files_do_not_matter(target: TorchTarget, tmp_path: Path) -> None:
    """Dots in a name, and two files of one name."""
    files = [tmp_path / folder / "answers.v2-1.7b.jsonl" for folder in ("a", "b")]
    for file, talks in zip(files, (TALKS[:3], TALKS[2:]), strict=True):
        regenerate(target, None, talks, file, settings())
    corpus = read_corpus(files, held_out=2, max_length=100)
    ids = [s.id for s in (*corpus.train, *corpus.held_out)]
    assert len(set(ids)) == len(ids) == 4 + 4
    assert len({s.conversation for s in corpus.held_out}) == 2
    corpus.check(272)
    with pytest.raises(ValueError, match="the target's end at 9"):
        corpus.check(10)
    files[0].write_bytes(files[0].read_bytes() * 2)
    with pytest.raises(ValueError, match="several answers of one id"):
        read_corpus(files, 0, 100)


def test_nothing_to_learn_from_is_an_error(tmp_path: Path) -> None:
    """R5."""
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps({**GOOD, "answer_ids": [4]}) + "\n")
    with pytest.raises(ValueError, match="nothing to learn from"):
        read_corpus([file], 0, 100)
    with pytest.raises(ValueError, match="does not exist: make it with dflash regenerate"):
        read_corpus([tmp_path / "none.jsonl"], 0, 100)
    with pytest.raises(ValueError, match="is a folder"):
        read_corpus([tmp_path], 0, 100)
