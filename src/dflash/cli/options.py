"""The options that commands share, each declared once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

DrafterKind: TypeAlias = Literal["ngram", "none", "dflash", "both"]
Backend: TypeAlias = Literal["torch", "mlx"]
Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
Verification: TypeAlias = Literal["match", "rejection"]


def path(name: str) -> Path:
    """The path of an option. An empty name, as of a variable that is not set, would be the current folder.

    Raises:
        typer.BadParameter: it is empty.
    """
    if not name.strip():
        raise typer.BadParameter("an empty name is no path: give a name, or . for the current folder")
    return Path(name)


_LOADING = "Models"
_BLOCKS = "Blocks"

Model = Annotated[
    str,
    typer.Option(
        metavar="M",
        help="The target: a hub id, a folder, a .gguf file or the alias smollm2-135m.",
        rich_help_panel=_LOADING,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="D",
        help="A DFlash draft made for the target: a hub id, a folder, or smollm2-135m, which is shipped.",
        rich_help_panel=_LOADING,
    ),
]
Drafter = Annotated[
    DrafterKind | None,
    typer.Option(
        metavar="WHO",
        help="Who proposes: dflash (a draft), ngram (text seen before), both (ngram where it promises as much as the "
        "draft) or none (plain decoding). "
        "By default both where --draft is given or a draft is shipped for the target, else ngram, which pays where "
        "answers repeat text and may cost a little elsewhere.",
        show_default=False,
        rich_help_panel=_LOADING,
    ),
]
BackendOption = Annotated[
    Backend | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="torch or mlx. By default mlx on Apple silicon, where it is installed, else torch.",
        rich_help_panel=_LOADING,
    ),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="float32, bfloat16 or float16, for target and draft. By default float32 on CPU, elsewhere each "
        "checkpoint's own.",
        rich_help_panel=_LOADING,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE", help="For example cpu, cuda, mps. By default the best there is.", rich_help_panel=_LOADING
    ),
]
Revision = Annotated[
    str | None, typer.Option(metavar="REV", help="Of the target's hub repository.", rich_help_panel=_LOADING)
]
DraftRevision = Annotated[
    str | None, typer.Option(metavar="REV", help="Of the draft's hub repository.", rich_help_panel=_LOADING)
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python that the target's repository ships.", rich_help_panel=_LOADING
    ),
]
DraftWindow = Annotated[
    int | None,
    typer.Option(
        "--draft-sliding-window-size",
        metavar="N",
        help="Committed tokens the draft may look back on. By default all.",
        rich_help_panel=_LOADING,
    ),
]
DraftConfidence = Annotated[
    float | None,
    typer.Option(
        "--draft-min-confidence",
        metavar="P",
        min=0.0,
        max=1.0,
        help="End a block where the draft's probability for its whole run of tokens falls below this. 0 checks whole "
        "blocks, 1 one token each. By default 0, and on a CPU in float32 0.1.",
        rich_help_panel=_LOADING,
    ),
]
DraftBits = Annotated[
    int | None,
    typer.Option(
        "--draft-bits",
        metavar="N",
        help="Quantize the draft's weights to 4 or 8 bits (mlx only). By default they stay as they are.",
        rich_help_panel=_LOADING,
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        metavar="B",
        help="Tokens verified at once, the pending one included. By default the drafter's own; 1 is plain decoding.",
        rich_help_panel=_BLOCKS,
    ),
]
VerificationOption = Annotated[
    Verification,
    typer.Option(
        "--verification",
        help="match: a draft stands where it is what the target samples. rejection: speculative sampling, "
        "for which the draft samples too.",
        rich_help_panel=_BLOCKS,
    ),
]
EnableThinking = Annotated[
    bool | None,
    typer.Option(
        "--enable-thinking/--no-enable-thinking",
        help="Handed to the chat template. By default the template decides.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


_OF_LIBRARY = {
    "max_tokens": "--max-new-tokens",
    "sliding_window_size": "--draft-sliding-window-size",
    "min_confidence": "--draft-min-confidence",
    "trust_remote_code=True": "--trust-remote-code",
}
"""Parameters of the library that a command calls something else."""


def as_typed(message: str, parameters: Iterable[Any]) -> str:
    """A message of the library with the parameters it names called what they are called on the command line.

    Values in quotes stay as they are. Of single words, as temperature or stop, which may be plain English, only the
    first of "... must be ..." is one for certain.

    Args:
        parameters: of the command in use.
    """
    options = {one.name: one.opts[0] for one in parameters if one.opts and one.opts[0].startswith("--")}
    names = {name: option for name, option in options.items() if "_" in name}
    names |= {name: option for name, option in _OF_LIBRARY.items() if option in options.values()}
    first, space, _ = message.partition(" must be ")
    if space and first in options:
        message = message.replace(first, options[first], 1)
    if not names:
        return message
    known = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    quoted = r"""(?<!\w)'[^']*'(?!\w)|"[^"]*\""""
    # Not inside a path or a longer word.
    return re.sub(rf"{quoted}|(?<![\w./-])({known})(?![\w/-])", lambda found: names.get(found[0], found[0]), message)
