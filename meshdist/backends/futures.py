"""Provide torch futures for collectives in flight.

The first thread that waits for a ``WorkFuture`` or polls it completes it. For code that waits
without these methods (``torch.futures.collect_all``, torch's C++), a ``Watcher`` thread polls.
Simulated ranks have no such thread: each rank polls its futures after its waits, and
``collect_all`` is patched.

Callbacks run in the thread that finds the collective done. If they start collectives, for example
in communication hooks, the order would differ between ranks, so in a ``Deferral`` a future
completes only in a wait.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TypeAlias

import torch

from ..error_text import without_frames
from ..errors import BackendError
from ..runtime.deadlines import Deadline, wait_until
from ..runtime.fork_safe_locks import ForkSafeLock

_here = threading.local()


class Deferral:
    """Queue of a context's futures; ``finalize`` waits for each in order."""

    # On NCCL a future is complete once its collective is enqueued: its callbacks run immediately,
    # on the thread that starts the collectives, and so in the same order on all ranks.

    def __init__(self) -> None:
        self._futures: deque[torch.futures.Future[Any]] = deque()

    def add(self, future: torch.futures.Future[Any]) -> None:
        """Append ``future``, which completes only in a wait or ``finalize``."""
        self._futures.append(future)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Collect the futures that this thread creates in the context."""
        before = find_deferral()
        _here.deferral = self
        try:
            with collecting_by_need():
                yield
        finally:
            _here.deferral = before

    def finalize(self) -> Exception | None:
        """Wait for all futures and run their callbacks; return the first error."""
        first: Exception | None = None
        with self.entered():
            while self._futures:  # callbacks may append more
                try:
                    self._futures.popleft().wait()
                except Exception as error:  # its callbacks have run, and may handle it
                    first = first or error
        return first


def find_deferral() -> Deferral | None:
    """Return the ``Deferral`` that this thread has entered, or None."""
    found: Any = getattr(_here, "deferral", None)
    return found  # type: ignore[no-any-return]


_log = logging.getLogger("meshdist.futures")


class WorkFuture(torch.futures.Future):  # type: ignore[type-arg]
    """A torch Future that ``wait`` and ``done`` complete.

    Args:
        pull: waits until a thread has completed it; does not raise its errors.
        poll: completes it if no wait is necessary.
        devices: the CUDA devices of its value.
        sync_cupy: returns the value's arrays to their library, in each thread that has waited
            (torch orders only its own streams).
    """

    def __init__(
        self,
        pull: Callable[[], object],
        poll: Callable[[], object],
        devices: Sequence[torch.device] = (),
        sync_cupy: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(devices=list(devices))
        self._pull = pull
        self._poll = poll
        self._devices = tuple(devices)
        self._sync_cupy = sync_cupy
        # The first thread that acquires it completes the future, and never releases it.
        self._completing = threading.Lock()
        self._guard = threading.Lock()
        self._callbacks: list[Callable[[], None]] | None = []  # None: they run now

    def done(self) -> bool:
        """Return whether the future is complete, without waiting."""
        if not super().done():
            self._poll()
        return super().done()

    def wait(self) -> Any:
        """Wait; return the value or raise the error."""
        if not super().done():
            self._pull()
        value = super().wait()
        if self._sync_cupy is not None:
            self._sync_cupy()
        return value

    def value(self) -> Any:
        """Return ``wait()``."""
        return self.wait()

    def then(self, callback: Callable[[Any], Any]) -> WorkFuture:
        """Return a Future of ``callback(self)``, called once on completion."""
        # Callbacks run in the thread that completes a future, in the order of their addition.
        child = WorkFuture(self._pull, self._poll, self._devices, self._sync_cupy)

        def run() -> None:
            try:
                child._fill(callback(self))
            except Exception as error:
                child._fill_error(error)
            except BaseException as error:
                child._fill_error(
                    BackendError(f"a callback of a future raised {type(error).__name__}")
                )
                raise
            finally:
                child._run_callbacks()

        self._when_done(run)
        return child

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback(self)`` once on completion; log its errors."""

        def run() -> None:
            try:
                callback(self)
            except Exception:
                _log.exception("a callback of a future failed")

        self._when_done(run)

    def complete(self, value: Any, error: Exception | None = None) -> None:
        """Complete the future, unless another thread does."""
        if not self._completing.acquire(blocking=False):
            return
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)

    def set_result(self, result: Any) -> None:
        """Complete the future with ``result`` and run callbacks; call it once."""
        self._fill(result)
        self._run_callbacks()

    def set_exception(self, result: Any) -> None:
        """Complete the future with the exception ``result`` and run callbacks."""
        self._fill_error(result)
        self._run_callbacks()

    def _fill(self, value: Any) -> None:
        super().set_result(value)

    def _fill_error(self, error: Exception) -> None:
        def raise_it(_: object) -> None:
            raise without_frames(error)

        self._set_unwrap_func(raise_it)
        # torch pickles the value of a future with devices, but not every error can be pickled.
        super().set_result(None)

    def _when_done(self, callback: Callable[[], None]) -> None:
        with self._guard:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback()

    def _run_callbacks(self) -> None:
        """Run all callbacks, then raise the first exception, such as Ctrl-C."""
        with self._guard:
            callbacks, self._callbacks = self._callbacks or [], None
        ended: BaseException | None = None
        for callback in callbacks:
            try:
                callback()
            except BaseException as error:  # a released rank, Ctrl-C
                ended = ended or error
        if ended is not None:
            raise ended


Completion: TypeAlias = tuple[Callable[[], bool], Callable[[], None]]
"""``poll``, which never waits, returns whether to call ``complete``."""

_SHORTEST_S, _LONGEST_S = 0.0005, 0.005


class Watcher:
    """Thread that calls ``complete`` once ``poll()`` is true; starts at the first ``watch``."""

    # It polls every 0.5 to 5 ms while it watches something, and sleeps otherwise. Waits in Python
    # do not depend on it, so the pauses do not delay them.

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._new: list[Completion] = []
        self._is_ending = False
        self._thread: threading.Thread | None = None

    def watch(self, poll: Callable[[], bool], complete: Callable[[], None]) -> None:
        """Call ``complete`` in this thread once ``poll()``, which never waits, is true."""
        with self._changed:
            self._new.append((poll, complete))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, name="meshdist-futures", daemon=True
                )
                self._thread.start()
                atexit.register(self.end)
            self._changed.notify()

    def end(self) -> None:
        """Stop the thread; wait one second at most for a running callback."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        watched: list[Completion] = []
        pause = _SHORTEST_S
        while True:
            with self._changed:
                if not self._new and not self._is_ending:
                    self._changed.wait(pause if watched else None)
                if self._is_ending:
                    return
                if self._new:
                    pause = _SHORTEST_S
                    watched += self._new
                    self._new = []
            still = [pair for pair in watched if not self._try_to_complete(*pair)]
            pause = _SHORTEST_S if len(still) < len(watched) else min(2 * pause, _LONGEST_S)
            watched = still
            del still

    def _try_to_complete(self, poll: Callable[[], bool], complete: Callable[[], None]) -> bool:
        """Call ``complete`` if ``poll()``; return whether it was called or failed."""
        try:
            if not poll():
                return False
            complete()
        except BaseException:  # SystemExit in a callback, for example, must not end the thread
            _log.exception("a future could not be completed")
        return True


@cache
def get_watcher() -> Watcher:
    return Watcher()


def watched_future(has_ended: Callable[[], bool], value: Callable[[], Any]) -> WorkFuture:
    """Return a Future of ``value()``, completed once ``has_ended()``."""

    def complete() -> None:
        future.complete(value())

    def poll() -> None:
        if has_ended():
            complete()

    def pull() -> None:
        wait_until(has_ended, Deadline(None))  # the communicator's watchdog ends it
        complete()

    future = WorkFuture(pull, poll)
    get_watcher().watch(has_ended, complete)
    return future


def _forget_watcher() -> None:
    """Forget the watcher in a forked child, which lacks its thread."""
    if get_watcher.cache_info().currsize:
        atexit.unregister(get_watcher().end)
    get_watcher.cache_clear()


os.register_at_fork(after_in_child=_forget_watcher)


_collecting = ForkSafeLock()
_num_collecting = 0
_torchs_collect_all = torch._C._collect_all


@contextmanager
def collecting_by_need() -> Iterator[None]:
    """Patch ``torch.futures.collect_all``: its waits complete WorkFutures."""
    # torch's function waits in C++, which cannot complete the futures of simulated ranks.
    global _num_collecting
    with _collecting.current:
        _num_collecting += 1
        torch._C._collect_all = _collect_all
    try:
        yield
    finally:
        with _collecting.current:
            _num_collecting -= 1
            if _num_collecting == 0:
                torch._C._collect_all = _torchs_collect_all


def _collect_all(futures: Sequence[Any]) -> Any:
    if not any(isinstance(future, WorkFuture) for future in futures):
        return _torchs_collect_all(futures)  # type: ignore[arg-type]
    return _Collection(list(futures))


class _Collection(WorkFuture):
    """Future of several futures: their list, or first error."""

    def __init__(self, futures: list[Any]) -> None:
        devices: set[torch.device] = set()
        for future in futures:
            devices.update(getattr(future, "_devices", ()))
        super().__init__(self._pull_all, self._poll_all, sorted(devices, key=str))
        self.futures = futures
        self._num_missing = len(futures)
        for future in futures:
            future.add_done_callback(self._count)

    def _count(self, _: object) -> None:
        self._num_missing -= 1
        if self._num_missing:
            return
        try:
            for future in self.futures:
                future.wait()
        except Exception as error:
            self.set_exception(error)
        else:
            self.set_result(self.futures)

    def _pull_all(self) -> None:
        for future in self.futures:
            with suppress(Exception):  # raised where it is read
                future.wait()

    def _poll_all(self) -> None:
        for future in self.futures:
            future.done()
