"""Operations in flight: what a backend has started, chains of them, queues; and how a backend
fails.

The device group, or ``Work``, turns a failure into an error that explains.
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
    """Failure of a backend's operation, which the collectives turn into an error that explains."""

    limit: timedelta | None = None
    """How long the caller was ready to wait, where that is not the group's timeout."""

    fix: str = ""
    """The fix, where the backend knows it."""


class BackendTimeout(BackendFailure):
    """An operation was not finished in time."""

    @classmethod
    def after(cls, timeout: timedelta) -> BackendTimeout:
        """Return the failure of an operation not finished after ``timeout``."""
        return cls(f"not finished after {timeout.total_seconds():g} s")


class BackendAborted(BackendFailure):
    """The communicator was aborted while an operation waited."""


class MemberGaveUp(BackendAborted):
    """Failure since ``member`` ended its wait in the same call, as ``text`` says."""

    def __init__(self, text: str, member: int) -> None:
        super().__init__(text)
        self.member = member


class Interrupted(BackendFailure):
    """The error of a signal's handler that ended this member's wait in a collective.

    Args:
        error: as the program is to see it.
        is_over: whether the backend uses no memory of the caller's any more.
    """

    def __init__(self, error: BaseException, is_over: Callable[[], bool] = lambda: True) -> None:
        super().__init__(f"{type(error).__name__}: {error}".rstrip(": "))
        self.error = error
        self.is_over = is_over


def given_up_for(
    error: BaseException, is_over: Callable[[], bool] = lambda: True
) -> BackendFailure:
    """Return ``error`` if it is a BackendFailure, else an Interrupted made of ``error``.

    Args:
        is_over: whether the backend uses no memory of the caller's any more.
    """
    return error if isinstance(error, BackendFailure) else Interrupted(error, is_over)


def plain_text(error: Exception) -> str:
    """Return the first sentence of an error from torch, without source positions."""
    text = re.sub(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*", "", first_line(error))
    return text.split(". This is typically caused")[0].strip()


def is_timeout(text: str) -> bool:
    """Return whether the text of an error from torch tells of a timeout."""
    return "timed out" in text.lower() or "timeout" in text.lower()


def failure_of(error: RuntimeError) -> BackendFailure:
    """Return the BackendTimeout or BackendFailure that stands for an error from torch."""
    text = plain_text(error)
    return BackendTimeout(text) if is_timeout(text) else BackendFailure(text)


class BackendUnsupported(BackendFailure):
    """The backend cannot serve this group; every member raises this."""


class MemberLost(BackendFailure):
    """A member has ended or left the group, as ``text`` says, while others waited for it."""

    def __init__(self, text: str, member: int) -> None:
        super().__init__(text)
        self.member = member


class MessageMismatch(BackendFailure):
    """A message came that is longer or shorter than the tensor that receives it."""


class RanksMismatch(BackendFailure):
    """A backend that compares calls found that members have started different calls.

    Args:
        text: what differs.
        number: of the call; None for the last. Of a message what the collectives gave as ``number``
            where the peer's is known as well; else how many of its kind there were.
        message: for a message whether it is a send, the peer and the tag.
        other_number: what the peer's collective gave as ``number``.
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
    """An operation that a communicator has started, or done already."""

    # A helper thread may finish an operation while the program's starts or finishes others; never
    # two threads the same operation.

    __slots__ = ()

    is_plain = False
    """Whether ``wait(seconds)`` waits for it as a whole.

    It returns 0 where it has ended well, or on a stream where that waits for it; else ``finish``
    goes on, or raises.
    """

    @property
    def on_stream(self) -> bool:
        """Return whether ``finish`` makes only the current stream wait, and not the host."""
        # It is done once ``poll`` says so, and may be finished again, on another stream.
        return False

    @property
    def adds_to_stream(self) -> bool:
        """Return whether the first ``finish`` enqueues work that other streams have to wait for."""
        return True

    @abstractmethod
    def finish(self, timeout: timedelta) -> None:
        """Wait until the operation is done; raise BackendTimeout, BackendAborted, another
        BackendFailure."""

    @abstractmethod
    def poll(self) -> bool:
        """Advance the operation without waiting; return whether it is done or has failed."""

    def is_ready(self) -> bool:
        """Return ``poll()``; on simulated ranks no other rank runs meanwhile."""
        return self.poll()

    def has_ended(self) -> bool:
        """Return whether the operation is over, without asking a device; raise its failure."""
        return self.poll()

    def bound(self, timeout: timedelta) -> None:  # noqa: B027 (elsewhere the wait is bounded)
        """Let the operation fail once ``timeout`` is over, even if no host thread waits for it."""

    def source(self) -> int:
        """Return the group rank that a finished receive came from; BackendError for all others."""
        raise BackendError("only a receive has a source rank", fix="call it on the Work of irecv")


@dataclass(eq=False, slots=True)
class Done(Request):
    """An operation that is done; ``sender`` is the member that a receive came from."""

    sender: int | None = None

    def finish(self, timeout: timedelta) -> None:
        pass

    def poll(self) -> bool:
        return True

    def source(self) -> int:
        return Request.source(self) if self.sender is None else self.sender


DONE = Done()
"""The operation of every collective that was done as it was started, and is no receive."""


class Completed(Protocol):
    """Protocol of operations with ``then``, a function that completes their result, or None."""

    then: Callable[[], None] | None


def complete(request: Completed) -> None:
    """Call ``request.then``, which completes its result, unless that is done.

    Raises:
        BackendError: an exception has ended it before; the result may be anything.
    """
    # It may not be done twice, as the division of a mean. Nor is a wait that comes after the
    # exception, such as that of a signal's handler, told that the result is there.
    then, request.then = request.then, reject_to_complete
    if then is not None:
        then()
    request.then = None


def reject_to_complete() -> None:
    """Raise BackendError, since an exception has ended the completion of the result."""
    raise BackendError(
        "the result is incomplete because an exception interrupted the wait that writes it",
        expected="a first wait() that returns, before the result is used",
        fix="fill the tensors again and repeat the collective",
    )


@dataclass(eq=False, slots=True)
class Chain(Request):
    """Operations that end together; ``then`` copies the result back once all are finished."""

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
    """Return an operation that calls ``then`` after ``started``, at once if ``started`` is done."""
    if then is None:
        return started
    if started is DONE:
        then()
        return DONE
    return Chain([started], then)


_GRACE_S = 1.0


@dataclass(eq=False, slots=True)
class QueuedRequest(Request):
    """An operation that ``run`` does, on another thread than the caller's."""

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
        """Do the operation and keep its failure for ``finish``; called once."""
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
    """Thread that runs operations in turn; its end calls ``release`` if an operation hangs."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._queue: SimpleQueue[QueuedRequest | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._at_exit = _end_at_exit(WeakMethod(self.end))
        finalize(self, self._queue.put, None).atexit = False  # nothing can be started any more

    def start(self, act: Callable[[], None]) -> QueuedRequest:
        """Queue ``act``; return its operation, which raises what ``act`` raises."""
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
        """End the thread after its queued jobs, or by ``release`` if that takes too long."""
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
