"""Define the interface of a group to one backend.

Backends get checked tensors: contiguous, of a supported device type, without gradients. Roots and
peers are group ranks. Shapes do not matter, only numbers of elements. A backend that
``takes_layouts`` may get gapless tensors in other memory orders. Members reduce in group order, so
results are bitwise equal.

Operations of a communicator:

* all_reduce, all_reduce_list: replace each tensor by the members' reduction.
* reduce: the same on the root; leave the other members' tensors unchanged.
* reduce_scatter: write member j's block of the reduction into its output. reduce_scatter_list:
  reduce the lists' j-th inputs for member j; sizes may differ.
* broadcast: copy the root's tensor to all. gather, scatter: collect or distribute equal tensors at
  the root; the other members' lists are empty.
* all_gather: concatenate all inputs. all_gather_list: copy member j's input, of any size, into the
  j-th output.
* all_to_all, all_to_all_single: send the j-th input, or part, to member j; any sizes.
* barrier: finish when every member has started.
* send: finish when the tensor may be overwritten. recv: receive from the root, or any member.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from ..checking.call_sites import is_of_handler
from ..dtypes import DTYPES
from ..errors import MeshdistError
from ..operation_table import BACKEND_OPERATIONS
from ..reduce_ops import PLAIN_OPS, ReduceKind
from ..runtime.memory import Scratch
from .composed_collectives import COMPOSED, find_lack
from .operation_args import OperationArgs, Tensors
from .requests import BackendFailure, Request, as_backend_failure

if TYPE_CHECKING:
    from .native import FastPath

_log = logging.getLogger("meshdist.backends")

Explain: TypeAlias = Callable[[BackendFailure, int | None], BaseException]
"""Turns a failure, and the number of the call's record, into the error to raise."""

ANY_SIZE = (1 << 63) - 1
"""The most bytes of a fast-path call without a limit."""

NUMBERED_OPS = {op.value: op for op in PLAIN_OPS}
"""The reductions by their numbers in the native core."""

FAST_REDUCTIONS = [
    (op, op.value, {dtype: 0 for dtype in DTYPES if find_lack(op, dtype) is None})
    for op in PLAIN_OPS
]
"""The reductions, as ``FastPath`` takes them, for backends that are called through Python."""


def explained(explain: Explain, timeout: timedelta, error: BaseException) -> BaseException:
    """Return ``explain``'s error if a backend or signal handler raised ``error``, else ``error``.

    Args:
        timeout: the failed call's.
    """
    if not isinstance(error, BackendFailure) and not is_of_handler(error):
        return error
    failure = as_backend_failure(error)
    failure.limit = timeout
    return explain(failure, None)


class Communicator(ABC):
    """A group's connection over one backend."""

    # ``start`` never waits for the caller. A finished operation keeps no references to tensors.
    # One thread at a time starts the operations of a communicator, in program order.

    implementations: ClassVar[Mapping[str, str]]
    """The method of each native operation: its name after an underscore, unless the class sets
    another. Operations of ``composed_collectives`` may be missing."""

    on_stream: ClassVar[bool] = False
    """Whether its collectives are enqueued on a device, so that only streams wait for them."""

    leaves_early: ClassVar[bool] = False
    """Whether a rooted call may return on one member before the other members have called."""

    posts_at_once = False
    """Whether starting a receive neither waits nor needs the number of its record."""

    averages_at_once: ClassVar[bool] = False
    """Whether an average costs no more than a sum, without a division of the result."""

    def __init_subclass__(cls) -> None:
        if "implementations" not in cls.__dict__:
            methods = {operation: f"_{operation}" for operation in BACKEND_OPERATIONS}
            cls.implementations = {
                operation: own for operation, own in methods.items() if hasattr(cls, own)
            }

    def __init__(self, backend: str, rank: int, size: int) -> None:
        self.backend = backend
        self.rank = rank
        self.size = size
        self.scratch = Scratch()

    @classmethod
    def support(cls, operation: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        """Return ``"native"`` for the backend's own operations, else ``"built"``."""
        return "native" if operation in cls.implementations else "built"

    def takes_layouts(self, operation: str, tensors: Tensors, op: ReduceKind | None) -> bool:
        """Return whether ``operation`` accepts gapless tensors in any memory order.

        Args:
            operation: elementwise across members.
            tensors: like ``op``, their dtypes are equal on all members.
        """
        # Elements correspond by their indices in the shape: a backend that returns True must give
        # correct results if the members' layouts differ.
        return False

    def start(self, prepared: OperationArgs) -> Request:
        """Start ``prepared`` by the backend's method or by ``build``."""
        own = self.implementations.get(prepared.backend_operation)
        return self.build(prepared) if own is None else getattr(self, own)(prepared)

    def build(self, prepared: OperationArgs) -> Request:
        """Start ``prepared`` as a composition of other collectives."""
        return COMPOSED[prepared.backend_operation](self, prepared)

    @abstractmethod
    def abort(self) -> None:
        """Make this process's current and later waits in the communicator raise; thread-safe."""

    @classmethod
    def abort_together(cls, communicators: Sequence[Communicator]) -> None:
        """Abort all ``communicators``; log exceptions and continue."""
        for communicator in communicators:
            try:
                communicator.abort()
            except Exception:
                _log.exception("failed to abort a communicator of backend %s", communicator.backend)

    @abstractmethod
    def close(self) -> None:
        """Close this member's connection; may wait for calls in flight."""

    def leave(self) -> None:  # noqa: B027 (most backends announce nothing)
        """Announce this process's normal exit to the other members."""

    def shared_bytes(self, num_bytes: int, timeout: timedelta) -> torch.Tensor:
        """Allocate ``num_bytes`` of memory, shared by all members if possible; collective."""
        return torch.empty(
            num_bytes, dtype=torch.uint8, device="cpu"
        )  # for a backend without shared memory

    def batch(self, explain: Explain) -> AbstractContextManager[None]:
        """Batch the context's sends and receives, in any order.

        Args:
            explain: makes the error of a failed batch.
        """
        return nullcontext()  # for a backend that never waits in the start of a message

    def connect(self, device: torch.device) -> None:  # noqa: B027 (most connect as they open)
        """Connect now, not at the first collective; collective; may raise BackendFailure."""

    def take_error(self) -> MeshdistError | None:
        """Return, once, the error of a failed call that no thread waited for, or None."""
        return None

    def watch(self, explain: Explain) -> None:  # noqa: B027 (most calls can be ended)
        """Store ``explain``, by which a watchdog reports a hanging call."""

    def fast_path(
        self, entry: Any, explain: Explain, timeout: timedelta, works: tuple[Any, ...]
    ) -> FastPath | None:
        """Return the native object for the group's fast-path calls, or None.

        Args:
            entry: the native object that records and compares these calls.
            works: ``FastPath``'s argument.
        """
        return None
