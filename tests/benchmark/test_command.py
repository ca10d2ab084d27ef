"""``dflash benchmark`` and ``python -m dflash.benchmark``: from options to table, results.json and report."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dflash
import tiny
from dflash.benchmark.compare import _both, comparison
from dflash.benchmark.figures import Parting
from dflash.benchmark.pictures import draw
from dflash.benchmark.report import coloured, page
from dflash.benchmark.results import ALL, Results, headline, load, save
from dflash.benchmark.systems import Loop
from dflash.benchmark.table import remarks, tables
from dflash.cli.main import app
from dflash.difference import Difference
from dflash.errors import RequestError
from dflash.processors import Processors

DATASETS = ("--dataset", "gsm8k-sample", "--dataset", "mt-bench-sample", "--max-samples", "2", "--max-new-tokens", "6")
SYSTEMS = ["draft", "both", "ngram", "plain", "transformers", "transformers-lookup"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target on disk."""
    place = tmp_path_factory.mktemp("target")
    tiny.model("llama", vocab_size=272, max_position_embeddings=2048).save_pretrained(place)
    tiny.make_tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def draft(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft for it."""
    return tiny.save_draft(tiny.draft(dflash.load(folder)), tmp_path_factory.mktemp("draft") / "draft")


@pytest.fixture(scope="module")
def run(folder: Path, draft: Path) -> Callable[..., Any]:
    """Run the command on them, on streams that are no terminals."""

    def run(*arguments: str | Path) -> Any:
        command = ["benchmark", "--model", folder, "--draft-model", draft, *arguments]
        return CliRunner().invoke(app, [str(argument) for argument in command])

    return run


@pytest.fixture(scope="module")
def measured(run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A whole benchmark: where it wrote, and what it said."""
    place = tmp_path_factory.mktemp("benchmark")
    result = run(*DATASETS, "--output", place)
    assert result.exit_code == 0, result.output
    return place, result


@pytest.fixture(scope="module")
def results(measured: tuple[Path, Any]) -> Results:
    return load(measured[0] / "results.json")


def one_line(text: str) -> str:
    return " ".join(text.split())


# --- the whole --------------------------------------------------------------------------------------


def test_everything_is_measured_and_written(measured: tuple[Path, Any], results: Results) -> None:
    place, result = measured
    assert list(results.systems) == SYSTEMS and results.baseline == "plain" and results.complete
    assert len(results.records) == 6 * (2 + 2 * 2), "six systems, two prompts of one turn and two of two"
    for rows in results.figures().values():
        for name, found in rows.items():
            assert found.failures == 0
            assert name == "plain" or (found.identity and found.identity.identical == found.identity.compared)
    assert list(results.figures()) == ["gsm8k", "mt-bench", ALL]
    overall = results.figures()[ALL]
    assert overall["plain"].acceptance_length == 1.0
    assert overall["draft"].round_time is not None and overall["draft"].round_time.draft > 0
    assert overall["transformers"].round_time is None
    assert {file.name for file in place.iterdir()} == {
        "records-0.jsonl", "results.json", "report.html", "speedup.png", "histogram.png", "positions.png",
        "round_time.png", "rates.png",
    }  # fmt: skip
    said = one_line(result.stdout)
    assert "greedy, at most 6 tokens, thinking as the template has it" in said
    assert "all data sets, 4 prompts" in said and "baseline" in said
    assert "conversations: 24 of 24" in result.stderr


def test_the_record_says_where_with_what_and_how(results: Results) -> None:
    where, settings = results.environment, results.settings
    for name in ("device", "cpu", "threads", "cores", "python", "dflash", "commit", "dtype", "versions"):
        assert name in where
    assert where["versions"].keys() == {"torch", "transformers", "tokenizers", "numpy"}, "of the backend in force"
    assert where["device"] == "cpu" and where["dtype"] == "float32"
    threads = Processors(where["cores"], where["cpu_quota"]).shared_by(where["threads"])
    assert headline(results)[2].endswith(f", {threads}") and "affinity" in threads
    assert settings["draft_min_confidence"] == 0.1
    assert settings["max_new_tokens"] == 6 and settings["datasets"]["gsm8k"]["prompts"] == 2
    assert settings["enable_thinking"] is None, "said in the heading, too"


def test_results_come_back_as_they_were(results: Results, tmp_path: Path) -> None:
    save(results, tmp_path / "again.json")
    assert load(tmp_path / "again.json") == results
    written = json.loads((tmp_path / "again.json").read_text())
    found = written["figures"]["gsm8k"]["draft"]
    assert found["acceptance_length"] == results.figures()["gsm8k"]["draft"].acceptance_length
    (tmp_path / "bad.json").write_text('{"dflash_benchmark": 99}')
    for name, message in (("bad.json", "format 99"), ("none.json", "cannot read")):
        with pytest.raises(RequestError, match=message):
            load(tmp_path / name)


def test_what_is_no_results_is_refused_in_a_sentence(results: Results, tmp_path: Path) -> None:
    whole = results.to_json()
    record = whole["records"][0]
    for name, value in (
        ("settings", {}), ("settings", []), ("settings", {"datasets": {"x": {}}}), ("settings", {"datasets": {"x": 1}}),
        ("records", [{**record, "answer": "x"}]), ("records", 3), ("systems", 3), ("partings", ["x"]),
    ):  # fmt: skip
        (tmp_path / "odd.json").write_text(json.dumps({**whole, name: value}))
        with pytest.raises(RequestError, match=r"no results\.json of dflash benchmark"):
            load(tmp_path / "odd.json")
    for text in (b"\xff", b"[]", b"[" * 100_000):
        (tmp_path / "odd.json").write_bytes(text)
        with pytest.raises(RequestError, match=r"no results\.json of dflash benchmark"):
            load(tmp_path / "odd.json")


def test_the_report_stands_alone(measured: tuple[Path, Any], results: Results) -> None:
    place, _ = measured
    html = (place / "report.html").read_text(encoding="utf-8")
    assert not re.search(r'(src|href)="(?!data:)', html), "nothing is fetched"
    assert html.count("data:image/png;base64,") == 5
    assert html.count("<table>") == 3 and 'class="answer"' in html
    # Nothing that came from outside is markup.
    evil = replace(results, settings={**results.settings, "model": "<script>x"}, command="<b>")
    text = page(evil, place, {})
    assert "<script>" not in text and "<b>" not in text


def test_the_coloured_answer_is_the_answer(results: Results) -> None:
    for record in results.of("ngram", ALL):
        if record.answer.pieces is None or record.answer.rounds is None:
            continue
        text = re.sub(r"<[^>]*>", "", coloured(record.answer))
        import html

        assert html.unescape(text) == "".join(record.answer.pieces) == record.answer.text
        drafted = sum(one.accepted for one in record.answer.rounds)
        shown = coloured(record.answer).count('class="t"')
        silent = sum(not piece for piece in record.answer.pieces)
        assert record.answer.count - drafted - silent <= shown <= record.answer.count - drafted


def test_the_same_run_again_measures_nothing(measured: tuple[Path, Any], run: Callable[..., Any]) -> None:
    place, _ = measured
    before = load(place / "results.json")
    result = run(*DATASETS, "--output", place)
    assert result.exit_code == 0
    again = load(place / "results.json")
    assert again.records == before.records and again.figures() == before.figures()
    result = run(*DATASETS, "--output", place, "--block-size", "4")
    assert result.exit_code == 2 and "holds a run with other settings (--block-size None there, 4 now)" in one_line(
        result.stderr
    )


def test_stopped_it_shows_what_it_has_and_goes_on(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converse = Loop.converse
    calls: list[str] = []

    def interrupted(self: Loop, talks: Any) -> Iterator[Any]:
        calls.append(self.name)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return converse(self, talks)

    monkeypatch.setattr(Loop, "converse", interrupted)
    result = run(*DATASETS, "--output", tmp_path)
    assert result.exit_code == 130
    assert "NOT COMPLETE" in result.stdout and "NOT COMPLETE" in (tmp_path / "report.html").read_text()
    stopped = load(tmp_path / "results.json")
    assert not stopped.complete and 0 < len(stopped.records) < 36
    monkeypatch.undo()
    result = run(*DATASETS, "--output", tmp_path)
    assert result.exit_code == 0
    whole = load(tmp_path / "results.json")
    assert whole.complete and len(whole.records) == 36
    kept = {(r.system, r.key): r for r in whole.records}
    assert all(kept[r.system, r.key] == r for r in stopped.records)


def test_the_draft_is_measured_alone_and_with_n_grams(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converse = Loop.converse
    drafters: dict[str, str] = {}

    def noted(self: Loop, talks: Any) -> Iterator[Any]:
        drafters[self.name] = type(self._drafter).__name__
        return converse(self, talks)

    monkeypatch.setattr(Loop, "converse", noted)
    assert run("--prompt", "x", "--systems", "draft,both,plain").exit_code == 0
    assert drafters == {"draft": "DFlashDraftModel", "both": "BothDrafters", "plain": "NoDrafter"}


def test_chosen_systems_in_batches_sampled_with_repeats(run: Callable[..., Any], tmp_path: Path) -> None:
    result = run(
        *DATASETS, "--systems", "ngram, plain,transformers", "--batch-size", "2", "--temperature", "0.8",
        "--top-k", "20", "--repeats", "2", "--output", tmp_path, "--no-split",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = load(tmp_path / "results.json")
    assert list(found.systems) == ["ngram", "plain", "transformers"] and len(found.records) == 3 * 6 * 2
    overall = found.figures()[ALL]
    assert overall["ngram"].identity is not None and overall["ngram"].identity.different == 0
    assert overall["transformers"].identity is None, "it draws from a generator of its own"
    assert overall["plain"].round_time is None
    first = [r.answer.tokens for r in found.of("plain", "gsm8k") if r.repeat == 0]
    second = [r.answer.tokens for r in found.of("plain", "gsm8k") if r.repeat == 1]
    assert first != second, "each repeat has a seed of its own"


def test_blocks_of_one_token_are_plain_decoding_of_the_same_pair(run: Callable[..., Any], tmp_path: Path) -> None:
    result = run("--prompt", "x", "--block-size", "1", "--max-new-tokens", "5", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    found = load(tmp_path / "results.json")
    assert list(found.systems) == ["plain", "transformers", "transformers-lookup"]
    assert found.figures()["prompt"]["plain"].acceptance_length == 1.0


def test_said_nothing_it_takes_a_few_of_each_sample(run: Callable[..., Any], tmp_path: Path) -> None:
    result = run("--systems", "plain", "--max-new-tokens", "2", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    found = load(tmp_path / "results.json")
    assert found.datasets == ["gsm8k", "humaneval", "mt-bench"] and len(found.records) == 5 + 5 + 2 * 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x", "--dataset", "gsm8k"], "leave one of them out"),
        (["--prompt", "x", "--systems", "llama.cpp"], "llama.cpp cannot run here: there are draft, both, ngram"),
        (["--prompt", "x", "--systems", "transformers-assisted"], "needs --assistant-model"),
        (["--prompt", "x", "--systems", "transformers-lookup", "--batch-size", "2"], "one prompt at a time"),
        (["--prompt", "x", "--temperature", "-1"], "--temperature must be a number in"),
        (["--prompt", "x", "--block-size", "0"], "--block-size must be 1 (plain decoding) or more"),
        (
            ["--prompt", "x", "--block-size", "1", "--systems", "draft"],
            "needs --block-size 2 or more; with 1 you can ask for plain",
        ),
        (["--prompt", "x", "--draft", ""], "the name of the draft is empty"),
        (["--dataset", "/nowhere.jsonl"], "/nowhere.jsonl does not exist"),
        (
            ["--backend", "openai", "--draft-min-confidence", "0.5"],
            "options of a draft do not go with --backend openai",
        ),
        (["--compare", "/nowhere/a.json", "/nowhere/b.json"], "cannot read /nowhere/a.json"),
    ],
)
def test_an_error_is_one_line(run: Callable[..., Any], arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and message in one_line(result.stderr) and not result.stdout


# --- what failed ------------------------------------------------------------------------------------


def test_one_failed_prompt_is_exit_status_1_and_the_others_are_recorded(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    """It does not fit the context."""
    file = tmp_path / "mixed.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one", "x" * 3000, "two")))
    command = ["--dataset", file, "--systems", "ngram,plain", "--max-new-tokens", "4", "--output", tmp_path / "out"]
    for _ in range(2):  # gone on with, there is nothing left to do, and what failed failed all the same
        result = run(*command)
        assert result.exit_code == 1, result.output
        last = one_line(result.stderr.strip().splitlines()[-1])
        assert last.startswith("failed: 2 of 6 answers: PromptTooLong: the prompt has ")
        found = load(tmp_path / "out" / "results.json")
        assert found.complete and len(found.records) == 6
        assert (tmp_path / "out" / "report.html").is_file()
        assert "2 + 1 FAILED" in one_line(result.stdout)
    compared = CliRunner().invoke(app, ["benchmark", "--compare", str(tmp_path / "out"), str(tmp_path / "out")])
    assert compared.exit_code == 1 and "A lacks what failed, 2 of 6 answers: PromptTooLong" in one_line(compared.stdout)
    assert "failed: 4 of 12 answers" in compared.stderr


def test_a_system_that_answers_less_is_seen(results: Results, tmp_path: Path) -> None:
    shorter = replace(
        results,
        records=[replace(r, answer=replace(r.answer, count=3)) if r.system == "draft" else r for r in results.records],
    )
    assert "of those of plain to the same prompts" not in " ".join(remarks(results))
    told = [line for line in remarks(shorter) if "tokens of those of plain" in line]
    assert len(told) == 1 and told[0].startswith("draft: its answers have 0.5")
    for width in (80, 160):
        text = printed(tables(shorter, width), width)
        assert "mean" in text and " 3.0 " in text and "…" not in text
    html = page(shorter, tmp_path, {})
    assert "<td>3.0</td>" in html and "mean\ntokens" in html and "draft: its answers have 0.5" in html
    compared = one_line(printed(comparison(results, shorter, "a", "b"), 200))
    assert "draft: B's answers have 0.5" in compared
    assert "ngram: B's answers" not in compared


def test_many_kinds_of_failure_are_not_a_wall_of_text(results: Results) -> None:
    records = [replace(r, answer=replace(r.answer, error=f"request {i} broke")) for i, r in enumerate(results.records)]
    told = remarks(replace(results, records=records))
    assert sum(line.startswith("failed 1 time: request") for line in told) == 10
    assert "... and for 26 more reasons (results.json has all)" in told


# --- as processes -----------------------------------------------------------------------------------


def test_the_documented_line_works_as_a_process(folder: Path, draft: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dflash.benchmark", "--model", str(folder), "--draft-model", str(draft)]
    command += ["--prompt", "How many?", "--max-new-tokens", "150", "--block-size", "32"]
    done = subprocess.run(
        [*command, "--systems", "draft,plain"], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "prompt, 1 prompt" in done.stdout and "1 of 1" in done.stdout
    assert "is above the 8 that draft" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [], "without --output nothing is written"


def test_two_processes_share_the_prompts(folder: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dflash.benchmark", "--model", str(folder), *DATASETS, "--systems", "ngram,plain"]
    import os

    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    both = [
        subprocess.Popen(
            [*command, "--output", str(tmp_path / "out")], env={**common, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert "all data sets, 4 prompts" in said[0][0] and said[1][0] == ""
    found = load(tmp_path / "out" / "results.json")
    assert found.complete and len(found.records) == 2 * (2 + 2 * 2)
    assert {record.lane for record in found.records} == {"0.0", "1.0"}
    assert sorted({r.prompt for r in found.records if r.lane == "1.0"}) == [20, 50], "every other prompt"


# --- comparing --------------------------------------------------------------------------------------


def printed(renderable: Any, width: int = 160) -> str:
    from rich.console import Console

    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def test_two_results_are_compared(
    measured: tuple[Path, Any], results: Results, run: Callable[..., Any], tmp_path: Path
) -> None:
    faster = replace(
        results,
        settings={**results.settings, "block_size": 4},
        records=[
            replace(r, answer=replace(r.answer, seconds=r.answer.seconds / 2, first=r.answer.first / 2))
            for r in results.records
        ],
    )
    text = printed(comparison(results, faster, "a.json", "b.json"))
    assert text.count("2.00x (2.00-2.00)") == 6 * 3, "six systems; two data sets and all"
    assert "setting differs: block_size: None -> 4" in text and "2 of 2" in text
    assert "do not meet" not in text, "all are faster, the speed-ups are as they were"
    assert "…" not in printed(comparison(results, faster, "a.json", "b.json"), 80)
    save(faster, tmp_path / "b.json")
    result = CliRunner().invoke(app, ["benchmark", "--compare", str(measured[0]), str(tmp_path / "b.json")])
    assert result.exit_code == 0 and "2.00x" in result.stdout
    other = replace(results, systems={"server": "x"})
    with pytest.raises(RequestError, match="nothing to compare"):
        comparison(results, other, "a", "b")


def test_speed_ups_whose_intervals_do_not_meet_are_named(results: Results) -> None:
    faster = replace(
        results,
        records=[
            replace(r, answer=replace(r.answer, seconds=r.answer.seconds / 100)) if r.system == "draft" else r
            for r in results.records
        ],
    )
    text = one_line(printed(comparison(results, faster, "a.json", "b.json"), 200))
    assert "do not meet: draft on gsm8k, draft on mt-bench, draft on all data sets" in text
    assert "ngram on" not in text


def test_other_caps_are_said_to_spoil_a_comparison(results: Results) -> None:
    shorter = replace(results, settings={**results.settings, "max_new_tokens": 3})
    text = one_line(printed(comparison(results, shorter, "a.json", "b.json"), 200))
    assert "A's answers end at 6 tokens, B's at 3" in text
    assert "answers end at" not in printed(comparison(results, results, "a.json", "a.json"), 200)


def test_what_may_be_chance_is_not_called_slow(results: Results) -> None:
    """An interval that goes beyond 1, or none."""
    prompts = sorted({r.prompt for r in results.of("plain", "gsm8k")})
    records = {
        prompt: [r for r in results.records if r.dataset == "gsm8k" and r.prompt == prompt] for prompt in prompts
    }
    first, second = records.values()

    def scaled(chosen: list[Any], factor: float) -> list[Any]:
        return [
            replace(r, answer=replace(r.answer, seconds=factor if r.system == "draft" else 1.0, first=0.1))
            for r in chosen
        ]

    only = {**results.settings, "datasets": {"gsm8k": results.settings["datasets"]["gsm8k"]}}
    for chosen in ([*scaled(first, 0.9), *scaled(second, 1.5)], scaled(first, 1.5)):
        assert "SLOWER" not in " ".join(remarks(replace(results, settings=only, records=chosen)))
    slow = [*scaled(first, 1.3), *scaled(second, 1.5)]
    assert "draft is SLOWER" in " ".join(remarks(replace(results, settings=only, records=slow)))


def test_only_the_same_prompts_are_compared(results: Results) -> None:
    """A file may have changed between two runs: the same index, another prompt."""

    def changed(*prompts: int) -> Results:
        """Other first turns."""
        return replace(
            results,
            records=[
                replace(r, answer=replace(r.answer, prompt_digest="other"))
                if r.turn == 0 and r.prompt in prompts
                else r
                for r in results.records
            ],
        )

    first, *rest = sorted({r.prompt for r in results.of("plain", "mt-bench")})
    for system in results.systems:
        assert [len(side) for side in _both(results, changed(first), system, ["mt-bench"])] == [2, 2]
        mine, yours = _both(results, changed(first), system, ["mt-bench"])
        assert {r.prompt for r in (*mine, *yours)} == set(rest), "with all turns of it"
    everything = changed(*{r.prompt for r in results.records})
    with pytest.raises(RequestError, match="nothing to compare"):
        comparison(results, everything, "a", "b")


# --- what must be seen ------------------------------------------------------------------------------


def test_a_difference_and_a_slow_draft_are_told_plainly(results: Results) -> None:
    first = results.of("draft", "gsm8k")[0]
    tie = Difference(3, 1, 2, margin=0.01, gap=0.02, bound=0.5)
    partings = [Parting("draft", first.key, 3, tie), Parting("ngram", first.key, 0, replace(tie, bound=0.0))]
    slow = [
        replace(r, answer=replace(r.answer, seconds=r.answer.seconds * (9 if r.system == "draft" else 1)))
        for r in results.records
    ]
    text = one_line(printed(tables(replace(results, partings=partings, records=slow), 80), 80))
    assert "draft is SLOWER than plain here" in text and "Try a smaller --block-size" in text
    assert "draft parts from plain at token 3 of gsm8k 0" in text
    assert "margin of the target's best two there 0.01, its best 0.02 above the worse answer: a tie, within" in text
    assert "NOT within rounding" in text


def test_a_busy_machine_is_told(results: Results) -> None:
    def shared(part: float) -> Results:
        records = [replace(r, answer=replace(r.answer, cpu_seconds=part * r.answer.seconds)) for r in results.records]
        return replace(results, records=records)

    assert all(r.answer.cpu_seconds for r in results.records)
    assert "36 of 36 answers had less than 80% of a processor" in " ".join(remarks(shared(0.5)))
    assert "processor" not in " ".join(remarks(shared(1.0)))
    on_gpu = replace(shared(0.5), environment={**results.environment, "device": "cuda:0"})
    assert "processor" not in " ".join(remarks(on_gpu))


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_fits_the_screen(results: Results, width: int) -> None:
    text = printed(tables(results, width), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    assert len(text.splitlines()) < 85


def test_only_plots_with_something_to_show_are_drawn(results: Results, tmp_path: Path) -> None:
    plain = replace(
        results,
        systems={"plain": "x"},
        records=[replace(r, answer=replace(r.answer, split=None)) for r in results.records if r.system == "plain"],
    )
    assert list(draw(plain, tmp_path)) == ["rates.png"]
