"""Callbacks of futures that run in one order on every rank.

A future's callbacks run in the thread that finds its verb done, so at a time that differs from rank
to rank. Where callbacks start verbs, as those of communication hooks do, the ranks would start them
in different orders. In a ``Deferral`` nothing completes a future until it is waited for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .futures import collecting_by_need

__all__ = ["Deferral", "find_deferral"]

_here = threading.local()


class Deferral:
    """The futures of verbs that one piece of code has started, in the order in which it asked.

    On NCCL a future is complete as soon as its verb is enqueued: there callbacks run at once, on
    the thread that starts the verbs, which is one order as well.
    """

    def __init__(self) -> None:
        self._futures: deque[torch.futures.Future[Any]] = deque()

    def add(self, future: torch.futures.Future[Any]) -> None:
        """Leave ``future`` alone until it is waited for, or ``settle`` is called."""
        self._futures.append(future)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Futures that this thread asks for in this context are deferred."""
        before = find_deferral()
        _here.deferral = self
        try:
            with collecting_by_need():
                yield
        finally:
            _here.deferral = before

    def settle(self) -> Exception | None:
        """Wait for all futures, and so run their callbacks, here; return the first error.

        Futures that the callbacks ask for come behind the others.
        """
        first: Exception | None = None
        with self.entered():
            while self._futures:
                try:
                    self._futures.popleft().wait()
                except Exception as error:  # of a verb; its callbacks have run, and may expect it
                    first = first or error
        return first


def find_deferral() -> Deferral | None:
    """The deferral that this thread has entered, or None."""
    found: Any = getattr(_here, "deferral", None)
    return found  # type: ignore[no-any-return]
