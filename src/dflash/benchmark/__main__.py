"""``python -m dflash.benchmark`` is ``dflash benchmark``."""

import sys

from dflash.__main__ import main

if __name__ == "__main__":
    main(["benchmark", *sys.argv[1:]])
