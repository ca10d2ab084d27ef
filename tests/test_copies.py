"""Drafts that come with more than their layers: copies of the target's tables, and a vocabulary of their own.

As vLLM's speculators library writes them: real files, on both backends.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dflash
import tiny
from dflash.backends.torch.target import TorchTarget
from dflash.decode import Request, decode
from dflash.drafters import NoDrafter
from dflash.errors import CheckpointError, IncompatibleDraft, RequestError
from dflash.limits import Output
from dflash.protocols import Features
from dflash.sampling import SamplingParams
from test_draft import straight_line

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
PROMPT = [(7 * i * i + 3) % 64 for i in range(30)]
GREEDY = [SamplingParams()]
Edit = Callable[[dict[str, Tensor]], Any]


@pytest.fixture(scope="module", params=["torch", "mlx"])
def target(request: Any, tmp_path_factory: Any) -> Any:
    """One model on each backend."""
    one = tiny.target("qwen3")
    if request.param == "torch":
        return one
    pytest.importorskip("mlx_lm")
    import tiny_mlx

    return tiny_mlx.converted(one.model, "qwen3", tmp_path_factory.mktemp("target"))


def tables(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The target's embedding and head, as a draft's files have them."""
    model = tiny.target("qwen3").model
    return {
        EMBEDDING: model.get_input_embeddings().weight.detach().to(dtype).clone(),
        HEAD: model.get_output_embeddings().weight.detach().to(dtype).clone(),
    }


def write(folder: Path, beside: dict[str, Tensor], edit: Edit | None = None, **overrides: Any) -> Path:
    """A draft in the speculators format with tensors beside its own, which ``edit`` changes in place."""
    made = tiny.draft(tiny.target("qwen3"), **overrides)
    tiny.save_draft(made, folder)
    config = made.config.to_speculators("org/model", ["Qwen3ForCausalLM"])
    config["architectures"] = ["DFlashSpeculator"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {**load_file(folder / "model.safetensors"), **beside}
    if edit is not None:
        edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(target: Any, folder: Path) -> Any:
    return dflash.load_draft(folder, backend=target.backend, min_confidence=0)


def at_work(target: Any, made: Any, sampling: SamplingParams = GREEDY[0], verification: str = "match") -> Any:
    """A draft that has read 19 positions."""
    taps = torch.randn(1, 19, 64, generator=torch.Generator().manual_seed(0))
    drafting = made.start(target, [sampling], verification, 64)
    if target.backend == "mlx":
        import mlx.core as mx

        drafting.extend([[0] * 19], Features(mx.array(taps.numpy()), [19]))
    else:
        drafting.extend([[0] * 19], Features(taps, [19]))
    return drafting, taps[0]


def rounds(target: Any, drafter: Any, count: int = 40) -> list[list[int]]:
    done = Output(lambda ids: "", count)
    request = Request(PROMPT, SamplingParams(), done)
    return [emitted[0].tokens for emitted in decode(target, drafter, [request], block_size=8)]


def flat(answer: list[list[int]]) -> list[int]:
    return [token for tokens in answer for token in tokens]


def numbers(array: Any) -> np.ndarray:
    """Of either framework."""
    return np.asarray(array.tolist())


# --- copies of the target's tables --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_copies_of_the_targets_tables_are_taken_and_not_kept(target: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    made = load(target, write(tmp_path / "draft", tables(dtype)))
    bare = load(target, tiny.save_draft(tiny.draft(tiny.target("qwen3")), tmp_path / "bare"))
    assert rounds(target, made) == rounds(target, bare)
    assert flat(rounds(target, made)) == flat(rounds(target, NoDrafter()))
    have, want = (numbers(at_work(target, one)[0].block_scores([7], 7)) for one in (made, bare))
    np.testing.assert_array_equal(have, want)
    names = made.state_dict() if target.backend == "torch" else made.parameters()
    assert not {"embed_tokens", "lm_head"} & {name.partition(".")[0] for name in names}


def test_what_only_training_reads_is_not_read(target: Any, tmp_path: Path) -> None:
    unread = {"verifier_norm.weight": torch.ones(32), "verifier_lm_head.weight": tables()[HEAD]}
    assert rounds(target, load(target, write(tmp_path / "draft", {**tables(), **unread})))


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
@pytest.mark.parametrize("change", [lambda t: t[41].neg_(), lambda t: t.mul_(1.02), lambda t: t.copy_(t.flip(0))])
def test_tables_of_another_target_are_refused(target: Any, tmp_path: Path, name: str, change: Any) -> None:
    made = load(target, write(tmp_path / "my-draft", tables(), lambda tensors: change(tensors[name])))
    with pytest.raises(IncompatibleDraft, match=f"draft my-draft does not fit .* a {name} that is not the target's"):
        made.start(target, GREEDY, "match", 8)


def test_a_table_of_whole_numbers_is_no_copy(target: Any, tmp_path: Path) -> None:
    codes = {EMBEDDING: torch.ones(64, 32, dtype=torch.int8)}
    with pytest.raises(IncompatibleDraft, match=EMBEDDING):
        load(target, write(tmp_path / "draft", codes)).start(target, GREEDY, "match", 8)


def test_tables_may_differ_in_their_padding(tmp_path: Path) -> None:
    """Also across the rows that are compared at a time."""
    model = tiny.model("qwen3", vocab_size=272)
    of = TorchTarget(model, tiny.tokenizer(), "tiny")
    tensors = {EMBEDDING: model.model.embed_tokens.weight, HEAD: model.lm_head.weight}
    for rows in (280, 264):
        padded = {name: torch.cat([t.detach(), torch.randn(8, 32)])[:rows].contiguous() for name, t in tensors.items()}
        folder = tiny.save_draft(tiny.draft(of, vocab_size=rows, mask_token_id=262), tmp_path / str(rows))
        file = folder / "model.safetensors"
        save_file({**load_file(file), **padded}, file)
        dflash.load_draft(folder, backend="torch").start(of, GREEDY, "match", 8)
        padded[HEAD][263, 0] += 1
        save_file({**load_file(file), **padded}, file)
        with pytest.raises(IncompatibleDraft, match=HEAD):
            dflash.load_draft(folder, backend="torch").start(of, GREEDY, "match", 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_target_in_a_coarser_dtype_has_the_same_tables(tmp_path: Path, dtype: torch.dtype) -> None:
    of = TorchTarget(tiny.model("qwen3", dtype=dtype), tiny.tokenizer(), "tiny")
    made = dflash.load_draft(write(tmp_path / "draft", tables()), backend="torch")
    made.start(of, GREEDY, "match", 8)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_target_has_the_tables_it_was_quantized_from(tmp_path: Path, bits: int) -> None:
    pytest.importorskip("mlx_lm")
    from mlx import nn

    import tiny_mlx

    of = tiny_mlx.converted(tiny.model("qwen3"), "qwen3", tmp_path / "target")
    nn.quantize(
        of.model,
        group_size=32,
        bits=bits,
        class_predicate=lambda _, module: hasattr(module, "to_quantized") and module.weight.shape[-1] == 32,
    )
    of = tiny_mlx.target_of(of.model, "quantized", tiny_mlx.config("qwen3"))
    load(of, write(tmp_path / "draft", tables())).start(of, GREEDY, "match", 8)
    for name in (EMBEDDING, HEAD):
        other = write(tmp_path / name, tables(), lambda tensors, name=name: tensors[name].copy_(tensors[name].flip(0)))
        with pytest.raises(IncompatibleDraft, match=name):
            load(of, other).start(of, GREEDY, "match", 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_target_whose_weights_mlx_lm_multiplies_has_the_tables_as_published(
    backend: str, tied: bool, dtype: str, tmp_path: Path
) -> None:
    """Falcon-H1's."""
    if backend == "mlx":
        pytest.importorskip("mlx_lm")
    own = {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.25, "tie_word_embeddings": tied, "vocab_size": 272}
    model = tiny.model("falcon-h1", **own)
    model.save_pretrained(tmp_path / "target")
    tiny.make_tokenizer().save_pretrained(tmp_path / "target")
    of = dflash.load(tmp_path / "target", backend, dtype=dtype)
    layers = {EMBEDDING: model.get_input_embeddings(), HEAD: model.get_output_embeddings()}
    published = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    made = tiny.draft(TorchTarget(model, tiny.tokenizer(), "tiny"))

    def draft(beside: dict[str, Tensor]) -> Any:
        folder = tiny.save_draft(made, tmp_path / "draft")
        file = folder / "model.safetensors"
        save_file({**load_file(file), **beside}, file)
        return load(of, folder)

    draft(published).start(of, GREEDY, "match", 8)
    for name in published:
        for other in (published[name] * 3, published[name] * 0.25, published[name].flip(0).contiguous()):
            with pytest.raises(IncompatibleDraft, match=name):
                draft({**published, name: other}).start(of, GREEDY, "match", 8)


# --- a vocabulary of its own --------------------------------------------------------------------------

REDUCED = {"draft_vocab_size": 20}


def mask_of(ids: Tensor, size: int = 64) -> Tensor:
    return torch.zeros(size, dtype=torch.bool).index_fill(0, ids, True)


@pytest.fixture
def reduced(tmp_path: Path) -> Path:
    """As published: with the target's embedding, and the mask of the tokens that it can propose."""
    ids = tiny.reduced_ids(tiny.draft_config(tiny.target("qwen3"), **REDUCED))
    return write(tmp_path / "reduced", {EMBEDDING: tables()[EMBEDDING], "t2d": mask_of(ids)}, **REDUCED)


def test_a_reduced_draft_scores_with_its_own_head_and_names_the_targets_tokens(target: Any, reduced: Path) -> None:
    made = load(target, reduced)
    drafting, taps = at_work(target, made)
    tensors = load_file(reduced / "model.safetensors")
    want = straight_line(made.config, tensors, tiny.target("qwen3"), taps, 7, 8).detach()
    assert want.shape == (7, 20)
    np.testing.assert_allclose(numbers(drafting.block_scores([7], 7))[0], want.numpy(), atol=3e-4, rtol=1e-3)
    ids = torch.arange(20) + tensors["d2t"]
    assert drafting.propose([7], 7).tokens.tolist()[0] == ids[want.argmax(-1)].tolist()


def test_what_a_reduced_draft_says_it_drew_from_is_over_the_targets_vocabulary(target: Any, reduced: Path) -> None:
    params = SamplingParams(temperature=0.7, seed=3)
    made = load(target, reduced)
    drafting, taps = at_work(target, made, params, "rejection")
    proposal = drafting.propose([7], 7)
    tensors = load_file(reduced / "model.safetensors")
    scores = straight_line(made.config, tensors, tiny.target("qwen3"), taps, 7, 8).detach()
    ids = torch.arange(20) + tensors["d2t"]
    want = torch.zeros(7, 64).index_copy(1, ids, (scores / 0.7).softmax(-1))
    np.testing.assert_allclose(numbers(proposal.q)[0], want.numpy(), atol=1e-4)
    assert set(proposal.tokens.tolist()[0]) <= set(ids.tolist())


def test_a_reduced_draft_changes_no_answer(target: Any, tmp_path: Path) -> None:
    plain = flat(rounds(target, NoDrafter(), 60))
    ids = torch.tensor([token for token, _ in Counter(plain).most_common(4)])  # so that it is right now and then
    offsets = ids - torch.arange(4)
    folder = write(tmp_path / "draft", {}, lambda tensors: tensors["d2t"].copy_(offsets), draft_vocab_size=4)
    drafted = rounds(target, load(target, folder), 60)
    assert flat(drafted) == plain
    widths = [len(tokens) for tokens in drafted]
    assert max(widths) > 1 and widths.count(1) > 5, "some proposals stood, most fell"


WRONG: dict[str, tuple[Edit, str]] = {
    "no offsets": (lambda t: t.pop("d2t"), "lacks d2t"),
    "no head": (lambda t: t.pop(HEAD), r"lacks lm_head\.weight"),
    "the target's head": (lambda t: t.update({HEAD: torch.ones(64, 32)}), r"\[64, 32\].*\[20, 32\]"),
    "offsets of another size": (
        lambda t: t.update({"d2t": torch.zeros(21, dtype=torch.long)}),
        r"d2t has shape \[21\]",
    ),
    "a token twice": (lambda t: t["d2t"].copy_(5 - torch.arange(20)), "d2t must give each"),
    "beyond the vocabulary": (lambda t: t["d2t"].fill_(45), "d2t must give each"),
    "before the vocabulary": (lambda t: t["d2t"].fill_(-1), "d2t must give each"),
    "no whole numbers, nor numpy's": (
        lambda t: t.update({"d2t": torch.zeros(20, dtype=torch.bfloat16)}),
        "whole numbers, not BF16",
    ),
    "no whole numbers": (lambda t: t.update({"d2t": torch.zeros(20)}), "whole numbers"),
    "another mask": (lambda t: t.update({"t2d": mask_of(torch.arange(20))}), "t2d and d2t"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_vocabulary_that_is_none_is_refused(target: Any, tmp_path: Path, what: str) -> None:
    edit, named = WRONG[what]
    ids = tiny.reduced_ids(tiny.draft_config(tiny.target("qwen3"), **REDUCED))
    folder = write(tmp_path / "reduced", {"t2d": mask_of(ids)}, edit, **REDUCED)
    with pytest.raises(CheckpointError, match=named) as caught:
        load(target, folder)
    assert "reduced" in str(caught.value) and "\n" not in str(caught.value)


def test_a_token_that_the_target_lacks_is_refused(tmp_path: Path) -> None:
    of = TorchTarget(tiny.model("qwen3", vocab_size=262), tiny.tokenizer(), "tiny")
    sizes = {"vocab_size": 272, "mask_token_id": 261, "draft_vocab_size": 20}
    folder = write(tmp_path / "draft", {}, lambda t: t["d2t"].fill_(243), **sizes)
    with pytest.raises(IncompatibleDraft, match="proposes token 262, the target's end at 261"):
        dflash.load_draft(folder, backend="torch").start(of, GREEDY, "match", 8)


def test_a_reduced_draft_is_exported_and_read_back_whole(reduced: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from dflash.cli.main import app

    back = tmp_path / "back"
    call = ["export", "--draft", str(reduced), "--output", str(back), "--format", "published"]
    assert CliRunner().invoke(app, call).exit_code == 0
    there, here = (dflash.load_draft(folder, backend="torch") for folder in (reduced, back))
    assert there.config == here.config and there.config.draft_vocab_size == 20
    assert all(torch.equal(tensor, here.state_dict()[name]) for name, tensor in there.state_dict().items())


def test_training_does_not_go_on_from_a_reduced_draft(reduced: Path) -> None:
    from dflash.train.run import Shape, make_draft

    with pytest.raises(RequestError, match="only 20 of the target's tokens"):
        make_draft(tiny.target("qwen3"), Shape(start=str(reduced)), 0)
