"""The common base of torch's own wires; Gloo and NCCL have modules of their own.

The classes are built directly, without torch.distributed's world: no other rank takes part, and
a group's rank order is the one that its mesh gives. A verb that a class lacks is built from those
that it has; so is a reduction (``substitutes``). What is only moved travels as bytes where the
class does not know its dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import distributed_c10d as c10d

from ...dtypes import DTYPES
from ...error_text import first_line
from ...reduce_ops import ReduceKind, ReduceOp, is_whole_mean
from ...verb_table import REDUCING_VERBS
from .. import fallbacks
from ..communicator import Communicator
from ..failures import WireAborted, WireFailure, WireTimeout
from ..fallbacks import find_lack
from ..messages import Mailbox
from ..operations import DONE, Chain, Operation, Terms
from ..packing import Sizes, Tensors, parts
from .substitutes import Arithmetic, Substitute, read_as

__all__ = [
    "CLOSED",
    "C10dCommunicator",
    "C10dTransfer",
    "is_timeout",
    "plain_text",
]

_MOVED = frozenset(dtype for dtype, facts in DTYPES.items() if facts.is_in_c10d)
"""The dtypes that all of these classes move as they are."""

_NOT_MADE: tuple[timedelta | None, Any] = (None, None)

_LACKING = re.compile(
    r"^(?:Backend .*|ProcessGroup\w+) does not support \w+|No backend type associated with"
)


class _Closed:
    """A stand-in for a process group that was closed."""

    supports_coalescing = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # looked up by code that inspects objects
            raise AttributeError(name)
        raise RuntimeError("the group's connection was closed, as at the end of the program")


CLOSED = _Closed()
"""Takes the place of a communicator's process group when it ends."""


class _VerbLacking(WireFailure):
    """The class has no such verb, and said so before anything was sent."""


def plain_text(error: Exception) -> str:
    """The first sentence of an error from c10d, without source positions."""
    text = re.sub(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*", "", first_line(error))
    return text.split(". This is typically caused")[0].strip()


def is_timeout(text: str) -> bool:
    """Whether an error from c10d is a timeout."""
    return "timed out" in text.lower() or "timeout" in text.lower()


@dataclass(eq=False, slots=True)
class C10dOperation(Operation):
    """A collective that the communicator has started in c10d, with the work that c10d gave."""

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
class C10dTransfer(C10dOperation):
    """A send to or receive from ``peer``, which is None where that may be any."""

    peer: int | None

    def source(self) -> int:
        return int(self.work._source_rank()) if self.peer is None else self.peer


class C10dCommunicator(Communicator):
    """One group's connection over a c10d process group that is made already."""

    arithmetic: ClassVar[Arithmetic | None] = None
    """The ops and dtypes that the class reduces correctly; None where they are not known."""
    lacking: ClassVar[frozenset[str]] = frozenset()
    """Verbs that the class lacks, or that are better built from its others."""
    gathers_uneven: ClassVar[bool] = False
    """Whether its all-gather takes tensors of several sizes."""

    def __init__(self, wire: str, rank: int, size: int, process_group: Any) -> None:
        super().__init__(wire, rank, size)
        self._group = process_group
        self.is_aborted = False
        self._mailbox = Mailbox(rank)
        self._batch: list[tuple[C10dTransfer, Terms]] | None = None
        self._options: dict[Any, tuple[timedelta | None, Any]] = {}

    @classmethod
    def support(cls, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        if verb in REDUCING_VERBS:
            if cls.arithmetic is not None and find_lack(op, dtype) is not None:
                return ""
            substitute = cls._substitute(op, dtype)
            if substitute is None or not substitute.is_view:
                return "built"
        if verb in cls.lacking:
            return "built"
        return super().support(verb, device_type, dtype, op)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceKind, terms: Terms) -> Operation:
        dtype = tensor.dtype
        key = c10d.AllreduceOptions, op, dtype, terms.waits
        last_timeout, options = self._options.get(key, _NOT_MADE)
        timeout = terms.timeout
        if last_timeout is not timeout:
            substitute = self._substitute(op, dtype)
            if substitute is None or substitute.dtype is not dtype:
                return self._all_reduce_otherwise(tensor, op, substitute, terms)
            options = self._new_options(c10d.AllreduceOptions, terms)
            options.reduceOp = substitute.op
            self._options[key] = timeout, options
        try:
            work = self._group.allreduce([tensor], options)
        except RuntimeError as error:
            raise self.failure(error) from None
        return self._operation(work, terms)

    def all_reduce_list(self, tensors: Tensors, op: ReduceKind, terms: Terms) -> Operation:
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        started = [self._all_reduce_alike(some, op, terms) for some in by_dtype.values()]
        return started[0] if len(started) == 1 else Chain(started)

    def reduce(self, tensor: torch.Tensor, op: ReduceKind, root: int, terms: Terms) -> Operation:
        started, substitute = None, self._view("reduce", op, tensor.dtype)
        if substitute is not None:
            options = self._options_for(c10d.ReduceOptions, terms, root, substitute.op)
            views = [read_as(tensor, substitute.dtype)]
            started = self._start_if_there(terms, "reduce", views, options)
        return started or super().reduce(tensor, op, root, terms)

    def broadcast(self, tensor: torch.Tensor, root: int, terms: Terms) -> Operation:
        options = self._options_for(c10d.BroadcastOptions, terms, root)
        return self._start(terms, "broadcast", [_movable(tensor)], options)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, terms: Terms) -> Operation:
        if output.numel() == 0:  # some refuse to cut nothing into blocks; wait for all the same
            return self.all_reduce(_movable(output), ReduceOp.MAX, terms)
        options = self._options_for(c10d.AllgatherOptions, terms)
        started = self._start_if_there(
            terms, "_allgather_base", _movable(output), _movable(tensor), options
        )
        if started is not None:
            return started
        blocks = parts(output, [tensor.numel()] * self.size)
        return self._start(terms, "allgather", [_all_movable(blocks)], [_movable(tensor)], options)

    def all_gather_list(self, outputs: Tensors, tensor: torch.Tensor, terms: Terms) -> Operation:
        count = tensor.numel()
        if self.gathers_uneven or all(out.numel() == count for out in outputs):
            options = self._options_for(c10d.AllgatherOptions, terms)
            lists = [_all_movable(outputs)]
            started = self._start_if_there(terms, "allgather", lists, [_movable(tensor)], options)
            if started is not None:
                return started
        return super().all_gather_list(outputs, tensor, terms)

    def gather(self, outputs: Tensors, tensor: torch.Tensor, root: int, terms: Terms) -> Operation:
        options = self._options_for(c10d.GatherOptions, terms, root)
        lists = [_all_movable(outputs)] if self.rank == root else []
        started = self._start_if_there(terms, "gather", lists, [_movable(tensor)], options)
        return started or super().gather(outputs, tensor, root, terms)

    def scatter(self, tensor: torch.Tensor, inputs: Tensors, root: int, terms: Terms) -> Operation:
        options = self._options_for(c10d.ScatterOptions, terms, root)
        lists = [_all_movable(inputs)] if self.rank == root else []
        started = self._start_if_there(terms, "scatter", [_movable(tensor)], lists, options)
        return started or super().scatter(tensor, inputs, root, terms)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceKind, terms: Terms
    ) -> Operation:
        if tensor.numel() == 0:
            return self.all_reduce(_movable(tensor), ReduceOp.SUM, terms)
        substitute = self._view("reduce_scatter", op, tensor.dtype)
        if substitute is not None:
            whole, mine = (read_as(x, substitute.dtype) for x in (tensor, output))
            options = self._options_for(c10d.ReduceScatterOptions, terms, op=substitute.op)
            started = self._start_if_there(terms, "_reduce_scatter_base", mine, whole, options)
            if started is not None:
                return started
        sizes = [output.numel()] * self.size
        return fallbacks.reduce_scatter_by_exchange(self, output, tensor, sizes, op, terms)

    def reduce_scatter_list(
        self, output: torch.Tensor, inputs: Tensors, op: ReduceKind, terms: Terms
    ) -> Operation:
        substitute = self._view("reduce_scatter_list", op, output.dtype)
        if substitute is not None:
            views = [read_as(part, substitute.dtype) for part in inputs]
            mine = read_as(output, substitute.dtype)
            options = self._options_for(c10d.ReduceScatterOptions, terms, op=substitute.op)
            started = self._start_if_there(terms, "reduce_scatter", [mine], [views], options)
            if started is not None:
                return started
        sizes = [part.numel() for part in inputs]
        whole = self.scratch.take(sum(sizes), output)
        with torch.inference_mode():
            torch.cat([part.view(-1) for part in inputs], out=whole)
        started = fallbacks.reduce_scatter_by_exchange(self, output, whole, sizes, op, terms)
        return Chain([started], lambda: self.scratch.give(whole))

    def all_to_all(self, outputs: Tensors, inputs: Tensors, terms: Terms) -> Operation:
        some, data = _all_movable(outputs), _all_movable(inputs)
        if "all_to_all" in self.lacking:
            return fallbacks.all_to_all_by_packing(self, some, data, terms)
        started = self._start_if_there(
            terms, "alltoall", some, data, self._options_for(c10d.AllToAllOptions, terms)
        )
        return super().all_to_all(outputs, inputs, terms) if started is None else started

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, takes: Sizes, gives: Sizes, terms: Terms
    ) -> Operation:
        whole, data = _movable(output), _movable(tensor)
        sizes: tuple[Sizes, ...] = (takes, gives)
        if data.dtype is not tensor.dtype:
            sizes = tuple([n * tensor.itemsize for n in some] for some in sizes)
        options = self._options_for(c10d.AllToAllOptions, terms)
        started = self._start_if_there(terms, "alltoall_base", whole, data, *sizes, options)
        return started or super().all_to_all_single(output, tensor, takes, gives, terms)

    def barrier(self, terms: Terms, device: torch.device | None = None) -> Operation:
        return self._start(terms, "barrier", self._new_options(c10d.BarrierOptions, terms))

    def send(self, tensor: torch.Tensor, peer: int, tag: int, terms: Terms) -> Operation:
        if peer == self.rank:
            return self._mailbox.send(tensor, tag)
        slot = self._slot(tag, tensor)
        work = self._call("send", [_movable(tensor)], peer, slot)
        return self._transfer(work, peer, terms)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, terms: Terms) -> Operation:
        if peer == self.rank:
            return self._mailbox.recv(tensor, tag)
        slot = self._slot(tag, tensor)
        if peer is None:
            if self.size == 1 or self._mailbox.has_sent(tag):
                return self._mailbox.recv(tensor, tag)
            # c10d refuses to receive nothing from anyone; a place for one byte takes it as well.
            place = _movable(tensor) if tensor.numel() else tensor.new_empty(1, dtype=torch.uint8)
            work = self._call("recv_anysource", [place], slot)
        else:
            work = self._call("recv", [_movable(tensor)], peer, slot)
        return self._transfer(work, peer, terms)

    def has_sent_itself(self, tag: int) -> bool:
        return self._mailbox.has_sent(tag)

    @contextmanager
    def batch(self) -> Iterator[None]:
        if not getattr(self._group, "supports_coalescing", False):
            yield
            return
        # NCCL and its kin run what is started alone in the order of its start, so that two ranks
        # which both receive first would wait for ever; what goes out as one call has no order.
        self._call("_start_coalescing")
        transfers: list[tuple[C10dTransfer, Terms]] = []
        self._batch = transfers
        try:
            yield
        except BaseException:
            with suppress(WireFailure):
                self._end_batch(transfers)
            raise
        self._end_batch(transfers)

    def finish_work(self, work: Any, timeout: timedelta) -> None:
        """Wait for what c10d has started; raises WireFailure."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self.failure(error) from None

    def bound_work(self, work: Any, timeout: timedelta) -> None:
        """Let a work be late after ``timeout``, where the communicator counts."""

    def has_ended(self, work: Any) -> bool:
        """Whether it is known, without asking a device, that it is done or has failed."""
        return bool(work.is_completed())

    def own_timeout(self, timeout: timedelta) -> timedelta:
        """The timeout to give c10d for an operation, on a clock that nothing pauses."""
        return timeout

    def failure(self, error: RuntimeError) -> WireFailure:
        """The failure that an error from c10d means."""
        text = plain_text(error)
        if self.is_aborted:
            return WireAborted(text)
        return WireTimeout(text) if is_timeout(text) else WireFailure(text)

    def abort(self) -> None:
        self.is_aborted = True
        self._mailbox.abort()
        if self._group is not CLOSED:
            self._group.abort()

    def close(self) -> None:
        self._group = CLOSED

    @classmethod
    def _substitute(cls, op: ReduceKind, dtype: torch.dtype) -> Substitute | None:
        if cls.arithmetic is None:
            return None if is_whole_mean(op, dtype) else Substitute(op, dtype, True)
        return cls.arithmetic.find(op, dtype)

    def _view(self, verb: str, op: ReduceKind, dtype: torch.dtype) -> Substitute | None:
        """The view of the tensor that the class's own ``verb`` reduces; None where it does not."""
        found = None if verb in self.lacking else self._substitute(op, dtype)
        return found if found is not None and found.is_view else None

    def _all_reduce_otherwise(
        self, tensor: torch.Tensor, op: ReduceKind, substitute: Substitute | None, terms: Terms
    ) -> Operation:
        if is_whole_mean(op, tensor.dtype):
            return fallbacks.all_reduce_dividing(self, tensor, terms)
        if substitute is None:
            return fallbacks.all_reduce_by_gathering(self, tensor, op, terms)
        if substitute.is_view:
            return self.all_reduce(read_as(tensor, substitute.dtype), substitute.op, terms)
        return fallbacks.all_reduce_widened(self, tensor, op, substitute.dtype, terms)

    def _all_reduce_alike(self, tensors: Tensors, op: ReduceKind, terms: Terms) -> Operation:
        """``all_reduce_list`` where all dtypes are equal."""
        substitute = self._view("all_reduce_list", op, tensors[0].dtype)
        if len(tensors) > 1 and substitute is not None:
            options = self._options_for(c10d.AllreduceCoalescedOptions, terms, op=substitute.op)
            views = tensors
            if substitute.dtype is not tensors[0].dtype:
                views = [read_as(tensor, substitute.dtype) for tensor in tensors]
            started = self._start_if_there(terms, "allreduce_coalesced", views, options)
            if started is not None:
                return started
        return super().all_reduce_list(tensors, op, terms)

    def _options_for(
        self, kind: Any, terms: Terms, root: int | None = None, op: ReduceKind | None = None
    ) -> Any:
        """c10d's options, made once for calls that repeat."""
        key, timeout = (kind, root, op, terms.waits), terms.timeout
        last_timeout, options = self._options.get(key, _NOT_MADE)
        if last_timeout is not timeout:
            options = self._new_options(kind, terms)
            if root is not None:
                options.rootRank = root
            if op is not None:
                options.reduceOp = op
            self._options[key] = timeout, options
        return options

    def _new_options(self, kind: Any, terms: Terms) -> Any:
        options = kind()
        options.timeout = self.own_timeout(terms.timeout)
        options.asyncOp = self._is_async(terms)
        return options

    def _is_async(self, terms: Terms) -> bool:
        """Whether c10d shall return a work."""
        return True

    def _start_if_there(self, terms: Terms, verb: str, *arguments: Any) -> Operation | None:
        """Start it, as ``_start`` does; None where the class lacks it."""
        try:
            return self._start(terms, verb, *arguments)
        except _VerbLacking:
            return None

    def _start(self, terms: Terms, verb: str, *arguments: Any) -> Operation:
        """Start a collective of c10d."""
        return self._operation(self._call(verb, *arguments), terms)

    def _operation(self, work: Any, terms: Terms) -> Operation:
        """The operation of a collective; finished, where the caller waits."""
        started = self._started(work, terms)
        if terms.waits:
            self.finish_work(started, terms.timeout)
            return DONE
        return C10dOperation(self, started)

    def _started(self, work: Any, terms: Terms) -> Any:
        """The work that ``finish_work`` takes: c10d's own."""
        return work

    def _call(self, verb: str, *arguments: Any) -> Any:
        """Call a method of the c10d process group."""
        try:
            return getattr(self._group, verb)(*arguments)
        except RuntimeError as error:
            if isinstance(error, NotImplementedError) or _LACKING.search(str(error)):
                raise _VerbLacking(plain_text(error)) from None
            raise self.failure(error) from None

    def _transfer(self, work: Any, peer: int | None, terms: Terms) -> Operation:
        if self._batch is None:
            return C10dTransfer(self, self._started(work, terms), peer)
        transfer = C10dTransfer(self, None, peer)
        self._batch.append((transfer, terms))
        return transfer

    def _end_batch(self, transfers: list[tuple[C10dTransfer, Terms]]) -> None:
        """Send the batch off; its one work is that of every transfer."""
        self._batch = None
        work = self._call("_end_coalescing")
        for transfer, terms in transfers:
            transfer.work = self._started(work, terms)

    def _slot(self, tag: int, tensor: torch.Tensor) -> int:
        """The wire's own tag for a message."""
        return tag


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, flat, in a dtype that every wire moves: its own, or its bytes."""
    return read_as(tensor, tensor.dtype if tensor.dtype in _MOVED else torch.uint8)


def _all_movable(tensors: Tensors) -> list[torch.Tensor]:
    return [_movable(tensor) for tensor in tensors]
