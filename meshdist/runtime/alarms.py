"""Calls that are made when a time is up, for waits that cannot look at the clock themselves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import cache

from .clock import clock
from .forks import num_forks

__all__ = ["Alarm"]

_log = logging.getLogger("meshdist.alarms")
_PERIOD_S = 0.05
_LINGER_S = 1.0


class Alarm:
    """A call to be made when ``seconds`` have gone by on the clock, at most once.

    One thread makes all of them, up to a twentieth of a second late. Setting one and turning it
    off takes less than a microsecond, so that each of many short waits can have its own.

    Args:
        seconds: how long from now.
        ring: what to call.
    """

    __slots__ = ("_bells", "_deadline", "ring")

    def __init__(self, seconds: float, ring: Callable[[], object]) -> None:
        self._deadline = clock.now() + seconds
        self.ring = ring
        self._bells = _bells_of(num_forks())  # threads do not follow into a forked child
        self._bells.hang(self)

    def is_due(self) -> bool:
        """Whether the time is up."""
        return clock.now() >= self._deadline

    def off(self) -> bool:
        """Turn it off; returns False, once its call is over, where it has rung already."""
        return self._bells.take(self) or self._bells.await_ringing()


class _Bells:
    """The alarms that are set, and the thread that looks after them while there are any."""

    def __init__(self) -> None:
        self._alarms: set[Alarm] = set()
        self._starting = threading.Lock()
        self._ringing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_asleep = True

    def hang(self, alarm: Alarm) -> None:
        self._alarms.add(alarm)
        # The thread says that it sleeps before it looks for alarms a last time: one of both sees.
        if self._is_asleep:
            self._rouse()

    def take(self, alarm: Alarm) -> bool:
        """Take an alarm away, unless somebody has."""
        try:
            self._alarms.remove(alarm)
        except KeyError:
            return False
        return True

    def await_ringing(self) -> bool:
        """Return False, when no call is being made."""
        with self._ringing:
            return False

    def _rouse(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._live, name="meshdist-alarms", daemon=True
                )
                self._thread.start()
        self._wake.set()

    def _live(self) -> None:
        while True:
            self._is_asleep = True
            if not self._alarms:
                self._wake.wait()
            self._is_asleep = False
            self._wake.clear()
            self._look_after()

    def _look_after(self) -> None:
        """Ring what is due, until there was nothing to look after for a while."""
        last_use = time.monotonic()
        while time.monotonic() - last_use < _LINGER_S:
            time.sleep(_PERIOD_S)
            alarms = self._alarms.copy()
            if alarms:
                last_use = time.monotonic()
            for alarm in alarms:
                if alarm.is_due():
                    self._ring(alarm)

    def _ring(self, alarm: Alarm) -> None:
        with self._ringing:
            if self.take(alarm):
                try:
                    alarm.ring()
                except Exception:
                    _log.exception("an alarm failed")


@cache
def _bells_of(num_forks: int) -> _Bells:
    return _Bells()
