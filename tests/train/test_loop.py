"""Runs: what they learn, that they resume to the bit, that several processes are as one."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import corpora
import pytest
import torch

import tiny
from dflash.backends.torch.draft import DFlashDraftModel
from dflash.backends.torch.target import TorchTarget
from dflash.decode import Request, decode
from dflash.limits import Output
from dflash.sampling import SamplingParams
from dflash.train.begun import RUN, config_of_run, latest
from dflash.train.data import Plan
from dflash.train.loop import read_log
from dflash.train.start import check_mask_token, default_mask_token, default_taps, draft_config, initialise


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3-next"])
def test_overfitting_reaches_nearly_full_acceptance(architecture: str, tmp_path: Path) -> None:
    """R2: a handful of sequences, learned by heart, then decoded."""
    target = tiny.target(architecture)
    train = corpora.answers(target, 4, 24)
    draft = tiny.draft(target, block_size=5, num_hidden_layers=2, intermediate_size=64)
    run = corpora.trainer(
        target, train, tmp_path, draft=draft, steps=250, sequences=4, anchors=24, learning_rate=6e-3, weights="uniform"
    )
    run.run(measure_every=1000, save_every=1000)
    draft.eval()
    lengths = []
    for sequence in train:
        output = Output(lambda ids: "", 24)
        request = Request(list(sequence.ids[: sequence.prompt]), SamplingParams(), output)
        lengths += [len(e[0].tokens) for e in list(decode(target, draft, [request], block_size=5))[1:]]
        assert output.tokens == list(sequence.ids[sequence.prompt :])
    assert sum(lengths) / len(lengths) > 4.2


def weights(run: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in run.draft.parameters()]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_equals_one_that_was_not_interrupted(optimizer: str, tmp_path: Path) -> None:
    target = tiny.target("qwen3")
    train = corpora.answers(target, 9)
    whole = corpora.trainer(target, train, tmp_path / "whole", optimizer=optimizer)
    whole.run(log_every=2, save_every=4)
    first = corpora.trainer(target, train, tmp_path / "parts", optimizer=optimizer)
    first.run(until=6, log_every=2, save_every=4)  # two steps after the last checkpoint are lost
    second = corpora.trainer(target, train, tmp_path / "parts", optimizer=optimizer, resume=True)
    assert second.step == 4
    second.run(log_every=2, save_every=4)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(second), strict=True))
    logs = [
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    ]
    for a, b in zip(*logs, strict=True):
        assert (a["step"], a.get("loss")) == (b["step"], b.get("loss"))


def test_a_half_written_checkpoint_is_not_taken(tmp_path: Path) -> None:
    target = tiny.target("qwen3")
    run = corpora.trainer(target, corpora.answers(target, 5), tmp_path)
    run.run(until=4, save_every=4)
    (tmp_path / "checkpoints" / ".step-8.part").mkdir()
    (tmp_path / "checkpoints" / "step-6").mkdir()
    last = latest(tmp_path / "checkpoints")
    assert last is not None
    assert last.name == "step-4"


def test_a_run_is_neither_overwritten_nor_resumed_with_another_recipe(tmp_path: Path) -> None:
    target = tiny.target("qwen3")
    train = corpora.answers(target, 5)
    corpora.trainer(target, train, tmp_path).run(save_every=4)
    with pytest.raises(ValueError, match="already holds a run: go on with --resume"):
        corpora.trainer(target, train, tmp_path)
    with pytest.raises(ValueError, match="begun with other --learning-rate"):
        corpora.trainer(target, train, tmp_path, resume=True, learning_rate=1.0)
    with pytest.raises(ValueError, match="begun with another set of answers"):
        corpora.trainer(target, train[1:], tmp_path, resume=True)
    other = tiny.target("qwen3", seed=5)
    with pytest.raises(ValueError, match="begun with another target"):
        corpora.trainer(other, train, tmp_path, resume=True)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="does not say what the run was begun with"):
        corpora.trainer(target, train, tmp_path, resume=True)


@pytest.mark.parametrize("name", ["draft.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{}"])
def test_a_checkpoint_that_cannot_be_read_is_told(tmp_path: Path, name: str, content: bytes) -> None:
    target = tiny.target("qwen3")
    train = corpora.answers(target, 5)
    corpora.trainer(target, train, tmp_path).run(until=4, save_every=4)
    (tmp_path / "checkpoints" / "step-old").mkdir()
    (tmp_path / "checkpoints" / "step-4" / name).write_bytes(content)
    with pytest.raises(ValueError, match="step-4 cannot be resumed from"):
        corpora.trainer(target, train, tmp_path, resume=True)


def test_a_log_that_a_kill_tore_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    target = tiny.target("qwen3")
    train = corpora.answers(target, 5)
    corpora.trainer(target, train, tmp_path).run(until=4, log_every=1, save_every=4)
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write("[" * 100_000 + '\n{"step": 4, "seconds": {"data": 1}')
    corpora.trainer(target, train, tmp_path, resume=True).run(log_every=1)
    assert [r["step"] for r in read_log(tmp_path / "log.jsonl") if "loss" in r] == list(range(1, 9))


def test_a_run_whose_beginning_cannot_be_read_is_told(tmp_path: Path) -> None:
    target = tiny.target("qwen3")
    train = corpora.answers(target, 5)
    corpora.trainer(target, train, tmp_path).run(until=4, save_every=4)
    for content in ("", "{", "[]", "[" * 100_000):
        (tmp_path / RUN).write_text(content)
        with pytest.raises(ValueError, match="does not say what the run was begun with"):
            corpora.trainer(target, train, tmp_path, resume=True)
        with pytest.raises(ValueError, match="does not say which draft the run makes"):
            config_of_run(tmp_path)


def test_only_the_drafts_tensors_change(tmp_path: Path) -> None:
    """R13."""
    target = tiny.target("qwen3")
    before = [p.detach().clone() for p in target.model.parameters()]
    run = corpora.trainer(target, corpora.answers(target, 5), tmp_path, steps=3)
    start = weights(run)
    run.run()
    assert all(torch.equal(a, b) for a, b in zip(before, target.model.parameters(), strict=True))
    changed = [not torch.equal(a, b) for a, b in zip(start, weights(run), strict=True)]
    assert all(changed)


def test_a_step_that_is_not_finite_is_left_out_and_told(tmp_path: Path, monkeypatch: Any) -> None:
    """R7."""
    target = tiny.target("qwen3")
    run = corpora.trainer(target, corpora.answers(target, 5), tmp_path, steps=30)
    forward = run.learner.forward
    calls = [0]

    def broken(batch: Any) -> Any:
        loss, accepted = forward(batch)
        calls[0] += 1
        return (loss * float("inf") if calls[0] in (2, 3) else loss), accepted

    monkeypatch.setattr(run.learner, "forward", broken)
    run.run(until=5)
    assert all(torch.isfinite(w).all() for w in weights(run))
    assert (tmp_path / "log.jsonl").read_text().count("not finite") == 2
    monkeypatch.setattr(run.learner, "forward", lambda batch: (forward(batch)[0] * float("nan"), torch.tensor(0.0)))
    with pytest.raises(Exception, match="not finite in 10 steps in a row"):
        run.run()


def test_the_log_is_also_written_as_tensorboard_scalars(tmp_path: Path) -> None:
    """A run that goes on strikes out what the stopped one wrote after its checkpoint."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    target = tiny.target("qwen3")
    train = corpora.answers(target, 5)
    corpora.trainer(target, train, tmp_path, steps=8).run(until=6, log_every=1, measure_every=2, save_every=4)
    corpora.trainer(target, train, tmp_path, steps=8, resume=True).run(log_every=1, measure_every=2)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [(r["step"], r["loss"]) for r in log if "loss" in r]
    lengths = [(r["step"], r["measured"]["length"]) for r in log if "measured" in r]
    for name, want in (("train/loss", losses), ("held_out/length", lengths)):
        have = [(e.step, e.value) for e in events.Scalars(name)]
        assert [step for step, _ in have] == [step for step, _ in want]
        assert [v for _, v in have] == pytest.approx([v for _, v in want])


@pytest.mark.parametrize("options", [{"accumulate": 3}, {"recompute": True}, {"compile": True}], ids=str)
def test_how_it_is_computed_changes_nothing(options: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    # Traced and differentiated ahead of time as always, but without the minutes of a C++ compiler.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    target = tiny.target("qwen3")
    train = corpora.answers(target, 9)
    plain = corpora.trainer(target, train, tmp_path / "a", steps=3)
    saving = corpora.trainer(target, train, tmp_path / "b", steps=3, **options)
    plain.run()
    saving.run()
    for a, b in zip(weights(plain), weights(saving), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


WORKER = """
import os
import sys
sys.path[:0] = [{tests!r}, {train!r}]
import torch
torch.set_num_threads(1)
import corpora, tiny
from pathlib import Path
from safetensors.torch import save_file
target = tiny.target("qwen3")
run = corpora.trainer(target, corpora.answers(target, 9), Path({output!r}), steps=4)
run.run()
if run.processes.first:
    save_file({{n: p.detach() for n, p in run.draft.named_parameters()}}, Path({output!r}) / "end.safetensors")
run.processes.leave()
os._exit(0)  # threads of torch that outlive the group abort some interpreters as they end
"""


def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    here = Path(__file__).parent
    target = tiny.target("qwen3")
    alone = corpora.trainer(target, corpora.answers(target, 9), tmp_path / "one", steps=4)
    alone.run()
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(tests=str(here.parent), train=str(here), output=str(tmp_path / "two")))
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        check=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    from safetensors.torch import load_file

    together = load_file(tmp_path / "two" / "end.safetensors")
    for name, parameter in alone.draft.named_parameters():
        torch.testing.assert_close(together[name], parameter.detach(), atol=1e-4, rtol=1e-3)


def test_every_sequence_once_an_epoch_and_other_anchors_each_time() -> None:
    plan = Plan([10 + i % 7 for i in range(50)], 4, 3, seed=1)
    epoch = [i for step in range(plan.steps_per_epoch) for i in plan.sequences(step)]
    assert len(epoch) == len(set(epoch)) == 48
    assert plan.sequences(0) != plan.sequences(plan.steps_per_epoch)
    drawn = [plan.draw(step, 0, range(5, 40)) for step in range(20)]
    assert all(d == sorted(set(d)) and len(d) == 3 and 5 <= d[0] <= d[-1] < 40 for d in drawn)
    assert len({tuple(d) for d in drawn}) > 15
    assert plan.draw(3, 0, range(5, 40)) == drawn[3]
    assert plan.draw(0, 0, range(5, 7)) == [5, 6]


def test_others_make_the_reduced_softmax_an_estimate_of_the_full_one(tmp_path: Path) -> None:
    """With all the others drawn it is the full softmax; with some, its partition function on average."""
    target = tiny.target("qwen3")
    train = corpora.answers(target, 5)
    full = corpora.trainer(target, train, tmp_path / "full", vocabulary="full", loss="0.5*ce+0.5*kl")
    exact = corpora.trainer(target, train, tmp_path / "all", others=64, loss="0.5*ce+0.5*kl")
    assert 0 < len(exact._outside) < 64
    for a, b in zip(full.draft.parameters(), exact.draft.parameters(), strict=True):
        assert torch.equal(a, b)
    full.run(until=3)
    exact.run(until=3)
    for a, b in zip(weights(full), weights(exact), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)
    few = corpora.trainer(target, train, tmp_path / "few", others=4)
    drawn = [tuple(few.plan.others(step, few._outside, 4).tolist()) for step in range(5)]
    assert len(set(drawn)) > 1
    assert drawn[2] == tuple(few.plan.others(2, few._outside, 4).tolist())


def test_a_draft_starts_as_the_target_has_it() -> None:
    target = tiny.target("llama")
    config = draft_config(target, layers=2, taps=(0, 3), block_size=4, mask_token=63)
    made = DFlashDraftModel(config)
    copied = initialise(made, target, "target", seed=0)
    assert copied == 1 + 2 * 9  # the final norm; of each layer seven matrices and two norms
    assert torch.equal(made.norm.weight, target.anatomy.norm.weight)
    assert torch.equal(made.layers[1].mlp.up_proj.weight, target.anatomy.layers[2].mlp.up_proj.weight)
    assert made.layers[0].self_attn.q_norm.weight[0] != 1.0
    qwen = tiny.target("qwen3")
    of_qwen = DFlashDraftModel(draft_config(qwen, layers=2, taps=(0, 3), block_size=4, mask_token=63))
    assert initialise(of_qwen, qwen, "target", seed=0) == 1 + 2 * 11
    assert torch.equal(of_qwen.layers[0].self_attn.q_norm.weight, qwen.anatomy.layers[0].self_attn.q_norm.weight)
    assert initialise(of_qwen, qwen, "random", seed=0) == 0


@pytest.mark.parametrize(("layers", "count", "taps"), [(36, 5, (1, 9, 17, 25, 33)), (32, 1, (16,)), (4, 3, (0, 2, 3))])
def test_default_taps_are_the_published_ones(layers: int, count: int, taps: tuple[int, ...]) -> None:
    assert default_taps(layers, count) == taps


def test_the_mask_token_is_a_row_that_text_does_not_use() -> None:
    target = TorchTarget(tiny.model("llama", vocab_size=300), tiny.make_tokenizer(), "tiny")
    assert default_mask_token(target) == 299
    with pytest.raises(ValueError, match="no row of the target's embedding"):
        check_mask_token(target, 300)
    with pytest.raises(ValueError, match="ends answers"):
        check_mask_token(target, min(target.eos_ids))
