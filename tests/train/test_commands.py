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
from dflash import checkpoint
from dflash.cli.main import app
from dflash.train import output
from dflash.train.regenerate import read_answers

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


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


def test_a_target_that_no_draft_can_read_is_refused_before_anything_is_written(answers: Path, tmp_path: Path) -> None:
    folder = tmp_path / "several-streams"
    tiny.model("gemma3n", vocab_size=272, vocab_size_per_layer_input=272).save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)
    refused = run("train", "--model", folder, "--data", answers, "--output", tmp_path / "draft", *TRAIN, code=2)
    assert "a draft cannot read the layers of several-streams" in " ".join(refused.output.split())
    assert not list(tmp_path.glob("draft/*"))


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
        f"# DFlash draft for {target_folder.name}",
        "vllm serve path/to/the/target --spec",
        'load("path/to/the/target")',
        "answers.jsonl (12 answers)",
        "vllm serve",
        '"steps": 6',
        "torch",
    ):
        assert part in card
    assert "base_model" not in card, "the name of a folder is no id of the hub"
    steps = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps if "measured" in record] == [3, 6]


def test_regenerate_says_who_drafts_and_refuses_an_empty_name(target_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}')
    command = ["regenerate", "--model", target_folder, "--data", prompts, "--output", tmp_path / "a.jsonl"]
    assert "the name of the draft is empty" in run(*command, "--draft", "", code=2).output
    said = CliRunner().invoke(app, ["regenerate", "--help"], env={"COLUMNS": "400", "TERM": "dumb"}).output
    assert "By default dflash where --draft is given, else none" in said
    run(*command, "--max-new-tokens", 2)
    refused = " ".join(run(*command, "--max-new-tokens", 2, "--top-p", 0.5, code=2).output.split())
    assert "was begun with another --top-p (1.0, now 0.5): give" in refused


def test_what_can_be_refused_is_before_anything_is_loaded(answers: Path, target_folder: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    (begun / "checkpoints" / "step-3").mkdir(parents=True)
    (begun / "checkpoints" / "step-3" / "state.json").write_text("{}")
    (begun / "run.json").write_text('{"recipe": {"steps": 7}}')
    new = tmp_path / "new"
    for options, message in (
        (["--output", begun], "already holds a run: go on with --resume"),
        (["--output", begun, "--resume"], "was begun with other --steps: resume with the same options"),
        (["--output", new, "--start", ""], "the draft to start from has an empty name"),
        (["--output", new, "--model", ""], "the name of the model is empty"),
        (["--output", new, "--taps", "x"], "--taps must be"),
        (["--output", new, "--loss", "x"], "must be a sum of"),
        (["--output", new, "--data", tmp_path / "none.jsonl"], "none.jsonl does not exist: make it with"),
    ):
        refused = run("train", "--model", target_folder, "--data", answers, *TRAIN, *options, code=2)
        assert message in " ".join(refused.output.split())
        assert "importing PyTorch" not in refused.output


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
        (["--learning-rate", "0"], "--learning-rate must be a number above 0"),
        (["--learning-rate", "inf"], "--learning-rate must be a number above 0"),
        (["--weight-decay", "-1"], "--weight-decay must be a number of at least 0"),
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


@pytest.mark.parametrize(("model", "hub"), [("smollm2-135m", HUB), ("org/T", "org/T")])
def test_a_card_names_the_target_as_others_know_it(model: str, hub: str) -> None:
    place = checkpoint.Place(model, model, hub=model) if "/" in model else checkpoint.locate(model)
    made = output.Made(place.name, place.hub, None, "dflash train", {}, (1, 2), {}, {}, 1, 1.0)
    card = output.card(made, tiny.draft(tiny.target("llama")), None)
    assert f"base_model: {hub}\n" in card
    assert f"\nvllm serve {hub} --spec" in card and f"--model-path {hub} --spec" in card
    assert f'load("{model}")' in card, "what is read here is called as it is here"


def test_the_shipped_draft_names_its_target_as_others_know_it() -> None:
    folder = checkpoint.DRAFTS / "smollm2-135m"
    card = (folder / "README.md").read_text()
    assert f"base_model: {HUB}\n" in card and f"\nvllm serve {HUB} --spec" in card
    assert json.loads((folder / "config.json").read_text())["rms_norm_eps"] == 1e-5


def test_export_writes_the_class_of_the_target(target_folder: Path, tmp_path: Path) -> None:
    start = tiny.save_draft(tiny.draft(tiny.target("llama")), tmp_path / "start")

    def verifier(name: str, *options: object) -> Any:
        run("export", "--draft", start, "--output", tmp_path / name, *options)
        return json.loads((tmp_path / name / "config.json").read_text())["speculators_config"]["verifier"]

    of_folder = verifier("a", "--target", target_folder)
    assert of_folder == {"name_or_path": str(target_folder), "architectures": ["LlamaForCausalLM"]}
    of_alias = verifier("b", "--target", "smollm2-135m")
    assert of_alias == {"name_or_path": HUB, "architectures": ["LlamaForCausalLM"]}
    given = verifier("c", "--target", "org/T", "--target-class", "TForCausalLM")
    assert given == {"name_or_path": "org/T", "architectures": ["TForCausalLM"]}
    (target_folder / "config.json").rename(target_folder / "kept.json")
    (target_folder / "config.json").write_text("{}")
    told = run("export", "--draft", start, "--output", tmp_path / "d", "--target", target_folder, code=2)
    (target_folder / "kept.json").replace(target_folder / "config.json")
    assert "the class of the target cannot be told: give --target-class" in " ".join(told.output.split())
    assert not (tmp_path / "d").exists()


def test_a_prompt_without_scores_fails_alone_and_a_run_without_answers_fails(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    model = tiny.model("llama", vocab_size=272)
    with torch.no_grad():
        z = tiny.tokenizer().encode("z")
        model.model.embed_tokens.weight[z] = torch.nan
        model.lm_head.weight[z] = 0  # so that no answer has it
    model.save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)
    prompts, file = tmp_path / "p.jsonl", tmp_path / "a.jsonl"
    common = ["regenerate", "--model", folder, "--data", prompts, "--max-new-tokens", 3]
    asked = [f"question {i}" + "z" * (i in (3, 8)) for i in range(12)]
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in asked))
    done = run(*common, "--output", file, code=1)
    assert "failed: 2 prompts: the target's scores are not numbers (NaN)" in done.output
    assert "done: 10 answers" in done.output
    assert {record["id"] for record in read_answers(file)} == {f"{i}.0" for i in range(12) if i not in (3, 8)}
    again = run(*common, "--output", file, code=1)
    assert "failed: 2 prompts" in again.output and len(read_answers(file)) == 10, "tried again, nothing lost"
    prompts.write_text('{"turns": ["z"]}\n{"turns": ["zz"]}\n')
    done = run(*common, "--output", tmp_path / "none.jsonl", code=1)
    assert "no prompt was answered" in done.output and "done:" not in done.output


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
