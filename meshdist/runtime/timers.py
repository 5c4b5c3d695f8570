"""Calls that are made when a time is up, for waits that cannot look at the clock themselves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache

from .deadlines import Deadline, Grace
from .hosts import num_forks

__all__ = ["Timer"]

_log = logging.getLogger("meshdist.timers")
_PERIOD_S = 0.05
_LINGER_S = 1.0


class Timer:
    """A call to be made when a timeout is over, at most once.

    One thread makes all of them, up to a twentieth of a second late. To set one and to cancel it
    takes less than a microsecond, so that each of many short waits can have its own.

    Args:
        timeout: how long from now; numbers are seconds.
        call: what to call.
    """

    __slots__ = ("_thread", "call", "deadline")

    def __init__(self, timeout: timedelta | float, call: Callable[[], object]) -> None:
        self.deadline = Deadline(timeout)
        self.call = call
        self._thread = _thread_of(num_forks())  # threads do not follow into a forked child
        self._thread.add(self)

    def cancel(self) -> bool:
        """Make no call; returns False, once the call is over, where it was made already."""
        if self._thread.remove(self):
            return True
        with self._thread.calling:
            return False


class _TimerThread(threading.Thread):
    """The timers that are set, and the thread that makes their calls while there are any."""

    def __init__(self) -> None:
        super().__init__(name="meshdist-timers", daemon=True)
        self._timers: set[Timer] = set()
        self.calling = threading.Lock()
        self._is_needed = threading.Event()
        self._is_asleep = True
        self.start()

    def add(self, timer: Timer) -> None:
        self._timers.add(timer)
        # The thread sets this flag before it looks for timers a last time: so none is missed.
        if self._is_asleep:
            self._is_needed.set()

    def remove(self, timer: Timer) -> bool:
        """Remove a timer; returns False where it is removed already."""
        try:
            self._timers.remove(timer)
        except KeyError:
            return False
        return True

    def run(self) -> None:
        while True:
            self._is_asleep = True
            if not self._timers:
                self._is_needed.wait()
            self._is_asleep = False
            self._is_needed.clear()
            self._fire_while_used()

    def _fire_while_used(self) -> None:
        """Make the calls that are due, until there has been no timer for a while."""
        linger = Grace(_LINGER_S)
        while not linger.is_over:
            time.sleep(_PERIOD_S)
            timers = self._timers.copy()
            if timers:
                linger = Grace(_LINGER_S)
            for timer in timers:
                if timer.deadline.is_over:
                    self._fire(timer)

    def _fire(self, timer: Timer) -> None:
        with self.calling:
            if self.remove(timer):
                try:
                    timer.call()
                except Exception:
                    _log.exception("a timer's call failed")


@cache
def _thread_of(num_forks: int) -> _TimerThread:
    return _TimerThread()
