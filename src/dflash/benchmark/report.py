"""``report.html``: one file with everything in it, readable without a network, and its plots as PNGs beside it."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from dflash.benchmark.answers import Answer, Record
from dflash.benchmark.pictures import draw
from dflash.benchmark.results import ALL, Results, headline
from dflash.benchmark.table import COLUMNS, remarks, row

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.85rem; }
th, td { text-align: right; padding: 0.35rem 0.5rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { vertical-align: bottom; font-weight: 600; white-space: pre; }
th:first-child, td:first-child { text-align: left; }
tr.baseline td { color: #555; }
.bad { color: #b00020; font-weight: 600; }
.scroll { overflow-x: auto; }
img { max-width: 100%; height: auto; }
figure { margin: 1.2rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.25rem 1rem; font-size: 0.9rem; }
dt { font-weight: 600; } dd { margin: 0; }
code, .answer { font-family: ui-monospace, monospace; font-size: 0.85rem; }
.command { background: #f4f4f4; padding: 0.5rem 0.7rem; overflow-wrap: anywhere; }
.answer { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #ddd; padding: 0.8rem; line-height: 1.9; }
.d { background: #cfe5f5; border-bottom: 3px solid #0072B2; }
.t { border-bottom: 3px dotted #D55E00; }
ul { font-size: 0.9rem; }
"""

_TERMS = (
    ("tokens a round", "tokens of the decode rounds over decode rounds (forwards of the target after the prefill), the "
     "target's own token included, cut at the end of the answer; 1 is plain decoding"),
    ("mean tokens", "of the answers that came, on average; a system that answers less does less"),
    ("first token", "median time from the call to the first token"),
    ("decode", "tokens after the first of each answer, per second between first token and end"),
    ("end to end", "all tokens, per second from call to end"),
    ("speed-up", "end to end, over the prompts that the baseline answered too; interval by bootstrap over prompts"),
    ("ms a round", "drafting, verifying (forward, verdict, rollback) and the rest of the loop, for one round"),
    ("peak", "largest memory while answering: of the GPU, else of the process with everything loaded in it"),
    ("identical", "answers that are, token for token, the baseline's"),
)  # fmt: skip


def write_report(results: Results, folder: Path) -> None:
    """``report.html`` and the PNGs."""
    pictures = draw(results, folder)
    beside = folder / ".report.html.part"
    beside.write_text(page(results, folder, pictures), encoding="utf-8")
    os.replace(beside, folder / "report.html")


def page(results: Results, folder: Path, pictures: dict[str, str]) -> str:
    """The whole page; pictures are embedded."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_e(results.settings['model'])}: benchmark</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_e(results.settings['model'])}: benchmark</h1>",
        "<p>" + "<br>".join(_e(line) for line in headline(results)) + "</p>",
        *_notes(remarks(results)),
        *_tables(results),
        "<h2>Plots</h2>",
        *(_picture(folder / name, title) for name, title in pictures.items()),
        *_example(results),
        *_about(results),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _e(text: object) -> str:
    return html.escape(str(text))


def _notes(lines: Sequence[str]) -> Iterable[str]:
    if lines:
        yield "<ul>" + "".join(f"<li>{_e(line)}</li>" for line in lines) + "</ul>"


def _tables(results: Results) -> Iterable[str]:
    sets = results.figures()
    for dataset in sorted(sets, key=lambda name: name != ALL):  # the line over all comes first
        rows = sets[dataset]
        if dataset == ALL:
            yield "<h2>All data sets</h2>"
        else:
            about = results.settings["datasets"][dataset]
            yield f"<h2>{_e(dataset)}</h2><p>{about['prompts']} prompts of {_e(about['source'])}</p>"
        yield '<div class="scroll"><table><thead><tr>'
        yield "".join(f"<th>{_e(name)}</th>" for name in COLUMNS) + "</tr></thead><tbody>"
        for name, found in rows.items():
            baseline = name == results.baseline
            cells = (
                f'<td class="bad">{_e(cell)}</td>' if "FAILED" in cell or "DIFFER" in cell else f"<td>{_e(cell)}</td>"
                for cell in row(name, found, baseline)
            )
            yield f"<tr{' class=baseline' if baseline else ''}>{''.join(cells)}</tr>"
        yield "</tbody></table></div>"


def _picture(file: Path, title: str) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    return f'<figure><img alt="{_e(title)}" src="data:image/png;base64,{data}"></figure>'


def example(results: Results) -> Record | None:
    """The answer to show: the first one of the first drafting system."""
    for system in results.systems:
        for record in results.of(system, ALL):
            if record.answer.pieces and record.answer.rounds:
                return record
    return None


def _example(results: Results) -> Iterable[str]:
    shown = example(results)
    if shown is None:
        return
    answer = shown.answer
    accepted = sum(one.accepted for one in answer.rounds or ())
    yield f"<h2>One answer, round by round: {_e(shown.system)}, {_e(shown.dataset)} {shown.prompt}</h2>"
    yield (
        f'<p><span class="d">drafted and accepted</span>: {accepted} of {answer.count} tokens. '
        f'<span class="t">The others</span> are the target\'s own: the first, and one in each of '
        f"{len(answer.rounds or ())} rounds.</p>"
    )
    yield f'<div class="answer">{coloured(answer)}</div>'


def coloured(answer: Answer) -> str:
    """The text of an answer as HTML: drafted tokens (class d) and the target's own (class t)."""
    drafted = [False]
    for one in answer.rounds or ():
        drafted += [i < one.accepted for i in range(one.tokens)]
    spans: list[tuple[bool, str]] = []
    for piece, by_draft in zip(answer.pieces or (), drafted):
        if spans and spans[-1][0] == by_draft and by_draft:
            spans[-1] = (True, spans[-1][1] + piece)
        else:
            spans.append((by_draft, piece))
    return "".join(f'<span class="{"d" if d else "t"}">{_e(text)}</span>' for d, text in spans if text)


def _about(results: Results) -> Iterable[str]:
    yield "<h2>How to read this</h2><dl>"
    yield "".join(f"<dt>{_e(term)}</dt><dd>{_e(text)}</dd>" for term, text in _TERMS) + "</dl>"
    yield "<h2>Systems</h2><dl>"
    yield "".join(f"<dt>{_e(name)}</dt><dd>{_e(text)}</dd>" for name, text in results.systems.items()) + "</dl>"
    yield "<p>They answered in turns, prompt by prompt, in one process.</p>"
    yield "<h2>Where it ran</h2><dl>"
    where = {**results.environment, **results.environment["versions"]}
    yield "".join(f"<dt>{_e(k)}</dt><dd>{_e(v)}</dd>" for k, v in where.items() if k != "versions" and v is not None)
    yield f'</dl><p class="command"><code>{_e(results.command)}</code></p>'
    yield "<p>Every answer and every figure is in results.json beside this page.</p>"
