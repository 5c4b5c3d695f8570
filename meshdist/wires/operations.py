"""Operations in flight: what a communicator's verb returns, several as one, and late starters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from ..checking.calls import Call
from ..errors import BackendError
from ..runtime.deadlines import Deadline
from .failures import WireFailure

__all__ = ["DONE", "Chain", "Deferred", "Done", "Operation", "Terms"]


class Terms(NamedTuple):
    """Under which terms an operation is started: the last argument of a communicator's verbs.

    Args:
        timeout: how long it may take.
        verb: the public verb that it belongs to, for messages; "" for none.
        number: under which the group has noted the call or message, for messages; 0 for none.
        waits: whether the caller waits for it at once, so that starting it may wait already.
        call: the call as the group has noted it, where the arguments of the communicator's verb do
            not show all that must be equal on all members: a wire that compares calls by itself
            compares this one, too. None where they do.
        note: under which the recorder keeps the call, for the error of one that nobody waits for;
            None means the last one.
    """

    timeout: timedelta
    verb: str = ""
    number: int = 0
    waits: bool = False
    call: Call | None = None
    note: int | None = None


class Operation(ABC):
    """An operation that a communicator has started, or done already.

    A helper thread may finish one while the program's starts or finishes others; never two threads
    the same one.
    """

    __slots__ = ()

    @property
    def on_stream(self) -> bool:
        """Whether ``finish`` lets the current stream wait for it, and not the host.

        It is done once ``poll`` says so, and may be finished again, on another stream.
        """
        return False

    @property
    def adds_to_stream(self) -> bool:
        """Whether ``finish``, the first time, enqueues what other streams have to wait for."""
        return True

    @abstractmethod
    def finish(self, timeout: timedelta) -> None:
        """Wait until it is done; raises WireTimeout, WireAborted or another WireFailure."""

    @abstractmethod
    def poll(self) -> bool:
        """Let it go on, without waiting; return whether it is done, or has failed."""

    def is_ready(self) -> bool:
        """As ``poll``; on simulated ranks no other rank runs meanwhile."""
        return self.poll()

    def has_ended(self) -> bool:
        """As ``poll``, but asks no device, which may capture a graph; raises its failure."""
        return self.poll()

    def bound(self, timeout: timedelta) -> None:  # noqa: B027 (elsewhere the wait is bounded)
        """Let it be late after ``timeout`` from now, where no caller waits on the host."""

    def source(self) -> int:
        """The member that a finished receive came from; raises WireFailure for anything else."""
        raise WireFailure("only a receive has a source")


@dataclass(eq=False, slots=True)
class Done(Operation):
    """An operation that is done; ``sender`` is the member that a receive came from."""

    sender: int | None = None

    def finish(self, timeout: timedelta) -> None:
        pass

    def poll(self) -> bool:
        return True

    def source(self) -> int:
        return Operation.source(self) if self.sender is None else self.sender


DONE = Done()
"""Of every verb that was done as it was started, and is no receive."""


@dataclass(eq=False, slots=True)
class Chain(Operation):
    """Several operations that end as one; ``then`` copies the result back once all are finished."""

    parts: Sequence[Operation]
    then: Callable[[], None] | None = None

    @property
    def on_stream(self) -> bool:
        return any(part.on_stream for part in self.parts)

    @property
    def adds_to_stream(self) -> bool:
        return self.then is not None or any(part.adds_to_stream for part in self.parts)

    def finish(self, timeout: timedelta) -> None:
        deadline = Deadline(timeout)
        for part in self.parts:
            part.finish(deadline.left)
        then, self.then = self.then, None
        if then is not None:
            then()

    def poll(self) -> bool:
        return all(part.poll() for part in self.parts)

    def has_ended(self) -> bool:
        return all(part.has_ended() for part in self.parts)

    def bound(self, timeout: timedelta) -> None:
        for part in self.parts:
            part.bound(timeout)

    def source(self) -> int:
        return self.parts[0].source() if len(self.parts) == 1 else Operation.source(self)


@dataclass(eq=False)
class Deferred(Operation):
    """An operation that starts when something else has happened.

    Args:
        start: starts it if that has happened; any thread may call it at any time.
        wait_for: waits for a condition, as ``Communicator.wait_for`` of what carries it.

    Attributes:
        started: the operation, once it has started.
        failure: why it never will.
        is_cancelled: whether its caller has given it up.
    """

    start: Callable[[], None]
    wait_for: Callable[[Callable[[], bool], timedelta], None]
    started: Operation | None = None
    failure: Exception | None = None
    is_cancelled: bool = False

    def finish(self, timeout: timedelta) -> None:
        deadline = Deadline(timeout)
        try:
            self.wait_for(self._try_to_start, timeout)
        except BaseException:  # Ctrl-C, too: the next receive must not wait behind it
            self.is_cancelled = True
            raise
        if self.started is not None:
            self.started.finish(deadline.left)
        elif self.failure is not None:
            raise self.failure

    def poll(self) -> bool:
        return self._try_to_start() and (self.started is None or self.started.poll())

    def source(self) -> int:
        if self.started is None:
            raise BackendError(
                "the sender of a receive that is not finished is not known",
                fix="call wait() before source_rank()",
            )
        return self.started.source()

    def _try_to_start(self) -> bool:
        """Start it if it can be; whether it has started, or never will."""
        if self.started is None and self.failure is None:
            self.start()
        return self.started is not None or self.failure is not None
