"""Provide module locks that are unlocked in a forked child, whichever thread held them.

A forked child has only the thread that forked, so a lock held by another thread would never be
released there. Example: thread B holds the lock while thread A forks.

    parent, thread A             parent, thread B       child
                                 acquires lock 1
    forks                                               lock 2 replaces lock 1
                                 releases lock 1        acquires lock 2

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
    """Holder of a module's lock, used as ``with it.current``; replaced in a forked child."""

    # Not a lock itself: a signal handler may raise inside an ``__enter__`` written in Python, and
    # the lock would stay held. A thread that forks inside releases the lock that it has acquired.

    def __init__(self, make: Callable[[], Any] = threading.Lock) -> None:
        self._make, self.current = make, make()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """Replace the lock by a new, unlocked lock."""
        self.current = self._make()
