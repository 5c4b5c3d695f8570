"""A model's part in a join context: what it says there, and what it does on ranks without data.

A rank that has joined follows the others' forwards and backwards with its own buckets, so that what
it has learned of them stays equal to what they have: it takes part where buckets are laid anew, in
the broadcast of buffers, and in each backward with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..collectives.flat_sums import broadcast_from
from ..collectives.verbs import all_reduce
from ..errors import JoinError
from ..groups.process_group import ProcessGroup
from ..joining.join import Join, Joinable, ReplicaHook
from ..reduce_ops import ReduceOp
from .autograd_engines import NO_TASK, current_task
from .wrapping import module_state

_BACKWARD = "backward"
_FORWARD = "forward"
_SYNCHRONISED = "synchronised"
_BUFFERS = "buffers"


class JoinedReplica(ReplicaHook):
    """A wrapped model's hook of a join context: announces its forwards, or follows others'."""

    def __init__(self, model: Any, *, divides_by_all: bool) -> None:
        self._model = model
        self._reducer = model.reducer
        self._group: ProcessGroup = model.process_group
        self._divides_by_all = divides_by_all

    def begin(self, context: Join, joinable: Joinable) -> None:
        """Let ``joinable`` own the collectives of backwards until ``end``."""
        self._reducer.sending.calls_inside = lambda: context.owned_by(joinable, _BACKWARD)

    def end(self) -> None:
        """Let the reducer average over all members again, outside of the context."""
        self._reducer.sending.calls_inside = nullcontext
        self._reducer.work_among([True] * self._group.size(), divides_by_all=True)

    def begin_forward(self, context: Join, joinable: Joinable) -> None:
        """Announce that a forward begins here, and learn which ranks have data; collective."""
        if current_task() != NO_TASK:  # a forward computed again, in a backward
            return
        self._reducer.complete_open()  # before others are told of the next step
        said = [_FORWARD]
        if torch.is_grad_enabled() and self._model.require_backward_grad_sync:
            said.append(_SYNCHRONISED)
        if self._model.takes_buffers(is_before=True):
            said.append(_BUFFERS)
        have_data = context.announce(joinable, " ".join(said))
        self._reducer.work_among(have_data, divides_by_all=self._divides_by_all)

    def take_part(self, action: str, have_data: Sequence[bool]) -> None:
        """Follow a forward or backward (``action``) of members with data; collective."""
        if action == _BACKWARD:
            self._reducer.take_part()
            return
        self._reducer.work_among(have_data, divides_by_all=self._divides_by_all)
        if _SYNCHRONISED in action:
            with torch.enable_grad():
                self._reducer.before_forward()
        else:
            self._reducer.end_last()
        if _BUFFERS in action:
            self._model.take_buffers()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcast the parameters and buffers of a rank that joined last; collective."""
        found = module_state(self._model.module, self._model.parameters_to_ignore)
        state = [tensor.detach() for tensor in found.values()]
        mine = self._group.rank() if is_last_joiner else -1
        source = torch.tensor([mine], device=state[0].device)
        all_reduce(source, ReduceOp.MAX, self._group)
        broadcast_from(int(source), state, self._group)


class JoinMethods(Joinable):
    """The methods of ``DistributedDataParallel`` for uneven loops."""

    device: torch.device
    process_group: ProcessGroup
    reducer: Any

    def refuse_unknown_context(self) -> None:
        """Raise where this model is trained in an uneven loop that does not know it."""
        is_known = self._join_config.context is not None
        if not is_known and self.process_group.open_channel(self.device.type).guard is not None:
            raise JoinError(
                "a model is trained in an uneven loop that does not know it",
                where=f"rank {self.process_group.world.rank}",
                expected="a loop inside model.join(), or Join([model, ...])",
                fix="write `with model.join():` around the loop, in place of md.uneven",
            )

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return the context ``Join([self])``, in which ranks may have unequally many steps.

        After the last rank has joined, all have its parameters and buffers.

        Args:
            divide_by_initial_world_size: whether gradients are divided by the number of ranks;
                False divides them by the number of those that still have data.
            enable, throw_on_early_termination: as in ``Join``.

        Raises:
            ArgumentError, JoinError: as ``Join``.

        Example:
            >>> import meshdist as md, torch
            >>> def program():
            ...     model = md.DDP(torch.nn.Linear(1, 1, bias=False))
            ...     with model.join(divide_by_initial_world_size=False):
            ...         for _ in range(1 + md.get_rank()):  # rank 1 has one step more
            ...             model.zero_grad()
            ...             model(torch.ones(1, 1)).sum().backward()
            ...     return model.module.weight.grad.item()
            >>> md.simulate(program, 2)
            [1.0, 1.0]
        """
        divide = divide_by_initial_world_size
        return Join([self], enable, throw_on_early_termination, divide_by_initial_world_size=divide)

    def join_hook(self, **kwargs: Any) -> JoinedReplica:
        """Return this model's part in a join context on ranks that have no data left.

        Args:
            kwargs: ``divide_by_initial_world_size``, as in ``join``.
        """
        divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        terms = self.reducer.layout.terms
        if terms.wider.groups:
            raise terms.reports.joined_beside_wider()
        return JoinedReplica(self, divides_by_all=divides_by_all)

    @property
    def join_device(self) -> torch.device:
        """The device of the module's first parameter."""
        return self.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group over which gradients are averaged."""
        return self.process_group
