"""Answers by the target itself: what a draft is trained on.

Rows run in batches through the one decode loop. Every answer is appended to the output as soon as it
ends; a run that was killed goes on where it stopped, repeating and losing nothing. A prompt that failed has
no answer there, so it is tried again.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash import jsontext
from dflash.decode import Request, check_prompts, decode
from dflash.errors import NonFiniteScores, RequestError
from dflash.generate import DraftLike, as_drafter, new_output
from dflash.only import only_run
from dflash.prompts import Conversation
from dflash.protocols import Target
from dflash.sampling import SamplingParams
from dflash.text import encode_prompt
from dflash.train.files import write


@dataclass(frozen=True)
class Settings:
    """What decides the answers. Written beside them; a run that goes on must have the same.

    Attributes:
        system: message of the conversations that open with none of their own.
    """

    model: str
    dtype: str = "float32"
    max_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    system: str | None = None
    enable_thinking: bool | None = None


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        total: turns of the conversations that are to be answered.
        done: those of them that are, by this run or one before it.
        tokens: of this run.
        failed: reason -> number of turns that could not be answered.
    """

    total: int
    done: int = 0
    tokens: int = 0
    failed: dict[str, int] = field(default_factory=dict)

    def fail(self, reason: str) -> None:
        """One more prompt that could not be answered."""
        self.failed[reason] = self.failed.get(reason, 0) + 1


def regenerate(
    target: Target,
    draft: DraftLike,
    conversations: list[Conversation],
    output: Path,
    settings: Settings,
    batch_size: int = 32,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Answer every turn of every conversation, the answers so far fed back.

    A prompt that cannot be answered (it does not fit, the target's scores are not numbers) fails alone: it is counted
    with its reason, and so are the later turns of its conversation. Nothing of it is written, so a run that goes on
    tries it again.

    One line of ``output`` an answer: ``id`` ("line.turn"), ``source``, ``messages`` (all that was asked, system
    message included), ``answer``, ``prompt_ids``, ``answer_ids`` (the stop id included), ``finish_reason``.

    Args:
        draft: any drafter may speed it up; the answers are the target's own.
        report: called at the start and after every round of the loop.

    Raises:
        RequestError: ``output`` holds answers made with other settings or to other prompts, or several to one, or is no
            file of answers; or another run is writing it.
    """
    with only_run(output):
        return _answer_all(target, draft, conversations, output, settings, batch_size, report)


def _answer_all(
    target: Target,
    draft: DraftLike,
    conversations: list[Conversation],
    output: Path,
    settings: Settings,
    batch_size: int,
    report: Callable[[Progress], None],
) -> Progress:
    done = _by_id(output)
    _check_settings(output, settings)
    _check_prompts(output, done, conversations, settings)
    _mend(output)
    asked = [f"{c.index}.{turn}" for c in conversations for turn in range(len(c.turns))]
    progress = Progress(len(asked), sum(one in done for one in asked))
    report(progress)
    with output.open("a", encoding="utf-8") as file:
        for turn in range(max(len(c.turns) for c in conversations)):
            open_turns = _open_turns(target, conversations, turn, done, settings, progress)
            for batch in _batches(open_turns, batch_size):
                for record in _sound_answers(target, draft, batch, settings, progress, report):
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                    done[record["id"]] = record
    return progress


def _by_id(output: Path) -> dict[str, dict[str, Any]]:
    """
    Raises:
        RequestError: several answers have one id.
    """
    found: dict[str, dict[str, Any]] = {}
    for record in read_answers(output):
        if record["id"] in found:
            raise RequestError(
                f"{output} has several answers of the id {record['id']}, as of two runs at once or of files that were "
                "joined: leave one line of each id in it, or give another --output"
            )
        found[record["id"]] = record
    return found


def read_answers(path: Path) -> list[dict[str, Any]]:
    """The answers of a file, which is only read. A last line that a kill cut off is left out.

    Raises:
        RequestError: a line that is no answer.
    """
    if not path.is_file():
        return []
    # Not splitlines: text may hold other separators (U+2028, U+0085), which JSON leaves as they are.
    *lines, last = path.read_bytes().split(b"\n")
    records = [_answer_of(f"{path}, line {number}", line) for number, line in enumerate(lines, 1)]
    if jsontext.is_json(last):
        records.append(_answer_of(f"{path}, line {len(lines) + 1}", last))
    return records


def _answer_of(where: str, line: bytes) -> dict[str, Any]:
    try:
        record = jsontext.parse(line)
    except ValueError as error:
        raise RequestError(f"{where}: not JSON; is it a file of answers?") from error
    if not isinstance(record, dict):
        raise RequestError(f"{where}: not an answer, which is an object")
    for key, kind in (("id", str), ("answer", str), ("prompt_ids", list), ("answer_ids", list)):
        if not isinstance(record.get(key), kind):
            raise RequestError(f"{where}: not an answer (id and answer, prompt_ids and answer_ids are needed)")
    ids = [*record["prompt_ids"], *record["answer_ids"]]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise RequestError(f"{where}: prompt_ids and answer_ids must be whole numbers of at least 0")
    return record


def _mend(path: Path) -> None:
    """Make the file end with a whole line: finish the last one, or cut off what a kill left of it.

    Raises:
        RequestError: it is not a file that ``regenerate`` began.
    """
    whole = path.read_bytes() if path.is_file() else b""
    last = whole[whole.rfind(b"\n") + 1 :]
    if not last:
        return
    with path.open("r+b") as file:
        if jsontext.is_json(last):
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(len(whole) - len(last))


def settings_file(output: Path) -> Path:
    """Where the settings of an answer file are written."""
    return output.with_suffix(output.suffix + ".settings.json")


def _check_settings(output: Path, settings: Settings) -> None:
    file = settings_file(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    wanted = json.loads(json.dumps(asdict(settings)))
    have = settings_of(output)
    if have:
        now, before = _flat(wanted), _flat(have)
        differing = [f"{key} ({before.get(key)!r}, now {now[key]!r})" for key in now if before.get(key) != now[key]]
        if differing:
            raise RequestError(
                f"{output} was begun with another {' and '.join(differing)}: give another --output, or the same "
                "settings to go on"
            )
    elif output.is_file() and output.stat().st_size:
        raise RequestError(f"{output} was not begun here ({file.name} is not beside it): give another --output")
    else:
        write(file, json.dumps(wanted, indent=2) + "\n")


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """With those of sampling among the others, so that each can be named."""
    sampling = settings.get("sampling")
    return {key: value for key, value in settings.items() if key != "sampling"} | (
        sampling if isinstance(sampling, dict) else {}
    )


def _opening(conversation: Conversation, settings: Settings) -> list[dict[str, str]]:
    """What is said before the first question."""
    if conversation.opening or settings.system is None:
        return list(conversation.opening)
    return [{"role": "system", "content": settings.system}]


def _check_prompts(
    output: Path, done: dict[str, dict[str, Any]], conversations: Iterable[Conversation], settings: Settings
) -> None:
    """Answers are known by the line and turn of their prompt: the prompt there must still be the same."""
    for conversation in conversations:
        asked: list[Any] = _opening(conversation, settings)
        for turn, text in enumerate(conversation.turns):
            asked.append({"role": "user", "content": text})
            record = done.get(f"{conversation.index}.{turn}")
            if record is not None and _asked(record) != asked:
                raise RequestError(
                    f"{output} holds an answer to another prompt as {record['id']}: give another --output, or the same "
                    "prompts in the same order to go on"
                )


def _asked(record: dict[str, Any]) -> list[Any]:
    """The messages of a record without the target's own."""
    messages = record.get("messages")
    if not isinstance(messages, list):
        return []
    return [one for one in messages if not (isinstance(one, dict) and one.get("role") == "assistant")]


@dataclass(frozen=True)
class _Turn:
    id: str
    source: str
    messages: list[dict[str, str]]
    ids: list[int]
    seed_offset: int


def _open_turns(
    target: Target,
    conversations: Iterable[Conversation],
    turn: int,
    done: dict[str, dict[str, Any]],
    settings: Settings,
    progress: Progress,
) -> Iterator[_Turn]:
    """The turns still to be answered; those whose history failed, or that do not fit, are counted and left out."""
    for conversation in conversations:
        name = f"{conversation.index}.{turn}"
        if turn >= len(conversation.turns) or name in done:
            continue
        messages = _opening(conversation, settings)
        before = [done.get(f"{conversation.index}.{i}") for i in range(turn)]
        try:
            for text, record in zip(conversation.turns, before, strict=False):
                if record is None:
                    raise RequestError("an earlier turn failed")
                messages += [{"role": "user", "content": text}, {"role": "assistant", "content": record["answer"]}]
            messages.append({"role": "user", "content": conversation.turns[turn]})
            ids = encode_prompt(target.tokenizer, messages, enable_thinking=settings.enable_thinking)
            if target.context_length is not None and len(ids) >= target.context_length:
                raise RequestError("the prompt is longer than the target's context")
            check_prompts(target, [ids])
        except RequestError as error:
            progress.fail(str(error))
            continue
        yield _Turn(name, conversation.source, messages, ids, 1000 * conversation.index + turn)


def _batches(turns: Iterator[_Turn], size: int) -> Iterator[list[_Turn]]:
    """Batches of prompts of like length, from a window of eight batches: rows of a batch end at like times."""
    while window := list(itertools.islice(turns, 8 * size)):
        window.sort(key=lambda turn: len(turn.ids))
        for first in range(0, len(window), size):
            yield window[first : first + size]


def _sound_answers(
    target: Target,
    draft: DraftLike,
    batch: list[_Turn],
    settings: Settings,
    progress: Progress,
    report: Callable[[Progress], None],
) -> Iterator[dict[str, Any]]:
    """The answers of a batch. One in which the target has no scores is halved until the prompt at fault is alone."""
    ended = set()
    try:
        for record in _answer(target, draft, batch, settings, progress, report):
            ended.add(record["id"])
            yield record
    except NonFiniteScores as error:
        left = [turn for turn in batch if turn.id not in ended]
        if len(left) == 1:
            progress.fail(str(error))
            return
        for half in (left[: len(left) // 2], left[len(left) // 2 :]):
            yield from _sound_answers(target, draft, half, settings, progress, report)


def _answer(
    target: Target,
    draft: DraftLike,
    batch: list[_Turn],
    settings: Settings,
    progress: Progress,
    report: Callable[[Progress], None],
) -> Iterator[dict[str, Any]]:
    """Decode a batch; yield each row's record as the row ends."""
    drafter = as_drafter(draft)
    outputs = [new_output(target, target.tokenizer, settings.max_tokens) for _ in batch]
    texts: list[list[str]] = [[] for _ in batch]
    requests = []
    for turn, output in zip(batch, outputs, strict=True):
        seed = settings.sampling.seed
        own = settings.sampling if seed is None else replace(settings.sampling, seed=seed + turn.seed_offset)
        requests.append(Request(turn.ids, own, output))
    for emitted in decode(target, drafter, requests, block_size=drafter.block_size):
        for one in emitted:
            texts[one.row].append(one.text)
            progress.tokens += len(one.tokens)
            if outputs[one.row].finish_reason is not None:
                progress.done += 1
                turn = batch[one.row]
                yield {
                    "id": turn.id,
                    "source": turn.source,
                    "messages": turn.messages,
                    "answer": "".join(texts[one.row]),
                    "prompt_ids": turn.ids,
                    "answer_ids": outputs[one.row].tokens,
                    "finish_reason": outputs[one.row].finish_reason,
                }
        report(progress)


def settings_of(answers: Path) -> dict[str, Any]:
    """The settings an answer file was made with; empty where they are not known.

    Raises:
        RequestError: the file of settings cannot be read.
    """
    file = settings_file(answers)
    if not file.is_file():
        return {}
    try:
        found = jsontext.parse(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RequestError(f"{file} is not JSON ({error}): remove it, or the answers with it") from error
    if not isinstance(found, dict):
        raise RequestError(f"{file} holds no settings: remove it, or the answers with it")
    return found
