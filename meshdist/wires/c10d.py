"""What torch's own wires have in common, and NCCL, UCC and XCCL; Gloo is in a room of its own.

The classes are built directly, without torch.distributed's world: no other rank takes part, and
a group's rank order is the one that its mesh gives. A verb that a class lacks is built from those
that it has; so is a reduction (``stand_ins``). What is only moved travels as bytes where the class
does not know its dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from ..reduce_ops import ReduceKind, ReduceOp
from . import fallbacks
from .base import (
    REDUCING_VERBS,
    Communicator,
    Pending,
    WireAborted,
    WireFailure,
    WireTimeout,
)
from .mailbox import Mailbox, SelfTransfer
from .pending import Chain
from .reductions import find_lack
from .stand_ins import Arithmetic, StandIn, read_as
from .transfers import Transfer

__all__ = ["CLOSED", "C10dCommunicator", "is_timeout", "plain_text"]

_MOVED = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
"""The dtypes that all of these classes move as they are."""

_NOT_MADE: tuple[timedelta | None, Any] = (None, None)

_LACKING = re.compile(
    r"^(?:Backend .*|ProcessGroup\w+) does not support \w+|No backend type associated with"
)


class _Closed:
    """What stands in the place of a process group that was closed."""

    supports_coalescing = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever inspects modules asks for such
            raise AttributeError(name)
        raise RuntimeError("the group's connection was closed, as at the end of the program")


CLOSED = _Closed()
"""Takes the place of a communicator's process group when it ends."""


class _VerbLacking(WireFailure):
    """The class has no such verb, and said so before anything was sent."""


def plain_text(error: Exception) -> str:
    """The first sentence of an error of c10d's, without source positions."""
    text = str(error).splitlines()[0] if str(error) else repr(error)
    text = re.sub(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*", "", text)
    return text.split(". This is typically caused")[0].strip()


def is_timeout(text: str) -> bool:
    """Whether an error of c10d's tells of a time that ran out."""
    return "timed out" in text.lower() or "timeout" in text.lower()


class C10dCommunicator(Communicator):
    """One group's connection over a c10d process group that is made already."""

    arithmetic: ClassVar[Arithmetic | None] = None
    """What the class reduces rightly; None where only whoever wrote it knows."""
    lacking: ClassVar[frozenset[str]] = frozenset()
    """Verbs that the class lacks, or that are better built from its others."""
    gathers_uneven: ClassVar[bool] = False
    """Whether its all-gather takes tensors of several sizes."""

    def __init__(self, wire: str, rank: int, size: int, process_group: Any) -> None:
        super().__init__(wire, rank, size)
        self._group = process_group
        self._aborted = False
        self._mailbox = Mailbox()
        self._batch: list[Transfer] | None = None
        self._options: dict[Any, tuple[timedelta | None, Any]] = {}

    @classmethod
    def support(cls, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        if verb in REDUCING_VERBS:
            if cls.arithmetic is not None and find_lack(op, dtype) is not None:
                return ""
            stand_in = cls._stand_in(op, dtype)
            if stand_in is None or not stand_in.is_view:
                return "built"
        if verb in cls.lacking:
            return "built"
        return super().support(verb, device_type, dtype, op)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceKind, timeout: timedelta) -> Pending:
        dtype = tensor.dtype
        key = AllreduceOptions, op, dtype
        last_timeout, options = self._options.get(key, _NOT_MADE)
        if last_timeout is not timeout:
            stand_in = self._stand_in(op, dtype)
            if stand_in is None or stand_in.dtype is not dtype:
                return self._all_reduce_otherwise(tensor, op, stand_in, timeout)
            options = AllreduceOptions()
            options.reduceOp = stand_in.op  # type: ignore[assignment]
            options.timeout = self._bound(timeout)
            self._options[key] = timeout, options
        try:
            return self._group.allreduce([tensor], options)
        except RuntimeError as error:
            raise self._failure(error) from None

    def all_reduce_list(
        self, tensors: Sequence[torch.Tensor], op: ReduceKind, timeout: timedelta
    ) -> Pending:
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        parts = [self._all_reduce_alike(some, op, timeout) for some in by_dtype.values()]
        return parts[0] if len(parts) == 1 else Chain(parts)

    def reduce(
        self, tensor: torch.Tensor, op: ReduceKind, root: int, timeout: timedelta
    ) -> Pending:
        stand_in = self._stand_in(op, tensor.dtype)
        if stand_in is not None and stand_in.is_view:
            options = self._options_for(ReduceOptions, timeout, root, stand_in.op)
            started = self._start_if_there("reduce", [read_as(tensor, stand_in.dtype)], options)
            if started is not None:
                return started
        return super().reduce(tensor, op, root, timeout)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: timedelta) -> Pending:
        options = self._options_for(BroadcastOptions, timeout, root)
        return self._start("broadcast", [_movable(tensor)], options)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, timeout: timedelta) -> Pending:
        if output.numel() == 0:  # some refuse to cut nothing into blocks; wait for all the same
            return self.all_reduce(_movable(output), ReduceOp.MAX, timeout)
        options = self._options_for(AllgatherOptions, timeout)
        started = self._start_if_there(
            "_allgather_base", _movable(output), _movable(tensor), options
        )
        if started is not None:
            return started
        blocks = fallbacks.parts(output, [tensor.numel()] * self.size)
        return self._start("allgather", [_all_movable(blocks)], [_movable(tensor)], options)

    def all_gather_list(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout: timedelta
    ) -> Pending:
        count = tensor.numel()
        if self.gathers_uneven or all(out.numel() == count for out in outputs):
            options = self._options_for(AllgatherOptions, timeout)
            lists = [_all_movable(outputs)]
            started = self._start_if_there("allgather", lists, [_movable(tensor)], options)
            if started is not None:
                return started
        return super().all_gather_list(outputs, tensor, timeout)

    def gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        root: int,
        timeout: timedelta,
    ) -> Pending:
        options = self._options_for(GatherOptions, timeout, root)
        lists = [_all_movable(outputs)] if self.rank == root else []
        started = self._start_if_there("gather", lists, [_movable(tensor)], options)
        return super().gather(outputs, tensor, root, timeout) if started is None else started

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        root: int,
        timeout: timedelta,
    ) -> Pending:
        options = self._options_for(ScatterOptions, timeout, root)
        lists = [_all_movable(inputs)] if self.rank == root else []
        started = self._start_if_there("scatter", [_movable(tensor)], lists, options)
        return super().scatter(tensor, inputs, root, timeout) if started is None else started

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        op: ReduceKind,
        timeout: timedelta,
    ) -> Pending:
        if tensor.numel() == 0:
            return self.all_reduce(_movable(tensor), ReduceOp.SUM, timeout)
        stand_in = self._stand_in(op, tensor.dtype)
        if "reduce_scatter" not in self.lacking and stand_in is not None and stand_in.is_view:
            whole, mine = (read_as(x, stand_in.dtype) for x in (tensor, output))
            options = self._options_for(ReduceScatterOptions, timeout, op=stand_in.op)
            started = self._start_if_there("_reduce_scatter_base", mine, whole, options)
            if started is not None:
                return started
        sizes = [output.numel()] * self.size
        return fallbacks.reduce_scatter_by_exchange(self, output, tensor, sizes, op, timeout)

    def reduce_scatter_list(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: ReduceKind,
        timeout: timedelta,
    ) -> Pending:
        stand_in = self._stand_in(op, output.dtype)
        if "reduce_scatter_list" not in self.lacking and stand_in is not None and stand_in.is_view:
            parts = [read_as(part, stand_in.dtype) for part in inputs]
            mine = read_as(output, stand_in.dtype)
            options = self._options_for(ReduceScatterOptions, timeout, op=stand_in.op)
            started = self._start_if_there("reduce_scatter", [mine], [parts], options)
            if started is not None:
                return started
        sizes = [part.numel() for part in inputs]
        whole = self.scratch.take(sum(sizes), output)
        with torch.inference_mode():
            torch.cat([part.view(-1) for part in inputs], out=whole)
        started = fallbacks.reduce_scatter_by_exchange(self, output, whole, sizes, op, timeout)
        return Chain([started], lambda: self.scratch.give(whole))

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        timeout: timedelta,
    ) -> Pending:
        some, data = _all_movable(outputs), _all_movable(inputs)
        if "all_to_all" in self.lacking:
            return fallbacks.all_to_all_by_packing(self, some, data, timeout)
        started = self._start_if_there(
            "alltoall", some, data, self._options_for(AllToAllOptions, timeout)
        )
        return super().all_to_all(outputs, inputs, timeout) if started is None else started

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        timeout: timedelta,
    ) -> Pending:
        whole, data = _movable(output), _movable(tensor)
        takes, sends = output_sizes, input_sizes
        if data.dtype is not tensor.dtype:
            takes, sends = ([n * tensor.itemsize for n in sizes] for sizes in (takes, sends))
        options = self._options_for(AllToAllOptions, timeout)
        started = self._start_if_there("alltoall_base", whole, data, takes, sends, options)
        if started is not None:
            return started
        return super().all_to_all_single(output, tensor, output_sizes, input_sizes, timeout)

    def barrier(self, timeout: timedelta, device: torch.device | None = None) -> Pending:
        options = BarrierOptions()
        options.timeout = self._bound(timeout)
        if device is not None:
            options.device = device
        return self._start("barrier", options)

    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout: timedelta) -> Pending:
        if peer == self.rank:
            return self._mailbox.send(tensor, tag)
        slot = self._slot(tag, tensor)
        return self._transfer(self._start("send", [_movable(tensor)], peer, slot), peer, timeout)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, timeout: timedelta) -> Pending:
        if peer == self.rank:
            return self._mailbox.recv(tensor, tag)
        slot = self._slot(tag, tensor)
        if peer is None:
            if self.size == 1 or self._mailbox.has_sent(tag):
                return self._mailbox.recv(tensor, tag)
            # c10d refuses to receive nothing from anyone; a place for one byte takes it as well.
            place = _movable(tensor) if tensor.numel() else tensor.new_empty(1, dtype=torch.uint8)
            work = self._start("recv_anysource", [place], slot)
        else:
            work = self._start("recv", [_movable(tensor)], peer, slot)
        return self._transfer(work, peer, timeout)

    def has_sent_itself(self, tag: int) -> bool:
        return self._mailbox.has_sent(tag)

    @contextmanager
    def batch(self) -> Iterator[None]:
        if not getattr(self._group, "supports_coalescing", False):
            yield
            return
        # NCCL and its kin run what is started alone in the order of its start, so that two ranks
        # which both receive first would wait for ever; what goes out as one call has no order.
        self._start("_start_coalescing")
        transfers = self._batch = []
        try:
            yield
        except BaseException:
            with suppress(WireFailure):
                self._end_batch(transfers)
            raise
        self._end_batch(transfers)

    def finish(self, pending: Pending, timeout: timedelta) -> None:
        kind = type(pending)
        if kind is Chain:
            self.finish_chain(pending, timeout)
        elif kind is SelfTransfer:
            self._mailbox.finish(pending, timeout, lambda: self._aborted)
        else:
            try:
                (pending.work if kind is Transfer else pending).wait()
            except RuntimeError as error:
                raise self._failure(error) from None

    def is_finished(self, pending: Pending) -> bool:
        kind = type(pending)
        if kind is Chain:
            return self.is_chain_finished(pending)
        if kind is SelfTransfer:
            return bool(pending.done)
        return bool((pending.work if kind is Transfer else pending).is_completed())

    def source(self, pending: Pending) -> int:
        kind = type(pending)
        if kind is SelfTransfer:
            return self.rank
        if kind is not Transfer:
            return super().source(pending)
        return pending.peer if pending.peer is not None else int(pending.work._source_rank())

    def abort(self) -> None:
        self._aborted = True
        if self._group is not CLOSED:
            self._group.abort()

    def close(self) -> None:
        self._group = CLOSED

    @classmethod
    def _stand_in(cls, op: ReduceKind, dtype: torch.dtype) -> StandIn | None:
        return (
            StandIn(op, dtype, True) if cls.arithmetic is None else cls.arithmetic.find(op, dtype)
        )

    def _all_reduce_otherwise(
        self,
        tensor: torch.Tensor,
        op: ReduceKind,
        stand_in: StandIn | None,
        timeout: timedelta,
    ) -> Pending:
        if stand_in is None:
            return fallbacks.all_reduce_by_gathering(self, tensor, op, timeout)
        if stand_in.is_view:
            return self.all_reduce(read_as(tensor, stand_in.dtype), stand_in.op, timeout)
        return fallbacks.all_reduce_widened(self, tensor, op, stand_in.dtype, timeout)

    def _all_reduce_alike(
        self, tensors: Sequence[torch.Tensor], op: ReduceKind, timeout: timedelta
    ) -> Pending:
        """``all_reduce_list`` where all dtypes are equal."""
        stand_in = self._stand_in(op, tensors[0].dtype)
        if len(tensors) > 1 and stand_in is not None and stand_in.is_view:
            options = AllreduceCoalescedOptions()
            options.reduceOp = stand_in.op  # type: ignore[assignment]
            options.timeout = self._bound(timeout)
            views = tensors
            if stand_in.dtype is not tensors[0].dtype:
                views = [read_as(tensor, stand_in.dtype) for tensor in tensors]
            started = self._start_if_there("allreduce_coalesced", views, options)
            if started is not None:
                return started
        return super().all_reduce_list(tensors, op, timeout)

    def _options_for(
        self, kind: Any, timeout: timedelta, root: int | None = None, op: ReduceKind | None = None
    ) -> Any:
        """Options of c10d's, made once for calls that repeat."""
        key = kind, root, op
        last_timeout, options = self._options.get(key, _NOT_MADE)
        if last_timeout is not timeout:
            options = kind()
            options.timeout = self._bound(timeout)
            if root is not None:
                options.rootRank = root
            if op is not None:
                options.reduceOp = op
            self._options[key] = timeout, options
        return options

    def _start_if_there(self, verb: str, *arguments: Any) -> Pending | None:
        """Start it, as ``_start`` does; None where the class lacks it."""
        try:
            return self._start(verb, *arguments)
        except _VerbLacking:
            return None

    def _start(self, verb: str, *arguments: Any) -> Pending:
        """Call a method of c10d's, which starts it."""
        try:
            return getattr(self._group, verb)(*arguments)
        except RuntimeError as error:
            if isinstance(error, NotImplementedError) or _LACKING.search(str(error)):
                raise _VerbLacking(plain_text(error)) from None
            raise self._failure(error) from None

    def _transfer(self, work: Any, peer: int | None, timeout: timedelta) -> Transfer:
        transfer = Transfer(work, peer, timeout)
        if self._batch is not None:
            self._batch.append(transfer)
        return transfer

    def _end_batch(self, transfers: list[Transfer]) -> None:
        """Send the batch off; its one work is that of every transfer."""
        self._batch = None
        work = self._start("_end_coalescing")
        for transfer in transfers:
            transfer.work = work

    def _slot(self, tag: int, tensor: torch.Tensor) -> int:
        """The wire's own tag for a message."""
        return tag

    def _bound(self, timeout: timedelta) -> timedelta:
        """How long c10d itself shall wait in an operation, on a clock that nobody stops."""
        return timeout

    def _failure(self, error: RuntimeError) -> WireFailure:
        text = plain_text(error)
        if self._aborted:
            return WireAborted(text)
        if is_timeout(text):
            return WireTimeout(text)
        return WireFailure(text)


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, flat, in a dtype that every wire moves: its own, or its bytes."""
    return read_as(tensor, tensor.dtype if tensor.dtype in _MOVED else torch.uint8)


def _all_movable(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [_movable(tensor) for tensor in tensors]
