"""``results.json``: what was measured, where, with what, and the figures. Everything else is made from it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash import __version__, jsontext
from dflash.benchmark.answers import Record
from dflash.benchmark.figures import Figures, Parting, figures
from dflash.difference import Difference
from dflash.errors import RequestError
from dflash.processors import Processors, processors

FORMAT = 1
"""Of the file. A reader of another number refuses it."""

ALL = "all"
"""The line over all data sets."""

_PACKAGES = {
    "torch": ("torch", "transformers", "tokenizers", "numpy"),
    "mlx": ("mlx", "mlx-lm", "transformers", "tokenizers", "numpy"),
    "openai": ("httpx2",),
}
"""Backend -> packages whose versions are recorded."""


@dataclass(frozen=True)
class Results:
    """A benchmark.

    Attributes:
        command: as it was typed.
        complete: False if it was stopped early.
        settings: what was asked, and of which models. Equal settings ask the same work.
        environment: where it ran.
        systems: name -> what it is. In the order of tables.
        baseline: the system the others are compared with; None for a single server.
        comparable: systems whose answers should be the baseline's, token for token.
    """

    command: str
    complete: bool
    settings: dict[str, Any]
    environment: dict[str, Any]
    systems: dict[str, str]
    baseline: str | None
    comparable: tuple[str, ...]
    records: list[Record]
    partings: list[Parting]

    @property
    def datasets(self) -> list[str]:
        """Names of the data sets."""
        return list(self.settings["datasets"])

    def of(self, system: str | None, dataset: str) -> list[Record]:
        """The records of a system on a data set, or on ``ALL`` of them."""
        return [r for r in self.records if r.system == system and dataset in (ALL, r.dataset)]

    def figures(self) -> dict[str, dict[str, Figures]]:
        """Data set -> system -> figures; and of all data sets where there are several. Only what was measured."""
        names = [*self.datasets, *([ALL] if len(self.datasets) > 1 else [])]
        return {
            dataset: {
                system: figures(
                    self.of(system, dataset), self.of(self.baseline, dataset), self.partings, system in self.comparable
                )
                for system in self.systems
                if self.of(system, dataset)
            }
            for dataset in names
        }

    def to_json(self) -> dict[str, Any]:
        """As one JSON object."""
        return {
            "dflash_benchmark": FORMAT,
            "command": self.command,
            "complete": self.complete,
            "environment": self.environment,
            "settings": self.settings,
            "systems": self.systems,
            "baseline": self.baseline,
            "comparable": list(self.comparable),
            "figures": {
                dataset: {system: asdict(found) for system, found in rows.items()}
                for dataset, rows in self.figures().items()
            },
            "partings": [asdict(parting) for parting in self.partings],
            "records": [record.to_json() for record in self.records],
        }


def save(results: Results, file: Path) -> None:
    """Write the file, whole or not at all. Records go one a line, for people and for diffs."""
    value = results.to_json()
    records = value.pop("records")
    head = json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False).removesuffix("\n}")
    lines = ",\n".join(json.dumps(record, ensure_ascii=False, allow_nan=False) for record in records)
    beside = file.with_name(f".{file.name}.part")
    beside.write_text(f'{head},\n "records": [\n{lines}\n]\n}}\n', encoding="utf-8")
    os.replace(beside, file)


def load(file: Path) -> Results:
    """Read a ``results.json``.

    Raises:
        RequestError: it is not there, or is something else.
    """
    try:
        value = jsontext.parse(file.read_text(encoding="utf-8"))
        found = value["dflash_benchmark"]
        results = _results(value) if found == FORMAT else None
    except OSError as error:
        raise RequestError(f"cannot read {file}: {error.strerror}") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RequestError(f"{file} is no results.json of dflash benchmark ({error!r})") from error
    if results is None:
        raise RequestError(f"{file} is of format {found}, this version reads {FORMAT}")
    return results


def _results(value: dict[str, Any]) -> Results:
    """What ``to_json`` wrote.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: it is something else.
    """
    for one in value["settings"]["datasets"].values():
        one["source"].encode()  # text: two results share prompts only where they were read from the same place
    return Results(
        command=value["command"],
        complete=value["complete"],
        settings=value["settings"],
        environment=dict(value["environment"]),
        systems=dict(value["systems"]),
        baseline=value["baseline"],
        comparable=tuple(value["comparable"]),
        records=[Record.from_json(record) for record in value["records"]],
        partings=[_parting(parting) for parting in value["partings"]],
    )


def _parting(value: dict[str, Any]) -> Parting:
    dataset, prompt, turn, repeat = value["key"]
    difference = None if value["difference"] is None else Difference(**value["difference"])
    return Parting(value["system"], (dataset, prompt, turn, repeat), value["position"], difference)


# --- where it ran -----------------------------------------------------------------------------------


def environment(device: str | None, dtype: str | None, backend: str) -> dict[str, Any]:
    """What the numbers depend on beside the settings. Of frameworks only the backend's own is imported.

    Args:
        device, dtype: of the target; None where servers are asked.
        backend: "torch", "mlx" or "openai".
    """
    found: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu(),
        "cores": processors().affinity,
        "cpu_quota": processors().quota,
        "python": platform.python_version(),
        "dflash": __version__,
        "commit": _commit(),
        "versions": {name: version for name in _PACKAGES[backend] if (version := _version(name)) is not None},
    }
    if backend == "torch":
        import torch

        found["threads"] = torch.get_num_threads()
        if device is not None and device.startswith("cuda"):
            found["gpu"] = torch.cuda.get_device_name(device)
            found["cuda"] = torch.version.cuda
    if backend == "mlx" and device == "gpu":
        import mlx.core as mx

        found["gpu"] = mx.device_info()["device_name"]
    return found


def fingerprint(files: Sequence[Path]) -> str:
    """SHA-256 over the contents of files, in this order."""
    hashed = hashlib.sha256()
    for name in files:
        with name.open("rb") as file:
            while part := file.read(1 << 24):
                hashed.update(part)
    return hashed.hexdigest()


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of the checkout this package runs from, "+" where files were changed; None for an installed package."""
    command = ["git", "-C", str(Path(__file__).parent)]
    try:
        tracked = subprocess.run([*command, "ls-files", "--error-unmatch", __file__], capture_output=True)
        if tracked.returncode != 0:
            return None
        head = subprocess.run([*command, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*command, "status", "--porcelain", "-uno"], capture_output=True, text=True)
    except OSError:  # no git here
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def headline(results: Results) -> Sequence[str]:
    """The conditions in a few short lines, for screen and report."""
    settings, where = results.settings, results.environment
    thinking = {None: "as the template has it", True: "on", False: "off"}[settings["enable_thinking"]]
    sampling = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    for name, none in (("top_p", 1), ("top_k", 0)):
        if settings["temperature"] and settings[name] != none:
            sampling += f", {name} {settings[name]:g}"
    models = settings["model"] + ("" if settings["draft_model"] is None else f" with draft {settings['draft_model']}")
    asked = [sampling, f"at most {settings['max_new_tokens']} tokens", f"thinking {thinking}"]
    asked += [f"block {settings['block_size']}"] * (settings["block_size"] is not None)
    if confidence := settings.get("draft_min_confidence"):  # newer than the first records
        asked.append(f"blocks end where the draft's confidence falls below {confidence:g}")
    asked += [f"{settings['at_once']} at once"] * (settings["at_once"] > 1)
    asked += [f"{settings['repeats']} repeats"] * (settings["repeats"] > 1)
    device = [where.get("gpu") or where["cpu"], str(where["device"] or "asking a server"), str(where["dtype"] or "")]
    if "threads" in where:
        device.append(Processors(where["cores"], where.get("cpu_quota")).shared_by(where["threads"]))
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return (
        models,
        ", ".join(asked),
        ", ".join(part for part in device if part),
        f"dflash {where['dflash']}{' at ' + where['commit'] if where['commit'] else ''}, python {where['python']}, "
        f"{versions}",
    )
