"""Calls into libraries that may stay for ever: made in a thread that can be left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from .deadlines import Deadline

__all__ = ["BoundedCall"]

_SLICE_S = 0.5


class BoundedCall:
    """A call in a thread of its own, which begins at once.

    Where no thread can be started, as while the interpreter ends, it is made here.

    Args:
        call: what to call.
        name: of the thread.
    """

    def __init__(self, call: Callable[[], object], name: str) -> None:
        self._call = call
        self._has_ended = threading.Event()
        self._result: Any = None
        self._error: Exception | None = None
        try:
            threading.Thread(target=self._run, name=f"meshdist-{name}", daemon=True).start()
        except RuntimeError:
            self._run()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except Exception as error:
            self._error = error
        finally:
            self._has_ended.set()

    def wait(self, timeout: timedelta) -> Any:
        """What the call returns, or raises.

        Raises:
            TimeoutError: it has not ended in time; its thread is left behind.
        """
        deadline = Deadline(timeout)
        while not self._has_ended.wait(deadline.slice_s(_SLICE_S)):
            if deadline.is_over:
                raise TimeoutError(f"not finished after {timeout.total_seconds():g} s")
        if self._error is not None:
            raise self._error
        return self._result
