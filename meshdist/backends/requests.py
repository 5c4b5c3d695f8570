"""Represent operations in flight and failures of backends.

The device group or ``Work`` converts a BackendFailure to an error for the user.
"""

from __future__ import annotations

import atexit
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Protocol
from weakref import WeakMethod, finalize

from ..error_text import first_line
from ..errors import BackendError
from ..runtime.deadlines import Deadline


class BackendFailure(Exception):
    """Failure of an operation, which becomes an error for the user."""

    limit: timedelta | None = None
    """The caller's timeout, if it is not the group's."""

    fix: str = ""
    """The fix, if the backend knows it."""


class BackendTimeout(BackendFailure):
    """An operation was not finished in time."""

    @classmethod
    def after(cls, timeout: timedelta) -> BackendTimeout:
        """Return the failure of an operation unfinished after ``timeout``."""
        return cls(f"not finished after {timeout.total_seconds():g} s")


class BackendAborted(BackendFailure):
    """The communicator was aborted while an operation waited."""


class MemberStopped(BackendAborted):
    """Failure because ``member`` ended its wait in the same call, as ``text`` describes."""

    def __init__(self, text: str, member: int) -> None:
        super().__init__(text)
        self.member = member


class Interrupted(BackendFailure):
    """Failure because a signal handler raised in this member's wait for a collective.

    Args:
        error: the exception for the program.
        is_over: returns whether the backend no longer uses the caller's memory.
    """

    def __init__(self, error: BaseException, is_over: Callable[[], bool] = lambda: True) -> None:
        super().__init__(f"{type(error).__name__}: {error}".rstrip(": "))
        self.error = error
        self.is_over = is_over


def as_backend_failure(
    error: BaseException, is_over: Callable[[], bool] = lambda: True
) -> BackendFailure:
    """Return ``error`` if it is a BackendFailure, else wrap it in an Interrupted.

    Args:
        is_over: as for Interrupted.
    """
    return error if isinstance(error, BackendFailure) else Interrupted(error, is_over)


def plain_text(error: Exception) -> str:
    """Return the first sentence of a torch error, without source positions."""
    text = re.sub(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*", "", first_line(error))
    return text.split(". This is typically caused")[0].strip()


def is_timeout(text: str) -> bool:
    """Return whether a torch error's text reports a timeout."""
    return "timed out" in text.lower() or "timeout" in text.lower()


def failure_of(error: RuntimeError) -> BackendFailure:
    """Convert a torch error to a BackendTimeout or BackendFailure."""
    text = plain_text(error)
    return BackendTimeout(text) if is_timeout(text) else BackendFailure(text)


class BackendUnsupported(BackendFailure):
    """Failure, on every member, because the backend does not support this group."""


class MemberLost(BackendFailure):
    """Failure because a member exited or left (``text``) while others waited."""

    def __init__(self, text: str, member: int) -> None:
        super().__init__(text)
        self.member = member


class MessageMismatch(BackendFailure):
    """Failure because a message and its receiving tensor differ in length."""


class RanksMismatch(BackendFailure):
    """Failure because a backend that compares calls found different calls.

    Args:
        text: the difference.
        number: the call's number; None for the last call. For a message: its record's number if the
            peer's is known, else its count among messages of its kind.
        message: of a message: (is_send, peer, tag).
        other_number: the number of the peer's record.
    """

    def __init__(
        self,
        text: str,
        number: int | None,
        message: tuple[bool, int, int] | None = None,
        other_number: int | None = None,
    ) -> None:
        super().__init__(text)
        self.number = number
        self.message = message
        self.other_number = other_number


class Request(ABC):
    """An operation that a communicator has started or done."""

    # A helper thread may finish a request while the program's thread starts or finishes others.
    # Two threads never finish the same request.

    __slots__ = ()

    is_plain = False
    """Whether ``wait(seconds)`` waits for all of it.

    ``wait`` returns 0 if the request has succeeded, or if the current stream waits for it; else
    call ``finish``, which continues or raises.
    """

    @property
    def on_stream(self) -> bool:
        """Return whether ``finish`` makes only the current stream wait, not the host."""
        # The request is done once ``poll`` returns True; it may be finished on several streams.
        return False

    @property
    def adds_to_stream(self) -> bool:
        """Return whether the first ``finish`` enqueues work that streams must wait for."""
        return True

    @abstractmethod
    def finish(self, timeout: timedelta) -> None:
        """Wait until the operation is done; raise BackendFailure if it fails or is late."""

    @abstractmethod
    def poll(self) -> bool:
        """Advance the operation without waiting; return whether it is done or failed."""

    def is_ready(self) -> bool:
        """Return ``poll()``, without running other simulated ranks."""
        return self.poll()

    def has_ended(self) -> bool:
        """Return whether the operation is over, without a device query; raise its failure."""
        return self.poll()

    def bound(self, timeout: timedelta) -> None:  # noqa: B027 (by default, only waits are bounded)
        """Set a timeout after which the operation fails, even if no host thread waits."""

    def source(self) -> int:
        """Return the group rank of a finished receive's sender; raise for other requests."""
        raise BackendError("only a receive has a source rank", fix="call it on the Work of irecv")


@dataclass(eq=False, slots=True)
class Done(Request):
    """A finished request; ``sender`` is the source of a received message."""

    sender: int | None = None

    def finish(self, timeout: timedelta) -> None:
        pass

    def poll(self) -> bool:
        return True

    def source(self) -> int:
        return Request.source(self) if self.sender is None else self.sender


DONE = Done()
"""The request of every operation that was done when it was started, except receives."""


class Completed(Protocol):
    """A request with ``then``, a function that completes its result, or None."""

    then: Callable[[], None] | None


def complete(request: Completed) -> None:
    """Complete the result by one call of ``request.then``.

    Raises:
        BackendError: an exception interrupted an earlier call; the result is undefined.
    """
    # ``then`` must not run twice: it may divide the sum of a mean. A wait after the exception, for
    # example in a signal handler, must not report that the result is complete.
    then, request.then = request.then, reject_to_complete
    if then is not None:
        then()
    request.then = None


def reject_to_complete() -> None:
    """Raise BackendError because an exception interrupted the result's completion."""
    raise BackendError(
        "the result is incomplete because an exception interrupted the wait that writes it",
        expected="a first wait() that returns, before the result is used",
        fix="fill the tensors again and repeat the collective",
    )


@dataclass(eq=False, slots=True)
class Chain(Request):
    """Requests that end together; afterwards ``then`` copies the result back."""

    parts: Sequence[Request]
    then: Callable[[], None] | None = None

    @property
    def on_stream(self) -> bool:
        return any(part.on_stream for part in self.parts)

    @property
    def adds_to_stream(self) -> bool:
        return self.then is not None or any(part.adds_to_stream for part in self.parts)

    def finish(self, timeout: timedelta) -> None:
        deadline = Deadline(timeout) if len(self.parts) > 1 else None
        for part in self.parts:
            if part is not DONE:
                part.finish(timeout if deadline is None else deadline.left)
        if self.then is not None:
            complete(self)

    def poll(self) -> bool:
        return all(part.poll() for part in self.parts)

    def has_ended(self) -> bool:
        return all(part.has_ended() for part in self.parts)

    def bound(self, timeout: timedelta) -> None:
        for part in self.parts:
            part.bound(timeout)

    def source(self) -> int:
        return self.parts[0].source() if len(self.parts) == 1 else Request.source(self)


def followed(started: Request, then: Callable[[], None] | None) -> Request:
    """Return a request that calls ``then`` after ``started``, now if it is done."""
    if then is None:
        return started
    if started is DONE:
        then()
        return DONE
    return Chain([started], then)


_GRACE_S = 1.0


@dataclass(eq=False, slots=True)
class QueuedRequest(Request):
    """A request that ``run`` executes on another thread."""

    _act: Callable[[], None] | None
    _is_over: threading.Event = field(default_factory=threading.Event)
    _failure: BaseException | None = None

    def finish(self, timeout: timedelta) -> None:
        if not self._is_over.wait(timeout.total_seconds()):
            raise BackendTimeout.after(timeout)
        if self._failure is not None:
            raise self._failure

    def poll(self) -> bool:
        return self._is_over.is_set()

    def run(self) -> None:
        """Execute the operation once; keep its failure for ``finish``."""
        act, self._act = self._act, None
        assert act is not None
        try:
            act()
        except BaseException as error:  # raised in the thread that waits for it
            self._failure = error
        finally:
            del act  # frees the tensors that it references
            self._is_over.set()


class WorkerQueue:
    """Thread that runs operations in order; ``end`` calls ``release`` if one hangs."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._queue: SimpleQueue[QueuedRequest | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._at_exit = _end_at_exit(WeakMethod(self.end))
        finalize(self, self._queue.put, None).atexit = False  # nothing can be queued any more

    def start(self, act: Callable[[], None]) -> QueuedRequest:
        """Queue ``act``; the request raises its exception."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._queue,), name="meshdist-collectives", daemon=True
            )
            self._thread.start()
            atexit.register(self._at_exit)
        job = QueuedRequest(act)
        self._queue.put(job)
        return job

    def end(self) -> None:
        """End the thread after its queued jobs; ``release`` a job that takes too long."""
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


def _work(queue: SimpleQueue[QueuedRequest | None]) -> None:
    while (job := queue.get()) is not None:
        job.run()
        del job


def _end_at_exit(end: WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    def call() -> None:
        found = end()
        if found is not None:
            found()

    return call
