"""What every group of torch's over one of our wires is, apart from its verbs.

Verbs that their callers wait for run in the caller's thread. What torch's C++ starts, and messages,
go on in the background. Tensors of a device that the wire does not serve go by a group of torch's
own.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.autograd.profiler as profiler
import torch.distributed as torch_distributed
from torch._C._distributed_c10d import Backend
from torch.distributed import PrefixStore, Store

from ..errors import (
    AbortedError,
    ArgumentError,
    BackendError,
    CollectiveTimeoutError,
    GroupClosedError,
    MeshdistError,
    ShapeError,
    WorldError,
)
from ..runtime.forks import num_forks
from ..wires.background import InOrder
from ..wires.base import (
    Communicator,
    MembersDisagree,
    Opening,
    Pending,
    Wire,
    WireFailure,
    WireRefused,
    WireTimeout,
)
from ..wires.work import Work
from .buffers import Buffers
from .calls import Asked, Call, Members, explain
from .comparing import Comparison
from .meeting import meet_monitored
from .other_devices import other_group
from .works import JointWork, TorchWork, begin_record

__all__ = ["GroupOfWire", "Start"]

Start = Callable[[Communicator, timedelta], Pending]
"""Starts a verb on a communicator, given how long it may take."""

_open: weakref.WeakSet[GroupOfWire] = weakref.WeakSet()


# Its methods take more than one form, which Python's cannot be declared to have.
_TorchsGroup: Any = torch_distributed.ProcessGroup


class GroupOfWire(_TorchsGroup):  # type: ignore[misc]
    """One group of torch's over one wire. Making one is collective over its members.

    Args:
        wire: what moves tensors of its device types.
        opening: the group, as the wire is to open it.
        name: what torch calls the group.

    Raises:
        BackendError: the wire could not be opened; CollectiveTimeoutError: a member did not come.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, wire: Wire, opening: Opening, name: str) -> None:
        super().__init__(opening.rank, len(opening.ranks))
        self._wire = wire
        self._opening = opening
        self._members = Members(name, wire.name, opening.ranks, opening.rank, opening.store)
        self._group_name = name
        self._group_desc = "undefined"
        self._timeout = opening.timeout
        self._broken = ""
        self._broken_by = ""
        self._comparison: Comparison | None = None
        if not wire.compares_calls:
            self._comparison = Comparison(opening, lambda: bool(self._broken))
            opening = replace(opening, look=self._comparison.look)
        # Opening is collective and calls need not be: so all that may be called for is opened here.
        try:
            self._carriers = {
                kind: _opened(wire, opening, kind, self._members)
                for kind in sorted(wire.device_types)
                if kind == opening.device_type or (kind == "cuda" and torch.cuda.is_available())
            }
        except BaseException:
            if self._comparison is not None:
                self._comparison.close()
            raise
        self._completer = InOrder(self._abort_carriers)
        self._starting = threading.Lock()
        self._counting = threading.Lock()
        self._num_calls = 0
        self._num_messages = 0
        self._num_meetings = 0
        self._num_forks = num_forks()
        self._is_closed = False
        self._coalesced: list[TorchWork] | None = None
        self._others: dict[str, Any] = {}
        _open.add(self)

    # -- what it is ------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # torch's names, here and below
        """The name of the wire."""
        return self._wire.name

    def name(self) -> str:
        """The name of the wire."""
        return self._wire.name

    def getGroupName(self) -> str:
        """What torch calls the group."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Let torch call it something else."""
        self._group_name = name

    def getGroupDesc(self) -> str:
        """What torch says that it is for."""
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        """Let torch say what it is for."""
        self._group_desc = desc

    def get_group_store(self) -> Store:
        """The store whose keys belong to the group."""
        return self._opening.store

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = sorted(self._wire.device_types.union(self._others))
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> Any:
        """Itself, or torch's own backend for a device that the wire does not serve."""
        kind = torch.device(device).type
        if kind in self._wire.device_types:
            return self
        return self._other(kind)._get_backend(device)

    @property
    def options(self) -> Any:
        """What torch asks a backend for: the name and the timeout."""
        return Backend.Options(self._wire.name, self._timeout)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether tensors for it come from memory of its own: they do not."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Let every later call take so long."""
        self._timeout = timeout
        for group in self._others.values():
            group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to be done: members count from the beginning."""

    def _get_sequence_number_for_group(self) -> int:
        return self._num_calls

    # -- several as one --------------------------------------------------------------------------

    def _start_coalescing(self, device_type: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device_type: torch.device) -> JointWork:
        works, self._coalesced = self._coalesced or [], None
        return JointWork(works)

    start_coalescing = _start_coalescing  # as torch's C++ calls them
    end_coalescing = _end_coalescing

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when every member has come; where one does not come, rank 0 names it."""
        self._check_open()
        self._num_meetings += 1
        limit = self._timeout if timeout is None else timeout
        meet_monitored(self._members, self._num_meetings, limit, names_all=wait_all_ranks)

    # -- its end ---------------------------------------------------------------------------------

    def abort(self) -> None:
        """Free whoever waits in the group, here and on the other members; nothing works after."""
        if self._is_inherited:
            return
        for group in self._others.values():
            group.abort()
        self._abort_carriers()

    def _abort_carriers(self) -> None:
        for carrier in self._carriers.values():
            carrier.abort()

    def shutdown(self) -> None:
        """End this member's part; a second call does nothing."""
        if self._is_closed or self._is_inherited:
            return
        self._is_closed = True
        self._completer.end()
        for carrier in self._carriers.values():
            carrier.leave()
            carrier.close()
        if self._comparison is not None:
            self._comparison.close()
        for group in self._others.values():
            group.shutdown()

    def leave(self) -> None:
        """Let the others know that this process ends in good order."""
        if not self._is_closed and not self._is_inherited:
            for carrier in self._carriers.values():
                carrier.leave()

    @property
    def _is_inherited(self) -> bool:
        """Whether it belongs to the process that this one was forked from."""
        return self._num_forks != num_forks()

    # -- how a verb runs -------------------------------------------------------------------------

    def _run(
        self, call: Call, asked: Asked, start: Start, buffers: Buffers, result: list[Any]
    ) -> TorchWork:
        self._check_usable()
        if not profiler._is_profiler_enabled:
            return self._handed_out(self._started(call, asked, start, buffers, result))
        records = begin_record(f"{self._wire.name}:{call.title}", call.tensors)
        work = self._started(call, asked._replace(is_async=True), start, buffers, result)
        work.end_with(records)
        if not asked.is_async:
            work.wait()
        return self._handed_out(work)

    def _started(
        self, call: Call, asked: Asked, start: Start, buffers: Buffers, result: list[Any]
    ) -> TorchWork:
        limit = asked.timeout or self._timeout
        carrier = self._carriers[call.tensors[0].device.type if call.tensors else "cpu"]
        communicator = carrier if asked.is_async else carrier.waiting
        explained = partial(self._explained, call=call, limit=limit)
        work: Work | None = None
        try:
            # A communicator of its own for those who wait lets other threads start meanwhile.
            with self._starting if communicator is carrier else nullcontext():
                call.number = communicator.number = self._count(call)
                communicator.caller = call.verb
                if self._comparison is not None and call.tag is None:
                    self._comparison.enter(call, limit)
                pending = start(communicator, limit)
            if asked.is_async:
                work = Work(
                    communicator,
                    pending,
                    limit,
                    explained,
                    lambda: result,
                    buffers.settle,
                    verb=call.verb,
                    group=str(self._members),
                )
            else:
                communicator.finish(pending, limit)
                buffers.settle()
        except WireFailure as failure:
            raise explained(failure) from None
        return TorchWork(work, result, self._completer)

    def _explained(self, failure: WireFailure, call: Call, limit: timedelta) -> MeshdistError:
        """The error to raise; after a timeout the members may be out of step, and the group ends.

        A member that comes late would else meet another call than its own. Calls that differ end
        the group where the wire does not compare them: it has started those of some members.
        """
        is_end = False
        if self._comparison is not None:
            try:
                self._comparison.look()  # one that sees it first may leave the others alone
            except MembersDisagree as disagreement:
                failure, is_end = disagreement, True
                call = self._comparison.noted(disagreement.number or 0) or call
        error = explain(failure, call, self._members, limit, is_end=is_end)
        if is_end or isinstance(failure, WireTimeout):
            self._broken_by = self._broken_by or ("a disagreement" if is_end else "a timeout")
            self._broken = self._broken or str(error).splitlines()[0]
            self._abort_carriers()
        return error

    def _finished(self, result: list[Any]) -> TorchWork:
        """The work of what is done."""
        return self._handed_out(TorchWork(None, result, self._completer))

    def _handed_out(self, work: TorchWork) -> TorchWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _count(self, call: Call) -> int:
        """Collectives, which all members count alike, apart from messages."""
        with self._counting:  # callers that wait do not share the other lock
            if call.tag is not None:
                self._num_messages += 1
                return self._num_messages
            self._num_calls += 1
            return self._num_calls

    def _check_open(self) -> None:
        if self._is_closed:
            raise GroupClosedError(
                f"{self._members} was destroyed before",
                where=self._members.here,
                fix="make a new group: torch.distributed.new_group(...)",
            )
        if self._is_inherited:
            raise WorldError(
                f"{self._members} belongs to the process that this one was forked from",
                where=self._members.here,
                fix="start processes by spawn, and initialize torch.distributed in each",
            )

    def _check_usable(self) -> None:
        self._check_open()
        if self._broken:
            raise AbortedError(
                f"{self._members} cannot be used after {self._broken_by}",
                where=self._members.here,
                found=self._broken,
                fix="make a new group on the ranks that are left",
            )

    def _check_place(self, place: int, verb: str) -> None:
        if not 0 <= place < self.size():
            raise ArgumentError(
                f"{verb}: rank {place} is outside {self._members}",
                where=self._members.here,
                expected=f"a group rank from 0 to {self.size() - 1}",
            )

    def _check_tag(self, tag: int, verb: str) -> None:
        if tag < 0:
            raise ArgumentError(
                f"{verb}: tag {tag} is negative",
                where=self._members.here,
                expected="a tag from 0 on",
            )

    def _check_list(self, tensors: Sequence[torch.Tensor], verb: str) -> None:
        if len(tensors) != self.size():
            raise ArgumentError(
                f"{verb}: a list of {len(tensors)} tensors",
                where=f"{self._members.here}, {self._members}",
                expected=f"{self.size()}, one for each member",
            )

    def _split_counts(self, tensor: torch.Tensor, sizes: Sequence[int], argument: str) -> list[int]:
        """How many elements go to or come from each member."""
        length = tensor.size(0) if tensor.dim() else 1
        if not sizes:
            if length % self.size():
                raise ShapeError(
                    f"all_to_all_single: {argument} does not divide equally among the members",
                    where=self._members.here,
                    expected=f"dim 0 a multiple of {self.size()}",
                    found=f"{length}",
                    fix=f"give {argument}_split_sizes",
                )
            sizes = [length // self.size()] * self.size()
        if len(sizes) != self.size() or sum(sizes) != length:
            raise ShapeError(
                f"all_to_all_single: {argument}_split_sizes do not fit dim 0 of {argument}",
                where=self._members.here,
                expected=f"{self.size()} sizes whose sum is {length}",
                found=f"{list(sizes)}",
            )
        row = tensor.numel() // length if length else 0
        return [size * row for size in sizes]

    def other_for(self, tensor: torch.Tensor | None) -> Any:
        """Torch's own group for a tensor that the wire does not serve; None for all others."""
        if tensor is None or tensor.device.type in self._wire.device_types:
            return None
        return self._other(tensor.device.type)

    def _other(self, kind: str) -> Any:
        if kind not in self._others:
            self._check_open()
            self._others[kind] = other_group(self._members, kind, self._timeout)
        return self._others[kind]


def _opened(wire: Wire, opening: Opening, kind: str, members: Members) -> Communicator:
    """What moves tensors of a device type."""
    if kind != opening.device_type:
        store = PrefixStore(kind, opening.store)
        opening = replace(opening, device_type=kind, store=store)
    try:
        return wire.open(opening)
    except WireFailure as failure:
        is_late = isinstance(failure, WireTimeout)
        raise (CollectiveTimeoutError if is_late else BackendError)(
            f"{members} could not be opened on wire {wire.name!r}",
            where=members.here,
            found=str(failure),
            fix="name another backend, for example 'gloo'"
            if isinstance(failure, WireRefused)
            else "see that all of these ranks come to this point, and that no one has ended",
        ) from None


@atexit.register
def _leave_all() -> None:
    """Whoever still waits for this process is to learn that it ended in good order."""
    for group in list(_open):
        with suppress(Exception):  # it may be broken already
            group.leave()
