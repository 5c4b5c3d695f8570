"""Provide deadlines, timers and ``wait_until``."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import TypeVar

from .hosts import forks

T = TypeVar("T")

_AWAKE_S = 0.0002
_SHORTEST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.02
LOOK_S = 1.0
_LOOK_S_PER_MEMBER = 0.002  # many members start more slowly, and must not make more requests
_MOST_FOLDS = 10
_REST_PER_LOOK = 20.0  # times the duration of the check
_REST_PER_WAIT = 0.5
_PAUSE_PER_WAIT = 1 / 16  # of the time waited so far, which bounds how late a wait ends


class Deadline:
    """A point in monotonic time, given in seconds from now; None never expires."""

    __slots__ = ("_end",)

    def __init__(self, timeout: timedelta | float | None) -> None:
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        self._end = float("inf") if timeout is None else time.monotonic() + timeout

    @property
    def left_s(self) -> float:
        """The remaining seconds, at least 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def left(self) -> timedelta:
        return timedelta(seconds=self.left_s)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end


class Looks:
    """Schedule of checks for missing members, rarer in longer waits and for slower checks.

    Example: with few members, the first waiting member (``index`` 1) checks after 1, 1.5, 2.3, 3.4,
    ... seconds, 11 times in 90 seconds; the second starts after 4 s, the third after 16 s.
    """

    def __init__(self, num_members: int, index: int) -> None:
        first_s = max(LOOK_S, _LOOK_S_PER_MEMBER * num_members) * 4 ** min(index - 1, _MOST_FOLDS)
        self._begin, self._due = time.monotonic(), Deadline(first_s)

    def take(self, look: Callable[[], T]) -> T | None:
        """Call ``look``, schedule the next, and return the result if a look is due; else None."""
        if not self._due.is_over:
            return None
        begin = time.monotonic()
        found = look()
        end = time.monotonic()
        rests = _REST_PER_WAIT * (end - self._begin), _REST_PER_LOOK * (end - begin)
        self._due = Deadline(max(rests))
        return found


def wait_until(
    condition: Callable[[], T],
    deadline: Deadline,
    check: Callable[[], object] | None = None,
    *,
    awake_s: float = _AWAKE_S,
    longest_pause_s: float = _LONGEST_PAUSE_S,
) -> T | None:
    """Return ``condition()`` as soon as it is true, or None after the deadline.

    Args:
        condition: called at least once, even after the deadline.
        check: called before each pause; it may raise to end the wait.
        awake_s: how long the thread yields its core instead of sleeping between calls.
        longest_pause_s: the longest sleep between two calls of ``condition``.
    """
    if found := condition():
        return found
    begin = time.monotonic()
    while not deadline.is_over:
        if check is not None:
            check()
        # Pauses grow with the time waited, so short waits end soon and long waits are cheap.
        if (waited_s := time.monotonic() - begin) < awake_s:
            os.sched_yield()
        else:
            pause_s = max(_SHORTEST_PAUSE_S, min(_PAUSE_PER_WAIT * waited_s, longest_pause_s))
            time.sleep(min(pause_s, deadline.left_s))
        if found := condition():
            return found
    return None


_log = logging.getLogger("meshdist.timers")
_PERIOD_S = 0.05
LINGER_S = 1.0


def _do_nothing() -> None:
    """Do nothing; replaces the callback of a timer that was canceled or has fired, to free it."""


class Timer:
    """A function to call once after a timeout, unless canceled."""

    # One thread makes all calls, up to 50 ms late. Setting and canceling a timer takes less than a
    # microsecond, so each of many short waits can have a timer.
    __slots__ = ("_thread", "call", "deadline")

    def __init__(self, timeout: timedelta | float, call: Callable[[], object]) -> None:
        self.deadline = Deadline(timeout)
        self.call = call
        self._thread = _thread_of(forks[0])  # a forked child has no threads
        self._thread.add(self)

    def cancel(self) -> bool:
        """Cancel the call and return True; if it has started, wait for it and return False."""
        if self._thread.remove(self):
            self.call = (
                _do_nothing  # the thread may still hold the timer, but must not keep the call alive
            )
            return True
        with self._thread.calling:
            return False


class _TimerThread(threading.Thread):
    """Thread that runs the calls of all pending timers."""

    def __init__(self) -> None:
        super().__init__(name="meshdist-timers", daemon=True)
        self._timers: set[Timer] = set()
        self.calling = threading.Lock()
        self._is_needed = threading.Event()
        self._is_asleep = True
        self.start()

    def add(self, timer: Timer) -> None:
        self._timers.add(timer)
        # The thread sets this flag before its last check for timers, so it misses none.
        if self._is_asleep:
            self._is_needed.set()

    def remove(self, timer: Timer) -> bool:
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
        """Run the calls of expired timers, until no timer was pending for a second."""
        linger = Deadline(LINGER_S)
        while not linger.is_over:
            time.sleep(_PERIOD_S)
            timers = self._timers.copy()
            if timers:
                linger = Deadline(LINGER_S)
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
                finally:
                    timer.call = _do_nothing


@cache
def _thread_of(num_forks: int) -> _TimerThread:
    return _TimerThread()


def start_timers() -> None:
    """Start the timer thread, which cannot be started during interpreter shutdown."""
    _thread_of(forks[0])
