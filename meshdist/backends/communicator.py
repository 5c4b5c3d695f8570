"""Connection of a group over one backend: how a call is started, and what the backend says of
itself.

Tensors that reach a backend are contiguous torch tensors of a device type it serves, without
gradients, checked by the collectives above; roots and peers count inside the group; only numbers of
elements matter, never shapes. A backend that ``takes_layouts`` may get others without gaps. Results
are the same bits on every member, since every member reduces in group order.

What a collective of a communicator does:

* all_reduce, all_reduce_list: each tensor becomes the reduction of all members' in its place.
* reduce: that on the root; the other members' tensors stay as they are.
* reduce_scatter: each member's output is its own block of the reduction of all inputs, or of those
  in its place of the lists, whose sizes may differ (reduce_scatter_list).
* broadcast: every member gets the root's. gather, scatter: the root gets a tensor from each, gives
  a tensor to each, all of equal size; the lists of the other members are empty.
* all_gather: every output holds all inputs in a row; all_gather_list: member j's comes into the
  j-th output, of any size.
* all_to_all, all_to_all_single: the j-th input, or part, goes to member j; any sizes.
* barrier: finished on a member when every member has started it.
* send: finished when the tensor may be written again. recv: from the root, or from any member.
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
from .requests import BackendFailure, Request, given_up_for

if TYPE_CHECKING:
    from .native import FastPath

_log = logging.getLogger("meshdist.backends")

Explain: TypeAlias = Callable[[BackendFailure, int | None], BaseException]
"""Makes the error to raise of a failure, given the number of the call's note."""

ANY_SIZE = (1 << 63) - 1
"""The most bytes of a shortcut's call if any number will do."""

NUMBERED_OPS = {op.value: op for op in PLAIN_OPS}
"""The reductions by their numbers in the native core."""

FAST_REDUCTIONS = [
    (op, op.value, {dtype: 0 for dtype in DTYPES if find_lack(op, dtype) is None})
    for op in PLAIN_OPS
]
"""The reductions, as ``FastPath`` takes them, where Python names them to the backend."""


def explained(explain: Explain, timeout: timedelta, error: BaseException) -> BaseException:
    """Return ``error``, or its explanation if a backend or a signal's handler raised ``error``.

    Args:
        timeout: of the failed call, for the error's text.
    """
    if not isinstance(error, BackendFailure) and not is_of_handler(error):
        return error
    failure = given_up_for(error)
    failure.limit = timeout
    return explain(failure, None)


class Communicator(ABC):
    """Connection of a group over one backend, which starts calls."""

    # ``start`` starts an operation at once and returns it; nothing is kept of the tensors once it
    # is finished. Operations of one communicator are started in program order by one thread at a
    # time.

    ways: ClassVar[Mapping[str, str]]
    """The method of each collective that the backend does itself: its name behind an underscore,
    unless the class says otherwise. All but the rows of ``built_operations`` are there."""

    on_stream: ClassVar[bool] = False
    """Whether its collectives are enqueued on a device, so that only streams wait for them."""

    leaves_early: ClassVar[bool] = False
    """Whether a member of a rooted call may return from it before the others have come."""

    posts_at_once = False
    """Whether starting a receive neither waits nor needs the number of its note."""

    averages_at_once: ClassVar[bool] = False
    """Whether an average costs no more than a sum; else a division over all of the result."""

    def __init_subclass__(cls) -> None:
        if "ways" not in cls.__dict__:
            methods = {operation: f"_{operation}" for operation in BACKEND_OPERATIONS}
            cls.ways = {operation: own for operation, own in methods.items() if hasattr(cls, own)}

    def __init__(self, backend: str, rank: int, size: int) -> None:
        self.backend = backend
        self.rank = rank
        self.size = size
        self.scratch = Scratch()

    @classmethod
    def support(cls, operation: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        """Return ``"native"`` for a collective that the backend does itself, else ``"built"``."""
        return "native" if operation in cls.ways else "built"

    def takes_layouts(self, operation: str, tensors: Tensors, op: ReduceKind | None) -> bool:
        """Return whether the backend takes gapless tensors in any memory order for ``operation``.

        Args:
            collective: a method of this class whose tensors correspond element by element on all
                members.
            tensors: whose dtypes, like ``op``, are equal on all members.
        """
        # Elements correspond by their places in the shape; a backend that returns True must be
        # right where members' layouts differ, too.
        return False

    def start(self, prepared: OperationArgs) -> Request:
        """Start ``prepared`` by the backend's method for it, or by ``build``; return its operation."""
        own = self.ways.get(prepared.way)
        return self.build(prepared) if own is None else getattr(self, own)(prepared)

    def build(self, prepared: OperationArgs) -> Request:
        """Start ``prepared`` by a composition of other collectives; return its operation."""
        return COMPOSED[prepared.way](self, prepared)

    @abstractmethod
    def abort(self) -> None:
        """Free every thread of this process that waits for an operation; any thread may call it."""

    @classmethod
    def abort_together(cls, communicators: Sequence[Communicator]) -> None:
        """Abort all ``communicators``, of this class; log an exception of any, and go on."""
        for communicator in communicators:
            try:
                communicator.abort()
            except Exception:
                _log.exception("failed to abort a communicator of backend %s", communicator.backend)

    @abstractmethod
    def close(self) -> None:
        """End this member's part, without later calls; a backend may wait here for calls in flight."""

    def leave(self) -> None:  # noqa: B027 (most backends announce nothing)
        """Announce to the others that this process exits normally."""

    def shared_bytes(self, num_bytes: int, timeout: timedelta) -> torch.Tensor:
        """Return ``num_bytes`` new bytes, in memory all members map if the backend can; collective."""
        return torch.empty(
            num_bytes, dtype=torch.uint8, device="cpu"
        )  # where the backend shares none

    def batch(self, explain: Explain) -> AbstractContextManager[None]:
        """Start the sends and receives inside as a batch, in which their order does not matter.

        Args:
            explain: makes the error of a batch that fails as a whole.
        """
        return nullcontext()  # where starting a message never waits

    def connect(self, device: torch.device) -> None:  # noqa: B027 (most connect as they open)
        """Connect now, not at the first collective; collective; raise BackendFailure if it fails."""

    def take_error(self) -> MeshdistError | None:
        """Return, once, the error of a call that failed while nobody waited for it; or None."""
        return None

    def watch(self, explain: Explain) -> None:  # noqa: B027 (most calls can be ended)
        """Store ``explain``, by which a watchdog explains a call that can neither end nor raise."""

    def fast_path(
        self, entry: Any, explain: Explain, timeout: timedelta, works: tuple[Any, ...]
    ) -> FastPath | None:
        """Return the native object that runs the group's plain calls, None if the backend has none.

        Args:
            entry: the native object that notes and compares plain calls.
            works: what calls that are started make their Work of, as ``FastPath`` takes it.
        """
        return None
