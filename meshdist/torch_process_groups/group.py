"""The base of torch's groups over one of our wires: all but the verbs.

Verbs that their callers wait for run in the caller's thread. What torch's C++ starts, and messages,
go on in the background. Tensors of a device that the wire does not serve go by a group of torch's
own.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.autograd.profiler as profiler
import torch.distributed as torch_distributed
from torch._C._distributed_c10d import Backend
from torch.distributed import PrefixStore, Store, distributed_c10d as c10d

from ..checking.program import never_nested, run_unnested
from ..collectives.monitored import MonitoredBarrier
from ..errors import (
    AbortedError,
    BackendError,
    CollectiveTimeoutError,
)
from ..groups.verb_methods import Asked
from ..wires.operations import WorkerQueue
from ..wires.registry import Opening, Wire
from ..wires.work import Work, bound
from .inner_group import InnerGroup
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
        self._group_name = name
        self._group_desc = "undefined"
        self.inner = InnerGroup(wire, opening, name)
        self._completer = WorkerQueue(self.inner.abort)
        self._num_meetings = 0
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
        return Backend.Options(self._wire.name, self.inner.timeout)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether tensors for it come from memory of its own: they do not."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Let every later call take so long."""
        self.inner.set_timeout(timeout)
        for group in self._others.values():
            group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to be done: members count from the beginning."""

    def _get_sequence_number_for_group(self) -> int:
        return self.inner.recorder.sequence

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
        self.inner.check_usable()
        self._num_meetings += 1
        inner, store = self.inner, self._opening.store
        ranks, rank, where = inner.ranks, inner.world.rank, f"{inner.here}, {inner.name}"
        limit = inner.timeout if timeout is None else timeout
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
        if self.inner.is_over:
            return
        for group in self._others.values():
            group.abort()
        self.inner.abort()

    def shutdown(self) -> None:
        """End this member's part; a second call does nothing."""
        if self.inner.is_over:
            return
        self._completer.end()
        self.inner.close()
        for group in self._others.values():
            group.shutdown()
        self._give_back()

    def leave(self) -> None:
        """Let the others know that this process ends in good order."""
        if not self.inner.is_over:
            self.inner.leave()

    # -- how a verb runs -------------------------------------------------------------------------

    def run(
        self,
        verb: str,
        asked: Asked,
        start: Callable[[], Work | None],
        noted: Sequence[Any],
        result: list[Any],
        title: str = "",
    ) -> TorchWork:
        """Start a verb, and wait for it unless it is asked to go on; torch's Work of it.

        Args:
            start: starts it; what it returns is waited for.
            noted: the tensors that a profile shows, some in lists.
            result: what its Work returns.
            title: its name in a profile, in place of ``verb``.
        """
        is_recorded = profiler._is_profiler_enabled
        if is_recorded:
            records = begin_record(f"{self._wire.name}:{title or verb}", noted)
        started = run_unnested(verb, start)
        if started is not None and asked.timeout is not None:
            bound(started, asked.timeout)
        work = TorchWork([] if started is None else [started], result, self._completer)
        if is_recorded:
            work.end_with(records, asked.is_async)
        if not asked.is_async:
            work.wait()
        return self.handed_out(work)

    def handed_out(self, work: TorchWork) -> TorchWork:
        """``work``, which ``_end_coalescing`` may join with others."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def check_usable(self) -> None:
        """Raise where the group has ended, or has failed."""
        inner = self.inner
        if inner.is_over:
            inner.check_usable()
        if inner.broken:
            raise AbortedError(
                f"{inner.name} cannot be used after a failure",
                where=inner.here,
                found=inner.broken,
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
        self.inner.check_usable()
        inner = self.inner
        has_nccl = torch_distributed.is_nccl_available() and torch.cuda.is_available()
        if kind != "cuda" or not has_nccl:
            raise BackendError(
                f"{inner.name} cannot carry {kind} tensors",
                where=inner.here,
                expected=f"tensors that the wire {self._wire.name!r} serves, or CUDA tensors by "
                "NCCL",
                found="a torch without NCCL, or no GPU" if kind == "cuda" else f"a {kind} tensor",
                fix="move the tensor to the CPU, or make a group of another backend for it",
            )
        store = PrefixStore(kind, self._opening.make_torch_store())
        ranks, place, size = inner.ranks, inner.rank(), inner.size()
        options = torch_distributed.ProcessGroupNCCL.Options()
        fields = {"_timeout": inner.timeout, "group_name": self._group_name}
        for name, value in {**fields, "global_ranks_in_group": list(ranks)}.items():
            setattr(options, name, value)
        backend = torch_distributed.ProcessGroupNCCL(store, place, size, options)
        backend._set_sequence_number_for_group()
        made = self._others[kind] = _TorchsGroup(store, place, size)
        nccl = _TorchsGroup.BackendType.NCCL
        made._set_default_backend(nccl)
        made._register_backend(torch.device(kind), nccl, backend)
        made._set_group_name(f"{self._group_name}/{kind}")
        return made


@atexit.register
def _leave_all() -> None:
    """Let members that still wait for this process see that it ended in good order."""
    for group in list(_open):
        with suppress(Exception):  # it may be broken already
            group.leave()
