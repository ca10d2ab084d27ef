"""The arranged head gives the scores of the plain one, and steps aside wherever it could be wrong."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dflash
import tiny
from dflash.backends.torch.head import PackedHead, arranged, pack_head
from dflash.backends.torch.target import TorchTarget


@pytest.fixture
def plain() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 300)


@pytest.fixture
def head(plain: nn.Linear) -> PackedHead:
    made = PackedHead(plain)
    made.refresh()
    assert made._packed is not None
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model on disk: only those loaded here get such a head."""
    tiny.model("llama", tie_word_embeddings=True, vocab_size=272).save_pretrained(tmp_path)
    tiny.make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def scores(head: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode(), arranged():
        out: Tensor = head(x)
        return out


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_loaded_target_gets_one_that_keeps_names_and_ties(folder: Path) -> None:
    target: Any = dflash.load(folder, backend="torch", dtype="float32", device="cpu")
    assert isinstance(target.anatomy.head, PackedHead) and target.anatomy.head._packed is not None
    assert target.anatomy.head.weight is target.anatomy.embedding.weight
    assert list(target.model.state_dict()) == list(tiny.model("llama", tie_word_embeddings=True).state_dict())
    other: Any = dflash.load(folder, backend="torch", dtype="bfloat16", device="cpu")
    assert type(other.anatomy.head) is nn.Linear


def test_a_users_own_model_is_left_as_it_is() -> None:
    model = tiny.model("llama")
    head = model.lm_head
    assert TorchTarget(model, tiny.tokenizer(), "tiny").anatomy.head is model.lm_head is head


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16, 33])
def test_its_scores_are_the_plain_ones(plain: nn.Linear, head: PackedHead, rows: int) -> None:
    x = torch.randn(2, rows, 48)
    close(scores(head, x), scores(plain, x))


def test_a_column_slice_of_states_is_read_right(plain: nn.Linear, head: PackedHead) -> None:
    x = torch.randn(2, 9, 48)[:, 1:]
    close(scores(head, x), scores(plain, x))


@pytest.mark.parametrize("bias", [None, torch.randn(600)[::2]], ids=["none", "strided"])
def test_a_bias_of_any_kind(plain: nn.Linear, bias: Tensor | None) -> None:
    plain.bias = None if bias is None else nn.Parameter(bias)
    head = PackedHead(plain)
    head.refresh()
    x = torch.randn(1, 5, 48)
    close(scores(head, x), scores(plain, x))
    assert scores(head, x[:, :0]).shape == (1, 0, 300)


def test_the_copy_is_what_answers(plain: nn.Linear, head: PackedHead) -> None:
    """Else the tests here would show nothing."""
    x = torch.randn(1, 8, 48)
    before = scores(head, x)
    with torch.no_grad():
        plain.weight.zero_()
    assert torch.equal(scores(head, x), before)
    with torch.inference_mode():
        assert torch.equal(head(x), plain(x)), "outside of a session the weights do"


def fused(weight: nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.1, fused=True).step()


CHANGES = {
    "in place": lambda head: head.weight.data.copy_(torch.randn(300, 48)),
    "added to data": lambda head: head.weight.data.__iadd__(0.1),
    "one number": lambda head: head.weight.data[7].__setitem__(3, 0.5),
    "two rows swapped": lambda head: head.weight.data.copy_(head.weight.data[[1, 0, *range(2, 300)]]),
    "other data": lambda head: setattr(head.weight, "data", torch.randn(300, 48)),
    "another parameter": lambda head: setattr(head, "weight", nn.Parameter(torch.randn(300, 48))),
    "there and back": lambda head: head.to(torch.bfloat16).to(torch.float32),
    "a fused optimizer": lambda head: fused(head.weight),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_that_were_changed_are_arranged_anew(head: PackedHead, change: Any) -> None:
    change(head)
    head.refresh()
    x = torch.randn(1, 8, 48)
    close(scores(head, x), nn.functional.linear(x, head.weight, head.bias))


def test_weights_that_were_not_changed_are_not(head: PackedHead) -> None:
    packed = head._packed
    head.refresh()
    assert head._packed is packed


def test_a_session_begins_with_the_weights_as_they_are(folder: Path) -> None:
    target: Any = dflash.load(folder, backend="torch", dtype="float32", device="cpu")

    def answer(of: Any) -> list[int]:
        return dflash.generate(of, None, of.tokenizer, [5, 9, 2], max_tokens=12).tokens

    before = answer(target)
    target.anatomy.embedding.weight.data += torch.randn(target.anatomy.embedding.weight.shape) * 0.5
    fresh = tiny.model("llama", tie_word_embeddings=True, vocab_size=272)
    fresh.load_state_dict(target.model.state_dict())
    assert answer(target) == answer(TorchTarget(fresh, target.tokenizer, "fresh")) != before


def test_weights_made_in_inference_mode_are_arranged_too() -> None:
    with torch.inference_mode():
        made = nn.Linear(48, 300)
    head = PackedHead(made)
    head.refresh()
    x = torch.randn(1, 8, 48)
    close(scores(head, x), scores(made, x))


def test_what_cannot_be_arranged_is_not() -> None:
    aside = nn.Linear(48, 300)
    aside.weight = nn.Parameter(torch.randn(300 * 48 + 1)[1:].view(300, 48))
    for odd in (nn.Linear(47, 300), aside, nn.Linear(48, 300).double(), nn.Linear(48, 300).to(torch.bfloat16)):
        head = PackedHead(odd)
        head.refresh()
        assert head._packed is None
        x = torch.randn(1, 8, odd.in_features, dtype=odd.weight.dtype)
        assert torch.equal(scores(head, x), scores(odd, x))


def test_training_goes_through_it(plain: nn.Linear, head: PackedHead) -> None:
    x = torch.randn(1, 8, 48, requires_grad=True)
    with arranged():
        head(x).sum().backward()
    torch.testing.assert_close(x.grad, plain.weight.sum(dim=0).expand(1, 8, -1))


def test_autocast_and_other_dtypes_go_the_usual_way(plain: nn.Linear, head: PackedHead) -> None:
    x = torch.randn(1, 8, 48)
    with torch.autocast("cpu", torch.bfloat16):
        assert scores(head, x).dtype == torch.bfloat16
    assert scores(head.double(), x.double()).dtype == torch.float64
    model = tiny.model("llama").to(torch.bfloat16)
    pack_head(model)
    assert type(model.get_output_embeddings()) is nn.Linear


def test_a_copy_of_a_used_head_is_a_head_of_its_own(head: PackedHead) -> None:
    x = torch.randn(1, 8, 48)
    before = scores(head, x)
    twin = copy.deepcopy(head)
    with torch.no_grad():
        twin.weight.zero_()
    twin.refresh()
    assert torch.equal(scores(head, x), before)
    close(scores(twin, x), twin.bias.expand(1, 8, -1))
