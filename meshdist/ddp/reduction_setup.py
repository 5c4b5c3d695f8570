"""The setup of a reducer: parameters, group, options; how buckets are laid, and laid anew."""

from __future__ import annotations

import dataclasses
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..collectives.verbs import broadcast
from ..groups.process_group import ProcessGroup
from .bucket_list import AnyBucket, BucketList
from .buckets import ReductionOptions
from .comm_hooks.registered import RegisteredHook
from .gradient_hooks import Backward, GradientHooks, Hook
from .history import History
from .logging_data import DataLogger, notes_errors
from .parting import Parting
from .reports import Reports
from .sending import Sending
from .settling import Verdict

__all__ = ["ReductionSetup"]


class ReductionSetup(Backward):
    """The parameters that are averaged, over which group, and how; ``Reducer`` does it.

    Args:
        parameters: those that require gradients, in the same order on every rank.
        names: one per parameter, for messages.
        group: over whose members gradients are averaged; open for the parameters' devices.
        options: how.
        parting: compares the replicas, if anything does.

    Attributes:
        buckets: in the order in which they are sent.
        arrivals: what is expected of the next backward.
        awaited: futures that the end of the next backward waits for.
        when_averaged: is called with the parameters of each bucket whose gradients are averages.
        logger: is told of iterations and errors, if there is one.
        source: the member whose buffers and order of buckets the others take.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        group: ProcessGroup,
        options: ReductionOptions,
        parting: Parting | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self._names = names
        self._reports = Reports(names, group)
        self._group = group
        self._options = options
        self._lock = threading.RLock()  # a module on several devices has a thread on each
        self.buckets: list[AnyBucket] = []
        self.arrivals = History(len(self.parameters))
        self._settling = Verdict(self.parameters, self.arrivals, options, self._reports, group)
        self._list = BucketList(self.parameters, self._settling.size, self._reports)
        self._parting = parting
        self._sending = Sending(self._list, group, parting)
        self._hooks = GradientHooks(self.parameters, self.arrivals, self)
        self._has_local_sums = False  # a backward since the last averaged one was local
        self.is_open = False  # a gradient has come, and the backward has not ended
        self.task: int | None = None  # the backward that will call _finish
        self._is_running: Callable[[], bool] = bool  # whether that has not ended, nor raised
        self._awaits_backward = False  # since a synchronised forward, of which it tells:
        self._sees_outputs = True  # whether it returned a tensor with a graph
        self._takes_any = False  # the next backward counts, since nothing tells which one is meant
        self._early: list[tuple[int, Hook, torch.Tensor]] = []  # gradients before any output's:
        self._early_task: int | None = None  # of this backward, which may yet reach one
        self._num_local = 0  # backwards since the last one that was averaged
        self._local_task: int | None = None  # one that reached an output under no_sync
        self._is_local_running: Callable[[], bool] = bool  # whether that one has not ended
        self._has_warned = self._has_warned_of_complete = False
        self._has_graph = False  # gradients of that backward could be differentiated again
        self.late: list[int] = []  # what came after its bucket had gone
        self._has_begun = False  # a synchronised forward, since the last check
        self._has_ended = False  # a backward, since the last synchronised forward, or check
        self._is_closed = False  # gradients stay local
        self.awaited: list[Any] = []
        self.logger: DataLogger | None = None
        self.when_averaged: Callable[[Sequence[torch.nn.Parameter]], None] | None = None
        self.source = 0
        self._share = 1.0  # by which averages over all members are multiplied
        self._lay()

    @abstractmethod
    def complete_open(self) -> None:
        """Finish what the last backward left open here."""

    @property
    def hook(self) -> RegisteredHook | None:
        """The communication hook, if one is registered."""
        return self._sending.hook

    @property
    def has_final_buckets(self) -> bool:
        """Whether the buckets were laid as gradients came; equal on every rank."""
        return self.arrivals.is_learned and not self._settling.must_rebuild

    def shared_options(self) -> dict[str, object]:
        """The settings that must be equal on every rank, by the wrapper's arguments."""
        return self._options.shared(self._names)

    def set_calls_inside(self, inside: Callable[[], AbstractContextManager[None]]) -> None:
        """Make the calls of each backward inside of such a context."""
        self._sending.calls_inside = inside

    def close(self) -> None:
        """Take the hooks off the parameters; gradients stay local from then on."""
        self._is_closed = True
        self._has_begun = False
        self._hooks.close()

    @notes_errors
    def change_options(self, what: str, **changes: Any) -> None:
        """Change options; raises after the first backward, and ``what`` names the change there."""
        if self._has_ended or self.arrivals.is_learned:
            raise self._reports.too_late(what)
        self._options = self._settling.options = dataclasses.replace(self._options, **changes)

    def change_group(self, group: ProcessGroup) -> None:
        """Average over ``group`` from now on, and learn arrivals anew."""
        self.complete_open()
        self._group = group
        self._sending.change_group(group)
        self._reports = Reports(self._names, group)
        self.arrivals.forget()
        stays = self._settling.stays
        self._settling = Verdict(
            self.parameters, self.arrivals, self._options, self._reports, group
        )
        self._settling.stays = stays
        self._has_begun = self._has_ended = False
        self._lay()

    @notes_errors
    def register_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Let a hook average the buckets from now on; raises if it does not fit or comes late."""
        if self._options.dtype is not None or self.when_averaged is not None:
            is_stepping = self.when_averaged is not None
            raise self._reports.hook_beside(
                "an optimizer in the backward" if is_stepping else "mixed_precision"
            )
        if self.hook is not None:
            raise self._reports.hook_again(self.hook.name)
        if self.is_open or self._has_ended or self.arrivals.is_learned:
            raise self._reports.hook_late()
        self._sending.hook = RegisteredHook(state, hook, self._group)
        self._settling.stays = True
        self._lay()

    def _lay(self) -> None:
        """Make the buckets anew, and put hooks on their parameters."""
        self._group.world.averaged.add(frozenset(self._group.ranks))
        with torch.no_grad():
            scale = self._sending.find_scale(self.parameters[0].device)
            self._list.lay(self.arrivals, self._options, self._group, scale)
        self.buckets = self._list.all
        self._settling.place(self._list.behind, 1.0 if scale is None else scale)
        self._hooks.put(self.buckets)

    def _rebuild(self) -> None:
        """Lay the buckets anew: the first time as gradients came on group rank 0.

        What changes later is known to all ranks already, so nothing is sent for it.
        """
        self._settling.must_rebuild = False
        if self.arrivals.is_learned and self.arrivals.order:
            order = self.arrivals.laid_order(self._list.order)
            agreed = torch.tensor(order, dtype=torch.int64, device=self._list.behind.device)
            broadcast(agreed, group=self._group, group_src=self.source)
            self.arrivals.order.clear()
            self._list.order = tuple(agreed.tolist())
        self._lay()
