"""How this process ends, asked at its end; and what is done where SIGTERM ends it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress

__all__ = ["call_at_sigterm", "ending_text", "is_ending_by_exception"]


_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def is_ending_by_exception() -> bool:
    """Whether an exception that nobody caught ends this process."""
    return _find_exception() is not None


def ending_text() -> str:
    """How this process ends, for messages of others, as in "ended by ValueError: no data"."""
    exception = _find_exception()
    if exception is None:
        return "ended in good order"
    kind, message = type(exception).__name__, str(exception).partition("\n")[0]
    frames = traceback.extract_tb(exception.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    place = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    return f"ended by {kind}{message and ': '}{message}{place}"


def _find_exception() -> BaseException | None:
    found = getattr(sys, "last_value", None) or sys.exc_info()[1]
    return found if isinstance(found, BaseException) else None


_actions: dict[Callable[[], object], int] = {}
"""What is called at SIGTERM, and in which process."""


def call_at_sigterm(action: Callable[[], object]) -> None:
    """Call ``action`` where SIGTERM ends this process, but not a forked child.

    Does nothing where the program handles SIGTERM itself, or outside its main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _act_and_end)
    _actions[action] = os.getpid()


def _act_and_end(number: int, frame: object) -> None:
    for action, process_id in _actions.items():
        if process_id == os.getpid():
            with suppress(Exception):  # it ends, whatever fails
                action()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
