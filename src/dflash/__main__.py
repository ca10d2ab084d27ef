"""``python -m dflash`` is ``dflash``."""

from dflash.cli.main import main

if __name__ == "__main__":
    main()
