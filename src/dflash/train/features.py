"""The target's hidden states of training sequences: computed once and kept on disk, or computed as needed.

Recomputing them for every pass costs as much as the training itself, so they are cached, in bfloat16
safetensors shards, as long as they fit the limit; sequences beyond it are computed on the fly.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash.backends.torch.target import TorchSession, TorchTarget
from dflash.errors import RequestError
from dflash.train.data import Sequence
from dflash.train.files import write_tensors
from dflash.train.processes import ALONE, Processes

SHARD = 64
"""Sequences a file."""

CHUNK = 512
"""Tokens a forward."""

SAMPLE = 512
"""Numbers of a weight that tell it from another, about."""

MULTIPLE = 64
"""Lengths are padded to a multiple of this: kernels are made anew for every shape, which costs more than padding."""


def padded(length: int) -> int:
    """The next multiple."""
    return -(-length // MULTIPLE) * MULTIPLE


class Features:
    """Taps, and where a loss reads the target's distribution its last hidden states, of sequences.

    Args:
        final: whether the last hidden states are wanted too.
        folder: of the cache; None computes everything on the fly.
        limit: bytes the cache may take.
    """

    def __init__(
        self, target: TorchTarget, taps: tuple[int, ...], final: bool, folder: Path | None, limit: float = 2e10
    ) -> None:
        self.target = target
        self.taps = taps
        self.final = final
        self.folder = folder
        self.limit = limit
        self._shards: dict[str, Path] = {}

    def prepare(
        self,
        sequences: SequenceOf[Sequence],
        report: Callable[[int, int], None] = lambda done, of: None,
        processes: Processes = ALONE,
    ) -> None:
        """Fill the cache, shard by shard; shards of an earlier run are taken as they are.

        Of several processes each fills its share, and waits for the others.

        Raises:
            RequestError: the processes have different folders of that name.
        """
        if self.folder is None:
            return
        report(0, len(sequences))
        self.folder.mkdir(parents=True, exist_ok=True)
        used = 0.0
        shards: list[tuple[Path, SequenceOf[Sequence]]] = []
        for first in range(0, len(sequences), SHARD):
            part = sequences[first : first + SHARD]
            used += sum(len(s.ids) for s in part) * self._width() * 2
            if used > self.limit:
                break
            shards.append((self.folder / f"{self._fingerprint(part)}.safetensors", part))
        for number, (file, part) in enumerate(shards):
            if number % processes.world == processes.rank and not _holds(file, part):
                self._write(file, part)
            self._shards |= {s.id: file for s in part}
            report(min((number + 1) * SHARD, len(sequences)), len(sequences))
        processes.wait()
        if processes.world > 1 and not all(_holds(file, part) for file, part in shards):
            raise RequestError(
                f"--cache {self.folder} must be one folder to all processes: what others wrote is not there"
            )

    def of(self, sequence: Sequence) -> tuple[Tensor, Tensor | None]:
        """Taps [length, taps * hidden] and last states [length, hidden] or None, bfloat16 (or float32 uncached)."""
        file = self._shards.get(sequence.id)
        if file is None:
            return compute(self.target, self.taps, self.final, sequence.ids)
        with safe_open(file, framework="pt") as tensors:
            taps = tensors.get_tensor(f"{sequence.id}/taps")
            return taps, tensors.get_tensor(f"{sequence.id}/final") if self.final else None

    def _width(self) -> int:
        return (len(self.taps) + self.final) * self.target.hidden_size

    def _fingerprint(self, part: SequenceOf[Sequence]) -> str:
        """Of everything the numbers depend on: a cache for other text, taps or another target is not used."""
        last = "last hidden states" if self.final else False  # True marks older caches: of what the head was given
        key = [self.identity, list(self.taps), last, [[s.id, s.ids] for s in part]]
        return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

    @functools.cached_property
    def identity(self) -> str:
        """Of the target's weights: of numbers spread over each of them, so that a fine-tune is another target.

        Of their bytes: a sum would depend on the number of threads.
        """
        digest = hashlib.sha256()
        for name, weight in self.target.model.state_dict().items():
            flat = weight.detach().flatten()
            some = flat[:: max(1, len(flat) // SAMPLE)].cpu().contiguous()
            digest.update(
                f"{name} {list(weight.shape)} {weight.dtype}".encode() + some.view(torch.uint8).numpy().tobytes()
            )
        return digest.hexdigest()[:32]

    def _write(self, file: Path, part: SequenceOf[Sequence]) -> None:
        tensors: dict[str, Tensor] = {}
        for sequence in part:
            taps, final = compute(self.target, self.taps, self.final, sequence.ids)
            tensors[f"{sequence.id}/taps"] = taps.bfloat16().cpu()
            if final is not None:
                tensors[f"{sequence.id}/final"] = final.bfloat16().cpu()
        write_tensors(file, tensors)


def _holds(file: Path, part: SequenceOf[Sequence]) -> bool:
    """Whether a shard is there and whole. It is only a cache: one that is not is made again."""
    if not file.is_file():
        return False
    try:
        with safe_open(file, framework="pt") as tensors:
            return {f"{sequence.id}/taps" for sequence in part} <= set(tensors.keys())
    except SafetensorError:
        return False


def compute(
    target: TorchTarget, taps: tuple[int, ...], final: bool, ids: SequenceOf[int]
) -> tuple[Tensor, Tensor | None]:
    """One sequence through the target: what it taps, and its last hidden states.

    In the target's own dtype, also inside an autocast: numbers do not depend on whether they come from the cache.
    """
    session = target.start(1, taps, 1, CHUNK)
    assert isinstance(session, TorchSession)
    chunks: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast(target.device.type, enabled=False))
        last = stack.enter_context(target.scoring.watched()) if final else []
        for first in range(0, len(ids), CHUNK):
            part = list(ids[first : first + CHUNK])
            count = len(part)
            # Padding comes last, where no position before it sees it, and never past the context. It repeats a token
            # of the text: NaN in the embedding of another would reach all positions through the mask.
            part += part[-1:] * (min(padded(count), (target.context_length or first + CHUNK) - first) - count)
            _, features = session.read([part], [count], torch.tensor([[0]]))  # no scores are wanted: one position's
            assert features.values is not None
            chunks.append(features.values[0])
    return torch.cat(chunks)[: len(ids)], torch.cat(last, dim=1)[0, : len(ids)] if final else None
