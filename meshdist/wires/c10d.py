"""torch's own wires (Gloo, NCCL, UCC, XCCL), each opened for the members of one group alone.

The classes are built directly, without torch.distributed's world: no other rank takes part, and
a group's rank order is the one that its mesh gives.

Seen on torch 2.13 with Gloo: a wait on a collective that expires changes nothing and can be
repeated, so collectives are waited for in short slices that notice an abort and Ctrl-C. A wait on
a send or receive that expires closes all connections of its communicator at once, which frees
everything that waits there: ``abort`` uses just that, since Gloo's own abort frees nobody.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import zlib
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from ..arrays import dtype_name
from ..errors import DtypeError
from ..reduce_ops import ReduceKind, ReduceOp
from .base import (
    Communicator,
    Opening,
    Pending,
    Wire,
    WireAborted,
    WireFailure,
    WireTimeout,
    register_wire,
)
from .mailbox import Mailbox, SelfTransfer

__all__ = ["C10dCommunicator", "C10dWire", "GlooCommunicator", "GlooWire"]

_SLICE = timedelta(milliseconds=500)
_EXPIRED_SLICE = "Operation timed out!"
_LOOPBACK = ("127.0.0.1",)
_YES = frozenset({"1", "y", "yes", "t", "true"})  # as c10d reads switches
_ABORT_TAG = (1 << 30) + 7  # of no message, see _slot
_GLOO_DTYPES = frozenset(
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


_GLOO_REDUCES = _GLOO_DTYPES | {torch.complex64, torch.complex128}
_LARGE_TAG = 1 << 14
_LARGE_SLOT = 1 << 30


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, flat, in a dtype that every wire moves: its own, or its bytes."""
    flat = tensor.view(-1)
    if tensor.dtype in _GLOO_DTYPES:
        return flat
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def plain_text(error: Exception) -> str:
    """The first sentence of an error of c10d's, without source positions."""
    text = str(error).splitlines()[0] if str(error) else repr(error)
    text = re.sub(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*", "", text)
    return text.split(". This is typically caused")[0].strip()


def is_timeout(text: str) -> bool:
    """Whether an error of c10d's tells of a time that ran out."""
    return "timed out" in text.lower() or "timeout" in text.lower()


class _Transfer:
    """A started send or receive; its wait must not be cut into slices."""

    __slots__ = ("_error", "_waiter", "peer", "timeout", "work")

    def __init__(self, work: Any, peer: int | None, timeout: timedelta) -> None:
        self.work = work
        self.peer = peer
        self.timeout = timeout
        self._waiter: threading.Thread | None = None
        self._error: RuntimeError | None = None

    @property
    def has_waiter(self) -> bool:
        """Whether another thread waits for it, or has waited."""
        return self._waiter is not None

    def is_over(self, seconds: float = 0.0) -> bool:
        """Let another thread wait for it, and look for ``seconds`` whether that one is done."""
        if self._waiter is None:
            self._waiter = threading.Thread(
                target=self._wait, name="meshdist-transfer", daemon=True
            )
            self._waiter.start()
        self._waiter.join(seconds)
        return not self._waiter.is_alive()

    def check(self) -> None:
        """Raise what the other thread's wait raised."""
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        try:
            self.work.wait(self.timeout)
        except RuntimeError as error:
            self._error = error


class _OwnBlock:
    """A started reduce-scatter over Gloo: an all-reduce, of which each member keeps its block.

    c10d's own does the same, but its Work says for ever that it is not done.
    """

    __slots__ = ("_output", "_reduced", "work")

    def __init__(self, work: Any, reduced: torch.Tensor, output: torch.Tensor) -> None:
        self.work = work
        self._reduced: torch.Tensor | None = reduced
        self._output = output

    def settle(self, rank: int) -> None:
        """Write this member's block; the all-reduce is done."""
        if self._reduced is None:
            return
        size = self._output.numel()
        self._output.view(-1).copy_(self._reduced[rank * size : (rank + 1) * size])
        self._reduced = None


class C10dCommunicator(Communicator):
    """One group's connection over a c10d process group that ``make`` has built."""

    def __init__(self, wire: str, rank: int, size: int, process_group: Any) -> None:
        super().__init__(wire, rank, size)
        self._group = process_group
        self._aborted = False
        self._mailbox = Mailbox()
        self._reduce_options: tuple[Any, Any, Any, AllreduceOptions]
        self._reduce_options = (None, None, None, AllreduceOptions())

    def all_reduce(self, tensor: torch.Tensor, op: ReduceKind, timeout: timedelta) -> Pending:
        # Checked and made once for calls that repeat.
        last_op, last_timeout, last_dtype, options = self._reduce_options
        if last_op is not op or last_timeout is not timeout or last_dtype is not tensor.dtype:
            self._check_reducible(tensor.dtype)
            options = AllreduceOptions()
            options.reduceOp = op  # type: ignore[assignment]
            options.timeout = timeout
            self._reduce_options = (op, timeout, tensor.dtype, options)
        try:
            return self._group.allreduce([tensor], options)
        except RuntimeError as error:
            raise self._failure(error) from None

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: timedelta) -> Pending:
        options = BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.timeout = timeout
        try:
            return self._group.broadcast([_movable(tensor)], options)
        except RuntimeError as error:
            raise self._failure(error) from None

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, timeout: timedelta) -> Pending:
        if output.numel() == 0:  # c10d refuses to cut nothing into blocks; wait for all the same
            return self.all_reduce(_movable(output), ReduceOp.SUM, timeout)
        options = AllgatherOptions()
        options.timeout = timeout
        try:
            return self._group._allgather_base(_movable(output), _movable(tensor), options)
        except RuntimeError as error:
            raise self._failure(error) from None

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        op: ReduceKind,
        timeout: timedelta,
    ) -> Pending:
        if tensor.numel() == 0:
            return self.all_reduce(tensor, op, timeout)
        options = ReduceScatterOptions()
        options.reduceOp = op  # type: ignore[assignment]
        options.timeout = timeout
        try:
            return self._group._reduce_scatter_base(output.view(-1), tensor.view(-1), options)
        except RuntimeError as error:
            raise self._failure(error) from None

    def barrier(self, timeout: timedelta, device: torch.device | None = None) -> Pending:
        options = BarrierOptions()
        options.timeout = timeout
        if device is not None:
            options.device = device
        try:
            return self._group.barrier(options)
        except RuntimeError as error:
            raise self._failure(error) from None

    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout: timedelta) -> Pending:
        if peer == self.rank:
            return self._mailbox.send(tensor, tag)
        slot = self._slot(tag, tensor)
        try:
            return _Transfer(self._group.send([_movable(tensor)], peer, slot), peer, timeout)
        except RuntimeError as error:
            raise self._failure(error) from None

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, timeout: timedelta) -> Pending:
        if peer == self.rank:
            return self._mailbox.recv(tensor, tag)
        slot = self._slot(tag, tensor)
        try:
            if peer is None:
                work = self._group.recv_anysource([_movable(tensor)], slot)
            else:
                work = self._group.recv([_movable(tensor)], peer, slot)
            return _Transfer(work, peer, timeout)
        except RuntimeError as error:
            raise self._failure(error) from None

    def finish(self, pending: Pending, timeout: timedelta) -> None:
        if isinstance(pending, SelfTransfer):
            self._finish_self(pending, timeout)
            return
        work = pending.work if type(pending) is _Transfer else pending
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failure(error) from None

    def is_finished(self, pending: Pending) -> bool:
        if isinstance(pending, SelfTransfer):
            return pending.done
        work = pending.work if type(pending) is _Transfer else pending
        return bool(work.is_completed())

    def source(self, pending: Pending) -> int:
        if isinstance(pending, SelfTransfer):
            return self.rank
        if not isinstance(pending, _Transfer):
            return super().source(pending)
        return pending.peer if pending.peer is not None else int(pending.work._source_rank())

    def abort(self) -> None:
        self._aborted = True
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        self._group = None

    def _check_reducible(self, dtype: torch.dtype) -> None:
        """Raise where the wire would fail on ``dtype``, before anything is sent."""

    def _slot(self, tag: int, tensor: torch.Tensor) -> int:
        """The wire's own tag for a message."""
        return tag

    def _finish_self(self, transfer: SelfTransfer, timeout: timedelta) -> None:
        transfer.buffer()
        deadline = time.monotonic() + timeout.total_seconds()
        while not transfer.done:  # the counterpart can only come from another thread
            if self._aborted:
                raise WireAborted("aborted while waiting for a message of this rank to itself")
            if time.monotonic() > deadline:
                raise WireTimeout("no counterpart for a message of this rank to itself")
            time.sleep(0.001)

    def _failure(self, error: RuntimeError) -> WireFailure:
        text = plain_text(error)
        if self._aborted:
            return WireAborted(text)
        if is_timeout(text):
            return WireTimeout(text)
        return WireFailure(text)


class GlooCommunicator(C10dCommunicator):
    """Gloo's connection: waits notice an abort, a timeout and Ctrl-C."""

    def _check_reducible(self, dtype: torch.dtype) -> None:
        if dtype not in _GLOO_REDUCES:
            raise DtypeError(
                f"the wire 'gloo' does not reduce {dtype_name(dtype)}",
                expected=f"one of {', '.join(sorted(map(dtype_name, _GLOO_REDUCES)))}",
                fix="convert the tensor, for example to int32 or float32",
            )

    def _slot(self, tag: int, tensor: torch.Tensor) -> int:
        # Gloo ends the process where a message is larger than the tensor that receives it, and
        # takes a smaller one without a word. So size and dtype are part of its tag: a message
        # that does not fit is not received, and the timeout's report shows both calls. Large tags
        # leave no room for that.
        if tag >= _LARGE_TAG:
            return _LARGE_SLOT + tag
        return tag << 16 | zlib.crc32(f"{tensor.numel()} {tensor.dtype}".encode()) & 0xFFFF

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        op: ReduceKind,
        timeout: timedelta,
    ) -> Pending:
        reduced = tensor.view(-1).clone()
        return _OwnBlock(self.all_reduce(reduced, op, timeout), reduced, output)

    def is_finished(self, pending: Pending) -> bool:
        if type(pending) is _Transfer:
            # Gloo learns that a message has come or gone only while somebody waits for it.
            return pending.is_over()
        if type(pending) is not _OwnBlock:
            return super().is_finished(pending)
        if not pending.work.is_completed():
            return False
        with suppress(WireFailure):  # told to whoever waits
            self.finish(pending, _SLICE)
        return True

    def finish(self, pending: Pending, timeout: timedelta) -> None:
        if type(pending) is _Transfer:
            self._finish_transfer(pending, timeout)
            return
        if type(pending) is _OwnBlock:
            self.finish(pending.work, timeout)
            pending.settle(self.rank)
            return
        if isinstance(pending, SelfTransfer):
            self._finish_self(pending, timeout)
            return
        try:
            pending.wait(_SLICE)
        except RuntimeError as error:
            if str(error) != _EXPIRED_SLICE:
                raise self._failure(error) from None
            self._finish_slowly(pending, timeout)

    def _finish_slowly(self, pending: Any, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds() - _SLICE.total_seconds()
        while True:
            try:
                pending.wait(_SLICE)
                return
            except RuntimeError as error:
                if str(error) != _EXPIRED_SLICE:
                    raise self._failure(error) from None
            if self._aborted:
                raise WireAborted("aborted while waiting")
            if time.monotonic() > deadline:
                raise WireTimeout(f"not finished after {timeout.total_seconds():g} s")

    def _finish_transfer(self, transfer: _Transfer, timeout: timedelta) -> None:
        try:
            if transfer.peer is None or transfer.has_waiter:
                self._finish_beside(transfer, timeout)
            else:
                transfer.work.wait(timeout)
        except RuntimeError as error:
            raise self._failure(error) from None

    def _finish_beside(self, transfer: _Transfer, timeout: timedelta) -> None:
        # A receive from any member belongs to no connection, so that closing all of them does
        # not free it: another thread waits, and this one watches for the abort.
        transfer.timeout = timeout
        deadline = time.monotonic() + timeout.total_seconds() + _SLICE.total_seconds()
        while not transfer.is_over(_SLICE.total_seconds()):
            if self._aborted:
                raise WireAborted("aborted while waiting for a message")
            if time.monotonic() > deadline:
                raise WireTimeout(f"not finished after {timeout.total_seconds():g} s")
        transfer.check()

    def abort(self) -> None:
        self._aborted = True
        group = self._group
        if group is None or self.size == 1:
            return
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            try:
                group.recv([torch.zeros(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if is_timeout(str(error)):  # the expiry that closes all connections
                    return
                # That connection was lost already, and with it nothing expires: try the next.


class C10dWire(Wire):
    """A wire over one of torch's process-group classes, where this torch has it."""

    def __init__(self, name: str, class_name: str, device_types: frozenset[str]) -> None:
        self.name = name
        self.device_types = device_types
        self._class_name = class_name

    def is_available(self) -> bool:
        return hasattr(torch_distributed, self._class_name)

    def open(self, opening: Opening) -> Communicator:
        kind = getattr(torch_distributed, self._class_name)
        try:
            group = kind(opening.store, opening.rank, len(opening.ranks), opening.timeout)
        except RuntimeError as error:
            raise WireFailure(plain_text(error)) from None
        return C10dCommunicator(self.name, opening.rank, len(opening.ranks), group)


class NcclWire(C10dWire):
    """NCCL. Opening does not communicate unless a device is bound: then it connects at once."""

    default_timeout = timedelta(minutes=10)

    def __init__(self) -> None:
        super().__init__("nccl", "ProcessGroupNCCL", frozenset({"cuda"}))

    def is_available(self) -> bool:
        return super().is_available() and torch.cuda.is_available()

    def open(self, opening: Opening) -> Communicator:
        kind = torch_distributed.ProcessGroupNCCL
        options = opening.options if isinstance(opening.options, kind.Options) else kind.Options()
        options._timeout = opening.timeout
        # A failure is raised where it is waited for, never by ending the process behind its back.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        try:
            group = kind(opening.store, opening.rank, len(opening.ranks), options)
            if opening.device is not None and opening.device.type == "cuda":
                group.eager_connect_single_device(opening.device)
        except RuntimeError as error:
            raise WireFailure(plain_text(error)) from None
        return C10dCommunicator(self.name, opening.rank, len(opening.ranks), group)


class GlooWire(Wire):
    """Gloo: CPU tensors over TCP, and CUDA tensors by way of host memory."""

    name = "gloo"
    device_types = frozenset({"cpu", "cuda"})

    def is_available(self) -> bool:
        return True

    def open(self, opening: Opening) -> Communicator:
        kind: Any = ProcessGroupGloo
        given = isinstance(opening.options, kind._Options)
        options = opening.options if given else kind._Options()
        options._devices = gloo_devices(gloo_interfaces(opening.is_one_host))
        options._timeout = opening.timeout
        try:
            group = kind(opening.store, opening.rank, len(opening.ranks), options)
        except RuntimeError as error:
            text = plain_text(error)
            raise (WireTimeout if is_timeout(text) else WireFailure)(text) from None
        return GlooCommunicator(self.name, opening.rank, len(opening.ranks), group)


def gloo_interfaces(is_one_host: bool) -> tuple[str, ...]:
    """The network interfaces to use: those that GLOO_SOCKET_IFNAME lists, or loopback, or ()."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if named:
        return tuple(name.strip() for name in named.split(",") if name.strip())
    return _LOOPBACK if is_one_host else ()


def gloo_devices(interfaces: tuple[str, ...]) -> list[Any]:
    """One Gloo device per interface, shared by all groups of the process.

    Where TORCH_GLOO_LAZY_INIT makes groups connect on demand, each has its own: groups that share
    one then take each other's connections for theirs, and wait for ever (seen on torch 2.13).
    """
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in _YES:
        return _make_devices(interfaces)
    return list(_shared_devices(interfaces, os.getpid()))


@cache
def _shared_devices(interfaces: tuple[str, ...], process_id: int) -> tuple[Any, ...]:
    return tuple(_make_devices(interfaces))


def _make_devices(interfaces: tuple[str, ...]) -> list[Any]:
    if not interfaces:
        return [ProcessGroupGloo.create_default_device()]
    if interfaces == _LOOPBACK:
        return [ProcessGroupGloo.create_device(hostname=_LOOPBACK[0])]
    try:
        return [ProcessGroupGloo.create_device(interface=name) for name in interfaces]
    except RuntimeError as error:
        there = ", ".join(name for _, name in socket.if_nameindex())
        raise WireFailure(
            f"GLOO_SOCKET_IFNAME={','.join(interfaces)} names an interface that has no address "
            f"here; this host has {there}"
        ) from error


register_wire(GlooWire())
register_wire(NcclWire())
register_wire(C10dWire("ucc", "ProcessGroupUCC", frozenset({"cpu", "cuda"})))
register_wire(C10dWire("xccl", "ProcessGroupXCCL", frozenset({"xpu"})))
