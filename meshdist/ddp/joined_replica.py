"""A model's part in a join context: what it says there, and what it does on ranks without data.

A rank that has joined follows the others' forwards and backwards with its own buckets, so that what
it has learned of them stays equal to what they have: it takes part in their rebuilding, in the
broadcast of buffers, and in each backward with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from ..collectives.verbs import all_reduce
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceOp
from .joining import Join, Joinable, ReplicaHook
from .reducer import Reducer
from .replicas import broadcast_from

__all__ = ["JoinedReplica"]

_FORWARD = "forward"
_FORWARD_ALONE = "forward without gradients"
_BACKWARD = "backward"


class JoinedReplica(ReplicaHook):
    """The hook of one wrapped model.

    Args:
        group: over which its gradients are averaged.
        reducer: averages them.
        take_state: what a forward begins with.
        state: gives the parameters and buffers.
        divides_by_all: whether averages are over all members, or those that have data.
    """

    def __init__(
        self,
        group: ProcessGroup,
        reducer: Reducer,
        take_state: Callable[[], None],
        state: Callable[[], Sequence[torch.Tensor]],
        *,
        divides_by_all: bool,
    ) -> None:
        self._group = group
        self._reducer = reducer
        self._take_state = take_state
        self._state = state
        self._divides_by_all = divides_by_all

    def begin(self, context: Join, joinable: Joinable) -> None:
        """Let the context know which calls are the backward's; ``end`` ends it."""
        self._reducer.calls_inside = lambda: context.owned_by(joinable, _BACKWARD)

    def end(self) -> None:
        """Let the reducer go on as outside of the context."""
        self._reducer.calls_inside = nullcontext
        self._reducer.source, self._reducer.share = 0, 1.0

    def begin_forward(self, context: Join, joinable: Joinable) -> None:
        """Say that a forward begins here, and learn which ranks have data."""
        if torch._C._current_graph_task_id() != -1:  # one computed again, in a backward
            return
        self._reducer.complete_open()  # before others are told of the next step
        what = _FORWARD if torch.is_grad_enabled() else _FORWARD_ALONE
        self._note(context.announce(joinable, what))

    def take_part(self, what: str, at_work: Sequence[bool]) -> None:
        """Follow a forward or a backward of the ranks with data."""
        if what == _BACKWARD:
            self._reducer.take_part()
            return
        self._note(at_work)
        with torch.set_grad_enabled(what == _FORWARD):
            self._take_state()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the parameters and buffers of one that joined last."""
        state = self._state()
        mine = self._group.rank() if is_last_joiner else -1
        source = torch.tensor([mine], device=state[0].device)
        all_reduce(source, ReduceOp.MAX, self._group)
        broadcast_from(state, self._group, int(source))

    def _note(self, at_work: Sequence[bool]) -> None:
        self._reducer.source = list(at_work).index(True)
        share = 1.0 if self._divides_by_all else len(at_work) / sum(at_work)
        self._reducer.share = share
