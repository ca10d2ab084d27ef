"""Which systems a run compares, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.benchmark.http import Server
from dflash.benchmark.peers import PROMPT_LOOKUP_TOKENS, MlxGenerate, TransformersGenerate
from dflash.benchmark.systems import Asking, Loop, System
from dflash.drafters import BothDrafters, NGramDrafter, NoDrafter
from dflash.errors import RequestError
from dflash.protocols import Drafter, Target

PLAIN = "plain"
DRAFT = "draft"
BOTH = "both"
NGRAM = "ngram"
TRANSFORMERS = "transformers"
LOOKUP = "transformers-lookup"
ASSISTED = "transformers-assisted"
MLX_LM = "mlx-lm"

BASELINES = (PLAIN, TRANSFORMERS, MLX_LM)
"""The first of these that runs is what the others are compared with."""

OURS = (DRAFT, BOTH, PLAIN, NGRAM)
"""They draw from one generator a request: with a seed, their answers are the same even when sampled."""


@dataclass(frozen=True)
class Line:
    """A line-up: what is compared.

    Attributes:
        descriptions: of the systems, in the order of tables.
        comparable: systems whose answers should be the baseline's, token for token.
    """

    systems: list[System]
    descriptions: dict[str, str]
    baseline: str | None
    comparable: tuple[str, ...]


@dataclass(frozen=True)
class Loaded:
    """What local systems share.

    Attributes:
        draft: None where there is none, and where blocks of one token leave it nothing to do.
        split: whether our loops measure where a round's time goes.
        at_once: rows decoded together.
    """

    target: Target
    asking: Asking
    draft: Drafter | None = None
    draft_name: str | None = None
    assistant: Any = None
    block_size: int | None = None
    at_once: int = 1
    split: bool = True


def local(loaded: Loaded, wanted: Sequence[str] | None) -> Line:
    """The systems of a target in this process: those wanted, or all that can be.

    Raises:
        RequestError: one is wanted that cannot be.
    """
    possible = _descriptions(loaded)
    chosen = list(possible) if not wanted else list(dict.fromkeys(wanted))
    for name in chosen:
        if name not in possible:
            raise RequestError(_refusal(name, loaded, ", ".join(possible)))
    names = [name for name in possible if name in chosen]
    baseline = next((name for name in BASELINES if name in names), None)
    same = names if loaded.asking.temperature == 0 else [name for name in names if name in OURS]
    comparable = tuple(name for name in same if name != baseline) if baseline in same else ()
    systems = [_build(name, loaded) for name in names]
    return Line(systems, {name: possible[name] for name in names}, baseline, comparable)


def _descriptions(loaded: Loaded) -> dict[str, str]:
    """What can run, in the order of tables."""
    block = "" if loaded.block_size is None else f", block {loaded.block_size}"
    draft = "" if loaded.draft is None else f"draft {Path(loaded.draft_name or '').name}"
    draft += "" if loaded.draft is None else f", block {loaded.block_size or loaded.draft.block_size}"
    found = {
        DRAFT: f"our loop with {draft}" if loaded.draft is not None else "",
        BOTH: "our loop with the draft, and with n-grams where they promise as much"
        if loaded.draft is not None
        else "",
        NGRAM: f"our loop with the n-gram drafter{block}" if loaded.block_size != 1 else "",
        PLAIN: "our loop with no drafter",
    }
    one = loaded.at_once == 1
    if loaded.target.backend == "torch":
        found[TRANSFORMERS] = "generate of transformers"
        found[LOOKUP] = f"the same, prompt_lookup_num_tokens={PROMPT_LOOKUP_TOKENS}" if one else ""
        found[ASSISTED] = "the same with the assistant model" if one and loaded.assistant is not None else ""
    if loaded.target.backend == "mlx" and one:
        found[MLX_LM] = "stream_generate of mlx-lm"
    return {name: text for name, text in found.items() if text}


def _refusal(name: str, loaded: Loaded, possible: str) -> str:
    if name in (DRAFT, BOTH, NGRAM) and loaded.block_size == 1:
        return f"--systems {name} needs --block-size 2 or more; with 1 you can ask for {possible}"
    return f"--systems {name} cannot run here: there are {possible}{_why(name, loaded)}"


def _why(name: str, loaded: Loaded) -> str:
    if name in (DRAFT, BOTH) and loaded.draft is None:
        return f" ({name} needs --draft-model)"
    if name == ASSISTED and loaded.assistant is None:
        return f" ({ASSISTED} needs --assistant-model)"
    return " (the others take one prompt at a time)" if loaded.at_once > 1 else ""


def _build(name: str, loaded: Loaded) -> System:
    target, asking = loaded.target, loaded.asking
    if name == MLX_LM:
        return MlxGenerate(name, target, asking)
    if name in (TRANSFORMERS, LOOKUP, ASSISTED):
        lookup = PROMPT_LOOKUP_TOKENS if name == LOOKUP else None
        assistant = loaded.assistant if name == ASSISTED else None
        return TransformersGenerate(name, target, asking, lookup, assistant, loaded.at_once)
    drafter: Drafter = NGramDrafter() if name == NGRAM else NoDrafter()
    if name in (DRAFT, BOTH):
        assert loaded.draft is not None
        drafter = BothDrafters(loaded.draft) if name == BOTH else loaded.draft
    return Loop(name, target, drafter, asking, loaded.block_size, loaded.at_once, loaded.split)


def servers(
    base_urls: Sequence[str],
    model: str | None,
    asking: Asking,
    concurrency: int,
    timeout: float,
    api_key: str | None,
) -> Line:
    """One or several servers; the first of several is the baseline.

    Args:
        base_urls: each an address, or ``NAME=ADDRESS``.
        model: as the servers call it; by default the first each names.

    Raises:
        RequestError: no address, or two of one name.
    """
    found: dict[str, str] = {}
    for given in base_urls:
        name, equals, url = given.partition("=")
        if not equals or "/" in name:  # an address may have an = of its own
            name, url = ("server" if len(base_urls) == 1 else f"server {len(found) + 1}"), given
        if name in found:
            raise RequestError(f"--base-url {given}: there is another server called {name}")
        found[name] = url
    if not found:
        raise RequestError("--backend openai needs --base-url, for example http://localhost:8000/v1")
    systems: list[System] = []
    descriptions: dict[str, str] = {}
    for name, url in found.items():
        server = Server(name, url, model or "", asking, concurrency, timeout, api_key)
        if model is None:
            server.model = server.first_model()
        systems.append(server)
        descriptions[name] = f"{server.model} at {url}"
    return Line(systems, descriptions, next(iter(found)) if len(found) > 1 else None, ())
