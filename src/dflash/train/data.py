"""Answers as training sequences, and which blocks of them a step learns from.

Everything drawn at random is a function of (seed, epoch, step): a run that resumes draws the same.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dflash.errors import RequestError
from dflash.prompt_files import check_file
from dflash.train.regenerate import read_answers


@dataclass(frozen=True)
class Sequence:
    """A prompt and the target's answer to it.

    Attributes:
        ids: prompt and answer.
        prompt: length of the prompt; the positions from there on may be anchors.
    """

    id: str
    source: str
    ids: tuple[int, ...]
    prompt: int

    @property
    def conversation(self) -> str:
        """The id without its turn."""
        return self.id.rpartition(".")[0]

    @property
    def anchors(self) -> range:
        """Positions that can be an anchor: an answer token, with at least one token after it.

        So the first answer token is never a label. In decoding the target gives it itself, from the scores of the
        prompt's last token, and the first block is anchored at it: no draft is ever asked for it.
        """
        return range(self.prompt, len(self.ids) - 1)


@dataclass(frozen=True)
class Corpus:
    """Sequences to learn from and sequences kept apart to measure on.

    Attributes:
        skipped: reason -> number of answers left out.
    """

    train: list[Sequence]
    held_out: list[Sequence]
    skipped: dict[str, int]

    @property
    def digest(self) -> str:
        """Equal for equal sequences on both sides: a run is resumed with what it was begun with."""
        sides = [[(s.id, s.ids, s.prompt) for s in side] for side in (self.train, self.held_out)]
        return hashlib.sha256(repr(sides).encode()).hexdigest()[:16]

    @property
    def supervised(self) -> tuple[int, int]:
        """Answer tokens, and all tokens, of the training sequences."""
        return sum(len(s.anchors) for s in self.train), sum(len(s.ids) for s in self.train)

    def check(self, vocab_size: int) -> None:
        """
        Raises:
            RequestError: answers with tokens that the target does not have.
        """
        for sequence in (*self.train, *self.held_out):
            if max(sequence.ids) >= vocab_size:
                raise RequestError(
                    f"answer {sequence.id} has token {max(sequence.ids)}, the target's end at {vocab_size - 1}: "
                    "are these the answers of another target?"
                )

    def vocabulary(self) -> Tensor:
        """The token ids that occur in the answers learned from, ascending."""
        seen = {token for s in self.train for token in s.ids[s.prompt :]}
        return torch.tensor(sorted(seen))


def read_corpus(paths: SequenceOf[Path], held_out: int, max_length: int) -> Corpus:
    """Read answer files of ``dflash regenerate``.

    Whole conversations are kept apart, with all answers to their prompts, so that no text is on both sides.

    Args:
        held_out: how many answers to keep apart, about.
        max_length: answers are cut there; one whose prompt is as long is skipped.

    Raises:
        RequestError: nothing to learn from, or two answers of one id in a file.
    """
    sequences: list[Sequence] = []
    skipped: dict[str, int] = {}
    for number, path in enumerate(paths):
        if not check_file(path):
            raise RequestError(f"{path} does not exist: make it with dflash regenerate")
        records = read_answers(path)
        if len({record["id"] for record in records}) < len(records):
            raise RequestError(
                f"{path} has several answers of one id: were files of answers joined? Give each as --data"
            )
        for record in records:
            ids = (*record["prompt_ids"], *record["answer_ids"])[:max_length]
            # The file's number: two files may have one name.
            name = f"{number}:{path.stem}/{record['id']}"
            made = Sequence(name, record.get("source", ""), ids, len(record["prompt_ids"]))
            if made.anchors:
                sequences.append(made)
            else:
                skipped["no two answer tokens"] = skipped.get("no two answer tokens", 0) + 1
    if not sequences:
        raise RequestError(f"{', '.join(map(str, paths))}: no answer has two tokens: nothing to learn from")
    apart = _apart(sequences, held_out)
    return Corpus(
        [s for s in sequences if s.conversation not in apart],
        [s for s in sequences if s.conversation in apart],
        skipped,
    )


def _apart(sequences: SequenceOf[Sequence], count: int) -> set[str]:
    """Conversations to keep apart, about ``count``, at most half: those whose first prompts have the least digests.

    So answers to one prompt are on one side, whatever file they are in; and when a corpus has grown, none that was
    learned from before is kept apart now.
    """
    first: dict[str, tuple[int, ...]] = {}
    for sequence in sequences:
        prompt = sequence.ids[: sequence.prompt]
        known = first.setdefault(sequence.conversation, prompt)
        if len(prompt) < len(known):
            first[sequence.conversation] = prompt
    digests = {name: hashlib.sha256(repr(prompt).encode()).digest() for name, prompt in first.items()}
    chosen = set(sorted(set(digests.values()))[: min(count, len(set(digests.values())) // 2)])
    return {name for name, digest in digests.items() if digest in chosen}


@dataclass(frozen=True, eq=False)
class Plan:
    """Which sequences and anchors each step takes.

    Attributes:
        per_step: sequences a step, over all processes.
        anchors: blocks a sequence; fewer where it has fewer positions.
    """

    lengths: list[int]
    per_step: int
    anchors: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps; the few sequences left over change from epoch to epoch."""
        return max(1, len(self.lengths) // self.per_step)

    def sequences(self, step: int) -> list[int]:
        """Indices of a step's sequences: of like length, every sequence once an epoch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._order(epoch)[place]

    @functools.lru_cache(maxsize=2)  # noqa: B019 (one plan a run)
    def _order(self, epoch: int) -> list[list[int]]:
        generator = _generator(self.seed, epoch)
        shuffled = torch.randperm(len(self.lengths), generator=generator).tolist()
        size = min(self.per_step, len(shuffled))
        batches = []
        for first in range(0, len(shuffled), 32 * size):
            window = sorted(shuffled[first : first + 32 * size], key=lambda i: self.lengths[i])
            batches += [window[i : i + size] for i in range(0, len(window) - size + 1, size)]
        order = torch.randperm(len(batches), generator=generator).tolist()
        return [batches[i] for i in order][: self.steps_per_epoch]

    def others(self, step: int, outside: Tensor, count: int) -> Tensor:
        """``count`` of the token ids ``outside`` the vocabulary, for this step."""
        chosen = torch.randperm(len(outside), generator=_generator(self.seed, step, -1))[:count]
        return outside[chosen]

    def draw(self, step: int, index: int, positions: range) -> list[int]:
        """Anchors of a sequence in a step, ascending, drawn afresh every epoch."""
        generator = _generator(self.seed, step, index)
        chosen = torch.randperm(len(positions), generator=generator)[: self.anchors]
        return sorted(positions[i] for i in chosen.tolist())


def _generator(*key: int) -> torch.Generator:
    """A generator for this place of the run, whatever came before it."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
