"""Operations that wait for several things one after the other, done in order by one thread."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from weakref import WeakMethod, finalize

__all__ = ["InOrder", "Job"]

_PATIENCE_S = 1.0


class Job:
    """An operation in the queue; afterwards ``failure`` is what it raised, or None."""

    __slots__ = ("_act", "_over", "failure")

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act
        self._over = threading.Event()
        self.failure: BaseException | None = None

    def is_over(self, seconds: float | None = 0.0) -> bool:
        """Whether it is over, after at most ``seconds`` of waiting; None waits to the end."""
        return self._over.is_set() or self._over.wait(seconds)

    def run(self) -> None:
        """Do it; called once."""
        act, self._act = self._act, None
        assert act is not None
        try:
            act()
        except BaseException as error:  # told to whoever waits for it
            self.failure = error
        finally:
            del act  # and the tensors that it keeps
            self._over.set()


class InOrder:
    """Does operations one after the other, in a thread that starts with the first one.

    Args:
        release: frees the thread where it waits; called when it has to end and does not.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Job | None = None
        self._at_exit = _end_at_exit(WeakMethod(self.end))
        finalize(self, self._queue.put, None).atexit = False  # nobody starts anything any more

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way; asked by the thread that starts operations."""
        return self._last is None or self._last.is_over()

    def start(self, act: Callable[[], None]) -> Job:
        """Let the thread do ``act`` after all that was started before."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_live, args=(self._queue,), name="meshdist collectives", daemon=True
            )
            self._thread.start()
            atexit.register(self._at_exit)
        self._last = job = Job(act)
        self._queue.put(job)
        return job

    def end(self) -> None:
        """Let the thread end: when it is done, or released if that takes too long."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self._at_exit)
        self._queue.put(None)
        thread.join(_PATIENCE_S)
        if thread.is_alive():
            with suppress(Exception):  # what it belongs to may be broken already
                self._release()
            thread.join(_PATIENCE_S)


def _live(queue: SimpleQueue[Job | None]) -> None:
    while (job := queue.get()) is not None:
        job.run()
        del job


def _end_at_exit(end: WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    def call() -> None:
        found = end()
        if found is not None:
            found()

    return call
