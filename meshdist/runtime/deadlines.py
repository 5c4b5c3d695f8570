"""Deadlines, the one way to wait for something, and the clock that both use.

The process has one clock, which is paused while a debugger stops a rank of the job: then no
deadline comes nearer on any rank. A grace, for others that may have ended, counts real time. In a
forked child the clock runs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import TypeVar

__all__ = ["Clock", "Deadline", "Grace", "clock", "wait_until"]

T = TypeVar("T")

_SHORTEST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.02
_PAUSE_PER_WAIT = 1 / 16  # of the time waited so far: a wait ends at most so much too late


class Clock:
    """Monotonic seconds, without those during which it was paused."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._holders: set[Hashable] = set()
        # Since when it is paused, if it is, and how long it had been before; replaced as one.
        self._state: tuple[float | None, float] = (None, 0.0)
        self._followers: list[Callable[[bool], None]] = []

    def now(self) -> float:
        """The time, in seconds since some moment."""
        paused_since, paused = self._state
        return (time.monotonic() if paused_since is None else paused_since) - paused

    def is_paused(self) -> bool:
        """Whether some holder has paused it."""
        return self._state[0] is not None

    def pause(self, holder: Hashable) -> None:
        """Pause it until all holders have resumed it; a second call does nothing."""
        with self._changing:
            self._holders.add(holder)
            paused_since, paused = self._state
            if paused_since is None:
                self._state = (time.monotonic(), paused)
                self._call_followers()

    def resume(self, holder: Hashable) -> None:
        """End the pause of ``holder``, if it has paused it; the clock runs when none is left."""
        with self._changing:
            self._holders.discard(holder)
            paused_since, paused = self._state
            if paused_since is not None and not self._holders:
                self._state = (None, paused + time.monotonic() - paused_since)
                self._call_followers()

    def follow(self, follower: Callable[[bool], None]) -> None:
        """Call ``follower`` now, and at every change, with whether the clock is paused."""
        with self._changing:
            self._followers.append(follower)
            follower(self.is_paused())

    def resume_in_child(self) -> None:
        """Forget all holders in a forked child, where no holder would resume it."""
        self._changing = threading.Lock()  # a thread of the parent may hold the other
        for holder in tuple(self._holders):
            self.resume(holder)

    def _call_followers(self) -> None:
        for follower in self._followers:
            follower(self.is_paused())


clock = Clock()
"""The clock of this process."""

os.register_at_fork(after_in_child=clock.resume_in_child)


class Deadline:
    """A moment on the process's clock; numbers are seconds from now, and None is for ever."""

    __slots__ = ("_end",)

    def __init__(self, timeout: timedelta | float | None) -> None:
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        self._end = float("inf") if timeout is None else self._now() + timeout

    @property
    def left_s(self) -> float:
        """The seconds that are left, 0 at least."""
        return max(0.0, self._end - self._now())

    @property
    def left(self) -> timedelta:
        """The time that is left, 0 at least."""
        return timedelta(seconds=self.left_s)

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self._now() >= self._end

    def slice_s(self, longest_s: float) -> float:
        """How many seconds to block before the next look at the deadline: ``longest_s`` at most."""
        return longest_s if clock.is_paused() else min(longest_s, self.left_s)

    @staticmethod
    def _now() -> float:
        return clock.now()


class Grace(Deadline):
    """A deadline in real time: it comes while the clock is paused, too.

    For waits for ranks that may have ended, or that the debugger itself keeps.
    """

    __slots__ = ()

    @staticmethod
    def _now() -> float:
        return time.monotonic()


def wait_until(
    condition: Callable[[], T],
    deadline: Deadline,
    check: Callable[[], object] | None = None,
    *,
    longest_pause_s: float = _LONGEST_PAUSE_S,
) -> T | None:
    """Return ``condition()`` as soon as it is true, or None where the deadline comes first.

    Pauses grow with the time waited, so that short waits end soon and long ones cost little.

    ``condition`` is called at least once, also where the deadline is over already; ``check`` before
    each pause, to raise where waiting is in vain. ``longest_pause_s`` is small where the waiting
    itself is on the clock of a program that communicates.
    """
    if found := condition():
        return found
    begin = time.monotonic()
    while not deadline.is_over:
        if check is not None:
            check()
        pause_s = _PAUSE_PER_WAIT * (time.monotonic() - begin)
        time.sleep(deadline.slice_s(max(_SHORTEST_PAUSE_S, min(pause_s, longest_pause_s))))
        if found := condition():
            return found
    return None
