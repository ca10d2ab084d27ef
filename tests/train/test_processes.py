"""Several processes: a device each, work shared once, files by one, the result of one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import corpora
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from typer.testing import CliRunner

import tiny
from dflash.cli import train as command
from dflash.cli.main import app
from dflash.launcher import own_device
from dflash.train import features, processes
from dflash.train.features import Features
from dflash.train.loop import Trainer
from dflash.train.processes import Processes
from dflash.train.recipe import Recipe
from dflash.train.run import Job, Shape, train

WORKER = """
import os
import sys
sys.path[:0] = [{tests!r}, {train!r}]
import torch
torch.set_num_threads(1)
import test_processes
from pathlib import Path
test_processes.stop_and_resume(Path({folder!r}))
os._exit(0)  # threads of torch that outlive the group abort some interpreters as they end
"""


class Stopped(Exception):
    """Ends a run between two steps."""


def stop_and_resume(folder: Path) -> None:
    """Train on the answers of a folder, stop after three steps, go on; note which sequences this process read."""
    read: list[list[int]] = []
    compute = features.compute

    def noted(target: Any, taps: Any, final: bool, ids: Any) -> Any:
        read.append(list(ids))
        return compute(target, taps, final, ids)

    def stop(progress: Any) -> None:
        if progress.step == 3:
            raise Stopped

    recipe = Recipe(steps=4, sequences=4, anchors=6, precision="fp32", others=8, loss="0.5*ce+0.5*kl")
    shape = Shape(block_size=4, layers=1, taps=2, mask_token=63)
    job = Job((folder / "answers.jsonl",), folder / "out", shape, recipe, 2, cache=folder / "cache", log_every=1)
    job = replace(job, measure_every=2, save_every=2)
    target = tiny.target("qwen3")
    with mock.patch.object(features, "compute", noted), mock.patch.object(features, "SHARD", 2):
        with contextlib.suppress(Stopped):
            train(target, job, report=stop)
        train(target, replace(job, resume=True))
    (folder / f"read-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(read))


def answers_in(folder: Path) -> Path:
    folder.mkdir()
    records = [
        {"id": f"{i}.0", "answer": "", "prompt_ids": s.ids[: s.prompt], "answer_ids": s.ids[s.prompt :]}
        for i, s in enumerate(corpora.answers(tiny.target("qwen3"), 9, 20))
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_two_processes_share_hidden_states_resume_and_end_as_one(tmp_path: Path) -> None:
    one, two = answers_in(tmp_path / "one"), answers_in(tmp_path / "two")
    stop_and_resume(one)
    here = Path(__file__).parent
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(tests=str(here.parent), train=str(here), folder=str(two)))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    alone, first, second = (
        json.loads(file.read_text()) for file in (one / "read-0.json", two / "read-0.json", two / "read-1.json")
    )
    assert len(alone) == 9
    assert sorted([*first, *second]) == sorted(alone), "every sequence is read once, by one of them"
    assert first
    assert second
    want, have = (load_file(folder / "out" / "model.safetensors") for folder in (one, two))
    for name, tensor in want.items():
        torch.testing.assert_close(have[name].float(), tensor.float(), atol=1e-2, rtol=1e-2)
    logs = [map(json.loads, (folder / "out" / "log.jsonl").read_text().splitlines()) for folder in (one, two)]
    steps = [[(record["step"], "measured" in record) for record in log] for log in logs]
    assert steps[0] == steps[1]
    assert [step for step, measured in steps[1] if not measured] == [1, 2, 3, 4]


def environment(monkeypatch: Any, rank: int, world: int, local: int | None = None) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_RANK", str(rank if local is None else local))


def gpus(monkeypatch: Any, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("rank", "local", "count", "asked", "given"),
    [
        (0, 0, 2, None, "cuda:0"),
        (1, 1, 2, None, "cuda:1"),
        (1, 1, 2, "cuda", "cuda:1"),
        (5, 1, 2, "cuda", "cuda:1"),  # of the second machine
        (1, 1, 2, "cpu", "cpu"),
        (1, 1, 2, "cuda:0", "cuda:0"),
        (1, 1, 0, None, None),
    ],
)
def test_each_process_loads_on_a_gpu_of_its_own(
    rank: int, local: int, count: int, asked: str | None, given: str | None, monkeypatch: Any
) -> None:
    environment(monkeypatch, rank, 8, local)
    gpus(monkeypatch, count)
    assert own_device(asked) == given


def test_one_process_loads_where_it_is_told(monkeypatch: Any) -> None:
    gpus(monkeypatch, 2)
    assert [own_device(asked) for asked in (None, "cuda", "cuda:1", "cpu")] == [None, "cuda", "cuda:1", "cpu"]


def test_more_processes_than_gpus_are_told(monkeypatch: Any) -> None:
    environment(monkeypatch, 2, 3)
    gpus(monkeypatch, 2)
    with pytest.raises(ValueError, match="process 2 of this machine has no GPU of its own, of 2"):
        own_device("cuda")


class Asked(Exception):
    """Ends a call once it has asked for what is tested."""


def test_the_command_loads_on_the_processes_own_device(monkeypatch: Any, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.touch()

    def load(wanted: Any, aloud: bool) -> Any:
        raise Asked(wanted.device)

    monkeypatch.setattr(command, "load_pair", load)
    gpus(monkeypatch, 4)
    devices = []
    for rank in range(4):
        environment(monkeypatch, rank, 4)
        result = CliRunner().invoke(app, ["train", "--data", str(answers), "--output", str(tmp_path), "--steps", "1"])
        devices.append(str(result.exception))
    assert devices == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


@pytest.mark.parametrize(("rank", "talks"), [(0, True), (1, False)])
def test_only_the_first_process_talks(rank: int, talks: bool, monkeypatch: Any, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.touch()

    class Loaded:
        target = tiny.target("qwen3")
        threads = ""

    def trained(target: Any, job: Any, say: Any = lambda line: None, *meters: Any) -> None:
        say("learned")

    monkeypatch.setattr(command, "load_pair", lambda wanted, aloud: Loaded())
    monkeypatch.setattr("dflash.train.run.train", trained)
    environment(monkeypatch, rank, 2)
    result = CliRunner().invoke(app, ["train", "--data", str(answers), "--output", str(tmp_path), "--steps", "1"])
    assert result.exit_code == 0
    assert ("learned" in result.output) == ("the draft is in" in result.output) == bool(result.output) == talks


@pytest.mark.parametrize(("kind", "backend", "lies"), [("cuda", "nccl", "cuda"), ("cpu", "gloo", "cpu")])
def test_sums_are_taken_where_the_group_can(kind: str, backend: str, lies: str, monkeypatch: Any) -> None:
    """On a machine without CUDA: which group is opened, on which device it works, and where its tensors lie."""
    environment(monkeypatch, 1, 2)
    opened: list[Any] = []
    current: list[torch.device] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: bool(opened))
    monkeypatch.setattr(dist, "init_process_group", lambda name, **options: opened.append(name))
    monkeypatch.setattr(dist, "get_backend", lambda: opened[0])
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    device = torch.device(f"{kind}:1" if kind == "cuda" else kind)
    joined = Processes.join(device)
    again = Processes.join(device)
    assert (opened, joined.began, again.began) == ([backend], True, False)
    assert current == ([device, device] if kind == "cuda" else [])
    assert joined.device == device
    made: list[torch.device] = []

    def tensor(values: Any, *, dtype: Any, device: torch.device) -> Any:
        made.append(device)
        raise Asked

    monkeypatch.setattr(processes.torch, "tensor", tensor)
    with pytest.raises(Asked):
        joined.total(1.0)
    assert [device.type for device in made] == [lies]


def test_several_processes_on_another_device_are_told(monkeypatch: Any) -> None:
    environment(monkeypatch, 0, 2)
    with pytest.raises(ValueError, match="not on mps"):
        Processes.join(torch.device("mps"))


class Pretended(Processes):
    """Two processes of which the other has nothing to add, or something else."""

    other = 0.0

    def total(self, value: float) -> float:
        return value + self.other


def pretend(monkeypatch: Any, other: float, world: int = 2) -> None:
    made = Pretended(0, world)
    object.__setattr__(made, "other", other)
    monkeypatch.setattr(Processes, "join", lambda device: made)
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", lambda module, **options: module)


def test_more_processes_than_sequences_a_step_are_told(monkeypatch: Any, tmp_path: Path) -> None:
    """One without a sequence computes no gradient, which the others would wait for."""
    target = tiny.target("qwen3")
    sequences = corpora.answers(target, 5)
    pretend(monkeypatch, 0.0, world=3)
    with pytest.raises(ValueError, match="a step of 2 answers cannot be shared by 3 processes"):
        corpora.trainer(target, sequences, tmp_path, sequences=2)
    with pytest.raises(ValueError, match="a step of 2 answers cannot be shared by 3 processes"):
        corpora.trainer(target, sequences[:2], tmp_path, sequences=4)


def test_processes_that_see_different_folders_are_told(monkeypatch: Any, tmp_path: Path) -> None:
    target = tiny.target("qwen3")
    sequences = corpora.answers(target, 5)
    run = corpora.trainer(target, sequences, tmp_path / "out")
    run.run(until=4, save_every=4)
    before = (tmp_path / "out" / "log.jsonl").read_bytes()
    pretend(monkeypatch, 0.0)  # the other one is at step 0
    with pytest.raises(ValueError, match="must be one folder to all processes"):
        corpora.trainer(target, sequences, tmp_path / "out", resume=True)
    assert (tmp_path / "out" / "log.jsonl").read_bytes() == before
    here = Features(target, (0, 3), False, tmp_path / "cache")
    here.prepare(sequences)  # all is there
    here.prepare(sequences, processes=Pretended(1, 2))
    with pytest.raises(ValueError, match="must be one folder to all processes"):
        Features(target, (0, 3), False, tmp_path / "other").prepare(sequences, processes=Pretended(1, 2))


def test_a_step_is_left_out_by_all_processes_where_one_is_not_finite(monkeypatch: Any, tmp_path: Path) -> None:
    target = tiny.target("qwen3")
    pretend(monkeypatch, 0.0)
    run: Trainer = corpora.trainer(target, corpora.answers(target, 5), tmp_path)
    before = [parameter.detach().clone() for parameter in run.draft.parameters()]
    object.__setattr__(run.processes, "other", 1.0)
    monkeypatch.setattr(run.parallel, "no_sync", contextlib.nullcontext, raising=False)
    run.run(until=3)
    assert all(torch.equal(a, b) for a, b in zip(before, run.draft.parameters(), strict=True))
    assert run._skipped == 3


def test_a_signal_can_end_a_wait_for_other_processes(monkeypatch: Any, tmp_path: Path) -> None:
    """No exchange is made while signals wait for weights and step to belong together."""
    target = tiny.target("qwen3")
    pretend(monkeypatch, 0.0)
    run: Trainer = corpora.trainer(target, corpora.answers(target, 5), tmp_path)
    monkeypatch.setattr(run.parallel, "no_sync", contextlib.nullcontext, raising=False)
    before, heard = signal.getsignal(signal.SIGINT), []
    monkeypatch.setattr(Pretended, "total", lambda self, value: heard.append(signal.getsignal(signal.SIGINT)) or value)
    run.run(until=2)
    assert heard == [before, before]


LEFT = """
import os, signal, sys
sys.path[:0] = [{tests!r}, {train!r}]
import torch
torch.set_num_threads(1)
import corpora, tiny
from pathlib import Path
from dflash.errors import ProcessLost
from dflash.train.processes import Processes
target = tiny.target("qwen3")
processes = Processes.join(target.device)
run = corpora.trainer(target, corpora.answers(target, 4, 12), Path({folder!r}), steps=9)

def leave(progress):
    if progress.step == 3 and processes.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

try:
    run.run(report=leave)
except ProcessLost as error:
    print("told:", error)
print("leaves", flush=True)
processes.leave()
print("left")
"""


def test_what_was_done_is_kept_where_another_process_ends(tmp_path: Path) -> None:
    here = Path(__file__).parent
    script = tmp_path / "left.py"
    script.write_text(LEFT.format(tests=str(here.parent), train=str(here), folder=str(tmp_path / "out")))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = []
    for rank in (0, 1):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environ = {**os.environ, **own, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script)]
        both.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    (out, err), _ = (process.communicate(timeout=240) for process in both)
    saved = tmp_path / "out" / "checkpoints" / "step-3"
    assert saved.is_dir(), err
    assert both[0].returncode == 0, err
    assert "told: another process of this run has ended" in out
    assert f"; step 3 is saved in {saved}: go on with the same command and --resume" in out
    assert out.endswith("leaves\nleft\n"), "nothing is wanted of the others at the end"


def test_signals_end_a_process_that_waits_for_the_others_to_leave(monkeypatch: Any) -> None:
    """At once: it may wait in code that Python's handlers do not interrupt."""
    found = []
    monkeypatch.setattr(Processes, "wait", lambda self: found.append(signal.getsignal(signal.SIGTERM)))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        Processes(0, 2).leave()
        assert found == [signal.SIG_DFL]
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_only_the_first_process_writes(monkeypatch: Any, tmp_path: Path) -> None:
    target = tiny.target("qwen3")
    made = Pretended(1, 2)
    monkeypatch.setattr(Processes, "join", lambda device: made)
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", lambda module, **options: module)
    corpora.trainer(target, corpora.answers(target, 5), tmp_path / "out").run(
        log_every=1, measure_every=1, save_every=1
    )
    assert not (tmp_path / "out").exists()
