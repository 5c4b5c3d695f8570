"""Calls into libraries that may stay for ever: made in a thread that can be left behind."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

from .deadlines import Deadline
from .hosts import num_forks

__all__ = ["BoundedCall", "keep_thread"]

_SLICE_S = 0.2


class BoundedCall:
    """A call in a thread of its own, which begins at once.

    Where no thread can be started, as while the interpreter ends, the one that ``keep_thread`` has
    started makes it, after others; it is made here where there is none.

    Args:
        call: what to call.
        name: of the thread.
    """

    def __init__(self, call: Callable[[], object], name: str) -> None:
        self._call: Callable[[], object] | None = call
        self._has_ended = threading.Event()
        self._result: Any = None
        self._error: Exception | None = None
        try:
            threading.Thread(target=self._run, name=f"meshdist-{name}", daemon=True).start()
        except RuntimeError:
            calls = _kept.get(num_forks())
            if calls is None:
                self._run()
            else:
                calls.put(self._run)

    def _run(self) -> None:
        call, self._call = self._call, None  # what it holds may go when it has returned
        assert call is not None
        try:
            self._result = call()
        except Exception as error:
            self._error = error
        finally:
            del call
            self._has_ended.set()

    def wait(self, timeout: timedelta, check: Callable[[], object] | None = None) -> Any:
        """Wait for the call, and return its result or raise its error.

        ``check`` is called now and then, and raises where waiting is in vain.

        Raises:
            TimeoutError: it has not ended in time; its thread is left behind.
        """
        deadline = Deadline(timeout)
        while not self._has_ended.wait(deadline.slice_s(_SLICE_S)):
            if check is not None:
                check()
            if deadline.is_over:
                raise TimeoutError(f"not finished after {timeout.total_seconds():g} s")
        if self._error is not None:
            raise self._error
        return self._result


_kept: dict[int, queue.SimpleQueue[Callable[[], None]]] = {}
"""The jobs of the kept thread of this process, by the number of forks before it."""


def keep_thread() -> None:
    """Start a thread that makes bounded calls when no other can be started any more."""
    _start_kept_thread(num_forks())


@cache
def _start_kept_thread(num_forks: int) -> None:
    calls = _kept[num_forks] = queue.SimpleQueue()

    def run() -> None:
        while True:
            calls.get()()

    threading.Thread(target=run, name="meshdist-last-calls", daemon=True).start()
