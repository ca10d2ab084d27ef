"""The arranged head gives the scores of the plain one, and steps aside wherever it could be wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import tiny
from dflash.backends.torch.head import PackedHead, pack_head
from dflash.backends.torch.target import TorchTarget


@pytest.fixture
def plain() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 300)


def scores(head: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        out: Tensor = head(x)
        return out


def test_a_target_in_float32_on_a_cpu_gets_one_that_keeps_names_and_ties() -> None:
    model = tiny.model("llama", tie_word_embeddings=True)
    names = list(model.state_dict())
    target = TorchTarget(model, tiny.tokenizer(), "tiny")
    assert isinstance(target.anatomy.head, PackedHead)
    assert target.anatomy.head.weight is target.anatomy.embedding.weight
    assert list(model.state_dict()) == names
    assert TorchTarget(model, tiny.tokenizer(), "again").anatomy.head is target.anatomy.head


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16, 33])
def test_its_scores_are_the_plain_ones(plain: nn.Linear, rows: int) -> None:
    x = torch.randn(2, rows, 48)
    torch.testing.assert_close(scores(PackedHead(plain), x), scores(plain, x), rtol=1e-5, atol=1e-5)


def test_it_serves_without_a_bias_and_without_rows() -> None:
    bare = nn.Linear(48, 300, bias=False)
    x = torch.randn(1, 5, 48)
    torch.testing.assert_close(scores(PackedHead(bare), x), scores(bare, x), rtol=1e-5, atol=1e-5)
    assert scores(PackedHead(bare), x[:, :0]).shape == (1, 0, 300)


def test_a_column_slice_of_states_is_read_right(plain: nn.Linear) -> None:
    x = torch.randn(2, 9, 48)[:, 1:]
    torch.testing.assert_close(scores(PackedHead(plain), x), scores(plain, x), rtol=1e-5, atol=1e-5)


def test_it_is_arranged_once_and_anew_when_the_weights_change(plain: nn.Linear) -> None:
    head = PackedHead(plain)
    x = torch.randn(1, 8, 48)
    scores(head, x)
    arranged = head._packed
    scores(head, x)
    assert head._packed is arranged is not None
    with torch.no_grad():
        plain.weight.mul_(-2)
    torch.testing.assert_close(scores(head, x), scores(plain, x), rtol=1e-5, atol=1e-5)
    plain.weight.data = torch.randn(300, 48)
    torch.testing.assert_close(scores(head, x), scores(plain, x), rtol=1e-5, atol=1e-5)


def test_weights_made_in_inference_mode_are_arranged_too() -> None:
    with torch.inference_mode():
        made = nn.Linear(48, 300)
    x = torch.randn(1, 8, 48)
    torch.testing.assert_close(scores(PackedHead(made), x), scores(made, x), rtol=1e-5, atol=1e-5)


def test_training_goes_through_it(plain: nn.Linear) -> None:
    x = torch.randn(1, 8, 48, requires_grad=True)
    PackedHead(plain)(x).sum().backward()
    torch.testing.assert_close(x.grad, plain.weight.sum(dim=0).expand(1, 8, -1))


def test_autocast_and_other_dtypes_go_the_usual_way(plain: nn.Linear) -> None:
    x = torch.randn(1, 8, 48)
    with torch.autocast("cpu", torch.bfloat16):
        assert scores(PackedHead(plain), x).dtype == torch.bfloat16
    head = PackedHead(plain).double()
    assert scores(head, x.double()).dtype == torch.float64
    assert head._packed is None
    model = tiny.model("llama").to(torch.bfloat16)
    pack_head(model)
    assert type(model.get_output_embeddings()) is nn.Linear


def test_a_copy_of_a_used_head_is_a_head_of_its_own(plain: nn.Linear) -> None:
    head = PackedHead(plain)
    x = torch.randn(1, 8, 48)
    before = scores(head, x)
    twin = copy.deepcopy(head)
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(scores(head, x), before)
    torch.testing.assert_close(scores(twin, x), twin.bias.expand(1, 8, -1))
