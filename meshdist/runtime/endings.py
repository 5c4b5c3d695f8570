"""The calls that this process makes at its end, and how it ends, asked there."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.util import Finalize

__all__ = ["DESTROYED", "IN_GOOD_ORDER", "call_at_end", "ending_text", "is_ending_by_exception"]

DESTROYED = "destroyed its process group"
_WITHOUT_EXCEPTION = "ended without an exception"
IN_GOOD_ORDER = (DESTROYED, _WITHOUT_EXCEPTION)
"""Endings of ranks that have not failed: another one may be why a call that lacks them failed."""


_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def call_at_end(function: Callable[[], None]) -> None:
    """Call ``function`` when this process ends, until ``atexit.unregister`` takes it back.

    A worker of multiprocessing runs no handlers of ``atexit``: there it is called in any case.
    """
    atexit.register(function)
    if parent_process() is not None:
        Finalize(None, function, exitpriority=0)


def is_ending_by_exception() -> bool:
    """Whether an exception that nobody caught ends this process."""
    return _find_exception() is not None


def ending_text() -> str:
    """How this process ends, for messages of others, as in "ended by ValueError: no data"."""
    exception = _find_exception()
    if exception is None:
        return _WITHOUT_EXCEPTION
    kind, message = type(exception).__name__, str(exception).partition("\n")[0]
    frames = traceback.extract_tb(exception.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    place = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    return f"ended by {kind}{message and ': '}{message}{place}"


def _find_exception() -> BaseException | None:
    found = getattr(sys, "last_value", None) or sys.exc_info()[1]
    return found if isinstance(found, BaseException) else None
