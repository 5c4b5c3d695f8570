"""Run operations on torch's c10d process groups, the base of Gloo and NCCL.

The process groups need no default group: only the members take part, in the mesh's rank order.
Missing collectives are composed of others, and missing reductions run on another dtype
(``dtype_fallbacks``). Data of dtypes unknown to c10d are sent as bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed import distributed_c10d as c10d

from ...checking.call_sites import is_of_handler
from ...operation_table import REDUCING_OPERATIONS, ROOTED_OPERATIONS
from ...reduce_ops import ReduceKind, ReduceOp, is_whole_mean
from ..communicator import Communicator, Explain
from ..composed_collectives import (
    all_reduce_by_gathering,
    all_reduce_dividing,
    all_reduce_widened,
    all_to_all_by_packing,
    find_lack,
    reduce_scatter_by_exchange,
)
from ..messages import Mailbox
from ..operation_args import OperationArgs, Tensors, parts, writing
from ..requests import (
    DONE,
    BackendAborted,
    BackendFailure,
    Chain,
    Request,
    failure_of,
    followed,
    plain_text,
)
from .dtype_fallbacks import Arithmetic, DtypeFallback, all_movable, movable, read_as
from .fast_path import open_fast_path

if TYPE_CHECKING:
    from ..native import FastPath

_NOT_MADE: tuple[timedelta | None, Any] = (None, None)

_LACKING = re.compile(
    r"^(?:Backend .*|ProcessGroup\w+) does not support \w+|No backend type associated with"
)


class _Closed:
    """Placeholder for a closed process group, whose methods raise RuntimeError."""

    supports_coalescing = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # looked up by code that inspects objects
            raise AttributeError(name)
        raise RuntimeError("the group's connection is closed, for example because the program ends")


CLOSED = _Closed()
"""Replaces a communicator's process group when it is closed."""


class _MissingOperation(BackendFailure):
    """Failure because torch's class lacks the collective; no data were sent."""


@dataclass(eq=False, slots=True)
class C10dRequest(Request):
    """A collective in flight in c10d, with c10d's work."""

    communicator: C10dCommunicator
    work: Any

    @property
    def on_stream(self) -> bool:
        return self.communicator.on_stream

    @property
    def adds_to_stream(self) -> bool:
        return not self.communicator.on_stream

    def finish(self, timeout: timedelta) -> None:
        self.communicator.finish_work(self.work, timeout)

    def poll(self) -> bool:
        return bool(self.work.is_completed())

    def has_ended(self) -> bool:
        return self.communicator.has_ended(self.work)

    def bound(self, timeout: timedelta) -> None:
        self.communicator.bound_work(self.work, timeout)


@dataclass(eq=False, slots=True)
class C10dTransfer(C10dRequest):
    """A send to or receive from member ``peer`` (None: any)."""

    peer: int | None

    def source(self) -> int:
        return int(self.work._source_rank()) if self.peer is None else self.peer


class C10dCommunicator(Communicator):
    """A group's connection over a torch process group (c10d)."""

    arithmetic: ClassVar[Arithmetic | None] = None
    """The ops and dtypes that the class reduces correctly; None if unknown."""
    lacking: ClassVar[frozenset[str]] = frozenset()
    """Collectives that the class lacks, or that are faster if composed of others."""
    gathers_uneven: ClassVar[bool] = False
    """Whether its all-gather takes tensors of several sizes."""
    spoils_others: ClassVar[bool] = False
    """Whether its reduce overwrites the tensors of members other than the root."""
    most_gathered_bytes: ClassVar[int] = 0
    """The largest size of narrow floats, of all members, that is gathered to be reduced."""
    operation_kind: ClassVar[type[Any] | None] = None
    """The request class of started fast-path calls; None without a fast path.

    Its arguments are the communicator, the timeout, the work, a function that completes the result
    afterwards, and the number of the call's record.
    """

    def __init__(self, backend: str, rank: int, size: int, process_group: Any) -> None:
        super().__init__(backend, rank, size)
        self.torch_group = process_group
        self.is_aborted = False
        self._mailbox = Mailbox(rank)
        self._batch: list[tuple[C10dTransfer, OperationArgs]] | None = None
        self._options: dict[Any, tuple[timedelta | None, Any]] = {}

    @classmethod
    def support(cls, operation: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        if operation in REDUCING_OPERATIONS:
            if cls.arithmetic is not None and find_lack(op, dtype) is not None:
                return ""
            substitute = cls.find_substitute(op, dtype)
            if substitute is None or not substitute.is_view:
                return "built"
        if operation in cls.lacking:
            return "built"
        return super().support(operation, device_type, dtype, op)

    def _all_reduce(self, prepared: OperationArgs) -> Request:
        (tensor,), op, timeout = prepared.outputs, prepared.op, prepared.timeout
        assert op is not None
        dtype = tensor.dtype
        key = c10d.AllreduceOptions, op, dtype, prepared.waits
        last_timeout, options = self._options.get(key, _NOT_MADE)
        if last_timeout is not timeout:
            substitute = self.find_substitute(op, dtype)
            if substitute is None or substitute.dtype is not dtype:
                return self._all_reduce_otherwise(prepared, substitute)
            options = self._new_options(c10d.AllreduceOptions, prepared)
            options.reduceOp = substitute.op
            self._options[key] = timeout, options
        try:
            work = self.torch_group.allreduce([tensor], options)
        except RuntimeError as error:
            raise self.failure(error) from None
        return self._request(prepared, work)

    def _all_reduce_list(self, prepared: OperationArgs) -> Request:
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in prepared.outputs:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        started = [self._all_reduce_alike(prepared, some) for some in by_dtype.values()]
        return started[0] if len(started) == 1 else Chain(started)

    def _reduce(self, prepared: OperationArgs) -> Request:
        started, (tensor,) = None, prepared.outputs
        substitute = self._view(prepared, tensor.dtype)
        if substitute is not None:
            options = self.options_for(c10d.ReduceOptions, prepared, substitute.op)
            views = [read_as(tensor, substitute.dtype)]
            started = self._start_own(prepared, "reduce", views, options)
        return started or self.build(prepared)

    def _broadcast(self, prepared: OperationArgs) -> Request:
        options = self.options_for(c10d.BroadcastOptions, prepared)
        return self._request(
            prepared, self._call("broadcast", all_movable(prepared.outputs), options)
        )

    def _all_gather(self, prepared: OperationArgs) -> Request:
        (output,), (tensor,) = prepared.outputs, prepared.inputs
        if output.numel() == 0:  # some classes cannot split an empty tensor; still wait for all
            return self._meet(prepared, output)
        options = self.options_for(c10d.AllgatherOptions, prepared)
        started = self._start_own(
            prepared, "_allgather_base", movable(output), movable(tensor), options
        )
        if started is not None:
            return started
        lists = [all_movable(parts(output, [tensor.numel()] * self.size))]
        return self._request(prepared, self._call("allgather", lists, [movable(tensor)], options))

    def _all_gather_list(self, prepared: OperationArgs) -> Request:
        outputs, (tensor,) = prepared.outputs, prepared.inputs
        count, started = tensor.numel(), None
        if self.gathers_uneven or all(out.numel() == count for out in outputs):
            options = self.options_for(c10d.AllgatherOptions, prepared)
            lists = [all_movable(outputs)]
            started = self._start_own(prepared, "allgather", lists, [movable(tensor)], options)
        return started or self.build(prepared)

    def _gather(self, prepared: OperationArgs) -> Request:
        options = self.options_for(c10d.GatherOptions, prepared)
        lists = [all_movable(prepared.outputs)] if self.rank == prepared.root else []
        mine = all_movable(prepared.inputs)
        return self._start_own(prepared, "gather", lists, mine, options) or self.build(prepared)

    def _scatter(self, prepared: OperationArgs) -> Request:
        options = self.options_for(c10d.ScatterOptions, prepared)
        lists = [all_movable(prepared.inputs)] if self.rank == prepared.root else []
        mine = all_movable(prepared.outputs)
        return self._start_own(prepared, "scatter", mine, lists, options) or self.build(prepared)

    def _reduce_scatter(self, prepared: OperationArgs) -> Request:
        (output,), (tensor,) = prepared.outputs, prepared.inputs
        if tensor.numel() == 0:
            return self._meet(prepared, tensor)
        substitute = self._view(prepared, tensor.dtype)
        if substitute is not None:
            whole, mine = (read_as(x, substitute.dtype) for x in (tensor, output))
            options = self.options_for(c10d.ReduceScatterOptions, prepared, substitute.op)
            started = self._start_own(prepared, "_reduce_scatter_base", mine, whole, options)
            if started is not None:
                return started
        sizes = [output.numel()] * self.size
        return reduce_scatter_by_exchange(self, prepared, output, tensor, sizes)

    def _reduce_scatter_list(self, prepared: OperationArgs) -> Request:
        (output,), inputs = prepared.outputs, prepared.inputs
        substitute = self._view(prepared, output.dtype)
        if substitute is not None:
            views = [read_as(part, substitute.dtype) for part in inputs]
            mine = read_as(output, substitute.dtype)
            options = self.options_for(c10d.ReduceScatterOptions, prepared, substitute.op)
            started = self._start_own(prepared, "reduce_scatter", [mine], [views], options)
            if started is not None:
                return started
        sizes = [part.numel() for part in inputs]
        whole = self.scratch.take(sum(sizes), output)
        with writing():
            torch.cat([part.view(-1) for part in inputs], out=whole)
        started = reduce_scatter_by_exchange(self, prepared, output, whole, sizes)
        return followed(started, lambda: self.scratch.give(whole))

    def _all_to_all(self, prepared: OperationArgs) -> Request:
        some, data = all_movable(prepared.outputs), all_movable(prepared.inputs)
        if "all_to_all" in self.lacking:
            return all_to_all_by_packing(self, prepared, some, data)
        options = self.options_for(c10d.AllToAllOptions, prepared)
        return self._start_own(prepared, "alltoall", some, data, options) or self.build(prepared)

    def _all_to_all_single(self, prepared: OperationArgs) -> Request:
        (output,), (tensor,), sizes = prepared.outputs, prepared.inputs, prepared.sizes
        assert sizes is not None
        whole, data = movable(output), movable(tensor)
        item = 1 if data.dtype is tensor.dtype else tensor.itemsize
        gives, takes = sizes if item == 1 else [[n * item for n in some] for some in sizes]
        options = self.options_for(c10d.AllToAllOptions, prepared)
        started = self._start_own(prepared, "alltoall_base", whole, data, takes, gives, options)
        return started or self.build(prepared)

    def _meet(self, prepared: OperationArgs, nothing: torch.Tensor) -> Request:
        """Start an all-reduce of the empty tensor ``nothing``, as a barrier."""
        empty = [movable(nothing)]
        return self.start(prepared.by("all_reduce", empty, empty, ReduceOp.MAX))

    def _barrier(self, prepared: OperationArgs) -> Request:
        return self._request(
            prepared, self._call("barrier", self.options_for(c10d.BarrierOptions, prepared))
        )

    def _send(self, prepared: OperationArgs) -> Request:
        (tensor,), peer, tag = prepared.inputs, prepared.root, prepared.tag
        if peer == self.rank:
            return self._mailbox.send(tensor, tag)
        slot = self._slot(tag, tensor)
        work = self._call("send", [movable(tensor)], peer, slot)
        return self._transfer(work, prepared)

    def _recv(self, prepared: OperationArgs) -> Request:
        (tensor,), peer, tag = prepared.outputs, prepared.root, prepared.tag
        if peer == self.rank:
            return self._mailbox.recv(tensor, tag)
        slot = self._slot(tag, tensor)
        if peer is None:
            if self.size == 1 or self._mailbox.has_sent(tag):
                return self._mailbox.recv(tensor, tag)
            # c10d cannot receive an empty tensor from any source; a tensor of one byte works.
            buffer = movable(tensor) if tensor.numel() else tensor.new_empty(1, dtype=torch.uint8)
            work = self._call("recv_anysource", [buffer], slot)
        else:
            work = self._call("recv", [movable(tensor)], peer, slot)
        return self._transfer(work, prepared)

    def fast_path(
        self, entry: Any, explain: Explain, timeout: timedelta, works: tuple[Any, ...]
    ) -> FastPath | None:
        return open_fast_path(self, self._request, entry, explain, timeout, works)

    @contextmanager
    def batch(self, explain: Explain) -> Iterator[None]:
        if not getattr(self.torch_group, "supports_coalescing", False):
            yield
            return
        # NCCL runs separately started transfers in order, so two ranks that both receive first
        # would deadlock; the transfers of one coalesced call have no order.
        with self._explained(explain):
            self.torch_group._start_coalescing()
        transfers: list[tuple[C10dTransfer, OperationArgs]] = []
        self._batch = transfers
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):
                self._end_batch(transfers)
            raise
        with self._explained(explain):
            self._end_batch(transfers)

    def finish_work(self, work: Any, timeout: timedelta) -> None:
        """Wait for c10d's ``work``; raise BackendFailure if it fails."""
        try:
            work.wait()
        except RuntimeError as error:
            if is_of_handler(error):
                raise
            raise self.failure(error) from None

    def bound_work(self, work: Any, timeout: timedelta) -> None:
        """Set a timeout of ``work``, if the class watches its works."""

    def has_ended(self, work: Any) -> bool:
        """Return whether ``work`` is over, as far as known without a device query."""
        return bool(work.is_completed())

    def own_timeout(self, timeout: timedelta) -> timedelta:
        """Return c10d's timeout: ``timeout``, or longer if the backend itself waits."""
        return timeout

    def failure(self, error: RuntimeError) -> BackendFailure:
        """Convert a c10d error to a BackendFailure."""
        return BackendAborted(plain_text(error)) if self.is_aborted else failure_of(error)

    def abort(self) -> None:
        self.is_aborted = True
        self._mailbox.abort()
        if self.torch_group is not CLOSED:
            self.torch_group.abort()

    def close(self) -> None:
        self.torch_group = CLOSED

    @classmethod
    def find_substitute(cls, op: ReduceKind, dtype: torch.dtype) -> DtypeFallback | None:
        """Return the class's substitute for ``op`` on ``dtype``, or None."""
        if cls.arithmetic is None:
            return None if is_whole_mean(op, dtype) else DtypeFallback(op, dtype, True)
        return cls.arithmetic.find(op, dtype)

    def _view(self, prepared: OperationArgs, dtype: torch.dtype) -> DtypeFallback | None:
        """Return a fallback that reads the tensor's bits as another dtype, or None."""
        op = prepared.op
        assert op is not None
        found = (
            None if prepared.backend_operation in self.lacking else self.find_substitute(op, dtype)
        )
        return found if found is not None and found.is_view else None

    def _all_reduce_otherwise(
        self, prepared: OperationArgs, substitute: DtypeFallback | None
    ) -> Request:
        (tensor,), op = prepared.outputs, prepared.op
        assert op is not None
        if substitute is None:
            is_divided = is_whole_mean(op, tensor.dtype)
            return (all_reduce_dividing if is_divided else all_reduce_by_gathering)(self, prepared)
        if substitute.is_view:
            view = [read_as(tensor, substitute.dtype)]
            return self.start(prepared.by("all_reduce", view, view, substitute.op))
        return all_reduce_widened(self, prepared, substitute.dtype)

    def _all_reduce_alike(self, prepared: OperationArgs, tensors: Tensors) -> Request:
        """All-reduce ``tensors`` of equal dtype, in a single c10d call if possible."""
        substitute = self._view(prepared, tensors[0].dtype)
        if len(tensors) > 1 and substitute is not None:
            options = self.options_for(c10d.AllreduceCoalescedOptions, prepared, substitute.op)
            views = tensors
            if substitute.dtype is not tensors[0].dtype:
                views = [read_as(tensor, substitute.dtype) for tensor in tensors]
            started = self._start_own(prepared, "allreduce_coalesced", views, options)
            if started is not None:
                return started
        alike = prepared.by("all_reduce_list", tensors, tensors, prepared.op)
        return self.build(alike)

    def options_for(self, kind: Any, prepared: OperationArgs, op: ReduceKind | None = None) -> Any:
        """Return c10d's options of class ``kind``, cached for equal calls."""
        root = prepared.root if prepared.backend_operation in ROOTED_OPERATIONS else None
        timeout = prepared.timeout
        key = kind, prepared.backend_operation, root, op, prepared.waits
        last_timeout, options = self._options.get(key, _NOT_MADE)
        if last_timeout is not timeout:
            options = self._new_options(kind, prepared)
            if root is not None:
                options.rootRank = root
            if op is not None:
                options.reduceOp = op
            self._options[key] = timeout, options
        return options

    def _new_options(self, kind: Any, prepared: OperationArgs) -> Any:
        options = kind()
        options.timeout = self.own_timeout(prepared.timeout)
        options.asyncOp = self._is_async(prepared)
        return options

    def _is_async(self, prepared: OperationArgs) -> bool:
        """Return whether c10d must return a work."""
        return True

    def _start_own(
        self, prepared: OperationArgs, operation: str, *arguments: Any
    ) -> Request | None:
        """Start the class's method ``operation``; return None if the class lacks it."""
        try:
            return self._request(prepared, self._call(operation, *arguments))
        except _MissingOperation:
            return None

    def _request(self, prepared: OperationArgs, work: Any, note: int | None = None) -> Request:
        """Return a collective's request, finished if the caller waits.

        Args:
            note: the record number of a fast-path call.
        """
        started = self._started(work, prepared)
        if prepared.waits:
            self.finish_work(started, prepared.timeout)
            return DONE
        return C10dRequest(self, started)

    def _started(self, work: Any, prepared: OperationArgs) -> Any:
        """Return ``finish_work``'s argument for c10d's ``work``: the work itself."""
        return work

    def _call(self, operation: str, *arguments: Any) -> Any:
        """Call a method of the c10d group; raise its error as a BackendFailure."""
        try:
            return getattr(self.torch_group, operation)(*arguments)
        except RuntimeError as error:
            if isinstance(error, NotImplementedError) or _LACKING.search(str(error)):
                raise _MissingOperation(plain_text(error)) from None
            raise self.failure(error) from None

    @contextmanager
    def _explained(self, explain: Explain) -> Iterator[None]:
        """Convert RuntimeErrors of the block with ``explain``."""
        try:
            yield
        except RuntimeError as error:
            raise explain(self.failure(error), None) from None

    def _transfer(self, work: Any, prepared: OperationArgs) -> Request:
        if self._batch is None:
            return C10dTransfer(self, self._started(work, prepared), prepared.root)
        transfer = C10dTransfer(self, None, prepared.root)
        self._batch.append((transfer, prepared))
        return transfer

    def _end_batch(self, transfers: list[tuple[C10dTransfer, OperationArgs]]) -> None:
        """Send the batch; set its work in each transfer."""
        self._batch = None
        work = self.torch_group._end_coalescing()
        for transfer, prepared in transfers:
            transfer.work = self._started(work, prepared)

    def _slot(self, tag: int, tensor: torch.Tensor) -> int:
        """Return the backend's tag for a message of ``tensor`` under ``tag``."""
        return tag
