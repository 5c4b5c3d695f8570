"""Locks of modules, which a forked child finds open whatever thread of its parent held them.

A thread that holds a lock does not follow into a forked child, where nothing would open it again.

Drawn case: thread B is inside as thread A forks; the child has thread A alone.

    parent, thread A             parent, thread B       child
                                 enters: lock 1
    forks                                               lock 2 takes the place of lock 1
                                 leaves: lock 1         enters: lock 2

    >>> import threading
    >>> lock = ForkSafeLock()
    >>> thread = threading.Thread(target=lock.current.acquire)
    >>> thread.start(); thread.join()
    >>> lock.renew()  # as in a child
    >>> with lock.current: "inside"
    'inside'
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


class ForkSafeLock:
    """Holder of a module's lock, entered as ``with it.current``, which a forked child renews."""

    # No lock by itself: between steps of an ``__enter__`` in Python a signal's handler may raise,
    # and the lock would stay held. A thread that forks inside leaves the lock that it has entered.

    def __init__(self, make: Callable[[], Any] = threading.Lock) -> None:
        self._make, self.current = make, make()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """Replace the lock by a new lock that no thread holds."""
        self.current = self._make()
