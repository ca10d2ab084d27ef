"""``dflash``: the commands, and how their errors are shown."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dflash import DFlashError, __version__
from dflash.cli import benchmark as benchmark_command
from dflash.cli import console, options, stopping
from dflash.cli.demo import demo
from dflash.cli.export import export
from dflash.cli.generate import generate
from dflash.cli.regenerate import regenerate
from dflash.cli.train import train
from dflash.cli.verify import EPILOG, verify
from dflash.errors import CheckpointError, ConfigError

ERROR_STATUS = 2
"""Exit status of a request that cannot be served, as for a wrong option."""


class Commands(TyperGroup):
    """Shows every error raised on purpose as one line, and that a command was interrupted."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""

        def worded(message: str) -> str:
            command = self.commands.get(ctx.invoked_subcommand or "")
            return message if command is None else options.as_typed(message, command.params)

        with console.plain_warnings(worded):
            try:
                return super().invoke(ctx)
            except (DFlashError, OSError) as error:
                if isinstance(error, BrokenPipeError):  # the reader has left: typer ends quietly
                    raise
                of_file = isinstance(error, (ConfigError, CheckpointError))  # these name fields of a file
                console.say("error", error if of_file else worded(str(error)), "bold red")
                raise typer.Exit(ERROR_STATUS) from error
            except KeyboardInterrupt as interrupt:  # what a command has to say of it, it has said
                raise stopping.stopped("interrupted") from interrupt


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command(epilog=EPILOG)(verify)
app.command(epilog=benchmark_command.EPILOG)(benchmark_command.benchmark)
app.command()(demo)
app.command()(regenerate)
app.command()(train)
app.command()(export)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dflash {__version__}")
        raise typer.Exit


@app.callback()
def dflash(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Lossless block decoding: a draft proposes, the target verifies, the answer is the target's own."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point. ``arguments``: those of the process by default.

    What a stream's encoding cannot express is printed as ``?`` rather than a crash.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    stopping.take_signals()
    app(arguments, prog_name="dflash")
