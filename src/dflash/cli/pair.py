"""Loading what a command works with: a target and what drafts for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dflash
from dflash.backends.draft import PublishedDraft
from dflash.checkpoint import Place, locate, shipped_draft
from dflash.cli import console, stopping
from dflash.cli.options import Backend, DrafterKind, Dtype
from dflash.drafters import BothDrafters
from dflash.errors import RequestError
from dflash.generate import as_drafter, choose_block
from dflash.processors import processors
from dflash.protocols import Drafter, Target

DRAFTING: tuple[DrafterKind, ...] = ("dflash", "both")
"""The drafters that need a draft."""


def draft_options(
    sliding_window_size: int | None, revision: str | None, bits: int | None, min_confidence: float | None
) -> list[str]:
    """The names of those that are given, of the options that only a draft can have."""
    values = {
        "--draft-sliding-window-size": sliding_window_size,
        "--draft-revision": revision,
        "--draft-bits": bits,
        "--draft-min-confidence": min_confidence,
    }
    return [name for name, value in values.items() if value is not None]


@dataclass(frozen=True)
class Wanted:
    """The loading options, as given.

    Raises:
        RequestError: options that contradict each other.
    """

    model: str
    draft: str | None = None
    drafter: DrafterKind | None = None
    block_size: int | None = None
    backend: Backend | None = None
    dtype: Dtype | None = None
    device: str | None = None
    revision: str | None = None
    draft_revision: str | None = None
    trust_remote_code: bool = False
    draft_sliding_window_size: int | None = None
    draft_bits: int | None = None
    draft_min_confidence: float | None = None

    def __post_init__(self) -> None:
        if self.draft_source is None:
            given = self.draft_options
            if given and self.drafter not in (None, *DRAFTING):
                raise RequestError(f"{given[0]} is not used by --drafter {self.drafter}: leave one of them out")
            if given or self.drafter in DRAFTING:
                option = f"--drafter {self.drafter}" if self.drafter in DRAFTING else given[0]
                raise RequestError(f"{option} needs a draft: give --draft with a folder or a hub id")
        elif self.drafter not in (None, *DRAFTING):
            raise RequestError(f"--draft is not used by --drafter {self.drafter}: leave one of them out")
        if self.block_size is not None and self.block_size < 1:
            raise RequestError(f"--block-size must be 1 (plain decoding) or more, not {self.block_size}")

    @property
    def draft_options(self) -> list[str]:
        """The options given that only a draft can have."""
        return draft_options(
            self.draft_sliding_window_size, self.draft_revision, self.draft_bits, self.draft_min_confidence
        )

    @property
    def draft_source(self) -> str | None:
        """The draft in force: the one given, else, where nothing else is asked for, one that comes with the package."""
        if self.draft is not None or self.drafter not in (None, *DRAFTING):
            return self.draft
        return shipped_draft(self.model)

    @property
    def kind(self) -> DrafterKind:
        """What drafts: as asked for, else a draft where there is one. In blocks of one token nothing does."""
        if self.block_size == 1:
            return "none"
        return self.drafter or ("ngram" if self.draft_source is None else "both")


@dataclass(frozen=True)
class Pair:
    """A target, its drafter, and the block size in force."""

    wanted: Wanted
    target: Target
    drafter: Drafter
    block_size: int

    @property
    def dtype(self) -> str:
        """Of the target's weights: "float32", "bfloat16" ..."""
        return self.target.dtype

    @property
    def min_confidence(self) -> float | None:
        """In force; None where no DFlash draft is."""
        draft: Any = self.drafter.draft if isinstance(self.drafter, BothDrafters) else self.drafter
        return draft.min_confidence if isinstance(draft, PublishedDraft) else None

    @property
    def drafter_label(self) -> str:
        """For people."""
        draft = f"draft {Path(self.wanted.draft_source or '').name}"
        kinds = {"ngram": "n-grams", "none": "plain decoding", "dflash": draft, "both": f"{draft} and n-grams"}
        return kinds[self.wanted.kind]

    @property
    def threads(self) -> str:
        """How many a CPU's speed comes from, and what there is for them; empty on other devices."""
        if self.target.backend != "torch" or str(self.target.device) != "cpu":
            return ""
        import torch

        return processors().shared_by(torch.get_num_threads())

    def settings(self) -> dict[str, Any]:
        """For records: the options, with what was in force for those left open."""
        return {
            **asdict(self.wanted),
            "draft": self.wanted.draft_source,
            "drafter": self.wanted.kind,
            "block_size": self.block_size,
            "draft_min_confidence": self.min_confidence,
            "backend": self.target.backend,
            "device": str(self.target.device),
            "dtype": self.dtype,
            "dflash": dflash.__version__,
        }


def check_installed(wanted: Wanted) -> None:
    """Asked before a framework is imported.

    Raises:
        MissingPackage: naming all that must be installed first.
    """
    dflash.check_backend(wanted.backend, wanted.model)


def load_pair(wanted: Wanted, aloud: bool = False) -> Pair:
    """Load drafter and target, the cheap one first.

    Args:
        aloud: say so where there is no terminal too.

    Raises:
        DFlashError: as ``dflash.load`` and ``dflash.load_draft``.
    """
    check_installed(wanted)
    place = locate(wanted.model)  # what does not exist is told before a framework is imported
    with _loading(place, aloud), stopping.importing():
        drafter = _drafter(wanted)
        block_size = choose_block(drafter, wanted.block_size)
        target = dflash.load(
            wanted.model, wanted.backend, wanted.dtype, wanted.device, wanted.revision, wanted.trust_remote_code
        )
    return Pair(wanted, target, drafter, block_size)


def _drafter(wanted: Wanted) -> Drafter:
    if wanted.draft_source is None or wanted.kind not in DRAFTING:
        return as_drafter(wanted.kind)
    draft = dflash.load_draft(
        wanted.draft_source,
        wanted.draft_sliding_window_size,
        wanted.backend,
        wanted.dtype,
        wanted.device,
        wanted.draft_revision,
        wanted.draft_bits,
        wanted.draft_min_confidence,
    )
    return BothDrafters(draft) if wanted.kind == "both" else draft


@contextmanager
def _loading(place: Place, aloud: bool) -> Iterator[None]:
    """A spinner while local files are read; a download shows the hub's own progress bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not Path(place.source).is_dir():
        console.say("loading", place.name, "dim")
        yield
        return
    logging.disable_progress_bar()
    once = " (a .gguf file is unpacked the first time)" if place.gguf is not None else ""
    with console.waiting(f"loading {place.name}{once}", aloud):
        yield
