"""Bounds what is enqueued on devices, where a wait in Python returns at once.

One thread of the process asks ten times a second how far each communicator's works have come. It
never asks a device: a thread that does so while another captures a CUDA graph ends the capture.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from functools import cache
from typing import Protocol

from ...runtime.hosts import num_forks

__all__ = ["watch"]

_log = logging.getLogger("meshdist.watchdog")
_PERIOD_S = 0.1
_END_S = 5.0


class Watched(Protocol):
    """What the thread looks after, as long as it lives."""

    def look(self) -> None:
        """Find out how its works end, and fail where one has failed or is late."""


def watch(one: Watched) -> None:
    """Look after ``one`` from now on."""
    _watchdog_of(num_forks()).watched.add(one)  # threads do not follow into a forked child


class _Watchdog:
    def __init__(self) -> None:
        self.watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshdist-watchdog", daemon=True)
        self._thread.start()
        # A thread that Python ends inside torch's C++ would take the process down with it.
        atexit.register(self._end)

    def _run(self) -> None:
        while not self._is_ending.wait(_PERIOD_S):
            for one in tuple(self.watched):
                try:
                    one.look()
                except Exception:
                    _log.exception("a communicator could not be looked after")

    def _end(self) -> None:
        self._is_ending.set()
        self._thread.join(_END_S)


@cache
def _watchdog_of(num_forks: int) -> _Watchdog:
    return _Watchdog()
