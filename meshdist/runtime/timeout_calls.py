"""Run calls that may block forever on helper threads, with a timeout.

``begin_elsewhere`` reuses threads for frequent calls, because starting a thread takes as long as
sending 100 KB over Gloo. ``watch`` registers communicators with the watchdog thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, Protocol

from .deadlines import Deadline
from .hosts import num_forks

_SLICE_S = 0.2
IDLE_S = 10.0
PERIOD_S = 0.1
_WATCHDOG_END_S = 5.0

_log = logging.getLogger("meshdist.watchdog")


class TimeoutCall:
    """A call in a separate thread, started immediately."""

    def __init__(self, call: Callable[[], object], name: str) -> None:
        self._call: Callable[[], object] | None = call
        self._has_ended = threading.Event()
        self._result: Any = None
        self._error: Exception | None = None
        try:
            threading.Thread(target=self._run, name=f"meshdist-{name}", daemon=True).start()
        except RuntimeError:  # no thread can be started during interpreter shutdown
            calls = _pools.get(num_forks())
            if calls is None:
                self._run()
            else:
                calls.put(self._run)

    def _run(self) -> None:
        call, self._call = self._call, None  # Release the call's references as soon as it returns.
        assert call is not None
        try:
            self._result = call()
        except Exception as error:
            self._error = error
        finally:
            del call
            self._has_ended.set()

    def wait(self, timeout: timedelta, check: Callable[[], object] | None = None) -> Any:
        """Return the call's result or raise its error or TimeoutError.

        Args:
            check: called regularly; it may raise to end the wait.
        """
        deadline = Deadline(timeout)
        while not self._has_ended.wait(min(_SLICE_S, deadline.left_s)):
            if check is not None:
                check()
            if deadline.is_over:
                raise TimeoutError(f"not finished after {timeout.total_seconds():g} s")
        if self._error is not None:
            raise self._error
        return self._result


_pools: dict[int, queue.SimpleQueue[Callable[[], None]]] = {}
"""The queue of this process's kept thread, by ``num_forks()``."""


def keep_thread() -> None:
    """Start a thread in advance, for calls when no new thread can be started."""
    _start_kept_thread(num_forks())


@cache
def _start_kept_thread(num_forks: int) -> None:
    calls = _pools[num_forks] = queue.SimpleQueue()

    def run() -> None:
        while True:
            calls.get()()

    threading.Thread(target=run, name="meshdist-last-calls", daemon=True).start()


class _Threads:
    """Pool of threads that end after being idle for some seconds."""

    # The garbage collector may begin a call in a thread that is inside these methods.

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        # One entry for each idle thread, less those for which a call is on its way.
        self._idle: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._num_busy = 0
        self._has_returned = threading.Condition(threading.RLock())

    def begin(self, call: Callable[[], object]) -> None:
        try:
            self._idle.get_nowait()
        except queue.Empty:
            try:
                threading.Thread(target=self._run, name="meshdist-calls", daemon=True).start()
            except RuntimeError:
                kept = _pools.get(num_forks())
                if kept is None:
                    raise
                kept.put(lambda: self._make([self._calls.get()]))
        with self._has_returned:
            self._num_busy += 1
        self._calls.put(call)

    def await_returns(self, limit_s: float) -> bool:
        with self._has_returned:
            return self._has_returned.wait_for(lambda: self._num_busy == 0, limit_s)

    def _run(self) -> None:
        while True:
            try:
                call = [self._calls.get(timeout=IDLE_S)]
            except queue.Empty:
                with suppress(queue.Empty):
                    self._idle.get_nowait()
                    return
                continue  # a call is on its way
            self._make(call)
            self._idle.put(None)

    def _make(self, call: list[Callable[[], object]]) -> None:
        """Run the call in the list, and count it as returned."""
        try:
            call.pop()()  # Release the call's references before reporting its end.
        finally:
            with self._has_returned:
                self._num_busy -= 1
                self._has_returned.notify_all()


@cache
def _threads(num_forks: int) -> _Threads:
    return _Threads()


def begin_elsewhere(call: Callable[[], object]) -> None:
    """Start ``call``, which must not raise, in another thread; raise if no thread starts."""
    _threads(num_forks()).begin(call)


def await_calls_elsewhere(limit_s: float) -> bool:
    """Wait up to ``limit_s`` for all started calls; return whether all have returned."""
    # A thread that returns from torch's C++ during interpreter shutdown crashes the process.
    return _threads(num_forks()).await_returns(limit_s)


class Watched(Protocol):
    """An object that the watchdog thread checks until it is freed."""

    def look(self) -> None:
        """Fail operations in flight that have failed or timed out."""


def watch(watched: Watched) -> None:
    """Make the watchdog thread call ``watched.look`` ten times a second."""
    _watchdog().add(watched)


class _Watchdog:
    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._changing = threading.Lock()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshdist-watchdog", daemon=True)
        self._thread.start()
        # If Python ends the thread inside torch's C++, the process crashes.
        atexit.register(self.end)

    def add(self, watched: Watched) -> None:
        with self._changing:
            self._watched.add(watched)

    def _run(self) -> None:
        while not self._is_ending.wait(PERIOD_S):
            with self._changing:
                watched = tuple(self._watched)
            for each in watched:
                try:
                    each.look()
                except Exception:
                    _log.exception("the watchdog failed to check a communicator")
            del watched

    def end(self) -> None:
        self._is_ending.set()
        self._thread.join(_WATCHDOG_END_S)


@cache
def _watchdog() -> _Watchdog:
    return _Watchdog()


def _forget_watchdog() -> None:
    if _watchdog.cache_info().currsize:
        atexit.unregister(_watchdog().end)
    _watchdog.cache_clear()


os.register_at_fork(after_in_child=_forget_watchdog)
