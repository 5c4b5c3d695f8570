"""Sends and receives over c10d."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

__all__ = ["Transfer"]


class Transfer:
    """A started send or receive; its wait must not be cut into slices."""

    __slots__ = ("_error", "_waiter", "peer", "timeout", "work")

    def __init__(self, work: Any, peer: int | None, timeout: timedelta) -> None:
        self.work = work
        self.peer = peer
        self.timeout = timeout
        self._waiter: threading.Thread | None = None
        self._error: RuntimeError | None = None

    @property
    def has_waiter(self) -> bool:
        """Whether another thread waits for it, or has waited."""
        return self._waiter is not None

    def is_over(self, seconds: float = 0.0) -> bool:
        """Let another thread wait for it, and look for ``seconds`` whether that one is done."""
        if self._waiter is None:
            self._waiter = threading.Thread(
                target=self._wait, name="meshdist-transfer", daemon=True
            )
            self._waiter.start()
        self._waiter.join(seconds)
        return not self._waiter.is_alive()

    def check(self) -> None:
        """Raise what the other thread's wait raised."""
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        try:
            self.work.wait(self.timeout)
        except RuntimeError as error:
            self._error = error
