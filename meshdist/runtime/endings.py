"""How this process ends, asked at its end."""

from __future__ import annotations

import os
import sys
import traceback

__all__ = ["ending_text", "is_ending_by_exception"]


_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def is_ending_by_exception() -> bool:
    """Whether an exception that nobody caught ends this process."""
    return _find_exception() is not None


def ending_text() -> str:
    """How this process ends, for messages of others, as in "ended by ValueError: no data"."""
    exception = _find_exception()
    if exception is None:
        return "ended without an exception"
    kind, message = type(exception).__name__, str(exception).partition("\n")[0]
    frames = traceback.extract_tb(exception.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    place = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    return f"ended by {kind}{message and ': '}{message}{place}"


def _find_exception() -> BaseException | None:
    found = getattr(sys, "last_value", None) or sys.exc_info()[1]
    return found if isinstance(found, BaseException) else None
