"""Operations that wait for several things one after the other, done in order by one thread."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from weakref import WeakMethod, finalize

from ..runtime.deadlines import Deadline
from .failures import WireTimeout
from .operations import Operation

__all__ = ["Job", "WorkerQueue"]

_GRACE_S = 1.0
_SLICE_S = 0.5


@dataclass(eq=False, slots=True)
class Job(Operation):
    """An operation in the queue."""

    _act: Callable[[], None] | None
    _is_over: threading.Event = field(default_factory=threading.Event)
    _failure: BaseException | None = None

    def finish(self, timeout: timedelta) -> None:
        deadline = Deadline(timeout)
        while not self._is_over.wait(min(deadline.left_s, _SLICE_S)):  # a debugger may pause it
            if deadline.is_over:
                raise WireTimeout.after(timeout)
        if self._failure is not None:
            raise self._failure

    def poll(self) -> bool:
        return self._is_over.is_set()

    def run(self) -> None:
        """Do it; called once."""
        act, self._act = self._act, None
        assert act is not None
        try:
            act()
        except BaseException as error:  # raised in the thread that waits for it
            self._failure = error
        finally:
            del act  # and the tensors that it keeps
            self._is_over.set()


class WorkerQueue:
    """Does operations in turn in one thread; ``release`` frees it if it has to end and does not."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Job | None = None
        self._at_exit = _end_at_exit(WeakMethod(self.end))
        finalize(self, self._queue.put, None).atexit = False  # nothing can be started any more

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way; for the thread that starts operations."""
        return self._last is None or self._last.poll()

    def start(self, act: Callable[[], None]) -> Job:
        """Let the thread do ``act`` after all that was started before."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._queue,), name="meshdist-collectives", daemon=True
            )
            self._thread.start()
            atexit.register(self._at_exit)
        self._last = job = Job(act)
        self._queue.put(job)
        return job

    def end(self) -> None:
        """End the thread: when its jobs are done, or by ``release`` if that takes too long."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self._at_exit)
        self._queue.put(None)
        thread.join(_GRACE_S)
        if thread.is_alive():
            with suppress(Exception):  # the connection may be broken already
                self._release()
            thread.join(_GRACE_S)


def _work(queue: SimpleQueue[Job | None]) -> None:
    while (job := queue.get()) is not None:
        job.run()
        del job


def _end_at_exit(end: WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    def call() -> None:
        found = end()
        if found is not None:
            found()

    return call
