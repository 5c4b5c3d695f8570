"""Operations in flight, as a communicator hands them out; several as one, and late starters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ..errors import BackendError

__all__ = ["Chain", "Deferred", "Pending"]

Pending: TypeAlias = Any
"""An operation that a communicator has started; opaque to everyone else."""


class Chain:
    """Several started operations that end as one, and what is to be done then, once.

    Args:
        pendings: the operations, all started.
        settle: brings their results home, when all are finished.
    """

    __slots__ = ("_settle", "pendings")

    def __init__(
        self, pendings: Sequence[Pending], settle: Callable[[], None] | None = None
    ) -> None:
        self.pendings = pendings
        self._settle = settle

    def settle(self) -> None:
        """Bring the results home; a second call does nothing."""
        settle, self._settle = self._settle, None
        if settle is not None:
            settle()


class Deferred:
    """An operation that starts when something else has happened.

    Args:
        look: starts it if that has happened; any thread may call it at any time.

    Attributes:
        started: the operation, once it has started.
        failure: why it never will.
        is_cancelled: whether nobody wants it any more; so is one that nobody holds.
    """

    __slots__ = ("__weakref__", "_look", "failure", "is_cancelled", "started")

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self.started: Pending | None = None
        self.failure: Exception | None = None
        self.is_cancelled = False

    def is_settled(self) -> bool:
        """Whether it has started, or never will."""
        if self.started is None and self.failure is None:
            self._look()
        return self.started is not None or self.failure is not None

    def get_started(self) -> Pending:
        """The operation, once it has started; raises BackendError before."""
        if self.started is None:
            raise BackendError(
                "the sender of a receive that is not finished is not known",
                fix="call wait() before source_rank()",
            )
        return self.started
