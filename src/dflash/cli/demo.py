"""``dflash demo``: see it work in under a minute."""

from __future__ import annotations

from dataclasses import dataclass

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from dflash.checkpoint import DEFAULT_MODEL
from dflash.cli import console, figures, options, prompts
from dflash.cli.accepted import Painter
from dflash.cli.generate import CUT_SHORT, print_stream
from dflash.cli.pair import Pair, Wanted, load_pair
from dflash.generate import Generation, collect, stream_generate

FAILED = 1
"""Exit status when an answer is not the target's own."""


@dataclass(frozen=True)
class Scene:
    """A prompt of the demo."""

    title: str
    prompt: str
    max_tokens: int


SCENES = (
    Scene(
        "Correct a letter: much of the answer is in the prompt",
        """Correct the typing errors in this letter and write it out in full:

Dear Ms Miller,

thank you for your oder of twelve blue chairs. We will deliver the chairs on Monday, the third of June, betwen nine \
and twelve in the morning. Please make sure that someone is at home to sign for the chairs. If you wish to change the \
day, call us before Friday.

Kind regards,
the Oak Street furniture team""",
        96,
    ),
    Scene(
        "A question of maths: little of the answer is in the prompt",
        "Tom picks 15 apples on each of 4 days and gives away a third of them. How many apples does he have left?",
        160,
    ),
)


N_GRAMS_ONLY = (
    "n-grams guess only text that was there before, so they help where an answer copies or repeats. "
    "A DFlash draft made for the model guesses new text too: dflash generate --model M --draft D."
)


def demo(model: options.Model = DEFAULT_MODEL, backend: options.BackendOption = None) -> None:
    """Two prompts, answered with and without a drafter on this machine: same tokens, and how much faster."""
    # In float32, where every token must agree.
    pair = load_pair(Wanted(model, backend=backend, dtype="float32"))
    out = console.stdout()
    out.print(Text(f"{pair.target.name}, {pair.dtype}, {pair.drafter_label}, block {pair.block_size}"), soft_wrap=True)
    if pair.threads:
        out.print(Text(pair.threads, style="dim"), soft_wrap=True)
    with console.waiting("warming up"):
        _plain(pair, SCENES[0].prompt, 4)
    same = [_play(scene, pair, out) for scene in SCENES]
    if pair.wanted.kind == "ngram":
        out.print(Text(f"\n{N_GRAMS_ONLY}"))
    raise typer.Exit(0 if all(same) else FAILED)


def _play(scene: Scene, pair: Pair, out: Console) -> bool:
    """Answer with the drafter, then without; tell whether the tokens are the same."""
    out.print()
    out.rule(scene.title)
    out.print(Padding(Text(scene.prompt, style="dim"), (0, 2)))
    out.print()
    tokenizer = pair.target.tokenizer
    asked = prompts.as_messages(tokenizer, scene.prompt)
    painter = Painter(out)
    stream = stream_generate(pair.target, pair.drafter, tokenizer, asked, max_tokens=scene.max_tokens)
    drafted = print_stream(stream, tokenizer, painter)
    if drafted is None or drafted.finish_reason == CUT_SHORT:
        raise KeyboardInterrupt  # half a scene compares nothing
    with console.waiting("the same without a drafter"):
        plain = _plain(pair, scene.prompt, scene.max_tokens)
    typer.echo("\n" + painter.legend(drafted.accepted, drafted.generation_tokens), color=console.coloured(out))
    _report(drafted, plain, pair, out)
    return bool(drafted.tokens == plain.tokens)


def _plain(pair: Pair, prompt: str, max_tokens: int) -> Generation:
    tokenizer = pair.target.tokenizer
    asked = prompts.as_messages(tokenizer, prompt)
    return collect(stream_generate(pair.target, None, tokenizer, asked, max_tokens=max_tokens))


def _report(drafted: Generation, plain: Generation, pair: Pair, out: Console) -> None:
    if drafted.tokens == plain.tokens:
        out.print(f"identical to plain decoding: yes, all {len(plain.tokens)} tokens")
    else:
        out.print("identical to plain decoding: NO (dflash verify tells more)", style="bold red")
    out.print(
        f"{len(drafted.rounds)} passes of the model instead of {len(plain.rounds)}, "
        f"{drafted.acceptance_length:.2f} tokens each; passes by the tokens they gave:"
    )
    for line in figures.histogram(drafted.rounds, pair.block_size, console.prints_unicode(out)):
        out.print(f"  {line}", style="dim", soft_wrap=True)
    if plain.generation_tps and drafted.generation_tps:
        speedup = round(drafted.generation_tps / plain.generation_tps, 2)
        out.print(
            f"{'SLOWER, ' if speedup < 1 else ''}speed-up {speedup:.2f}x: {drafted.generation_tps:.1f} tok/s "
            f"against {plain.generation_tps:.1f} (one run each, just now, on this machine)",
            soft_wrap=True,
        )
