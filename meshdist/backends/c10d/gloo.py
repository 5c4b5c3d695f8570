"""Run a group's operations over Gloo.

On torch 2.13, an expired wait on a collective can be repeated, so collectives are waited for in
short slices that detect an abort and Ctrl-C. An expired wait on a send or receive closes all
connections of its communicator and so releases all waiting threads: ``abort`` uses this, since
Gloo's own abort releases none.

Slices or a timer enforce timeouts. Gloo's own timeout is almost infinite, so its errors are never
timeouts.

Gloo rounds narrow floats at every step. So members exchange parts, each reduces its part in float32
in group order, and all share the results (``_reduce_shared``). This moves as many bytes as Gloo's
ring, and is bitwise equal to shared memory.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
from torch.distributed import DistNetworkError, Store

from ...checking.call_sites import is_of_handler
from ...dtypes import DTYPES
from ...reduce_ops import ReduceKind
from ...runtime.deadlines import Deadline, Timer, start_timers
from ...runtime.timeout_calls import await_calls_elsewhere, begin_elsewhere, keep_thread
from ..composed_collectives import all_reduce_by_gathering, reduce_scatter_by_exchange
from ..messages import TagNumbers
from ..operation_args import EXCHANGE_TAG, OperationArgs, cuts, parts, write
from ..requests import (
    DONE,
    BackendAborted,
    BackendFailure,
    BackendTimeout,
    MemberLost,
    Request,
    WorkerQueue,
    as_backend_failure,
    followed,
    reject_to_complete,
)
from .communicator import CLOSED, C10dCommunicator, C10dRequest, C10dTransfer
from .dtype_fallbacks import GLOO, DtypeFallback
from .gloo_connections import DroppedMessages, connects_late, drop_within, expire, start_expiring

_SLICE = timedelta(milliseconds=500)
_SPIN_S = 0.0005
_ABORT_LOOK_S = 0.1
_LOST_LOOK_S = 1.0
_LAST_S = 5.0  # for threads that wait for Gloo when the program exits
_AT_ONCE = timedelta(milliseconds=10)
_ALMOST_FOR_EVER = timedelta(days=3650)
_EXPIRED_SLICE = "Operation timed out!"
_GATHERED_BYTES = 1 << 20
"""Narrow floats of all members that are gathered as a whole: one step instead of two."""
_LONG_BYTES = 1 << 16
"""The size from which a message is waited for in another thread, which costs 0.05 ms."""
_LARGE_TAG = 1 << 13
_NUMBERED_SLOT = 1 << 28
_SMALL_SLOT = 1 << 29
_LARGE_SLOT = 1 << 30
_MOST_NUMBERED = 1 << 12
_OF_HOST_MEMORY = frozenset({"all_reduce_list", "send", "recv"})
"""Collectives that the class supports only for CPU tensors; its others stage CUDA tensors."""


class GlooRequest(C10dRequest):
    """A fast-path collective in Gloo; ``then`` completes the result at the end."""

    communicator: GlooCommunicator
    is_plain = True
    on_stream = False
    _has_expired = False

    def __init__(
        self,
        communicator: GlooCommunicator,
        limit: timedelta,
        work: Any,
        then: Callable[[], None] | None,
        note: int | None,
    ) -> None:
        self.communicator, self.work, self.then = communicator, work, then

    def wait(self, seconds: float) -> int:
        """Wait half a second, whatever ``seconds``; return 0 if done, else 1, for ``finish``."""
        try:
            self.work.wait(_SLICE)
        except RuntimeError as error:
            if is_of_handler(error):
                raise
            self._has_expired = str(error) == _EXPIRED_SLICE
            return 1
        if self.then is not None:
            with self.communicator.completing:  # another thread may complete it
                if (then := self.then) is not None:  # inlines ``complete``
                    self.then = reject_to_complete
                    then()
                    self.then = None
        return 0

    def finish(self, timeout: timedelta) -> None:
        if not self._has_expired and self.wait(0.0) == 0:
            return
        if self._has_expired:
            self._has_expired = False
            self.communicator.finish_slowly(self.work, timeout)
        else:
            self.communicator.finish_work(self.work, timeout)  # which raises
        self.wait(0.0)


class GlooCommunicator(C10dCommunicator):
    """Communicator over Gloo, whose waits detect an abort, a timeout and Ctrl-C.

    Args:
        store: members number large tags in it.
        spins: whether waits may spin first, since no other rank needs the core.
    """

    arithmetic = GLOO
    # c10d's reduce-scatter is an all-reduce of which each member keeps its block: it moves twice
    # the bytes of an exchange, and its Work never reports that it is done. Its all-to-all of lists
    # requires equal sizes, and a member does not know the other members' sizes.
    lacking = frozenset({"all_to_all", "reduce_scatter", "reduce_scatter_list"})
    spoils_others = True
    most_gathered_bytes = _GATHERED_BYTES
    operation_kind = GlooRequest

    def __init__(
        self,
        backend: str,
        rank: int,
        size: int,
        process_group: Any,
        store: Store,
        *,
        spins: bool = False,
        has_died: Callable[[int], bool] = lambda _: False,
    ) -> None:
        super().__init__(backend, rank, size, process_group)
        self._tag_numbers = TagNumbers(store)
        self._spins = spins and hasattr(os, "sched_yield")
        self._has_died = has_died
        self._exited: set[int] = set()  # members that left normally
        self._process_id = os.getpid()
        self.completing = threading.Lock()
        self._main_thread = threading.main_thread().ident
        self._is_lazy = connects_late()
        self.dropped = DroppedMessages(_ALMOST_FOR_EVER)
        self._queue = WorkerQueue(partial(_disconnect, weakref.ref(self)))
        self.posts_at_once = not self._is_lazy
        # Python 3.12 cannot start threads in atexit handlers, which close open groups.
        start_timers()
        keep_thread()
        _open.add(self)

    @classmethod
    def support(cls, operation: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        found = super().support(operation, device_type, dtype, op)
        return "built" if found and device_type != "cpu" and operation in _OF_HOST_MEMORY else found

    def _all_reduce_list(self, prepared: OperationArgs) -> Request:
        if prepared.outputs[0].is_cpu:
            return super()._all_reduce_list(prepared)
        return self.build(prepared)

    def _reduce(self, prepared: OperationArgs) -> Request:
        # Gloo leaves partial results on members other than the root.
        if self.rank == prepared.root:
            return super()._reduce(prepared)
        (tensor,) = prepared.outputs
        target = self.scratch.take(tensor.numel(), tensor)
        write(target, tensor)
        given = prepared.by("reduce", [target], [target], prepared.op, prepared.root)
        return followed(super()._reduce(given), lambda: self.scratch.give(target))

    def _send(self, prepared: OperationArgs) -> Request:
        (tensor,), peer, tag = prepared.inputs, prepared.root, prepared.tag
        if peer != self.rank and not tensor.is_cpu:  # Gloo's messages support only host memory
            prepared = prepared.by("send", [tensor.cpu()], (), root=peer, tag=tag)
        return super()._send(prepared)

    def _recv(self, prepared: OperationArgs) -> Request:
        (tensor,), peer, tag = prepared.outputs, prepared.root, prepared.tag
        if peer == self.rank or tensor.is_cpu:
            return super()._recv(prepared)
        host = torch.empty_like(tensor, device="cpu")
        received = super()._recv(prepared.by("recv", (), [host], root=peer, tag=tag))
        return followed(received, lambda: write(tensor, host))

    def finish_work(self, work: Any, timeout: timedelta) -> None:
        try:
            work.wait(_SLICE)
        except RuntimeError as error:
            if str(error) != _EXPIRED_SLICE:
                raise self.failure(error) from None
            self.finish_slowly(work, timeout)

    def own_timeout(self, timeout: timedelta) -> timedelta:
        return timeout if self._is_lazy else _ALMOST_FOR_EVER

    def failure(self, error: RuntimeError) -> BackendFailure:
        # Gloo raises from C++. If an error was raised in Python code, its source is a signal
        # handler, which Python runs when a Gloo call returns: it does not change the collective.
        if is_of_handler(error):
            raise error
        return super().failure(error)

    @property
    def is_closed(self) -> bool:
        """Return whether the communicator is closed."""
        return self.torch_group is CLOSED

    def disconnect(self) -> None:
        """Close all connections, so that operations in flight fail."""
        group = self.torch_group
        if group is not CLOSED:
            expire(start_expiring(group, peer) for peer in self._peers())

    def abort(self) -> None:
        self.is_aborted = True
        self._mailbox.abort()
        if not self._is_lazy:  # closing a connecting pair would end the process
            self.disconnect()

    def close(self) -> None:
        if self._process_id == os.getpid():
            self._queue.end()
        group, self.torch_group = self.torch_group, CLOSED
        if group is CLOSED:
            return
        if self._process_id != os.getpid():  # a forked child
            # Its threads exist only in the parent, and the destructor would wait for them forever.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            return
        has_waiting_threads = self.dropped.close()
        if self._is_lazy:
            return
        # The group's destructor waits for all operations, and other members may never call theirs.
        messages = [start_expiring(group, peer) for peer in self._peers()]
        if has_waiting_threads:
            expire(messages)
        timeout, last_references = group.options._timeout, [group]
        del group
        timer = Timer(timeout, partial(expire, messages))
        try:
            drop_within(timeout if any(messages) else timedelta(0), last_references)
        finally:
            timer.cancel()

    def __del__(self) -> None:
        self.close()

    def find_lost(self) -> MemberLost | None:
        """Return the failure of a receive from any member; None while a member may send."""
        group, peers = self.torch_group, self._peers()
        if group is CLOSED or self._is_lazy:  # the check would connect
            return None
        for peer in peers:
            if peer not in self._exited and start_expiring(group, peer) is None:
                if self._has_died(peer):
                    return MemberLost("has ended", peer)
                self._exited.add(peer)
        if len(self._exited) < len(peers):
            return None
        return MemberLost("has left this group, like all other ranks", peers[0])

    def _peers(self) -> list[int]:
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _slot(self, tag: int, tensor: torch.Tensor) -> int:
        # Gloo ends the process if a message is larger than the tensor that receives it, and accepts
        # a smaller message silently. Its tag therefore includes size and dtype: a mismatched
        # message is not received, and the timeout's report shows both calls. Tag 0 leaves most bits
        # for the hash; large tags are replaced by small numbers.
        if tag == 0:
            return _code(tensor.numel(), tensor.dtype)
        base = _SMALL_SLOT | tag << 16
        if tag >= _LARGE_TAG:
            number = _MOST_NUMBERED if tag == EXCHANGE_TAG else self._number_of(tag)
            if number >= _MOST_NUMBERED:
                return _LARGE_SLOT + tag
            base = _NUMBERED_SLOT | number << 16
        return base | _code(tensor.numel(), tensor.dtype) & 0xFFFF

    def _number_of(self, tag: int) -> int:
        try:
            return self._tag_numbers.number_of(tag, lambda: self.is_aborted)
        except DistNetworkError:  # the store's server has ended and cannot number the tag
            return _MOST_NUMBERED
        except RuntimeError as error:
            raise super().failure(error) from None

    def _all_reduce_otherwise(
        self, prepared: OperationArgs, substitute: DtypeFallback | None
    ) -> Request:
        (tensor,), op = prepared.outputs, prepared.op
        assert op is not None
        asked = substitute or DtypeFallback(op, tensor.dtype, True)
        if asked.is_view or DTYPES[asked.dtype].is_whole or not tensor.is_cpu:
            return super()._all_reduce_otherwise(prepared, substitute)
        if self.size * tensor.numel() * tensor.itemsize <= _GATHERED_BYTES:
            return all_reduce_by_gathering(self, prepared)
        return self._reduce_shared(prepared, tensor.view(-1))

    def _reduce_shared(self, prepared: OperationArgs, tensor: torch.Tensor) -> Request:
        """Exchange and reduce part j on member j; a job then sends all parts to all."""
        # The exchange starts here, since Gloo matches collectives by order. A thread then shares
        # the results by messages, so that other collectives can start before it finishes.
        sizes, timeout = cuts(tensor.numel(), self.size), prepared.timeout
        mine = (shares := parts(tensor, sizes))[self.rank]
        later = prepared.by("all_to_all", [mine] * self.size, shares, prepared.op).as_async()
        reduced = reduce_scatter_by_exchange(self, later, mine, tensor, sizes)

        def share() -> None:
            reduced.finish(timeout)
            self.build(later).finish(timeout)

        job = self._queue.start(share)
        try:
            if prepared.waits:
                job.finish(timeout)
        except BaseException as error:
            raise as_backend_failure(error, job.poll) from None
        return job

    def _request(self, prepared: OperationArgs, work: Any, note: int | None = None) -> Request:
        # Asynchronous calls are rarely small, and Gloo's threads need the cores for them. A second
        # spinning thread would take time from the main thread.
        if not prepared.waits:
            return GlooRequest(self, prepared.timeout, work, None, note)
        try:
            if self._spins and threading.get_ident() == self._main_thread:
                _spin_until(work.is_completed)
            self.finish_work(work, prepared.timeout)
            return DONE
        except BaseException as error:  # Gloo may still write to the caller's tensors
            raise as_backend_failure(error, work.is_completed) from None

    def _transfer(self, work: Any, prepared: OperationArgs) -> Request:
        self.dropped.look()
        is_long = (prepared.inputs or prepared.outputs)[0].nbytes >= _LONG_BYTES
        return GlooTransfer(self, work, prepared.root, prepared.timeout, is_long)

    def finish_slowly(self, work: Any, timeout: timedelta) -> None:
        """Wait for ``work`` in slices up to ``timeout``; raise BackendFailure, also if aborted."""
        deadline = Deadline(timeout - _SLICE)  # the first slice has passed
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                if str(error) != _EXPIRED_SLICE:
                    raise self.failure(error) from None
            if self.is_aborted:
                raise BackendAborted("aborted while waiting")
            if deadline.is_over:
                self.disconnect()
                raise BackendTimeout.after(timeout)


@dataclass(eq=False, slots=True)
class GlooTransfer(C10dTransfer):
    """A send or receive, whose wait must not be split into slices.

    Args:
        communicator, work, peer: as in ``C10dTransfer``.
        timeout: its timeout, from its first poll.
        is_long: whether a closed connection has probably moved a part of it.
    """

    # Gloo detects the end of a message only while a thread waits for it, so the first poll starts
    # such a thread. A message that is dropped before any wait is kept.

    communicator: GlooCommunicator
    timeout: timedelta
    is_long: bool = False
    _is_waited_for: bool = False
    _waited: threading.Event | None = None
    _error: RuntimeError | None = None
    _is_late: bool = False
    _lost: MemberLost | None = None
    _deadline: Deadline = field(init=False)
    _next_look: Deadline = field(init=False)

    def finish(self, timeout: timedelta) -> None:
        if self.communicator.is_closed:
            self._finish_closed()
        elif self.peer is None or self.is_long or self._waited is not None:
            self._finish_on_thread(timeout)
        else:
            self._finish_here(timeout)

    def poll(self) -> bool:
        return self._join(0.0)

    def __del__(self) -> None:
        if not self._is_waited_for and not self.communicator.is_closed:
            self.communicator.dropped.add(self.work, is_from_anyone=self.peer is None)

    def _finish_closed(self) -> None:
        """Finish a message that ended before the close; raise BackendFailure for others."""
        try:
            self.work.wait(_AT_ONCE)
        except RuntimeError:
            raise BackendFailure("the group was closed before this message was complete") from None

    def _finish_here(self, timeout: timedelta) -> None:
        timer = Timer(timeout, self.communicator.disconnect)
        self._is_waited_for = True
        try:
            self.work.wait(self.communicator.own_timeout(timeout))
        except RuntimeError as error:
            if timer.cancel() or self.communicator.is_aborted:
                raise self.communicator.failure(error) from None
            raise BackendTimeout.after(timeout) from None
        if not timer.cancel():
            raise BackendTimeout.after(timeout)

    def _finish_on_thread(self, timeout: timedelta) -> None:
        # Closing all connections releases neither a receive from any member, which belongs to no
        # connection, nor a message that is partly transferred (torch 2.13). Another thread waits,
        # and this thread checks for the abort.
        is_over = self._join(0.0)
        self._deadline = Deadline(timeout)
        while not is_over:
            if self.communicator.is_aborted:
                raise BackendAborted("aborted while waiting for a message")
            is_over = self._join(_ABORT_LOOK_S)
        if self._lost is not None:
            raise self._lost
        if self._is_late:
            raise BackendTimeout.after(timeout)
        if self._error is not None:
            raise self.communicator.failure(self._error) from None

    def _join(self, seconds: float) -> bool:
        """Wait for the work in a thread; return whether it ended, is late or lost.

        Args:
            seconds: the longest wait for the thread.
        """
        # Close all connections if it is late. That does not end a receive from any member, so check
        # whether a member that may send is left.
        if self._waited is None:
            self._deadline, self._next_look = Deadline(self.timeout), Deadline(_LOST_LOOK_S)
            self._waited = threading.Event()
            begin_elsewhere(partial(self._wait, self._waited))
        if self._waited.wait(seconds):
            return True
        if self.peer is None and self._next_look.is_over:
            self._next_look = Deadline(_LOST_LOOK_S)
            lost = self.communicator.find_lost()
            # A member's last message may still arrive.
            if lost is not None and not self._waited.wait(_LOST_LOOK_S):
                self._lost = lost
        if not self._is_late and self._deadline.is_over:
            self._is_late = True
            self.communicator.disconnect()
        return self._is_late or self._lost is not None

    def _wait(self, waited: threading.Event) -> None:
        self._is_waited_for = True
        try:
            self.work.wait(self.communicator.own_timeout(self.timeout))
        except RuntimeError as error:
            self._error = error
        finally:
            waited.set()


def _disconnect(alive: weakref.ref[GlooCommunicator]) -> None:
    if (communicator := alive()) is not None:
        communicator.disconnect()


def _spin_until(condition: Callable[[], bool]) -> None:
    """Poll ``condition`` without sleeping, for at most half a millisecond."""
    # Waking an idle core takes longer than a small message. By yielding, this thread leaves the
    # core to Gloo's threads whenever one can run.
    end = time.perf_counter() + _SPIN_S
    while not condition() and time.perf_counter() < end:
        os.sched_yield()


@lru_cache(1024)
def _code(numel: int, dtype: torch.dtype) -> int:
    """Return a 28-bit hash of a number of elements and a dtype."""
    digest = hashlib.blake2b(f"{numel} {dtype}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & _NUMBERED_SLOT - 1


def _close_all() -> None:
    """Close all open Gloo communicators at exit, while other threads still run."""
    for communicator in tuple(_open):
        communicator.close()
    await_calls_elsewhere(_LAST_S)


_open: weakref.WeakSet[GlooCommunicator] = weakref.WeakSet()
atexit.register(_close_all)
