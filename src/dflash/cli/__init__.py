"""The command line: parse, then call. One file per command.

A progress bar that transformers draws past its own switch would break up the spinner. tqdm reads its
default once, when imported; the hub's bars for downloads are asked for explicitly, and stay.
"""

import os

os.environ.setdefault("TQDM_DISABLE", "1")
