"""Targets: what is found in a model, what is refused, and the self-check at load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import fakes
import tiny
from dflash.backends.torch import cache as cache_module
from dflash.backends.torch.load import check_rollback
from dflash.backends.torch.target import TorchTarget
from dflash.decode import Request, decode
from dflash.errors import RequestError, UnsupportedTarget
from dflash.limits import Output
from dflash.sampling import SamplingParams

PROMPT = [11, 3, 60, 7, 22]


def wrapped(name: str) -> Any:
    """A multimodal wrapper around a tiny text model."""
    torch.manual_seed(0)
    text = tiny.config(name).to_dict()
    if name == "gemma3":
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config: Any = transformers.Gemma3Config(
            text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
        )
        made: Any = transformers.Gemma3ForConditionalGeneration(config)
    else:
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
        config = transformers.Qwen3_5Config(text_config=text, vision_config={**vision, "patch_size": 4})
        made = transformers.Qwen3_5ForConditionalGeneration(config)
    language = made.model.language_model
    language.load_state_dict(tiny.model(name).model.state_dict())
    return made.eval()


@pytest.mark.parametrize("name", ["gemma3", "qwen3.5"])
def test_a_language_model_inside_a_wrapper(name: str) -> None:
    """L6."""
    target = TorchTarget(wrapped(name), tiny.tokenizer(), name)
    check_rollback(target)
    ids = torch.tensor([PROMPT])
    own = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    own = own[0, 5:].tolist()
    done = [Output(lambda ids: "", 24) for _ in range(2)]
    oracle = fakes.OracleDrafter(5, [[*PROMPT, *own]] * 2, fakes.scripted(0, 2, 4, 1))
    for _ in decode(target, oracle, [Request(PROMPT, SamplingParams(), o) for o in done], block_size=5):
        pass
    assert [o.tokens for o in done] == [own, own]


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_architecture_passes_the_self_check(name: str) -> None:
    check_rollback(tiny.target(name))


def test_a_state_that_is_not_rolled_back_fails_the_self_check(monkeypatch: Any) -> None:
    """CH1, CH4: what others shipped is found at load."""
    target = tiny.target("qwen3-next")
    with monkeypatch.context() as patch:
        patch.setattr(cache_module.RecurrentLayer, "keep", lambda self, count, width, cache: None)
        with pytest.raises(UnsupportedTarget, match="does not read on correctly"):
            check_rollback(target)
    check_rollback(target)


REFUSED = {
    "Jamba": ("recurrent state in a module we cannot replay .JambaMambaMixer", {"num_experts": 2}),
    "Llama4Text": (
        "layers of kind 'chunked_attention'",
        {"num_local_experts": 2, "attention_chunk_size": 8, "intermediate_size_mlp": 32},
    ),
    "MiniMax": ("MiniMaxLightningAttention", {"num_local_experts": 2}),
    "GPT2": ("found none", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rolled_back_is_refused_by_name(name: str) -> None:
    message, own = REFUSED[name]
    config = getattr(transformers, f"{name}Config")(**{**tiny._BASE, **own})
    kind = {"GPT2": "GPT2LMHeadModel", "Llama4Text": "Llama4ForCausalLM"}.get(name, f"{name}ForCausalLM")
    made = getattr(transformers, kind)(config)
    with pytest.raises(UnsupportedTarget, match=message):
        TorchTarget(made, tiny.tokenizer(), name)


def test_a_tap_outside_the_target_is_refused_with_the_valid_range() -> None:
    with pytest.raises(RequestError, match="tap 4 is no layer of qwen3: valid ids are 0 to 3"):
        tiny.target("qwen3").start(1, (1, 4), 8, 64)


def test_keeping_more_than_the_block_is_a_bug_of_ours() -> None:
    session = tiny.target("qwen3").start(1, (), 8, 64)
    session.prefill([PROMPT], lambda tokens, features: None)
    from dflash.protocols import Proposal

    with pytest.raises(AssertionError, match="cannot keep"), session.verify([1], Proposal([[2, 3]], 2)) as ahead:
        ahead.keep([4])
    assert session.lengths == [5]
