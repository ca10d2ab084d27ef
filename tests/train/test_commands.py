"""``dflash regenerate`` and ``dflash train`` from prompts to a draft that decodes, as a user runs them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
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


def test_system_messages_and_packed_files_from_the_command_line(target_folder: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.NDJSON.gz", tmp_path / "answers.jsonl"
    system = {"role": "system", "content": "Be brief."}
    rows = [
        {"messages": [system, {"role": "user", "content": "one"}]},
        {"conversations": [{"from": "human", "value": "two"}]},
    ]
    prompts.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    command = ["regenerate", "--model", target_folder, "--data", prompts, "--output", output, "--max-new-tokens", 4]
    run(*command)
    by_id = {record["id"]: record["messages"] for record in read_answers(output)}
    assert by_id == {"0.0": rows[0]["messages"], "1.0": [{"role": "user", "content": "two"}]}
    run(*command)
    assert len(read_answers(output)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--loss", "mse"], "must be a sum of ce, kl, l1"),
        (["--schedule", "linear"], "schedule must be one of"),
        (["--taps", "a,b"], "--taps must be layer ids"),
        (["--taps", "1,9"], "names layer 9"),
        (["--mask-token", "9999"], "is no row of the target's embedding"),
        (["--learning-rate", "0"], "learning_rate must be a number above 0"),
        (["--learning-rate", "inf"], "learning_rate must be a number above 0"),
        (["--weight-decay", "-1"], "weight_decay must be a number of at least 0"),
        (["--warmup", "nan"], "warmup must be a share of the steps"),
        (["--decay", "1.5"], "decay must be a share of the steps"),
        (["--seed", str(2**70)], "seed must be a whole number of 64 bits"),
        (["--loss", "0*ce"], "nothing would be learned"),
        (["--start", "nowhere/at/all"], "does not exist"),
        (["--start", ""], "the draft to start from has an empty name"),
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


VARIANTS = [
    {},
    {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8},
    {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8, "causal": (False, False)},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
]


def test_a_draft_that_is_gone_on_from_keeps_its_shape(answers: Path, target_folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    common = ["train", "--model", target_folder, "--data", answers, "--steps", 2, "--sequences", 2, "--held-out", 0]
    run(*common, "--output", base, "--layers", 1, "--taps", 2, "--block-size", 4)
    run(*common, "--output", tmp_path / "on", "--start", base)
    assert dflash.load_draft(tmp_path / "on").config == dflash.load_draft(base).config
    for option in (["--layers", 2], ["--taps", "0,1"], ["--block-size", 8], ["--mask-token", 5]):
        told = run(*common, "--output", tmp_path / "x", "--start", base, *option, code=2)
        assert "leave it out to go on from that draft" in " ".join(told.output.split())
    (base / "config.json").unlink()  # as a run that was stopped leaves its folder
    run(*common, "--output", tmp_path / "on2", "--start", base)
    have, want = (dflash.load_draft(tmp_path / name, dtype="float32").state_dict() for name in ("on2", "on"))
    assert all(torch.allclose(have[name], want[name], atol=2e-2) for name in want)
    stranger = tiny.save_draft(tiny.draft(tiny.target("qwen3"), hidden_size=32), tmp_path / "stranger")
    told = run(*common, "--output", tmp_path / "x", "--start", stranger, code=2)
    assert "does not fit target" in " ".join(told.output.split())


def test_what_is_no_draft_is_not_exported(tmp_path: Path) -> None:
    start = tiny.save_draft(tiny.draft(tiny.target("qwen3")), tmp_path / "start")
    save_file({"foo": torch.zeros(3)}, start / "model.safetensors")
    result = run("export", "--draft", start, "--output", tmp_path / "x", "--target", "org/model", code=2)
    assert "is not the DFlash draft its config describes" in " ".join(result.output.split())
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("variant", VARIANTS)
def test_export_to_speculators_and_back_is_the_same_draft(tmp_path: Path, variant: dict[str, Any]) -> None:
    made = tiny.draft(tiny.target("qwen3"), **variant)
    start = tiny.save_draft(made, tmp_path / "start")
    there, back = tmp_path / "there", tmp_path / "back"
    run("export", "--draft", start, "--output", there, "--target", "org/model", "--target-class", "Qwen3ForCausalLM")
    config = json.loads((there / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [i + 1 for i in made.config.target_layer_ids]
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/model",
        "architectures": ["Qwen3ForCausalLM"],
    }
    run("export", "--draft", there, "--output", back, "--format", "published")
    for folder in (there, back):
        loaded = dflash.load_draft(folder, dtype="float32")
        assert loaded.config == made.config
        for name, tensor in made.state_dict().items():
            assert torch.equal(tensor, loaded.state_dict()[name])
    assert json.loads((back / "config.json").read_text()) == json.loads((start / "config.json").read_text())


@pytest.mark.parametrize("variant", [{"causal": (True, True)}, {"output_multiplier": 0.5}])
def test_what_speculators_cannot_say_is_refused(tmp_path: Path, variant: dict[str, Any]) -> None:
    start = tiny.save_draft(tiny.draft(tiny.target("qwen3"), **variant), tmp_path / "start")
    result = run("export", "--draft", start, "--output", tmp_path / "x", "--target", "org/model", code=2)
    assert "the speculators format" in result.output
    assert not (tmp_path / "x").exists()
