"""Ctrl-C: what was done is kept, how to go on is said, and the status is 130. The signals are real, and so are the
processes where what is interrupted takes its time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import corpora
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import tiny
from dflash.benchmark.run import Journal
from dflash.cli import benchmark, demo, generate, regenerate, stopping, train, verify
from dflash.cli.main import app
from dflash.only import only_run
from dflash.train.loop import Learner
from dflash.train.regenerate import read_answers

LONG = ("--prompt", "abcabc and so on", "--max-new-tokens", 100_000, "--drafter", "none")


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """A job in the background of a shell is started with SIGINT ignored, and hands that on to what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with room for very long answers."""
    place = tmp_path_factory.mktemp("target")
    tiny.model("llama", vocab_size=272, max_position_embeddings=200_000).save_pretrained(place)
    tiny.make_tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def answers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    prompts = questions(output.with_name("prompts.jsonl"), 12)
    assert run("regenerate", "--model", folder, "--data", prompts, "--output", output, "--max-new-tokens", 24) == 0
    return output


def questions(file: Path, count: int) -> Path:
    file.write_text("".join(json.dumps({"turns": [f"question {i}"]}) + "\n" for i in range(count)))
    return file


def result(*arguments: object) -> Result:
    """Of a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run(*arguments: object) -> int:
    return result(*arguments).exit_code


def begin(*arguments: object) -> subprocess.Popen[str]:
    """A command in a process of its own."""
    command = [sys.executable, "-m", "dflash", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def interrupted(process: subprocess.Popen[str], number: int = signal.SIGINT) -> tuple[str, str]:
    """What it says when it is interrupted now: no traceback, and the right status."""
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    return out, err


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not happened():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)


def signalled(monkeypatch: pytest.MonkeyPatch, module: Any, function: str, call: int) -> None:
    """Let this process be interrupted as a function is called for the n-th time."""
    real, calls = getattr(module, function), []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args, **options)

    monkeypatch.setattr(module, function, counted)


def test_the_first_moments_have_no_traceback_either(tmp_path: Path) -> None:
    """While the commands themselves are imported."""
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "typer.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    for module in ("dflash", "dflash.benchmark"):
        command = [sys.executable, "-m", module, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped: interrupted\n")


# --- generate ---------------------------------------------------------------------------------------


def test_an_import_that_is_cut_short_is_an_interrupt_whatever_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut() -> None:
        with stopping.importing():
            raise ImportError("Could not import module 'LlamaConfig'")  # as transformers has it

    with pytest.raises(ImportError):
        cut()
    monkeypatch.setattr(stopping, "_received", [signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        cut()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_generate_prints_the_figures_of_what_was_answered(folder: Path, number: int) -> None:
    process = begin("generate", "--model", folder, *LONG)
    assert process.stdout is not None
    assert process.stdout.read(5)
    out, err = interrupted(process, number)
    assert out.endswith("\n")
    assert " tokens (interrupted) at " in err
    assert "stopped: interrupted, this is the answer so far" in err


def test_generate_prints_the_object_of_what_was_answered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = generate.stream_generate

    def signalled_in_the_eighth_round(*args: Any, **options: Any) -> Iterator[Any]:
        for n, response in enumerate(real(*args, **options)):
            if n == 7:
                os.kill(os.getpid(), signal.SIGINT)
            yield response

    with monkeypatch.context() as patch:
        patch.setattr(generate, "stream_generate", signalled_in_the_eighth_round)
        done = result("generate", "--model", folder, *LONG, "--json")
    assert done.exit_code == 130
    record = json.loads(done.stdout)
    assert record["finish_reason"] == "interrupted"
    assert len(record["tokens"]) == record["generation_tokens"] == 7
    assert "stopped: interrupted, the object holds the answer so far (7 tokens)" in done.stderr
    whole = result("generate", "--model", folder, *LONG, "--max-new-tokens", 7, "--json")
    assert json.loads(whole.stdout)["tokens"] == record["tokens"]


# --- the others -------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [generate, verify, demo, regenerate, benchmark])
def test_before_there_is_anything_to_keep_it_says_so(
    module: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = module.__name__.rpartition(".")[2]
    rest: dict[str, list[object]] = {
        "generate": ["--prompt", "x"],
        "regenerate": ["--data", questions(tmp_path / "p.jsonl", 2), "--output", tmp_path / "a.jsonl"],
    }
    signalled(monkeypatch, module, "load_pair", 1)
    done = result(command, "--model", folder, *rest.get(command, []))
    assert (done.exit_code, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == "stopped: interrupted"


def test_verify_shows_the_prompts_compared_so_far(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["verify", "--model", folder, "--max-new-tokens", 4]
    for as_json in (False, True):
        with monkeypatch.context() as patch:
            signalled(patch, verify, "_check", 3)
            done = result(*command, *(["--json"] if as_json else []))
        assert done.exit_code == 130
        assert "stopped: interrupted after 2 of 6 prompts" in done.stderr
        if as_json:
            record = json.loads(done.stdout)
            assert (record["passed"], record["complete"], record["identical"]) == (False, False, 2)
        else:
            assert "2 of 2 answers identical" in done.stdout


def test_regenerate_keeps_its_answers_and_says_how_to_go_on(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"
    command = ["regenerate", "--model", folder, "--data", questions(tmp_path / "p.jsonl", 150), "--output", output]
    command += ["--max-new-tokens", 24, "--batch-size", 1]
    process = begin(*command)
    wait_until(lambda: output.is_file() and output.read_bytes().count(b"\n") > 2, process)
    _, err = interrupted(process)
    kept = len(read_answers(output))
    assert 2 < kept < 150
    assert f"stopped: interrupted, {kept} answers are kept in {output}; go on with the same command: dflash reg" in err
    assert run(*command) == 0
    assert len({record["id"] for record in read_answers(output)}) == len(read_answers(output)) == 150


def test_benchmark_says_how_to_go_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signalled(monkeypatch, Journal, "add", 2)
    command = ["benchmark", "--model", folder, "--prompt", "hello", "--max-new-tokens", 4, "--systems", "plain,ngram"]
    done = result(*command, "--output", tmp_path / "out")
    assert done.exit_code == 130
    said = "stopped: interrupted, the figures are of the answers so far; "
    assert f"{said}go on with the same command: " in done.stderr
    monkeypatch.undo()
    signalled(monkeypatch, Journal, "add", 2)
    assert f"{said}a run with --output can be continued" in result(*command).stderr


# --- train ------------------------------------------------------------------------------------------

STEPS = 150
TRAIN = ["--sequences", 2, "--anchors", 4, "--layers", 1, "--taps", 2, "--block-size", 4]
TRAIN += ["--held-out", 2, "--precision", "fp32", "--others", 16]


def test_train_saves_the_last_whole_step(answers: Path, folder: Path, tmp_path: Path) -> None:
    output, alone = tmp_path / "draft", tmp_path / "alone"
    command = ["train", "--model", folder, "--data", answers, "--steps", STEPS, *TRAIN]
    process = begin(*command, "--output", output, "--measure-every", 1)
    log = output / "log.jsonl"
    wait_until(lambda: log.is_file() and '"step": 5,' in log.read_text(), process)
    _, err = interrupted(process)
    [saved] = (output / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert 5 <= step < STEPS, "before the first checkpoint that was due"
    assert f"stopped: interrupted, step {step} of {STEPS} is saved in {saved}; go on with: dflash train" in err
    assert err.rstrip().endswith("--measure-every 1 --resume")

    assert run(*command, "--output", output, "--resume") == run(*command, "--output", alone) == 0
    have, want = (load_file(place / "model.safetensors") for place in (output, alone))
    assert all(torch.equal(have[name], want[name]) for name in want), "as if nobody had interrupted it"


def test_train_interrupted_before_its_first_step_begins_again(
    answers: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["train", "--model", folder, "--data", answers, "--output", tmp_path / "d", "--cache", tmp_path / "c"]
    process = begin(*command, "--steps", STEPS, *TRAIN)
    assert process.stderr is not None
    assert any(line.startswith("importing") for line in process.stderr)
    _, err = interrupted(process)
    assert "stopped: interrupted before the first step; nothing to keep; begin again with: dflash train" in err
    with monkeypatch.context() as patch:
        signalled(patch, train, "load_pair", 1)
        err = result(*command, "--steps", STEPS, *TRAIN).stderr
    assert "stopped: interrupted before the first step; nothing to keep; begin again with: " in err
    with monkeypatch.context() as patch:
        signalled(patch, Learner, "forward", 1)
        err = result(*command, "--steps", STEPS, *TRAIN).stderr
    assert "stopped: interrupted before the end of the first step; hidden states computed by now are kept" in err
    assert "begin again with the same command: " in err
    assert not (tmp_path / "d" / "checkpoints").exists()

    done = result(*command, "--steps", 2, *TRAIN)
    assert done.exit_code == 0, "it begins again"
    said = done.stderr  # and says at once what it does, without a terminal too
    expected = ["importing PyTorch\n", f"loading {folder.name}", "data: ", "hidden states: 0 of 12", "steps: 0 of 2"]
    places = [said.index(part) for part in [*expected, "steps: 2 of 2", "done: "]]
    assert places == sorted(places) and places[0] == 0


def test_a_second_run_on_one_output_is_refused(answers: Path, folder: Path, tmp_path: Path) -> None:
    train = ["train", "--model", folder, "--data", answers, "--steps", 1, *TRAIN, "--output", tmp_path / "d"]
    ask = ["benchmark", "--model", folder, "--prompt", "hello", "--max-new-tokens", 2, "--systems", "plain"]
    ask += ["--output", tmp_path / "b"]
    for command, written in ((train, tmp_path / "d"), (ask, tmp_path / "b")):
        with only_run(written):
            done = result(*command)
        assert done.exit_code == 2
        told = f"error: another run is writing {written}: wait until it has ended, or give another --output"
        assert done.stderr.splitlines()[-1] == told
        assert not written.exists()
        assert run(*command) == 0


def test_what_belongs_together_is_not_cut_in_two() -> None:
    from dflash.train.whole import whole

    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with whole():
            os.kill(os.getpid(), signal.SIGINT)
            done += ["weights", "step"]
        done.append("never")
    assert done == ["weights", "step"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_is_not_lost_where_what_belongs_together_fails() -> None:
    from dflash.train.whole import whole

    with pytest.raises(KeyboardInterrupt) as caught, whole():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("an error of its own")
    assert isinstance(caught.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_waits_until_the_first_one_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny.target("qwen3")
    run = corpora.trainer(target, corpora.answers(target, 4, 12), tmp_path)
    count_time = run._count_time

    def interrupted_again() -> float:
        os.kill(os.getpid(), signal.SIGINT)
        return count_time()

    def interrupt(progress: Any) -> None:
        if progress.step == 2:
            monkeypatch.setattr(run, "_count_time", interrupted_again)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(report=interrupt)
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-2"]


def test_a_second_signal_does_not_change_the_status() -> None:
    code = """
import os, signal, sys
from dflash.cli import stopping
signal.signal(signal.SIGINT, signal.default_int_handler)
stopping.take_signals()
end = stopping.stopped("interrupted")
os.kill(os.getpid(), signal.SIGINT)
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(end.exit_code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "stopped: interrupted\n")
