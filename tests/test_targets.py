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
from dflash.backends.torch import hooks
from dflash.backends.torch.check import check_rollback
from dflash.backends.torch.target import Reading, TorchTarget
from dflash.decode import Request, decode
from dflash.drafters import NGramDrafter, NoDrafter
from dflash.errors import IncompatibleDraft, RequestError, UnsupportedTarget
from dflash.limits import Output
from dflash.protocols import Proposal
from dflash.sampling import SamplingParams
from dflash.train.run import Shape, make_draft

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


def answers(target: TorchTarget, drafter: Any, prompts: list[list[int]], count: int = 20) -> list[list[int]]:
    done = [Output(lambda ids: "", count) for _ in prompts]
    rows = [Request(prompt, SamplingParams(), output) for prompt, output in zip(prompts, done, strict=True)]
    for _ in decode(target, drafter, rows, block_size=max(drafter.block_size, 2)):
        pass
    return [output.tokens for output in done]


MANY_STREAMS = "gemma3n"
"""Its layers pass on several streams at once: no draft can be made for that."""


@pytest.mark.parametrize("name", [name for name in tiny.ARCHITECTURES if name != MANY_STREAMS])
def test_a_draft_reads_every_architecture_and_changes_no_answer(name: str) -> None:
    target = tiny.target(name)
    prompts = [PROMPT, PROMPT[:2]]
    plain = answers(target, NoDrafter(), prompts)
    assert answers(target, tiny.draft(target, block_size=5), prompts) == plain
    assert [answers(target, tiny.draft(target, block_size=5), [prompt])[0] for prompt in prompts] == plain


@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT, PROMPT[:2]]], ids=["a row", "rows"])
def test_a_target_whose_layers_pass_on_several_streams_is_refused_to_drafts_only(prompts: list[list[int]]) -> None:
    target = tiny.target(MANY_STREAMS)
    with pytest.raises(UnsupportedTarget, match="a draft cannot read the layers of gemma3n, whose outputs") as caught:
        answers(target, tiny.draft(target), prompts)
    assert "n-grams or plain decoding" in str(caught.value)
    assert answers(target, NGramDrafter(4, 2, 1), prompts) == answers(target, NoDrafter(), prompts)


NARROW: dict[str, tuple[Any, str]] = {
    "OPT": (
        lambda: transformers.OPTForCausalLM(
            transformers.OPTConfig(
                vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=4, num_attention_heads=4,
                max_position_embeddings=128, word_embed_proj_dim=16,
            )
        ),
        "its embedding 16",
    ),
    "RemBERT": (
        lambda: transformers.RemBertForCausalLM(
            transformers.RemBertConfig(
                **{**tiny._BASE, "pad_token_id": None}, input_embedding_size=32, output_embedding_size=24,
                is_decoder=True,
            )
        ),
        "its head 24",
    ),
}  # fmt: skip
"""Models that project between their layers and their embedding or head -> what a draft is told."""


@pytest.mark.parametrize("name", NARROW)
def test_a_target_whose_embedding_or_head_has_another_width_is_refused_to_drafts_only(name: str) -> None:
    make, message = NARROW[name]
    torch.manual_seed(0)
    target = TorchTarget(make().eval(), tiny.tokenizer(), name)
    for draft in (tiny.draft(target), tiny.draft(target, draft_vocab_size=20)):
        if "head" in message and draft.lm_head is not None:  # which has a head of its own
            answers(target, draft, [PROMPT], 4)
            continue
        with pytest.raises(IncompatibleDraft, match=f"layers are 32 wide and {message}"):
            answers(target, draft, [PROMPT], 4)
    assert answers(target, NGramDrafter(4, 2, 1), [PROMPT]) == answers(target, NoDrafter(), [PROMPT])
    shape = Shape(mask_token=63, layers=1, taps=(0, 1))
    with pytest.raises(IncompatibleDraft, match=f"layers are 32 wide and {message}"):
        make_draft(target, shape, 0)


@pytest.mark.parametrize("kind", ["of this package", "of the model itself"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-next", "gpt2"])
def test_a_hook_that_asks_the_model_something_leaves_the_answer_as_it_is(name: str, kind: str) -> None:
    target = TorchTarget(tiny.model(name), tiny.tokenizer(), name)
    repeating = [5, 6, 5, 6, 5, 6]
    draft, lookup = tiny.draft(target), NGramDrafter(4, 2, 1)

    def seen() -> list[torch.Tensor]:
        tapped: list[Any] = []
        target.start(1, (0, 3), 8, 64).prefill([repeating], lambda tokens, features: tapped.append(features.values))
        return tapped

    expected, states = [answers(target, drafter, [repeating, PROMPT]) for drafter in (draft, lookup)], seen()
    asked: list[Any] = []

    def ask(module: nn.Module, args: Any, output: Any) -> None:
        if asked and asked[-1] == "busy":
            return
        asked.append("busy")
        asked.append(
            answers(target, NoDrafter(), [[1, 2]], 2)
            if kind == "of this package"
            else target.model(torch.tensor([[9, 8, 7]])).logits
        )

    hook = target.anatomy.layers[1].register_forward_hook(ask)
    try:
        assert [answers(target, drafter, [repeating, PROMPT]) for drafter in (draft, lookup)] == expected
        torch.testing.assert_close(seen(), states, rtol=0, atol=0)
    finally:
        hook.remove()
    assert len(asked) > 2


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    target = TorchTarget(tiny.model("qwen3-next"), tiny.tokenizer(), "tiny")
    expected = answers(target, NGramDrafter(4, 2, 1), [[5, 6, 5, 6, 5, 6]])

    def fail(module: nn.Module, args: Any, output: Any) -> None:
        raise RuntimeError("of a hook")

    for model in (target.model, target.anatomy.layers[2]):
        hook = model.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="of a hook"):
            answers(target, NGramDrafter(4, 2, 1), [PROMPT])
        hook.remove()
    assert not hooks.running.caches
    assert answers(target, NGramDrafter(4, 2, 1), [[5, 6, 5, 6, 5, 6]]) == expected


@pytest.mark.parametrize("name", ["bloom", "falcon-alibi", "bart", "gpt-neo", "qwen3"])
def test_whoever_wraps_a_model_of_his_own_has_it_checked_on_first_use(name: str) -> None:
    made = tiny.model(name)
    target = TorchTarget(made, tiny.tokenizer(), name)
    prompts = [PROMPT, PROMPT[:2]]
    for prompt, answer in zip(prompts, answers(target, tiny.draft(target), prompts), strict=True):
        ids = torch.tensor([prompt])
        own = made.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert answer == own[0, len(prompt) :].tolist()
    assert target.reading is tiny.target(name).reading


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
    with pytest.raises(UnsupportedTarget):
        TorchTarget(made, tiny.tokenizer(), "roberta").start(1, (), 8, 64)


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
