"""Bounds what is enqueued on devices, where a wait in Python returns at once.

One thread of the process asks ten times a second how far each communicator's works have come. It
never asks a device: a thread that does so while another captures a CUDA graph ends the capture.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from functools import cache
from typing import Protocol

__all__ = ["watch"]

_log = logging.getLogger("meshdist.watchdog")
_PERIOD_S = 0.1
_END_S = 5.0


class Watched(Protocol):
    """The communicator that the thread looks after, as long as it lives."""

    def look(self) -> None:
        """Find out how its works end, and fail where one has failed or is late."""


def watch(one: Watched) -> None:
    """Look after ``one`` from now on."""
    _watchdog().add(one)


class _Watchdog:
    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._changing = threading.Lock()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshdist-watchdog", daemon=True)
        self._thread.start()
        # A thread that Python ends inside torch's C++ would take the process down with it.
        atexit.register(self.end)

    def add(self, one: Watched) -> None:
        with self._changing:
            self._watched.add(one)

    def _run(self) -> None:
        while not self._is_ending.wait(_PERIOD_S):
            with self._changing:
                watched = tuple(self._watched)
            for one in watched:
                try:
                    one.look()
                except Exception:
                    _log.exception("a communicator could not be looked after")
            del watched

    def end(self) -> None:
        self._is_ending.set()
        self._thread.join(_END_S)


@cache
def _watchdog() -> _Watchdog:
    return _Watchdog()


def _forget_watchdog() -> None:
    """In a forked child: the thread has not followed, and may have held a lock."""
    if _watchdog.cache_info().currsize:
        atexit.unregister(_watchdog().end)
    _watchdog.cache_clear()


os.register_at_fork(after_in_child=_forget_watchdog)
