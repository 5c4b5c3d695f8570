"""The clock on which verbs count their timeouts. It stands while somebody debugs the job.

It is one for the process, as time is: whoever waits reads ``clock.now()`` in place of
``time.monotonic()``. What else takes time (pauses, patience with ranks that may have ended) is
counted on the real clock. A forked child's goes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable

__all__ = ["Clock", "clock"]


class Clock:
    """Monotonic seconds, without those during which it stood."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._stoppers: set[Hashable] = set()
        # Since when it stands, if it does, and how long it had stood before; replaced as one.
        self._state: tuple[float | None, float] = (None, 0.0)
        self._followers: list[Callable[[bool], None]] = []

    def follow(self, tell: Callable[[bool], None]) -> None:
        """Call ``tell`` now, and at every change, with whether the clock stands."""
        with self._changing:
            self._followers.append(tell)
            tell(self.stands())

    def now(self) -> float:
        """The time, in seconds since some moment."""
        stands_since, stood = self._state
        return (time.monotonic() if stands_since is None else stands_since) - stood

    def stands(self) -> bool:
        """Whether somebody has stopped it."""
        return self._state[0] is not None

    def stop(self, who: Hashable) -> None:
        """Let it stand, until all who have stopped it let it go; a second call does nothing."""
        with self._changing:
            self._stoppers.add(who)
            stands_since, stood = self._state
            if stands_since is None:
                self._state = (time.monotonic(), stood)
                self._tell(True)

    def go(self, who: Hashable) -> None:
        """Let it go, as far as ``who`` is concerned, who need not have stopped it."""
        with self._changing:
            self._stoppers.discard(who)
            stands_since, stood = self._state
            if stands_since is not None and not self._stoppers:
                self._state = (None, stood + time.monotonic() - stands_since)
                self._tell(False)

    def _tell(self, stands: bool) -> None:
        for tell in self._followers:
            tell(stands)

    def release(self) -> None:
        """Forget who has stopped it, in a forked child: nobody there would let it go."""
        self._changing = threading.Lock()  # a thread that is not here may hold the other
        for who in tuple(self._stoppers):
            self.go(who)


clock = Clock()
"""The clock of this process."""

os.register_at_fork(after_in_child=clock.release)
