"""Implement torch process groups on a meshdist backend.

``GroupMethods`` defines the methods, in torch's call forms. Synchronous collectives run in the
caller's thread, messages and collectives of torch's C++ in the background. Tensors of other devices
use a torch process group.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, cached_property, partial, wraps
from inspect import unwrap
from typing import Any, NamedTuple

import torch
import torch.autograd.profiler as profiler
import torch.distributed as torch_distributed
from torch._C._distributed_c10d import Backend, FakeProcessGroup
from torch.distributed import PrefixStore, Store, distributed_c10d as c10d

from ..backends.registry import BackendType, Opening
from ..backends.requests import WorkerQueue
from ..backends.work import Work, bound, joined
from ..checking.call_sites import never_nested, run_unnested
from ..collectives.argument_checks import find_peer
from ..collectives.collective import Collective
from ..collectives.flat_sums import sum_sparse
from ..collectives.monitored_barrier import MonitoredBarrier
from ..collectives.normalize_args import prepare
from ..collectives.point_to_point import open_device_group, prepare_message
from ..collectives.torch_private import num_dispatch_modes, without_dispatch_modes
from ..errors import BackendError, CollectiveTimeoutError
from ..groups.group_methods import Asked, GroupMethods, operations, read_options
from ..operation_table import OPERATIONS, Role, TensorLayout
from ..reduce_ops import ReduceOp, split_premul
from .inner_group import InnerGroup
from .works import TorchWork, begin_record, end_records, tensors_of

Tensors = Sequence[torch.Tensor]

_open: weakref.WeakSet[BackendGroup] = weakref.WeakSet()
_LATER = Asked()


# torch's methods have several call forms, which Python's class cannot declare.
_TorchsGroup: Any = torch_distributed.ProcessGroup


class _BackendForHooks(Backend):
    """A no-op backend for hooks that torch attaches to a group's backend."""

    # Torch 2.15 attaches a flight recorder to each group's default backend, but a Python process
    # group has no such backend. This recorder stays empty, because torch's dispatcher feeds it and
    # meshdist's collectives do not pass the dispatcher. meshdist has its own recorder.
    def getBackendName(self) -> str:
        """Return "meshdist", for torch's errors."""
        return "meshdist"


def _for_its_backend(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap collective ``name``: use torch for other devices, show it to dispatch modes."""

    @wraps(method)
    def called(self: BackendGroup, *given: Any, **named: Any) -> Any:
        x = given[0] if given else None
        x = x[0] if type(x) is list and x else x
        if not isinstance(x, torch.Tensor):
            x = next(tensors_of((*given, *named.values())), None)
        if x is None or x.is_cpu or x.device.type in self._backend.device_types:
            if not num_dispatch_modes():
                return method(self, *given, **named)
            # Show a copy, because both this collective and torch's fake backend write into the
            # tensors.
            with without_dispatch_modes():
                shown = _copied(given), {key: _copied(value) for key, value in named.items()}
                work = method(self, *given, **named)
            if hasattr(_TorchsGroup, name):
                getattr(self._shown, name)(*shown[0], **shown[1])
            return work
        return getattr(self._other(x.device.type), name)(*given, **named)

    return called


class BackendGroup(_TorchsGroup):  # type: ignore[misc]
    """A torch process group on a meshdist backend; its creation is collective.

    Args:
        kept: An object that the store needs while the group exists.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, backend: BackendType, opening: Opening, kept: object = None) -> None:
        rank_and_size = opening.rank, len(opening.ranks)
        super().__init__(*rank_and_size)
        if hasattr(c10d, "FlightRecorderHook"):
            self._for_hooks = _BackendForHooks(*rank_and_size)
            none_of_torchs = _TorchsGroup.BackendType.UNDEFINED
            self._register_backend(torch.device("cpu"), none_of_torchs, self._for_hooks)
        self._group_name = opening.name
        self._kept = kept
        self._backend = backend
        self._opening = opening
        self.inner = InnerGroup(backend, opening)
        self._completer = WorkerQueue(self.inner.abort)
        self._coalesced: list[TorchWork] | None = None
        self.other_groups: dict[str, Any] = {}
        _open.add(self)

    # -- properties ----------------------------------------------------------------------------

    def getBackendName(self) -> str:  # torch's names, here and below
        """Return torch's display name of this group's backend."""
        return self._backend.name

    name = getBackendName

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def get_group_store(self) -> Store:
        """Return the store for the group's keys."""
        return self._opening.make_torch_store()

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = sorted(self._backend.device_types.union(self.other_groups))
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> Any:
        """Return this group, or torch's backend for an unsupported device."""
        kind = torch.device(device).type
        if kind in self._backend.device_types:
            return self
        return self._other(kind)._get_backend(device)

    @property
    def options(self) -> Any:
        """The backend options that torch reads: name and timeout."""
        return Backend.Options(self._backend.name, self.inner.timeout)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: the group allocates no tensors."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)
        for group in self.other_groups.values():
            group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: members count calls from the start."""

    def _get_sequence_number_for_group(self) -> int:
        return self.inner.recorder.sequence

    @cached_property
    def _shown(self) -> Any:
        """A no-op torch group whose calls reach dispatch modes through torch's dispatcher."""
        # A Python group overrides the C++ methods that call the dispatcher, and the dispatcher can
        # call only a C++ backend.
        rank_and_size = self.rank(), self.size()
        shown, none_of_torchs = _TorchsGroup(*rank_and_size), _TorchsGroup.BackendType.UNDEFINED
        for kind in self._backend.device_types:
            backend = FakeProcessGroup._create_internal(*rank_and_size)
            shown._register_backend(torch.device(kind), none_of_torchs, backend)
        shown._set_group_name(self._group_name)
        return shown

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
        """Wait for all members; name the first missing member, or all, in an error.

        Args:
            wait_all_ranks: Whether to name all.
        """
        # It uses the store, so the group stays usable after a timeout.
        inner, ranks = self.inner, self._opening.ranks
        inner.check_usable()
        rank, limit = inner.world.rank, inner.timeout if timeout is None else timeout
        expected, fix = "a timeout above zero", None
        failure = f"Rank {rank} timed out in monitoredBarrier: it may not wait"
        number = inner.world.next_number("matching")
        if limit > timedelta(0):
            terms = ranks, rank, number, limit, wait_all_ranks
            failure = MonitoredBarrier(self._opening.store, "matching", *terms).wait().failure
            expected = "every member to call it"
            fix = "check what that rank did instead; the group stays usable"
        if failure:
            where, found = f"{inner.here}, {inner.name}", None if fix else f"{limit}"
            raise CollectiveTimeoutError(
                failure, where=where, expected=expected, found=found, fix=fix
            )

    # -- its end ---------------------------------------------------------------------------------

    def abort(self) -> None:
        """Abort all waits on all members; the group can no longer be used."""
        if self.inner.is_over:
            return
        for group in self.other_groups.values():
            group.abort()
        self.inner.abort()

    def shutdown(self) -> None:
        """Close the group on this rank; do nothing if closed."""
        if self.inner.is_over:
            return
        self._completer.end()
        self.inner.close()
        for group in self.other_groups.values():
            group.shutdown()
        self._kept = None

    # -- how a collective runs ---------------------------------------------------------------------

    def _start(self, operation: str, asked: Asked, given: dict[str, Any]) -> TorchWork:
        inner, call_form = self.inner, _call_form_of(operation)
        inner.check_unbroken()
        written: Any = given[call_form.tensors[0]] if call_form.tensors else None
        noted = given.get(call_form.noted)
        if call_form.is_sum and written.layout is not torch.strided:
            kind, factor = split_premul(asked.op)
            sum_sparse(self, written, kind if factor is None else ReduceOp.PREMUL_SUM)
            return self._kept_for_joining(TorchWork((), [written], self._completer))
        for name in call_form.tensors:
            x = given[name]
            bare = x.data if type(x) is torch.Tensor else _bare(x)
            given[name] = _flat(bare) if call_form.has_blocks else bare
        waits = not (asked.is_async or asked.timeout or profiler._is_profiler_enabled)
        start = partial(call_form.run, **given, group=inner, async_op=not waits)
        result = [written] if isinstance(written, torch.Tensor) else list(written or ())
        num_blocks = self.inner.size() if call_form.gathers_one else 0
        return self._run(operation, asked, start, [noted], result, num_blocks=num_blocks)

    def _run(
        self,
        operation: str,
        asked: Asked,
        start: Callable[[], Work | None],
        noted: Sequence[Any],
        result: list[Any],
        op_name: str = "",
        num_blocks: int = 0,
    ) -> TorchWork:
        """Start a collective, wait unless it is asynchronous, and return its Work.

        Args:
            noted: Tensors for a profile, some in lists.
            result: the Work's.
            op_name: The name in a profile, if not ``operation``.
            num_blocks: as in ``TorchWork``.
        """
        is_recorded = profiler._is_profiler_enabled
        records = (
            begin_record(f"{self._backend.name}:{op_name or operation}", noted)
            if is_recorded
            else []
        )
        try:
            started = run_unnested(operation, start)
            if started is not None and asked.timeout is not None:
                bound(started, asked.timeout)
            works = () if started is None else (started,)
            work = TorchWork(works, result, self._completer, num_blocks=num_blocks)
            if is_recorded:
                work.end_with(records, asked.is_async)
        except BaseException:
            end_records(records)
            raise
        if not asked.is_async:
            work.wait()
        return work if self._coalesced is None else self._kept_for_joining(work)

    def _kept_for_joining(self, work: TorchWork) -> TorchWork:
        """Return ``work``, kept for ``_end_coalescing`` to join."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _message(
        self, operation: str, tensor: torch.Tensor, peer: int | None, tag: int
    ) -> TorchWork:
        inner, spec = self.inner, OPERATIONS[operation]
        inner.check_unbroken()
        # find_peer is slower, so skip it for a valid number
        if type(peer) is not int or not 0 <= peer < len(inner.ranks):
            peer = find_peer(inner, None, peer, operation, *spec.named(Role.PEER))
        message = prepare_message(operation, inner, peer, _bare(tensor), tag, is_send=spec.sends)
        start = partial(open_device_group(inner, message).run, message, is_async=True)
        op_name = "recvAnySource" if peer is None else operation
        return self._run(operation, _LATER, start, [tensor], [tensor], op_name)

    def _start_pairs(
        self, operation: str, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> TorchWork:
        """Check all pairs of tensors, then start a collective on each; return one Work."""
        self.inner.check_unbroken()
        asked = read_options((), opts=opts)
        ops = [asked.op] if OPERATIONS[operation].reduces else []
        Collective(operation, self.inner).check_list(inputs, "inputs")
        calls = [
            prepare(operation, self.inner, _flat(_bare(output)), _flat(_bare(tensor)), *ops)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]

        def start() -> Work | None:
            return joined(list(filter(None, [call.run(True) for call in calls])))

        return self._run(operation, asked, start, inputs, list(outputs))

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Start an ``all_gather_single`` per output and input; return one Work."""
        return self._start_pairs("all_gather_into_tensor", outputs, inputs, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        return self._start_pairs("reduce_scatter_tensor", outputs, inputs, opts)

    # Names before torch 2.13, which torch's C++ and programs also call.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- other devices ---------------------------------------------------------------------------

    def _other(self, kind: str) -> Any:
        """Return the members' torch group for device type ``kind``, created once."""
        # For ``cpu:shm,cuda:nccl``, torch passes the whole group to a backend that is a process
        # group, and drops the other half. So open that half here.
        if kind in self.other_groups:
            return self.other_groups[kind]
        inner = self.inner
        inner.check_usable()
        has_nccl = torch_distributed.is_nccl_available() and torch.cuda.is_available()
        if kind != "cuda" or not has_nccl:
            raise BackendError(
                f"{inner.name} does not support {kind} tensors",
                where=inner.here,
                expected=f"tensors that the backend {self._backend.name!r} serves, or CUDA "
                f"tensors by "
                "NCCL",
                found="a torch without NCCL, or no GPU" if kind == "cuda" else f"a {kind} tensor",
                fix="move the tensor to the CPU, or create a group with another backend for it",
            )
        store = PrefixStore(kind, self._opening.make_torch_store())
        ranks, group_rank, size = inner.ranks, inner.rank(), inner.size()
        options = torch_distributed.ProcessGroupNCCL.Options()
        fields = {"_timeout": inner.timeout, "group_name": self._group_name}
        for name, value in {**fields, "global_ranks_in_group": list(ranks)}.items():
            setattr(options, name, value)
        backend = torch_distributed.ProcessGroupNCCL(store, group_rank, size, options)
        backend._set_sequence_number_for_group()
        made = self.other_groups[kind] = _TorchsGroup(store, group_rank, size)
        nccl = _TorchsGroup.BackendType.NCCL
        made._set_default_backend(nccl)
        made._register_backend(torch.device(kind), nccl, backend)
        made._set_group_name(f"{self._group_name}/{kind}")
        return made


# Wrap each name separately, because torch's group has only its version's names.
_coalesced = {
    name: operation for name, operation in vars(BackendGroup).items() if name.endswith("_coalesced")
}
for _name, _method in {**vars(GroupMethods), **_coalesced}.items():
    if callable(_method):
        setattr(BackendGroup, _name, _for_its_backend(_name, _method))


@atexit.register
def _leave_all() -> None:
    """Announce to waiting members that this process exits normally."""
    for group in list(_open):
        with suppress(Exception):  # it may be broken already
            group.inner.leave()


def _bare(given: Any) -> Any:
    """Replace tensors in ``given`` by ``.data``, which autograd does not track."""
    # Like torch's own groups, let a program overwrite values that autograd has saved: FSDP gathers
    # parameters again into memory that a forward has used.
    if isinstance(given, torch.Tensor):
        return (given if type(given) is torch.Tensor else given.detach()).data
    return list(map(_bare, given)) if isinstance(given, (list, tuple)) else given


def _copied(given: Any) -> Any:
    """Clone the tensors in ``given``."""
    if isinstance(given, torch.Tensor):
        return given.detach().clone()
    return list(map(_copied, given)) if isinstance(given, (list, tuple)) else given


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as a 1-D view if contiguous, else unchanged."""
    # For blocks, torch compares only the numbers of elements.
    return tensor.view(-1) if tensor.dim() != 1 and tensor.is_contiguous() else tensor


class _TorchTensorLayout(NamedTuple):
    """Facts to call a meshdist collective from torch's groups.

    Args:
        run: the undecorated collective: without the fast path, which is for one thread, a profile's
            record, and typed contexts.
        tensors: its tensor parameters, first the written parameter.
        noted: the parameter for a profile.
        has_blocks: whether a larger tensor has a block per member.
        gathers_one: whether it gathers into one tensor, whose blocks are the result.
        is_sum: whether it reduces one tensor, maybe sparse, for all members.
    """

    run: Callable[..., Any]
    tensors: tuple[str, ...]
    noted: str
    has_blocks: bool
    gathers_one: bool
    is_sum: bool


@cache
def _call_form_of(operation: str) -> _TorchTensorLayout:
    spec, run = OPERATIONS[operation], unwrap(operations[operation])
    executor = spec.executor
    layouts = executor.takes, executor.gives
    tensors = spec.named(Role.IN_PLACE, Role.OUTPUT, Role.INPUT)
    noted = tensors[0] if executor.root == "from" else "".join(tensors[-1:])
    has_blocks = spec.is_plain and layouts == (TensorLayout.ONE, TensorLayout.ONE)
    gathers_one = has_blocks and not spec.reduces and not spec.named(Role.SIZES)
    is_sum = layouts == (TensorLayout.IN_PLACE, TensorLayout.ONE) and not executor.root
    return _TorchTensorLayout(run, tensors, noted, has_blocks, gathers_one, is_sum)
