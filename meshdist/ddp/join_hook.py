"""Announce each forward of a DDP model in a join context, and shadow the forwards of other ranks.

A forward announces, by one number per rank, whether its backward averages gradients and whether it
broadcasts buffers. A joined rank sends 0, reads the other ranks' numbers and makes the same calls,
with zeros as gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from ..collectives.flat_sums import broadcast_from
from ..collectives.tensor_collectives import all_reduce
from ..groups.process_group import ProcessGroup
from ..join.join_context import Join, Joinable, JoinHook, config_of
from ..join.step_flags import Flags
from ..reduce_ops import ReduceOp
from .autograd_engines import NO_TASK, current_task
from .backward import ActiveRanks
from .model_checks import module_state

_FORWARD, _AVERAGED, _BUFFERS = 1, 2, 4  # bits of the number that a forward announces


class ReplicaHook(JoinHook):
    """Shadows the forwards and backwards of a DDP model on joined ranks."""

    def __init__(self, model: JoinMethods) -> None:
        self._model = model

    def main_hook(self) -> None:
        """Shadow one forward and its backward, with zeros; collective."""
        reducer, action = self._model.reducer, self._model.exchange_actions(0)
        with torch.enable_grad():
            if action & _AVERAGED:
                reducer.before_forward()
            else:
                reducer.end_last()
        if action & _BUFFERS:
            self._model.take_buffers()
        if action & _AVERAGED:
            reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcast the parameters and buffers of a rank that joined last; collective."""
        model, group = self._model, self._model.process_group
        found = module_state(model.module, model.parameters_to_ignore)
        state = [tensor.detach() for tensor in found.values()]
        source = torch.tensor([group.rank() if is_last_joiner else -1], device=state[0].device)
        all_reduce(source, ReduceOp.MAX, group)
        broadcast_from(int(source), state, group)


class JoinMethods(Joinable):
    """The methods of ``DistributedDataParallel`` for join contexts."""

    device: torch.device
    module: Any
    parameters_to_ignore: Any
    process_group: ProcessGroup
    reducer: Any
    require_backward_grad_sync: bool
    take_buffers: Any
    takes_buffers: Any
    _divides_by_all = True

    def announce_forward(self) -> None:
        """Announce a forward in a join context; outside, average over all ranks again."""
        if not config_of(self).enable:
            if self.reducer.reducer_state.active_ranks.is_joining:
                self.reducer.reducer_state.active_ranks = ActiveRanks(self.process_group.size())
            return
        if current_task() != NO_TASK:  # a checkpoint recomputes the forward in a backward
            return
        self.reducer.complete_open()  # before the other ranks begin the next step
        Join.notify_join_context(self)
        averaged = torch.is_grad_enabled() and self.require_backward_grad_sync
        buffers = self.takes_buffers(is_before=True)
        self.exchange_actions(_FORWARD | _AVERAGED * averaged | _BUFFERS * buffers)

    def exchange_actions(self, action: int) -> int:
        """Exchange the ranks' next actions, 0 if joined; return the action to take."""
        group = self.process_group
        actions = Flags(action, group, self.device, "a forward of DDP in md.Join").wait()
        num, source = sum(map(bool, actions)), next(i for i, it in enumerate(actions) if it)
        share = 1.0 if self._divides_by_all else group.size() / num
        self.reducer.reducer_state.active_ranks = ActiveRanks(num, source, share, is_joining=True)
        return max(actions)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return the context ``Join([self])``, in which ranks may run different numbers of steps.

        At its end every rank gets the parameters and buffers of a rank that joined last.

        Args:
            divide_by_initial_world_size: True divides gradients by the number of ranks, False by
                the number that still have data.
            enable, throw_on_early_termination: as in ``Join``.

        Raises:
            ArgumentError, JoinError: as ``Join``.

        Example:
            >>> import meshdist as md, torch
            >>> def program():
            ...     model = md.DDP(torch.nn.Linear(1, 1, bias=False))
            ...     with model.join(divide_by_initial_world_size=False):
            ...         for _ in range(1 + md.get_rank()):  # rank 1 runs one step more
            ...             model.zero_grad()
            ...             model(torch.ones(1, 1)).sum().backward()
            ...     return model.module.weight.grad.item()
            >>> md.simulate(program, 2)
            [1.0, 1.0]
        """
        divide = divide_by_initial_world_size
        return Join([self], enable, throw_on_early_termination, divide_by_initial_world_size=divide)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook of this model for a join context.

        Args:
            kwargs: ``divide_by_initial_world_size``, as in ``join``.
        """
        terms = self.reducer.layout.terms
        if terms.extra_groups.groups:
            raise terms.gradient_errors.joined_with_extra_groups()
        self._divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        return ReplicaHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the module's first parameter."""
        return self.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group over which gradients are averaged."""
        return self.process_group
