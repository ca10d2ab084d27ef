"""JSON that others wrote: what cannot be read is a ValueError, whatever is wrong with it."""

from __future__ import annotations

import json
from typing import Any


def is_json(text: str | bytes) -> bool:
    """Whether ``parse`` can read it."""
    try:
        parse(text)
    except ValueError:
        return False
    return True


def parse(text: str | bytes) -> Any:
    """The value of a JSON text. The caller says where the text stands.

    Raises:
        ValueError: no JSON, no Unicode, or nested more deeply than Python can read.
    """
    try:
        return json.loads(text)
    except RecursionError:  # nearly a million brackets fit in a megabyte
        raise ValueError("it is nested too deeply") from None
