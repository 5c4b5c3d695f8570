"""Gloo, opened for the members of one group alone, and the network devices that it uses.

Seen on torch 2.13: a wait on a collective that expires changes nothing and can be repeated, so
collectives are waited for in short slices that notice an abort and Ctrl-C. A wait on a send or
receive that expires closes all connections of its communicator at once, which frees everything
that waits there: ``abort`` uses just that, since Gloo's own abort frees nobody.

Sums and products of float16 and bfloat16 are rounded at every step; the smallest or largest of
numbers one of which is NaN may be either, but the same on every member.
"""

from __future__ import annotations

import os
import socket
import time
import zlib
from datetime import timedelta
from functools import cache, lru_cache
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Work

from ..reduce_ops import ReduceKind
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
from .c10d import C10dCommunicator, is_timeout, plain_text
from .pending import Chain
from .stand_ins import GLOO
from .transfers import Transfer

__all__ = ["GlooCommunicator", "GlooWire", "gloo_devices", "gloo_interfaces"]

_SLICE = timedelta(milliseconds=500)
_EXPIRED_SLICE = "Operation timed out!"
_LOOPBACK = ("127.0.0.1",)
_YES = frozenset({"1", "y", "yes", "t", "true"})  # as c10d reads switches
_ABORT_TAG = (1 << 30) + 7  # of no message, see _slot
_LARGE_TAG = 1 << 14
_LARGE_SLOT = 1 << 30


class GlooCommunicator(C10dCommunicator):
    """Gloo's connection: waits notice an abort, a timeout and Ctrl-C."""

    arithmetic = GLOO
    # c10d's reduce-scatter is an all-reduce, of which each member keeps its block: twice the bytes
    # of an exchange, and its Work says for ever that it is not done. Its all-to-all of lists takes
    # equal sizes only, which a member cannot tell of the others.
    lacking = frozenset({"all_to_all", "reduce_scatter", "reduce_scatter_list"})

    @classmethod
    def support(cls, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        if verb in ("send", "recv") and device_type != "cpu":
            return "built"
        return super().support(verb, device_type, dtype, op)

    def reduce(
        self, tensor: torch.Tensor, op: ReduceKind, root: int, timeout: timedelta
    ) -> Pending:
        # Gloo leaves partial results on the other members.
        target = tensor if self.rank == root else tensor.clone()
        return super().reduce(target, op, root, timeout)

    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout: timedelta) -> Pending:
        if peer != self.rank and not tensor.is_cpu:  # Gloo's messages know host memory alone
            tensor = tensor.cpu()
        return super().send(tensor, peer, tag, timeout)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, timeout: timedelta) -> Pending:
        if peer == self.rank or tensor.is_cpu:
            return super().recv(tensor, peer, tag, timeout)
        host = torch.empty_like(tensor, device="cpu")
        received = super().recv(host, peer, tag, timeout)
        return Chain([received], lambda: _copy(tensor, host))

    def source(self, pending: Pending) -> int:
        return super().source(pending.pendings[0] if type(pending) is Chain else pending)

    def is_finished(self, pending: Pending) -> bool:
        if type(pending) is Transfer:
            # Gloo learns that a message has come or gone only while somebody waits for it.
            return pending.is_over()
        return super().is_finished(pending)

    def finish(self, pending: Pending, timeout: timedelta) -> None:
        if type(pending) is not Work:
            if type(pending) is Transfer:
                self._finish_transfer(pending, timeout)
            else:
                super().finish(pending, timeout)
            return
        try:
            pending.wait(_SLICE)
        except RuntimeError as error:
            if str(error) != _EXPIRED_SLICE:
                raise self._failure(error) from None
            self._finish_slowly(pending, timeout)

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

    def _slot(self, tag: int, tensor: torch.Tensor) -> int:
        # Gloo ends the process where a message is larger than the tensor that receives it, and
        # takes a smaller one without a word. So size and dtype are part of its tag: a message
        # that does not fit is not received, and the timeout's report shows both calls. Large tags
        # leave no room for that.
        if tag >= _LARGE_TAG:
            return _LARGE_SLOT + tag
        return tag << 16 | _code(tensor.numel(), tensor.dtype)

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

    def _finish_transfer(self, transfer: Transfer, timeout: timedelta) -> None:
        try:
            if transfer.peer is None or transfer.has_waiter:
                self._finish_beside(transfer, timeout)
            else:
                transfer.work.wait(timeout)
        except RuntimeError as error:
            raise self._failure(error) from None

    def _finish_beside(self, transfer: Transfer, timeout: timedelta) -> None:
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


class GlooWire(Wire):
    """Gloo: CPU tensors over TCP, and CUDA tensors by way of host memory."""

    name = "gloo"
    device_types = frozenset({"cpu", "cuda"})
    communicator_kind = GlooCommunicator

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


@lru_cache(1024)
def _code(numel: int, dtype: torch.dtype) -> int:
    """16 bits that tell tensors of another size or dtype apart; programs repeat theirs."""
    return zlib.crc32(f"{numel} {dtype}".encode()) & 0xFFFF


def _copy(output: torch.Tensor, data: torch.Tensor) -> None:
    with torch.inference_mode():  # it may be a parameter, or an inference tensor
        output.copy_(data)


register_wire(GlooWire())
