"""Gloo, opened for the members of one group alone, and the network devices that it uses.

Seen on torch 2.13: a wait on a collective that expires changes nothing and can be repeated, so
collectives are waited for in short slices that notice an abort and Ctrl-C. A wait on a send or
receive that expires closes all connections of its communicator at once, which frees everything
that waits there: ``abort`` uses just that, since Gloo's own abort frees nobody.

Gloo counts time on a clock that nobody can stop. So it is told to wait almost for ever, and how
long a verb may take is counted here: by slices, and for a send or receive by an alarm.

Sums and products of float16 and bfloat16 are rounded at every step; the smallest or largest of
numbers one of which is NaN may be either, but the same on every member.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch.distributed import DistNetworkError, ProcessGroupGloo, Store, Work

from ..reduce_ops import ReduceKind
from ..runtime.alarms import Alarm
from ..runtime.clock import clock
from ..runtime.hosts import num_cores
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
from .c10d import CLOSED, C10dCommunicator, is_timeout, plain_text
from .pending import Chain, Deferred
from .stand_ins import GLOO
from .tag_numbers import TagNumbers
from .transfers import Transfer

__all__ = ["GlooCommunicator", "GlooWire", "gloo_devices", "gloo_interfaces"]

_SLICE = timedelta(milliseconds=500)
_SPIN_S = 0.0005
_WATCH_S = 0.1
_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.001
_AT_ONCE = timedelta(milliseconds=10)
_ALMOST_FOR_EVER = timedelta(days=3650)
_EXPIRED_SLICE = "Operation timed out!"
_LOOPBACK = ("127.0.0.1",)
_YES = frozenset({"1", "y", "yes", "t", "true"})  # as c10d reads switches
_ABORT_TAG = (1 << 30) + 7  # of no message, see _slot
_LARGE_TAG = 1 << 13
_NUMBERED_SLOT = 1 << 28
_SMALL_SLOT = 1 << 29
_LARGE_SLOT = 1 << 30
_MOST_NUMBERED = 1 << 12


class GlooCommunicator(C10dCommunicator):
    """Gloo's connection: waits notice an abort, a timeout and Ctrl-C.

    Args:
        wire, rank, size, process_group: as for any of c10d.
        store: where members number the large tags that they use.
        spins: whether who waits may stay awake at first, since no rank of this host needs the core.
    """

    arithmetic = GLOO
    wants_senders = True
    # c10d's reduce-scatter is an all-reduce, of which each member keeps its block: twice the bytes
    # of an exchange, and its Work says for ever that it is not done. Its all-to-all of lists takes
    # equal sizes only, which a member cannot tell of the others.
    lacking = frozenset({"all_to_all", "reduce_scatter", "reduce_scatter_list"})

    def __init__(
        self,
        wire: str,
        rank: int,
        size: int,
        process_group: Any,
        store: Store,
        *,
        spins: bool = False,
    ) -> None:
        super().__init__(wire, rank, size, process_group)
        self._tag_numbers = TagNumbers(store)
        self._spins = spins and hasattr(os, "sched_yield")
        self._process_id = os.getpid()
        self._is_lazy = _connects_late()
        self.posts_at_once = not self._is_lazy
        _open.add(self)

    @classmethod
    def support(cls, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        if verb in ("send", "recv") and device_type != "cpu":
            return "built"
        return super().support(verb, device_type, dtype, op)

    def reduce(
        self, tensor: torch.Tensor, op: ReduceKind, root: int, timeout: timedelta
    ) -> Pending:
        # Gloo leaves partial results on the other members.
        if self.rank == root:
            return super().reduce(tensor, op, root, timeout)
        target = self.scratch.take(tensor.numel(), tensor)
        with torch.inference_mode():
            target.copy_(tensor.view(-1))
        started = super().reduce(target, op, root, timeout)
        return Chain([started], lambda: self.scratch.give(target))

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
        if type(pending) is Deferred:
            pending = pending.get_started()
        return super().source(pending.pendings[0] if type(pending) is Chain else pending)

    def is_finished(self, pending: Pending) -> bool:
        if type(pending) is Transfer:
            # Gloo learns that a message has come or gone only while somebody waits for it.
            return self._has_ended(pending)
        if type(pending) is Deferred:
            return self.is_deferred_finished(pending)
        return super().is_finished(pending)

    def finish(self, pending: Pending, timeout: timedelta) -> None:
        if type(pending) is not Work:
            if type(pending) is Transfer:
                self._finish_transfer(pending, timeout)
            elif type(pending) is Deferred:
                self.finish_deferred(pending, timeout, self._wait_until)
            else:
                super().finish(pending, timeout)
            return
        if self._spins and threading.current_thread() is threading.main_thread():
            _look_a_while(pending)  # another thread would take the time from this one
        try:
            pending.wait(_SLICE)
        except RuntimeError as error:
            if str(error) != _EXPIRED_SLICE:
                raise self._failure(error) from None
            self._finish_slowly(pending, timeout)

    def abort(self) -> None:
        self._aborted = True
        if not self._is_lazy:  # closing what still connects would end the process
            self._disconnect()

    def close(self) -> None:
        group, self._group = self._group, CLOSED
        if group is CLOSED:
            return
        if self._process_id != os.getpid():  # a forked child
            # Its threads stayed with the parent, and its end would wait for them for ever.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            return
        if self._is_lazy:
            return
        # The group ends only when all of its operations have, and one may be in flight that other
        # members do not come to.
        messages = [_start_expiring(group, peer) for peer in self._peers()]
        alarm = Alarm(group.options._timeout.total_seconds(), partial(_expire, messages))
        try:
            del group
        finally:
            alarm.off()

    def __del__(self) -> None:
        self.close()

    def _peers(self) -> list[int]:
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _disconnect(self) -> None:
        """Close all connections; whatever waits for one fails."""
        group = self._group
        if group is not CLOSED:
            _expire(_start_expiring(group, peer) for peer in self._peers())

    def _slot(self, tag: int, tensor: torch.Tensor) -> int:
        # Gloo ends the process where a message is larger than the tensor that receives it, and
        # takes a smaller one without a word. So size and dtype are part of its tag: a message
        # that does not fit is not received, and the timeout's report shows both calls. The usual
        # tag 0 has most room for that; large tags have it by their number, the first of them.
        if tag == 0:
            return _code(tensor.numel(), tensor.dtype)
        base = _SMALL_SLOT | tag << 16
        if tag >= _LARGE_TAG:
            number = self._number_of(tag)
            if number >= _MOST_NUMBERED:
                return _LARGE_SLOT + tag
            base = _NUMBERED_SLOT | number << 16
        return base | _code(tensor.numel(), tensor.dtype) & 0xFFFF

    def _number_of(self, tag: int) -> int:
        try:
            return self._tag_numbers.number_of(tag, lambda: self._aborted)
        except DistNetworkError:  # the store's server has ended: no tag has a new number
            return _MOST_NUMBERED
        except RuntimeError as error:
            raise self._failure(error) from None

    def _bound(self, timeout: timedelta) -> timedelta:
        return timeout if self._is_lazy else _ALMOST_FOR_EVER

    def _finish_slowly(self, pending: Any, timeout: timedelta) -> None:
        deadline = clock.now() + timeout.total_seconds()
        if not clock.stands():
            deadline -= _SLICE.total_seconds()  # gone by in the first slice
        while True:
            try:
                pending.wait(_SLICE)
                return
            except RuntimeError as error:
                if str(error) != _EXPIRED_SLICE:
                    raise self._failure(error) from None
            if self._aborted:
                raise WireAborted("aborted while waiting")
            if clock.now() > deadline:
                self._disconnect()
                raise _late(timeout)

    def _finish_transfer(self, transfer: Transfer, timeout: timedelta) -> None:
        if self._group is CLOSED:  # nothing could free who waits
            self._finish_closed(transfer)
            return
        if transfer.peer is None or transfer.has_waiter:
            self._finish_beside(transfer, timeout)
            return
        alarm = Alarm(timeout.total_seconds(), self._disconnect)
        try:
            transfer.work.wait(self._bound(timeout))
        except RuntimeError as error:
            if alarm.off() or self._aborted:
                raise self._failure(error) from None
            raise _late(timeout) from None
        if not alarm.off():
            raise _late(timeout)

    def _finish_closed(self, transfer: Transfer) -> None:
        """Finish what was done before the end; Gloo tells that only to who waits."""
        try:
            transfer.work.wait(_AT_ONCE)
        except RuntimeError:
            raise WireFailure("the group was closed before this message came or went") from None

    def _finish_beside(self, transfer: Transfer, timeout: timedelta) -> None:
        # A receive from any member belongs to no connection, so that closing all of them does
        # not free it: another thread waits, and this one watches for the abort.
        transfer.is_over(self._bound(timeout))
        transfer.extend(timeout)
        while not self._has_ended(transfer, _WATCH_S):
            if self._aborted:
                raise WireAborted("aborted while waiting for a message")
        if transfer.is_late:
            raise _late(timeout)
        try:
            transfer.check()
        except RuntimeError as error:
            raise self._failure(error) from None

    def _wait_until(self, is_so: Callable[[], bool], timeout: timedelta) -> None:
        deadline = clock.now() + timeout.total_seconds()
        awake_until = time.perf_counter() + _SPIN_S * self._spins
        pause = _PAUSE_S
        while not is_so():
            if clock.now() > deadline:
                raise _late(timeout)
            if time.perf_counter() < awake_until:
                os.sched_yield()
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _has_ended(self, transfer: Transfer, seconds: float = 0.0) -> bool:
        """Whether a transfer that another thread waits for is over within ``seconds``, or late."""
        if transfer.is_late or transfer.is_over(self._bound(transfer.timeout), seconds):
            return True
        if transfer.is_due():
            transfer.is_late = True
            self._disconnect()
        return transfer.is_late


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
        return GlooCommunicator(
            self.name,
            opening.rank,
            len(opening.ranks),
            group,
            opening.store,
            spins=opening.num_local <= num_cores(),
        )


def _look_a_while(work: Work) -> None:
    """Return when ``work`` is done, or it takes longer than is worth staying awake for.

    A core that has nothing to do falls asleep, and to wake it takes longer than a small message;
    yielding, this thread leaves it to Gloo's whenever one of those can run.
    """
    is_done, end = work.is_completed, time.perf_counter() + _SPIN_S
    while not is_done() and time.perf_counter() < end:
        os.sched_yield()


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
    if _connects_late():
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
    """28 bits that tell tensors of another size or dtype apart; programs repeat theirs."""
    digest = hashlib.blake2b(f"{numel} {dtype}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & _NUMBERED_SLOT - 1


def _connects_late() -> bool:
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in _YES


def _late(timeout: timedelta) -> WireTimeout:
    return WireTimeout(f"not finished after {timeout.total_seconds():g} s")


def _start_expiring(group: Any, peer: int) -> Any:
    """A receive of what is never sent; None where the connection is lost."""
    try:
        return group.recv([torch.zeros(1)], peer, _ABORT_TAG)
    except RuntimeError:
        return None


def _expire(messages: Iterable[Any]) -> None:
    """Let the first receive that can still expire do so, which closes all connections."""
    for message in messages:
        if message is None:
            continue
        try:
            message.wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if is_timeout(str(error)):
                return
            # That connection was lost already, and with it nothing expires: try the next.


def _close_all() -> None:
    """Close what the program left open, while there are threads that can end it."""
    for communicator in tuple(_open):
        communicator.close()


_open: weakref.WeakSet[GlooCommunicator] = weakref.WeakSet()
atexit.register(_close_all)


def _copy(output: torch.Tensor, data: torch.Tensor) -> None:
    with torch.inference_mode():  # it may be a parameter, or an inference tensor
        output.copy_(data)


register_wire(GlooWire())
