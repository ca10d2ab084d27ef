"""The DFlash draft: written, loaded, and recomputed in a straight line from the published description."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dflash
import tiny
from dflash.backends.torch.draft import DFlashDrafting, DFlashDraftModel
from dflash.backends.torch.target import TorchTarget
from dflash.decode import Request, decode
from dflash.draft_config import DFlashConfig
from dflash.drafters import NoDrafter
from dflash.limits import Output
from dflash.protocols import Features
from dflash.sampling import SamplingParams

GREEDY = [SamplingParams()]
VARIANTS = tiny.DRAFTS


def target() -> TorchTarget:
    return tiny.target("qwen3")


def features(length: int, seed: int = 0) -> Tensor:
    return torch.randn(1, length, 2 * 32, generator=torch.Generator().manual_seed(seed))


def straight_line(
    config: DFlashConfig, w: dict[str, Tensor], of: TorchTarget, taps: Tensor, anchor: int, width: int
) -> Tensor:
    """Logits [width - 1, vocab] of a block behind ``taps`` [n, taps * H], with nothing of the package."""
    n, dim, heads, kv = len(taps), config.head_dim, config.num_attention_heads, config.num_key_value_heads

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * weight

    def rotate(x: Tensor, positions: Tensor) -> Tensor:  # [T, heads, dim]
        frequency, factor = inverse_frequencies(config)
        angle = positions[:, None].double() * frequency
        cos, sin = (f(torch.cat([angle, angle], -1)).float()[:, None] * factor for f in (torch.cos, torch.sin))
        half = dim // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def linear(name: str, x: Tensor) -> Tensor:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    ctx = norm(taps @ w["fc.weight"].T, w["hidden_norm.weight"])
    ids = torch.tensor([anchor] + [config.mask_token_id] * (width - 1))
    x = of.model.get_input_embeddings().weight[ids] * config.input_embedding_scale
    before, block = torch.arange(n), torch.arange(n, n + width)
    for i in range(config.num_hidden_layers):
        at = f"layers.{i}"
        z = norm(x, w[f"{at}.input_layernorm.weight"])
        q = norm(linear(f"{at}.self_attn.q_proj", z).view(width, heads, dim), w[f"{at}.self_attn.q_norm.weight"])
        both = torch.cat([ctx, z])
        k = norm(linear(f"{at}.self_attn.k_proj", both).view(-1, kv, dim), w[f"{at}.self_attn.k_norm.weight"])
        v = linear(f"{at}.self_attn.v_proj", both).view(-1, kv, dim)
        q, k = rotate(q, block), rotate(k, torch.cat([before, block]))
        out = torch.zeros(width, heads, dim)
        for query in range(width):
            seen = torch.ones(n + width, dtype=torch.bool)
            if config.layer_types[i] == "sliding_attention":
                seen &= ((n + query) - torch.arange(n + width)).abs() < config.sliding_window
            if config.causal[i]:
                seen &= torch.arange(n + width) <= n + query
            for head in range(heads):
                group = head // (heads // kv)
                weight = (k[seen, group] @ q[query, head] / math.sqrt(dim)).softmax(0)
                out[query, head] = weight @ v[seen, group]
        x = x + linear(f"{at}.self_attn.o_proj", out.view(width, -1))
        m = norm(x, w[f"{at}.post_attention_layernorm.weight"])
        x = x + linear(f"{at}.mlp.down_proj", F.silu(linear(f"{at}.mlp.gate_proj", m)) * linear(f"{at}.mlp.up_proj", m))
    x = norm(x, w["norm.weight"])[1:] * config.output_multiplier
    logits = x @ w.get("lm_head.weight", of.model.get_output_embeddings().weight).T
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


def inverse_frequencies(config: DFlashConfig) -> tuple[Tensor, float]:
    """Plain RoPE, or YaRN by its paper (arXiv 2309.00071)."""
    rope, dim = config.rope_parameters, config.head_dim
    base = rope["rope_theta"] ** (torch.arange(0, dim, 2).double() / dim)
    if rope["rope_type"] == "default":
        return 1 / base, 1.0

    def dimension(rotations: float) -> float:
        wave = rope["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return dim * math.log(wave) / (2 * math.log(rope["rope_theta"]))

    low, high = max(math.floor(dimension(rope["beta_fast"])), 0), min(math.ceil(dimension(rope["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2).double() - low) / max(high - low, 1e-3)).clamp(0, 1)
    return (1 / base) * (1 - ramp) + (1 / (rope["factor"] * base)) * ramp, 0.1 * math.log(rope["factor"]) + 1


def at_work(made: DFlashDraftModel, taps: Tensor, steps: list[int]) -> DFlashDrafting:
    """A draft that has absorbed ``taps`` in steps of these sizes."""
    drafting = made.start(target(), GREEDY, "match", 64)
    for part in taps.split(steps, dim=1):
        drafting.extend([[0] * part.shape[1]], Features(part, [part.shape[1]]))
    return drafting


def logits_of(drafting: DFlashDrafting, anchor: int, room: int) -> Tensor:
    """The scores behind a proposal."""
    scores = drafting.block_scores([anchor], room)
    best = scores.argmax(-1)
    if "draft_vocab_size" in drafting.draft.config.to_published():
        best = tiny.reduced_ids(drafting.draft.config)[best]
    assert drafting.propose([anchor], room).tokens.tolist() == best.tolist()
    return scores[0]


@pytest.mark.parametrize("steps", [[19], [4, 1, 8, 6]], ids=["at once", "in steps"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_block_logits_equal_a_straight_line_recomputation(
    variant: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    written = tiny.draft(target(), **variant)
    loaded = dflash.load_draft(
        tiny.save_draft(written, tmp_path / "draft"), backend="torch", device="cpu", min_confidence=0
    )
    assert loaded.config == written.config
    assert loaded.path == tmp_path / "draft"
    taps = features(19)
    have = logits_of(at_work(loaded, taps, steps), 7, 7)
    want = straight_line(written.config, dict(written.state_dict()), target(), taps[0], 7, 8)
    torch.testing.assert_close(have, want, atol=2e-4, rtol=1e-4)


def test_a_smaller_block_equals_its_own_recomputation() -> None:
    made = tiny.draft(target())
    have = logits_of(at_work(made, features(9), [9]), 3, 2)
    torch.testing.assert_close(
        have, straight_line(made.config, dict(made.state_dict()), target(), features(9)[0], 3, 3), atol=2e-4, rtol=1e-4
    )


def test_rejected_blocks_leave_no_trace_in_the_context() -> None:
    """D14: only committed features stay, whatever was proposed in between, also where a ring wraps."""
    for variant in (VARIANTS["full"], VARIANTS["sliding"]):
        made = tiny.draft(target(), **variant)
        drafting = made.start(target(), GREEDY, "match", 8)
        taps, done = features(40), 0
        for count in (5, 1, 8, 1, 3, 2, 8, 1, 7):
            drafting.extend([[0] * count], Features(taps[:, done : done + count], [count]))
            done += count
            assert drafting.rows.lengths == [done]
            have = logits_of(drafting, 7, 7)
            fresh = logits_of(at_work(made, taps[:, :done], [done]), 7, 7)
            torch.testing.assert_close(have, fresh, atol=1e-4, rtol=1e-4)


def test_ragged_rows_are_each_as_if_alone() -> None:
    made = tiny.draft(target(), **VARIANTS["sliding"])
    drafting = made.start(target(), GREEDY * 3, "match", 16)
    rows = [features(16, seed)[0] for seed in range(3)]
    lengths = [0, 0, 0]
    for counts in ([16, 3, 9], [1, 5, 0], [4, 0, 2]):
        padded = torch.zeros(3, max(counts), 64)
        for i, count in enumerate(counts):
            padded[i, :count] = torch.cat([rows[i]] * 3)[lengths[i] : lengths[i] + count]
            lengths[i] += count
        drafting.extend([[0] * count for count in counts], Features(padded, counts))
    proposed = drafting.propose([1, 2, 3], 6).tokens.tolist()
    for i, length in enumerate(lengths):
        alone = at_work(made, torch.cat([rows[i]] * 3)[None, :length], [length])
        assert alone.propose([i + 1], 6).tokens.tolist()[0] == proposed[i]
    drafting.select([2, 0])
    assert drafting.propose([3, 1], 6).tokens.tolist() == [proposed[2], proposed[0]]


def test_sliding_window_size_bounds_the_committed_context(tmp_path: Path) -> None:
    free = tiny.draft(target())
    bounded = dflash.load_draft(tiny.save_draft(free, tmp_path), 5, backend="torch", device="cpu", min_confidence=0)
    taps = features(23)
    have = logits_of(at_work(bounded, taps, [6, 6, 11]), 7, 7)
    # Only relative positions matter to rotary attention: the last five alone give the same.
    want = logits_of(at_work(free, taps[:, -5:], [5]), 7, 7)
    torch.testing.assert_close(have, want, atol=1e-3, rtol=1e-3)
    unbounded = logits_of(at_work(free, taps, [23]), 7, 7)
    assert (have - unbounded).abs().max() > 0.01


@pytest.mark.parametrize("bad", [0, -3, 2.5, True, "4"])
def test_sliding_window_size_must_be_positive(bad: Any, tmp_path: Path) -> None:
    folder = tiny.save_draft(tiny.draft(target()), tmp_path)
    with pytest.raises(ValueError, match="sliding_window_size must be a positive whole number or None"):
        dflash.load_draft(folder, bad, backend="torch")


@pytest.mark.parametrize("size", [numpy.int64(5), numpy.int32(5), numpy.uint8(5)], ids=repr)
def test_sliding_window_size_may_be_numpys(size: Any, tmp_path: Path) -> None:
    folder = tiny.save_draft(tiny.draft(target()), tmp_path)
    loaded: Any = dflash.load_draft(folder, size, backend="torch")
    assert loaded.sliding_window_size == 5 and type(loaded.sliding_window_size) is int


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_without_limits_costs_no_mask_of_every_query(causal: bool) -> None:
    """Of the usual layer, all positions of a block see the same: its mask is of the slots alone."""
    drafting = at_work(tiny.draft(target()), features(23), [23])
    mask = drafting._visible(drafting.context[0], 8, None, causal)
    assert mask.shape == (1, 8, 31)
    assert mask.untyped_storage().nbytes() == (8 * 31 if causal else 31)


# --- where a block ends -----------------------------------------------------------------------------


CONFIDENCES = [0.0, 1e-3, 0.003, 0.01, 0.3, 1.0]


def proposals(backend: str, folder: Path, confidence: float) -> tuple[Tensor, Tensor]:
    """Of three rows: the scores of whole blocks [rows, 7, vocab], and the tokens proposed at a confidence."""
    taps = torch.stack([features(9, seed)[0] for seed in range(3)])
    if backend == "torch":
        of, made, values = target(), tiny.draft(target()), taps
    else:
        pytest.importorskip("mlx_lm")
        import mlx.core as mx

        import tiny_mlx

        of = tiny_mlx.target("qwen3")
        made, values = tiny_mlx.draft(of, folder), mx.array(taps.numpy())
    made.min_confidence = confidence
    drafting = made.start(of, GREEDY * 3, "match", 16)
    drafting.extend([[0] * 9] * 3, Features(values, [9] * 3))
    scores, tokens = drafting.block_scores([1, 2, 3], 7), drafting.propose([1, 2, 3], 7).tokens
    return torch.tensor(scores.tolist()), torch.tensor(tokens.tolist())


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("confidence", CONFIDENCES)
def test_a_block_ends_where_the_draft_doubts_it(backend: str, confidence: float, tmp_path: Path) -> None:
    scores, tokens = proposals(backend, tmp_path / "draft", confidence)
    sure = scores.double().softmax(-1).amax(-1).cumprod(-1)  # [rows, 7]
    worth = max(1, int((sure >= confidence).sum(-1).max()))
    assert tokens.shape == (3, worth)
    assert tokens.tolist() == scores.argmax(-1)[:, :worth].tolist()


def test_confidences_of_the_test_above_end_blocks_at_different_places(tmp_path: Path) -> None:
    widths = [proposals("torch", tmp_path, confidence)[1].shape[1] for confidence in CONFIDENCES]
    assert widths[0] == 7 and widths[-1] == 1 and len(set(widths)) >= 4, widths


@pytest.mark.parametrize("confidence", [0.01, 0.5])
def test_scores_that_are_not_finite_end_a_block_at_once(confidence: float) -> None:
    made = tiny.draft(target())
    made.min_confidence = confidence
    made.norm.weight.data.fill_(float("nan"))
    assert at_work(made, features(9), [9]).propose([1], 7).width == 1


@pytest.mark.parametrize("bad", [-0.1, 1.5, float("nan"), True, "0.2"])
def test_min_confidence_must_be_a_probability(bad: Any, tmp_path: Path) -> None:
    folder = tiny.save_draft(tiny.draft(target()), tmp_path)
    with pytest.raises(ValueError, match="min_confidence must be a probability from 0"):
        dflash.load_draft(folder, backend="torch", min_confidence=bad)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_blocks_are_cut_by_default_where_checking_tokens_costs(backend: str, tmp_path: Path) -> None:
    if backend == "mlx":
        pytest.importorskip("mlx_lm")
    folder = tiny.save_draft(tiny.draft(target()), tmp_path)

    def load(**options: Any) -> Any:
        return dflash.load_draft(folder, backend=backend, **options)

    assert load(dtype="float32").min_confidence == 0.1
    assert load(dtype="bfloat16").min_confidence == 0.0
    assert load(dtype="float32", min_confidence=0).min_confidence == 0.0
    assert load(dtype="bfloat16", min_confidence=numpy.float32(0.5)).min_confidence == 0.5


# --- in the loop ------------------------------------------------------------------------------------


def run(of: TorchTarget, drafter: Any, prompt: list[int], count: int = 30, **options: Any) -> list[int]:
    done = Output(lambda ids: "", count)
    block = options.pop("block_size", drafter.block_size)
    for _ in decode(of, drafter, [Request(prompt, SamplingParams(), done)], block_size=block, **options):
        pass
    return done.tokens


PROMPT = [(7 * i * i + 3) % 64 for i in range(50)]


@pytest.mark.parametrize("confidence", [0.0, 0.003])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3-next", "lfm2", "gpt-oss"])
def test_a_random_draft_changes_nothing(architecture: str, confidence: float) -> None:
    of = tiny.target(architecture)
    made = tiny.draft(of, **VARIANTS["sliding"])
    made.min_confidence = confidence
    assert run(of, made, PROMPT) == run(of, NoDrafter(), PROMPT)


def test_taps_are_the_outputs_of_the_named_layers() -> None:
    """D2, D3: bit-equal to a hook at that layer, the last one before the final norm."""
    of = tiny.target("qwen3")
    seen: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda m, a, out, i=i: seen.__setitem__(i, out))
        for i, layer in enumerate(of.model.model.layers)
    ]
    got: list[Tensor] = []
    of.start(1, (0, 2, 3), 8, 64).prefill([PROMPT], lambda tokens, features: got.append(features.values))
    for hook in hooks:
        hook.remove()
    assert torch.equal(got[0], torch.cat([seen[0], seen[2], seen[3]], -1))
    last = of.model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(of.model.model.norm(got[0][..., -32:]), last)


@pytest.mark.parametrize("chunk", [16, 50, 512])
def test_the_draft_gets_the_whole_prompt_whatever_the_chunk(chunk: int) -> None:
    """D10, X3: every chunk is absorbed, and its features are let go."""
    of = tiny.target("qwen3")
    made = tiny.draft(of)
    drafting = made.start(of, GREEDY, "match", 64)
    session = of.start(1, made.taps, 8, chunk)
    session.prefill([PROMPT], drafting.extend)
    assert drafting.rows.lengths == [50] == session.lengths
    assert session.cache.tapped == {}
    reference = made.start(of, GREEDY, "match", 64)
    of.start(1, made.taps, 8, 50).prefill([PROMPT], reference.extend)
    assert torch.equal(drafting.propose([5], 7).tokens, reference.propose([5], 7).tokens)


def test_prefill_is_the_same_with_and_without_a_draft() -> None:
    """V2: bit-equal."""
    of = tiny.target("gemma3")
    ignore = lambda tokens, features: None  # noqa: E731
    assert torch.equal(
        of.start(1, (0, 3), 8, 16).prefill([PROMPT], ignore), of.start(1, (), 8, 16).prefill([PROMPT], ignore)
    )


def test_no_tap_keeps_more_than_was_asked_for() -> None:
    """X3: of four layers only two are held, and never the whole prompt's scores."""
    of = tiny.target("qwen3")
    shapes: list[Any] = []
    scores = of.start(1, (1, 2), 8, 16).prefill([PROMPT], lambda t, f: shapes.append(tuple(f.values.shape)))
    assert shapes == [(1, 16, 64)] * 3 + [(1, 2, 64)]
    assert scores.shape == (1, 1, 64)


def test_beyond_the_drafts_own_limit_it_warns_once_and_goes_on() -> None:
    """D8."""
    of = tiny.target("qwen3")
    made = tiny.draft(of, max_position_embeddings=64)
    with pytest.warns(UserWarning, match="64 positions draft .* was made for") as caught:
        assert run(of, made, PROMPT, 40) == run(of, NoDrafter(), PROMPT, 40)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(of, made, PROMPT, 40)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")])
def test_target_and_draft_may_differ_in_dtype(dtypes: tuple[str, str]) -> None:
    """L10: features are cast to the draft's dtype, its last states to the head's."""
    of_dtype, draft_dtype = (getattr(torch, name) for name in dtypes)
    of = TorchTarget(tiny.model("qwen3", dtype=of_dtype), tiny.tokenizer(), "tiny")
    made = tiny.draft(of).to(draft_dtype)
    assert len(run(of, made, PROMPT, 12)) == 12


def test_a_draft_that_overflows_is_reported_once_and_harms_nothing() -> None:
    """D15."""
    of = tiny.target("qwen3")
    made = tiny.draft(of)
    made.fc.weight.data[0] = math.inf
    with pytest.warns(UserWarning, match="not finite") as caught:
        answers = [run(of, made, PROMPT, 20) for _ in range(2)]
    assert answers == [run(of, NoDrafter(), PROMPT, 20)] * 2
    assert len(caught) == 1
