"""Locks of modules, which a forked child finds open whatever thread of its parent held them.

A thread that holds a lock does not follow into a forked child, where nothing would open it again.

Drawn case: thread B is inside as thread A forks; the child has thread A alone.

    parent, thread A             parent, thread B       child
                                 enters: lock 1
    forks                                               lock 2 takes the place of lock 1
                                 leaves: lock 1         enters: lock 2

    >>> import threading
    >>> lock = ModuleLock()
    >>> thread = threading.Thread(target=lock.__enter__)
    >>> thread.start(); thread.join()
    >>> lock.renew()  # as in a child
    >>> with lock: "inside"
    'inside'
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


class ModuleLock:
    """A lock for ``with``, kept as long as the process; ``make`` makes a lock of threading's."""

    def __init__(self, make: Callable[[], Any] = threading.Lock) -> None:
        self._make, self._lock = make, make()
        # The thread that forks may be inside, and leaves the lock that it has entered.
        self._entered: list[Any] = []
        os.register_at_fork(after_in_child=self.renew)

    def __enter__(self) -> None:
        lock = self._lock
        lock.acquire()
        self._entered.append(lock)

    def __exit__(self, *_: object) -> None:
        self._entered.pop().release()

    def renew(self) -> None:
        """Take another lock from now on."""
        self._lock = self._make()
