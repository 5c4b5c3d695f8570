"""The hooks of joinables in a join context, on ranks that have no data left.

torch's sharded optimizer has on each rank the state of a share of the parameters, and steps it;
then all ranks give each other their shares by torch's own group, whose calls no context sees. So a
step is announced before it begins, and the ranks that have joined take it, too. What they step by
is that of a rank with data, as it lies there behind the backward: averaged, unscaled, clipped. Two
ranks, of which rank 1 has joined:

    rank 0: backward(), clip; step(): announces     | sends grad, lr | steps share 0 | gives it
    rank 1: answers the backward ... hears of it    | takes grad, lr | steps share 1 | gives it
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import get_process_group_ranks
from torch.distributed.algorithms.join import Joinable as TorchJoinable

from ..collectives.objects import broadcast_object_list
from ..errors import JoinError
from .replicas import broadcast_from

__all__ = ["JoinHook", "JoinedOptimizer", "ReplicaHook", "is_sharded_optimizer"]


class JoinHook:
    """A joinable's part on a rank that has no data left. Both methods do nothing here."""

    def main_hook(self) -> None:
        """Call what the joinable calls in one step on ranks with data; once for each of theirs.

        Calls that it leaves out are answered without it.
        """

    def post_hook(self, is_last_joiner: bool) -> None:
        """Bring all ranks to one state, after the last has joined; runs on all of them.

        Args:
            is_last_joiner: whether this rank was among the last to join.
        """


class ReplicaHook(JoinHook, ABC):
    """A hook that takes part in what its joinable announces, or owns, step by step."""

    @abstractmethod
    def begin(self, context: Any, joinable: Any) -> None:
        """The context begins, in which ``joinable`` is."""

    @abstractmethod
    def end(self) -> None:
        """The context ends; post-hooks follow."""

    def take_part(self, what: str, at_work: Sequence[bool]) -> None:
        """Take part in what the joinable does on the ranks with data."""


def is_sharded_optimizer(joinable: object) -> bool:
    """Whether it is torch's ``ZeroRedundancyOptimizer``, or the like."""
    return isinstance(joinable, TorchJoinable) and isinstance(joinable, torch.optim.Optimizer)


class JoinedOptimizer(ReplicaHook):
    """The hook of one of torch's ``ZeroRedundancyOptimizer``s."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._has_joined = False
        self.ranks = get_process_group_ranks(optimizer.join_process_group)

    def begin(self, context: Any, joinable: Any) -> None:
        """Announce each step from now on; ``end`` ends it."""
        self._context = context
        self._handle = joinable.register_step_pre_hook(self._begin_step)

    def end(self) -> None:
        """Let steps go unannounced."""
        self._handle.remove()

    def take_part(self, what: str, at_work: Sequence[bool]) -> None:
        """Step this rank's share by the gradients of the ranks with data."""
        self._share(at_work)
        self._has_joined = True
        self._optimizer.step()

    def _begin_step(self, optimizer: Any, args: Sequence[Any], given: dict[str, Any]) -> None:
        if self._has_joined:
            return
        if any(one is not None for one in [*args[1:], *given.values()]):
            raise JoinError(
                f"{type(optimizer).__name__}.step() was given arguments in a join context",
                where=f"rank {self._context.group.world.rank}",
                expected="a step that ranks without data can take, too",
                fix="run forward and backward before it, and call step() without a closure",
            )
        self._share(self._context.announce(optimizer, "step"))

    def _share(self, at_work: Sequence[bool]) -> None:
        """Give gradients, and the numbers of the optimizer's groups, to ranks without data."""
        if all(at_work):
            return
        group, source = self._context.group, at_work.index(True)
        groups = self._optimizer.param_groups
        parameters = [one for each in groups for one in each["params"]]
        said: list[Any] = [
            [one.grad is not None for one in parameters],
            [{name: of for name, of in each.items() if name != "params"} for each in groups],
        ]
        broadcast_object_list(said, group=group, group_src=source)
        if not at_work[group.rank()]:
            for each, numbers in zip(groups, said[1], strict=True):
                each.update(numbers)
            for one, has_gradient in zip(parameters, said[0], strict=True):
                if not has_gradient:
                    one.grad = None
                elif one.grad is None:
                    one.grad = torch.empty_like(one)
        gradients = [one.grad for one in parameters if one.grad is not None]
        broadcast_from(source, gradients, group)
