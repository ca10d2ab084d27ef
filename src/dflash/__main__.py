"""``python -m dflash`` is ``dflash``: the entry point, which imports nothing before it can be interrupted."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. ``arguments``: those of the process by default."""
    try:
        from dflash.cli.main import main as run
    except KeyboardInterrupt:  # what can say so otherwise is not imported yet
        print("stopped: interrupted", file=sys.stderr)
        sys.exit(130)
    run(arguments)


if __name__ == "__main__":
    main()
