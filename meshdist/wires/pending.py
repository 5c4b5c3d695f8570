"""Operations in flight: what a communicator hands out, and several that end as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

__all__ = ["Chain", "Pending"]

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
