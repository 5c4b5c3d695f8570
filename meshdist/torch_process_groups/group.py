"""The base of torch's groups over one of our wires: all but the verbs.

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
from torch.distributed import PrefixStore, Store, distributed_c10d as c10d

from ..bootstrap.bounded_store import within
from ..checking.calls import GroupFacts, Note, Tensors, get_call, get_message
from ..checking.program import never_nested, run_unnested
from ..checking.recorder import Recorder
from ..collectives.monitored import MonitoredBarrier
from ..error_text import ranks_text
from ..errors import (
    AbortedError,
    BackendError,
    CollectiveTimeoutError,
    GroupClosedError,
    WorldError,
)
from ..groups.failures import Explainer, opening_error
from ..groups.verb_methods import Asked
from ..reduce_ops import ReduceKind
from ..runtime.deadlines import Deadline
from ..runtime.hosts import num_forks
from ..verb_table import ROOTED_VERBS
from ..wires.communicator import Communicator
from ..wires.failures import WireFailure
from ..wires.operations import Chain, WorkerQueue
from ..wires.packing import Sizes
from ..wires.prepared import PreparedCall
from ..wires.registry import Opening, Wire
from ..wires.work import Work
from .members import Comparison, MembersOfTorchGroup
from .requests import Request
from .works import TorchWork, begin_record

__all__ = ["GroupOfWire"]

_open: weakref.WeakSet[GroupOfWire] = weakref.WeakSet()


# Its methods take more than one form, which Python's cannot be declared to have.
_TorchsGroup: Any = torch_distributed.ProcessGroup


class _BackendForHooks(Backend):
    """Carries nothing: stands where torch's own groups have the backend that they call.

    Torch 2.15 attaches a flight recorder to each group's default backend, and a group that is a
    process group itself has none. The recorder stays empty: torch's dispatcher feeds it, which our
    verbs do not pass. Ours notes them.
    """

    def getBackendName(self) -> str:
        """The group's name in errors."""
        return "meshdist"


class GroupOfWire(_TorchsGroup):  # type: ignore[misc]
    """One group of torch's over one wire. Making one is collective over its members.

    Args:
        wire: what moves tensors of its device types.
        opening: the group, as the wire is to open it.
        name: what torch calls the group.
        give_back: called once the group needs the opening's store no more.

    Raises:
        BackendError: the wire could not be opened; CollectiveTimeoutError: a member did not come.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(
        self,
        wire: Wire,
        opening: Opening,
        name: str,
        give_back: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(opening.rank, len(opening.ranks))
        if hasattr(c10d, "FlightRecorderHook"):
            self._for_hooks = _BackendForHooks(opening.rank, len(opening.ranks))
            self._register_backend(
                torch.device("cpu"), _TorchsGroup.BackendType.UNDEFINED, self._for_hooks
            )
        self._give_back = give_back
        self._wire = wire
        self._opening = opening
        self._facts = GroupFacts(
            f"group {name!r} ({ranks_text(opening.ranks)})",
            *(opening.ranks, opening.rank),
            wire=wire.name,
            timeout=opening.timeout,
        )
        self._recorder = Recorder()
        self._group_name = name
        self._group_desc = "undefined"
        self._timeout = opening.timeout
        self._broken = ""
        self._comparison: Comparison | None = None
        if not wire.compares_calls:
            self._comparison = Comparison(opening, lambda: bool(self._broken))
            opening = replace(opening, look=self._comparison.compare_again)
        # Opening is collective and calls need not be: so all that may be called for is opened here.
        try:
            self._carriers = {
                kind: _opened(wire, opening, kind, self._facts)
                for kind in sorted(wire.device_types)
                if kind == opening.device_type or (kind == "cuda" and torch.cuda.is_available())
            }
        except BaseException:
            if self._comparison is not None:
                self._comparison.close()
            raise
        others = MembersOfTorchGroup(self._facts, opening.store, self._comparison, self._break)
        self._explainer = Explainer(self._facts, self._recorder, others)
        for carrier in self._carriers.values():
            carrier.watch(self._explainer.explain)
        self._completer = WorkerQueue(self._abort_carriers)
        self._starting = threading.Lock()
        self._noting = threading.Lock()
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

    name = getBackendName

    def getGroupName(self) -> str:
        """Torch's name of the group."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Let torch call it something else."""
        self._group_name = name

    def getGroupDesc(self) -> str:
        """Torch's description of the group."""
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        """Let torch say what it is for."""
        self._group_desc = desc

    def get_group_store(self) -> Store:
        """The store whose keys belong to the group."""
        return self._opening.make_torch_store()

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
        """The options that torch asks a backend for: the name and the timeout."""
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
        return self._recorder.sequence

    # -- several as one --------------------------------------------------------------------------

    def _start_coalescing(self, device_type: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device_type: torch.device) -> TorchWork:
        coalesced, self._coalesced = self._coalesced or [], None
        return TorchWork.joined(coalesced, self._completer)

    start_coalescing = _start_coalescing  # as torch's C++ calls them
    end_coalescing = _end_coalescing

    @never_nested
    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when every member has come; where one does not come, rank 0 names it.

        It goes through the store, and breaks nothing.

        Raises:
            CollectiveTimeoutError: one did not come. It names the first that did not, or all of
                them with ``wait_all_ranks``.
            StoreError: the store is lost.
        """
        self._check_open()
        self._num_meetings += 1
        limit = self._timeout if timeout is None else timeout
        store, ranks = self._opening.store, self._facts.ranks
        rank, where = ranks[self._facts.rank], f"{self._facts.here}, {self._facts.name}"
        if limit <= timedelta(0):
            raise CollectiveTimeoutError(
                f"Rank {rank} timed out in monitoredBarrier: it may not wait",
                where=where,
                expected="a timeout above zero",
                found=f"{limit}",
            )
        outcome = MonitoredBarrier(
            store, "meeting", ranks, rank, self._num_meetings, limit, wait_all_ranks
        ).wait()
        if outcome.failure:
            raise CollectiveTimeoutError(
                outcome.failure,
                where=where,
                expected="every member to call it",
                fix="look at what that rank did instead; the group can be used afterwards",
            )

    # -- its end ---------------------------------------------------------------------------------

    def abort(self) -> None:
        """Free every wait in the group, here and on the other members; it is unusable then."""
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
        self._give_back()

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

    def _request(self, verb: str, asked: Asked) -> Request:
        """A call of ``verb``."""
        self._check_usable()
        request = Request(verb, self._facts, asked)
        if verb in ROOTED_VERBS:
            request.check_place(asked.root)
            request.facts["root"] = asked.root
        return request

    def _run(
        self,
        request: Request,
        noted: Tensors,
        result: list[Any],
        way: str,
        pairs: Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
        op: ReduceKind | None = None,
        sizes: tuple[Sizes, Sizes] | None = None,
    ) -> TorchWork:
        """Run a call that was checked.

        Args:
            noted: what it is noted and compared by.
            way: the verb of a ``Communicator`` that starts it.
            pairs: what it reads and what it writes; several start as one.
            op, sizes: as of ``PreparedCall``.
        """
        request.noted, request.sizes = noted, sizes or ()
        peer, tag = request.message or (request.facts.get("root"), 0)
        calls = [
            PreparedCall(
                *(request.verb, way, inputs, outputs, noted, op, peer, sizes, tag),
                limit=request.asked.timeout or self._timeout,
                shows_all=request.shows_all,
            )
            for inputs, outputs in pairs
        ]
        is_async, is_recorded = request.asked.is_async, profiler._is_profiler_enabled
        if is_recorded:
            records = begin_record(f"{self._wire.name}:{request.title}", request.tensors)
        is_async_here = is_async or is_recorded
        work = run_unnested(request.verb, self._started, request, result, calls, is_async_here)
        if is_recorded:
            work.end_with(records, is_async)
            if not is_async:
                work.wait()
        return self._handed_out(work)

    def _started(
        self,
        request: Request,
        result: list[Any],
        calls: Sequence[PreparedCall],
        is_async: bool,
    ) -> TorchWork:
        limit = request.asked.timeout or self._timeout
        tensors = request.tensors
        carrier = self._carriers[tensors[0].device.type if tensors else "cpu"]
        explain, works = self._explainer.explain, []
        try:
            with self._starting if is_async else nullcontext():
                number, note = self._note(request)
                explain = partial(explain, note=number)
                if not note.is_message and self._comparison is not None:
                    self._comparison.enter(note, limit)
                for prepared in calls:
                    prepared.timeout, prepared.waits = limit, not is_async
                    prepared.number, prepared.recorder = number, self._recorder
                    prepared.sequence = number if note.is_message else note.sequence
                parts = [carrier.start(prepared) for prepared in calls]
                operation = parts[0] if len(parts) == 1 else Chain(parts)
            if is_async:
                work = Work(
                    operation,
                    limit,
                    explain,
                    result,
                    request.copy_back,
                    request.verb,
                    self._facts.name,
                )
                works.append(work)
            else:
                operation.finish(limit)
                request.copy_back()
        except WireFailure as failure:
            failure.limit = limit
            raise explain(failure) from None
        return TorchWork(works, result, self._completer)

    def _note(self, request: Request) -> tuple[int, Note]:
        """Note a call; returns the note's number too."""
        recorder, noted, sizes = self._recorder, request.noted, request.sizes
        with self._noting:  # several threads may use the group
            if request.message is None:
                call = get_call(request.verb, noted, is_uneven=bool(sizes), **request.facts)
                note = recorder.note(self._facts, call, sizes)
            else:
                call = get_message(request.verb, noted, *request.message)
                note = recorder.note_message(self._facts, call)
            return recorder.num_notes, Note(*note)

    def _break(self, reason: str) -> None:
        """Refuse all that follows, and free every wait.

        After a timeout the members may be out of step: one that comes late would else meet another
        call than its own. Calls that differ end the group where the wire does not compare them: it
        has started those of some members.
        """
        self._broken = self._broken or reason
        self._abort_carriers()

    def _handed_out(self, work: TorchWork) -> TorchWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _check_open(self) -> None:
        if self._is_closed:
            raise GroupClosedError(
                f"{self._facts.name} was destroyed before",
                where=self._facts.here,
                fix="make a new group: torch.distributed.new_group(...)",
            )
        if self._is_inherited:
            raise WorldError(
                f"{self._facts.name} belongs to the process that this one was forked from",
                where=self._facts.here,
                fix="start processes by spawn, and initialize torch.distributed in each",
            )

    def _check_usable(self) -> None:
        self._check_open()
        if self._broken:
            raise AbortedError(
                f"{self._facts.name} cannot be used after a failure",
                where=self._facts.here,
                found=self._broken,
                fix="make a new group on the ranks that are left",
            )

    def other_for(self, tensor: torch.Tensor | None) -> Any:
        """Torch's own group for a tensor that the wire does not serve; None for all others."""
        if tensor is None or tensor.device.type in self._wire.device_types:
            return None
        return self._other(tensor.device.type)

    def _other(self, kind: str) -> Any:
        """Torch's group of the same members for tensors of a device type; it connects at a verb.

        In a text such as ``cpu:shm,cuda:nccl`` torch gives the whole group to a backend that is a
        process group itself, and drops the other half. So that half is opened here, on the same
        store.

        Raises:
            BackendError: this torch, or this machine, has nothing for that device type.
        """
        if kind in self._others:
            return self._others[kind]
        self._check_open()
        has_nccl = torch_distributed.is_nccl_available() and torch.cuda.is_available()
        if kind != "cuda" or not has_nccl:
            raise BackendError(
                f"{self._facts.name} cannot carry {kind} tensors",
                where=self._facts.here,
                expected=f"tensors that the wire {self._wire.name!r} serves, or CUDA tensors by "
                "NCCL",
                found="a torch without NCCL, or no GPU" if kind == "cuda" else f"a {kind} tensor",
                fix="move the tensor to the CPU, or make a group of another backend for it",
            )
        store, ranks = PrefixStore(kind, self._opening.make_torch_store()), self._facts.ranks
        place, size = self._facts.rank, len(ranks)
        options: Any = torch_distributed.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.global_ranks_in_group = list(ranks)
        options.group_name = self._group_name
        backend = torch_distributed.ProcessGroupNCCL(store, place, size, options)
        backend._set_sequence_number_for_group()
        made = self._others[kind] = _TorchsGroup(store, place, size)
        nccl = _TorchsGroup.BackendType.NCCL
        made._set_default_backend(nccl)
        made._register_backend(torch.device(kind), nccl, backend)
        made._set_group_name(f"{self._group_name}/{kind}")
        return made


def _opened(wire: Wire, opening: Opening, kind: str, group: GroupFacts) -> Communicator:
    """The communicator for tensors of a device type."""
    if kind != opening.device_type:
        opening = opening.below(kind, device_type=kind)
    try:
        with within(Deadline(opening.timeout)):
            return wire.open(opening)
    except WireFailure as failure:
        raise opening_error(failure, group.name, group.ranks, wire, group.here) from None


@atexit.register
def _leave_all() -> None:
    """Let members that still wait for this process see that it ended in good order."""
    for group in list(_open):
        with suppress(Exception):  # it may be broken already
            group.leave()
