"""The command line: parse, then call. One file per command.

A progress bar that transformers draws past its own switch would break up the spinner. tqdm reads its
default once, when imported; the hub's bars for downloads are asked for explicitly, and stay. Nor is its advice for
here: without PyTorch it says that models will not be available, in front of the answers of one on MLX.
"""

import os

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
