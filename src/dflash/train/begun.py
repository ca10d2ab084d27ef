"""What there is of a run already, in its folder, and whether it may go on. Read before PyTorch is imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash import jsontext
from dflash.draft_config import DFlashConfig
from dflash.errors import RequestError
from dflash.train.recipe import Recipe

RUN = "run.json"
"""What a run was begun with."""


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run."""
    whole = [path for path in folder.glob("step-*") if _step(path).isdigit() and (path / "state.json").is_file()]
    return max(whole, key=lambda path: int(_step(path)), default=None)


def step_of(path: Path | None) -> int | None:
    """The step that a checkpoint is of."""
    return None if path is None else int(_step(path))


def _step(path: Path) -> str:
    return path.name.removeprefix("step-")


def check_folder(output: Path, resume: bool, recipe: Recipe) -> None:
    """What can be told without the target and the answers of whether a run may go on in this folder.

    Raises:
        RequestError: as ``check_output`` and ``check_same``.
    """
    check_output(output, resume)
    if resume and latest(output / "checkpoints") is not None:
        check_same(output, {"recipe": json.loads(json.dumps(asdict(recipe)))})


def check_output(output: Path, resume: bool) -> None:
    """
    Raises:
        RequestError: a run is there, which is not to be gone on with.
    """
    if (output / RUN).is_file() and not resume and latest(output / "checkpoints") is not None:
        raise RequestError(f"{output} already holds a run: go on with --resume, or give another --output")


def check_same(output: Path, run: Mapping[str, Any]) -> None:
    """
    Args:
        run: as in ``run.json``; what is not known yet may be left out, all but the recipe.

    Raises:
        RequestError: the run was begun with something else, or with what cannot be told.
    """
    file = output / RUN
    try:
        have = jsontext.parse(file.read_text(encoding="utf-8"))
        recipe = [key for key in run["recipe"] if have["recipe"].get(key) != run["recipe"][key]]
        others = [key for key in run if key != "recipe" and have[key] != run[key]]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RequestError(f"{file} does not say what the run was begun with ({error!r}): begin anew") from error
    if recipe or others:
        names = {"answers": "set of answers (--data, --held-out, --max-length)"}
        what = f"other --{recipe[0].replace('_', '-')}" if recipe else f"another {names.get(others[0], others[0])}"
        raise RequestError(f"{output} was begun with {what}: resume with the same options")


def check_start(start: str) -> None:
    """
    Raises:
        RequestError: it is empty, as a variable that is not set.
    """
    if not start.strip():
        raise RequestError("the draft to start from has an empty name: give target, random or a folder")


def config_of_run(output: Path) -> DFlashConfig:
    """
    Raises:
        RequestError: it is no run's folder, or what it was begun with cannot be told.
    """
    try:
        return DFlashConfig.parse(jsontext.parse((output / RUN).read_text(encoding="utf-8"))["draft"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RequestError(f"{output / RUN} does not say which draft the run makes ({error})") from error
