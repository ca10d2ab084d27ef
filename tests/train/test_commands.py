"""``dflash regenerate`` and ``dflash train`` from prompts to a draft that decodes, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import dflash
import tiny
from dflash.cli.main import app
from dflash.train.regenerate import read_answers


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny.model("llama", vocab_size=272).save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def answers(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"question {i}"]}) + "\n" for i in range(12)))
    output = folder / "answers.jsonl"
    run("regenerate", "--model", target_folder, "--data", prompts, "--output", output, "--max-new-tokens", 24)
    return output


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


TRAIN = ["--steps", 6, "--sequences", 4, "--anchors", 8, "--layers", 1, "--taps", 2, "--block-size", 4]
TRAIN += ["--held-out", 2, "--measure-every", 3, "--save-every", 3, "--precision", "fp32", "--others", 16]


def test_answers_are_made_and_a_second_call_has_nothing_to_do(answers: Path, target_folder: Path) -> None:
    before = answers.read_bytes()
    assert len(read_answers(answers)) == 12
    prompts = answers.parent / "prompts.jsonl"
    again = run("regenerate", "--model", target_folder, "--data", prompts, "--output", answers, "--max-new-tokens", 24)
    assert "12 answers" in again.output
    assert answers.read_bytes() == before


def test_a_draft_is_trained_resumed_and_used(answers: Path, target_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "draft"
    done = run(
        "train", "--model", target_folder, "--data", answers, "--output", output, "--cache", tmp_path / "c", *TRAIN
    )
    assert "10 answers to learn from" in done.output
    assert "tokens a round" in done.output
    refused = run("train", "--model", target_folder, "--data", answers, "--output", output, *TRAIN, code=2)
    assert "go on with --resume" in " ".join(refused.output.split())
    weights = (output / "model.safetensors").read_bytes()
    run("train", "--model", target_folder, "--data", answers, "--output", output, "--resume", *TRAIN)
    assert (output / "model.safetensors").read_bytes() == weights, "there was nothing left to do"

    target = dflash.load(target_folder, dtype="float32")
    draft = dflash.load_draft(output)
    assert draft.config.num_target_layers == 4
    question = [{"role": "user", "content": "question 3"}]
    plain = dflash.generate(target, None, None, question, max_tokens=20)
    assert dflash.generate(target, draft, None, question, max_tokens=20).tokens == plain.tokens

    card = (output / "README.md").read_text()
    for part in (
        f"base_model: {target_folder.name}",
        "answers.jsonl (12 answers)",
        "vllm serve",
        '"steps": 6',
        "torch",
    ):
        assert part in card
    steps = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps if "measured" in record] == [3, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--loss", "mse"], "must be a sum of ce, kl, l1"),
        (["--schedule", "linear"], "schedule must be one of"),
        (["--taps", "a,b"], "--taps must be layer ids"),
        (["--taps", "1,9"], "names layer 9"),
        (["--mask-token", "9999"], "is no row of the target's embedding"),
        (["--learning-rate", "0"], "learning_rate must be above 0"),
        (["--start", "nowhere/at/all"], "does not exist"),
        (["--sliding-layers", "5"], "cannot be sliding"),
    ],
)
def test_bad_options_are_one_line(
    answers: Path, target_folder: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    result = run(
        "train", "--model", target_folder, "--data", answers, "--output", tmp_path / "d", *TRAIN, *options, code=2
    )
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not (tmp_path / "d" / "config.json").exists()
