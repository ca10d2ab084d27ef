"""Targets: what is found in a model, what is refused, and the self-check at load."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fakes
import tiny
from dflash.backends.torch import cache as cache_module
from dflash.backends.torch.load import check_rollback
from dflash.backends.torch.target import Reading, TorchTarget
from dflash.decode import Request, decode
from dflash.drafters import NGramDrafter, NoDrafter
from dflash.errors import RequestError, UnsupportedTarget
from dflash.limits import Output
from dflash.protocols import Proposal
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
    "DeepseekV4": ("layers of kind 'compressed_sparse_attention'", {}),
    "MiniMax": ("MiniMaxLightningAttention", {"num_local_experts": 2}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rolled_back_is_refused_by_name(name: str) -> None:
    message, own = REFUSED[name]
    config = getattr(transformers, f"{name}Config")(**{**tiny._BASE, **own})
    made = getattr(transformers, f"{name}ForCausalLM")(config)
    with pytest.raises(UnsupportedTarget, match=message):
        TorchTarget(made, tiny.tokenizer(), name)


LAYERS_ELSEWHERE = ["gpt2", "gptj", "codegen", "gpt-bigcode", "gpt-neo", "gpt-neox", "falcon", "bloom", "mpt", "bart"]
"""Families whose layers sit elsewhere than at ``layers``, or are not handed the cache by its usual name."""


@pytest.mark.parametrize("name", [*LAYERS_ELSEWHERE, "longcat-flash", "qwen3"])
def test_taps_are_the_outputs_of_decoder_layers_wherever_these_sit(name: str) -> None:
    target = tiny.target(name)
    outputs = target.model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    assert len(outputs) == target.num_layers + 1
    tapped: list[Any] = []
    target.start(1, (0,), 8, 64).prefill([PROMPT], lambda tokens, features: tapped.append(features.values))
    torch.testing.assert_close(tapped[0], outputs[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "longcat-flash"])
def test_a_draft_reads_layers_that_sit_elsewhere(name: str) -> None:
    target = tiny.target(name)
    ids = torch.tensor([PROMPT])
    own = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    done = [Output(lambda ids: "", 20) for _ in range(2)]
    for _ in decode(target, tiny.draft(target), [Request(PROMPT, SamplingParams(), o) for o in done], block_size=5):
        pass
    assert [o.tokens for o in done] == [own[0, 5:].tolist()] * 2


def test_a_model_with_two_caches_a_layer_counts_its_layers() -> None:
    target = tiny.target("longcat-flash")
    assert (target.num_layers, len(target.anatomy.kinds)) == (2, 4)


def test_each_way_of_reading_is_used_by_those_that_need_it() -> None:
    ways = {name: tiny.target(name).reading for name in ["gpt2", "mpt", "gpt-neo", "bart", "bloom", "falcon-alibi"]}
    assert ways == {
        "gpt2": Reading.TOGETHER,
        "mpt": Reading.TOGETHER,
        "gpt-neo": Reading.ALONE,  # a local window counted from the last slot
        "bart": Reading.ALONE,  # positions taken from the cache
        "bloom": Reading.BY_ITSELF,  # a position bias made from a mask of two dimensions
        "falcon-alibi": Reading.BY_ITSELF,
    }


@pytest.mark.parametrize(("name", "long"), [("gpt-neo", {"window_size": 256}), ("llama4", {"floor_scale": 8192})])
def test_what_only_a_long_text_would_show_is_not_left_to_the_self_check(name: str, long: dict[str, int]) -> None:
    target = TorchTarget(tiny.model(name, **long), tiny.tokenizer(), name)
    check_rollback(target)
    assert target.reading is Reading.ALONE


def test_a_model_whose_positions_depend_on_the_tokens_is_refused() -> None:
    """RoBERTa skips padding: a drafted padding token would move what follows it in its block."""
    torch.manual_seed(0)
    config = transformers.RobertaConfig(**{**tiny._BASE, "pad_token_id": 1}, is_decoder=True)
    made = transformers.RobertaForCausalLM(config).eval()
    for parameter in made.parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(std=0.35)
    with pytest.raises(UnsupportedTarget):
        check_rollback(TorchTarget(made, tiny.tokenizer(), "roberta"))


class Blocks(nn.Module):
    """Runs like a list of modules and is none."""

    def __init__(self, blocks: Any) -> None:
        super().__init__()
        for index, block in enumerate(blocks):
            self.add_module(str(index), block)

    def __iter__(self) -> Any:
        return iter(self.children())


def test_a_model_without_a_list_of_layers_does_all_that_needs_no_taps() -> None:
    made = tiny.model("gpt2")
    ids = torch.tensor([PROMPT])
    own = made.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)[0, 5:].tolist()
    made.transformer.h = Blocks(made.transformer.h)
    target = TorchTarget(made, tiny.tokenizer(), "unlisted")
    check_rollback(target)
    for drafter in (NoDrafter(), NGramDrafter(4, 2, 1)):
        done = Output(lambda ids: "", 20)
        for _ in decode(target, drafter, [Request(PROMPT, SamplingParams(), done)], block_size=4):
            pass
        assert done.tokens == own
    with pytest.raises(UnsupportedTarget, match="unlisted: no list of decoder layers was found in GPT2LMHeadModel"):
        decode(target, tiny.draft(target), [Request(PROMPT, SamplingParams(), done)], block_size=4)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-next"])
def test_a_users_own_model_is_left_as_it_is(name: str) -> None:
    made = tiny.model(name)
    ids = torch.tensor([PROMPT])
    before, settings, hooked = made(ids).logits, made.config.to_dict(), []
    for model in (made, made, copy.deepcopy(made)):
        target = TorchTarget(model, tiny.tokenizer(), name)
        hooked.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()))
        session = target.start(1, (0, 3), 8, 64)
        session.prefill([PROMPT], lambda tokens, features: None)
        with session.verify([1], Proposal([[2, 3]], 2)) as ahead:
            ahead.keep([2])
    assert hooked[0] == hooked[1] == hooked[2] > 0
    assert made.config._attn_implementation == "sdpa"
    assert made.config.to_dict() == settings
    assert torch.equal(made(ids).logits, before)
    made.train()
    TorchTarget(made, tiny.tokenizer(), name)
    assert made.training


def test_a_tap_outside_the_target_is_refused_with_the_valid_range() -> None:
    with pytest.raises(RequestError, match="tap 4 is no layer of qwen3: valid ids are 0 to 3"):
        tiny.target("qwen3").start(1, (1, 4), 8, 64)


def test_keeping_more_than_the_block_forgets_the_block() -> None:
    session = tiny.target("qwen3").start(1, (), 8, 64)
    session.prefill([PROMPT], lambda tokens, features: None)
    with pytest.raises(RequestError, match="keep takes"), session.verify([1], Proposal([[2, 3]], 2)) as ahead:
        ahead.keep([4])
    assert session.lengths == [5]
