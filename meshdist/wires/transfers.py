"""Sends and receives over c10d."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from ..runtime.clock import clock

__all__ = ["Transfer"]


class Transfer:
    """A started send or receive; its wait must not be cut into slices.

    Args:
        work: what c10d gave.
        peer: the other side; None where that may be any.
        timeout: how long it may take, once somebody looks after it.
    """

    __slots__ = ("_deadline", "_error", "_waiter", "is_late", "peer", "timeout", "work")

    def __init__(self, work: Any, peer: int | None, timeout: timedelta) -> None:
        self.work = work
        self.peer = peer
        self.timeout = timeout
        self.is_late = False
        """Whether it was given up."""
        self._deadline = 0.0
        self._waiter: threading.Thread | None = None
        self._error: RuntimeError | None = None

    @property
    def has_waiter(self) -> bool:
        """Whether another thread waits for it, or has waited."""
        return self._waiter is not None

    def is_over(self, bound: timedelta, seconds: float = 0.0) -> bool:
        """Let another thread wait for it, and look for ``seconds`` whether that one is done.

        That thread waits for ``bound`` at most, on a clock that nobody stops.
        """
        if self._waiter is None:
            self.extend(self.timeout)
            self._waiter = threading.Thread(
                target=self._wait, args=(bound,), name="meshdist-transfer", daemon=True
            )
            self._waiter.start()
        self._waiter.join(seconds)
        return not self._waiter.is_alive()

    def extend(self, timeout: timedelta) -> None:
        """Let it take ``timeout`` from now on."""
        self._deadline = clock.now() + timeout.total_seconds()

    def is_due(self) -> bool:
        """Whether the time is up that it may take, once somebody looks after it."""
        return clock.now() > self._deadline

    def check(self) -> None:
        """Raise what the other thread's wait raised."""
        if self._error is not None:
            raise self._error

    def _wait(self, bound: timedelta) -> None:
        try:
            self.work.wait(bound)
        except RuntimeError as error:
            self._error = error
