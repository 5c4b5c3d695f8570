"""The shared-memory wire: the ranks of one host, through memory that they share.

The work is done by a native core (``native/``), which takes addresses, counts and codes. Every call
is compared with the other members' before a result is returned, a member that ends is noticed by
its handle, and waiting ends at an abort; ``handshake`` tells how members come together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore

from ..arrays import dtype_name
from ..reduce_ops import ReduceKind, ReduceOp, find_refusal, op_name
from ..runtime.clock import clock
from ..runtime.hosts import free_bytes, num_cores
from . import fallbacks
from .base import (
    LARGEST_TAG,
    Communicator,
    MemberLost,
    MembersDisagree,
    Opening,
    Pending,
    PlainCalls,
    Wire,
    WireAborted,
    WireFailure,
    WireRefused,
    WireTimeout,
    register_wire,
)
from .core import core as _core
from .handshake import Shared, share
from .pending import Chain

__all__ = ["ShmCommunicator", "ShmWire"]

if _core is not None:
    clock.follow(_core.let_timeouts_stand)

_SUM = ReduceOp.SUM
_OTHER_OPS = (
    ReduceOp.AVG,
    ReduceOp.PRODUCT,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.BAND,
    ReduceOp.BOR,
    ReduceOp.BXOR,
)
_KIB = 1024
# Per member there are four slots, and per pair of members two rings. With two members larger ones
# measured faster: what is written anew has left the cores' own caches by then (messages of 4 MiB
# took 148 us through 2 MiB, 177 through 1). Many members get smaller ones, so that their slots
# together stay in the shared cache, and a group takes no more than some MiB.
_MEMORY = ((2, 512 * _KIB, 2048 * _KIB), (4, 256 * _KIB, 256 * _KIB), (None, 128 * _KIB, 64 * _KIB))
_ALIGNMENT = 4096


class _Started:
    """A collective or message in flight, with the tensors whose memory it uses."""

    __slots__ = ("kept", "message", "number", "ticket")

    def __init__(
        self, ticket: Any, number: int, kept: Any, message: tuple[bool, int, int] | None = None
    ) -> None:
        self.ticket = ticket
        self.number = number
        self.kept = kept
        self.message = message


class _Received:
    """A receive that is done, and where it came from."""

    __slots__ = ("source",)

    def __init__(self, source: int) -> None:
        self.source = source


class ShmCommunicator(Communicator):
    """One member's part of a group in shared memory.

    Args:
        opening: the group.
        core: the native communicator.
        is_waiting: whether its verbs wait, and return None, instead of going on in the background.
    """

    def __init__(self, opening: Opening, core: Any, *, is_waiting: bool = False) -> None:
        super().__init__("shm", opening.rank, len(opening.ranks))
        self._ranks = opening.ranks
        self._opening = opening
        self._num_buffers = 0
        self._core = core
        self._all_reduce = core.all_reduce
        self._is_waiting = is_waiting
        self._in_flight: dict[_Started, None] = {}
        self._waiting = None if is_waiting else ShmCommunicator(opening, core, is_waiting=True)

    @property
    def waiting(self) -> Communicator:
        return self._waiting or self

    @classmethod
    def support(cls, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        """Everything is native but what the core cannot reduce."""
        if _core is None:
            return ""
        if verb in _REDUCING and _codes(dtype, op) is None:
            return "built"
        return super().support(verb, device_type, dtype, op)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceKind, timeout: timedelta) -> Pending:
        codes = _sums[tensor.dtype] if op is _SUM else _codes(tensor.dtype, op)
        if codes is None:
            return fallbacks.all_reduce_by_gathering(self, tensor, op, timeout)
        dtype, number = codes
        place, count, seconds = tensor.data_ptr(), tensor.numel(), timeout.total_seconds()
        if not self._is_waiting:
            ticket = self._core.all_reduce_async(place, count, dtype, number, 1.0, seconds)
            return self._keep(_Started(ticket, self.number, tensor))
        status = self._all_reduce(place, count, dtype, number, 1.0, seconds)
        if status:
            raise self._failure(status, self._core.last_failure())
        return None

    def all_reduce_list(
        self, tensors: Sequence[torch.Tensor], op: ReduceKind, timeout: timedelta
    ) -> Pending:
        codes = _codes(tensors[0].dtype, op)
        if codes is None or any(tensor.dtype != tensors[0].dtype for tensor in tensors):
            return super().all_reduce_list(tensors, op, timeout)
        return self._start("all_reduce_list", tensors, timeout, *_places(tensors), *codes, 1.0)

    def reduce(
        self, tensor: torch.Tensor, op: ReduceKind, root: int, timeout: timedelta
    ) -> Pending:
        codes = _codes(tensor.dtype, op)
        if codes is None:
            return super().reduce(tensor, op, root, timeout)
        place = (tensor.data_ptr(), tensor.numel())
        return self._start("reduce", tensor, timeout, *place, *codes, root, 1.0)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: timedelta) -> Pending:
        place = (tensor.data_ptr(), *_amount(tensor))
        return self._start("broadcast", tensor, timeout, *place, root)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, timeout: timedelta) -> Pending:
        places = (output.data_ptr(), tensor.data_ptr(), *_amount(tensor))
        return self._start("all_gather", (output, tensor), timeout, *places)

    def all_gather_list(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout: timedelta
    ) -> Pending:
        outputs, (tensor,) = _movable(outputs), _movable([tensor])
        place = (tensor.data_ptr(), *_amount(tensor))
        return self._start("all_gather_v", (outputs, tensor), timeout, *_places(outputs), *place)

    def gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        root: int,
        timeout: timedelta,
    ) -> Pending:
        addresses = [output.data_ptr() for output in outputs]
        place = (tensor.data_ptr(), *_amount(tensor))
        return self._start("gather", (outputs, tensor), timeout, addresses, *place, root)

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        root: int,
        timeout: timedelta,
    ) -> Pending:
        addresses = [part.data_ptr() for part in inputs]
        arguments = (tensor.data_ptr(), addresses, *_amount(tensor), root)
        return self._start("scatter", (inputs, tensor), timeout, *arguments)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceKind, timeout: timedelta
    ) -> Pending:
        codes = _codes(tensor.dtype, op)
        if codes is None:
            return super().reduce_scatter(output, tensor, op, timeout)
        places = (output.data_ptr(), tensor.data_ptr(), output.numel())
        return self._start("reduce_scatter", (output, tensor), timeout, *places, *codes, 1.0)

    def reduce_scatter_list(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: ReduceKind,
        timeout: timedelta,
    ) -> Pending:
        codes = _codes(output.dtype, op)
        if codes is None:
            return super().reduce_scatter_list(output, inputs, op, timeout)
        arguments = (output.data_ptr(), output.numel(), *_places(inputs), *codes, 1.0)
        return self._start("reduce_scatter_v", (output, inputs), timeout, *arguments)

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        timeout: timedelta,
    ) -> Pending:
        outputs, inputs = _movable(outputs), _movable(inputs)
        _, code = _amount(inputs[0])
        places = (*_places(outputs), *_places(inputs))
        return self._start("all_to_all_v", (outputs, inputs), timeout, *places, code)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        timeout: timedelta,
    ) -> Pending:
        places = (*_cuts(output, output_sizes), *_cuts(tensor, input_sizes))
        _, code = _amount(tensor)
        return self._start("all_to_all_v", (output, tensor), timeout, *places, code)

    def barrier(self, timeout: timedelta, device: torch.device | None = None) -> Pending:
        return self._start("barrier", None, timeout)

    def shared_bytes(self, num_bytes: int, timeout: timedelta) -> torch.Tensor:
        stride = -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        made: list[Any] = []

        def attach(shared: Shared) -> None:
            _close_all(shared.processes)
            try:
                made.append(_core.Memory(shared.memory))
            finally:
                os.close(shared.memory)

        self._num_buffers += 1
        share(
            PrefixStore(f"buffer {self._num_buffers}", self._opening.store),
            self.rank,
            self._ranks,
            partial(_make_memory, stride * self.size),
            attach,
            timeout.total_seconds(),
        )
        (memory,) = made
        self._core.add_memory(memory)
        start = self.rank * stride
        # Cut before torch sees it: the storage of the tensor is this member's part alone.
        return torch.from_numpy(memory.array()[start : start + num_bytes])

    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout: timedelta) -> Pending:
        arguments = (tensor.data_ptr(), *_amount(tensor), peer, tag)
        if not self._is_waiting:
            ticket = self._core.send_async(*arguments, self.number)
            return self._keep(_Started(ticket, self.number, tensor, (True, peer, tag)))
        status = self._core.send(*arguments, timeout.total_seconds(), self.number)
        if status:
            raise self._transfer_failure(status, (True, peer, tag))
        return None

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, timeout: timedelta) -> Pending:
        place = -1 if peer is None else peer
        arguments = (tensor.data_ptr(), *_amount(tensor), place, tag)
        if not self._is_waiting:
            ticket = self._core.recv_async(*arguments, self.number)
            return self._keep(_Started(ticket, self.number, tensor, (False, place, tag)))
        status = self._core.recv(*arguments, timeout.total_seconds(), self.number)
        if status:
            raise self._transfer_failure(status, (False, place, tag))
        return _Received(self._core.last_source)

    def plain_calls(self, noting: dict[str, Any], timeout: timedelta) -> PlainCalls | None:
        if not noting:
            return None
        core, explain = self._core, noting["explain"]

        def failed(status: int) -> BaseException:
            return explain(self._failure(status, core.last_failure()))  # type: ignore[no-any-return]

        def message_failed(
            status: int, is_send: bool, peer: int, tag: int, note: int
        ) -> BaseException:
            failure, message = core.last_transfer_failure(), (is_send, peer, tag)
            return explain(self._failure(status, failure, note, message), note)  # type: ignore[no-any-return]

        facts = {
            **noting,
            "codes": _plain_codes(),
            "reductions": _plain_reductions(),
            "largest_tag": LARGEST_TAG,
            "failed": failed,
            "message_failed": message_failed,
        }
        return _core.ShmCalls(core, facts, timeout.total_seconds())  # type: ignore[no-any-return]

    def finish(self, pending: Pending, timeout: timedelta) -> None:
        kind = type(pending)
        if pending is None or kind is _Received:
            return
        if kind is Chain:
            self.finish_chain(pending, timeout)
            return
        status = pending.ticket.wait(timeout.total_seconds())
        self._in_flight.pop(pending, None)
        if status:
            failure = pending.ticket.failure()
            raise self._failure(status, failure, pending.number, pending.message)

    def is_finished(self, pending: Pending) -> bool:
        kind = type(pending)
        if pending is None or kind is _Received:
            return True
        if kind is Chain:
            return self.is_chain_finished(pending)
        return bool(pending.ticket.is_done())

    def source(self, pending: Pending) -> int:
        if isinstance(pending, _Received):
            return pending.source
        if isinstance(pending, _Started) and pending.message and not pending.message[0]:
            return int(pending.ticket.source)
        return super().source(pending)

    def abort(self) -> None:
        self._core.abort()

    def leave(self) -> None:
        self._core.announce_end()

    def close(self) -> None:
        self._core.close()

    def _start(self, name: str, kept: Any, timeout: timedelta, *arguments: Any) -> Pending:
        """Do a collective, or start it in the background."""
        seconds = timeout.total_seconds()
        if self._is_waiting:
            status = getattr(self._core, name)(*arguments, seconds)
            if status:
                raise self._failure(status, self._core.last_failure())
            return None
        ticket = getattr(self._core, f"{name}_async")(*arguments, seconds)
        return self._keep(_Started(ticket, self.number, kept))

    def _keep(self, started: _Started) -> _Started:
        """Let the tensors of what is in flight live, also where nobody keeps its Work."""
        in_flight = self._in_flight
        for _ in range(2):  # so that those whose Work was dropped are let go in time
            oldest = next(iter(in_flight), None)
            if oldest is None:
                break
            in_flight.pop(oldest, None)
            if not oldest.ticket.is_done():
                in_flight[oldest] = None
        in_flight[started] = None
        return started

    def _transfer_failure(self, status: int, message: tuple[bool, int, int]) -> WireFailure:
        return self._failure(status, self._core.last_transfer_failure(), self.number, message)

    def _failure(
        self,
        status: int,
        failure: dict[str, Any],
        number: int | None = None,
        message: tuple[bool, int, int] | None = None,
    ) -> WireFailure:
        known = _core.STATUSES
        cause = failure["cause"] if status == known["ABORTED"] and failure["cause"] else status
        text = failure["text"]
        if cause == known["TIMEOUT"]:
            return WireTimeout(text or "not finished in time")
        if cause == known["MISMATCH"]:
            if message is None:
                return MembersDisagree(text or "the members' calls differ", number)
            is_send, peer, tag = message
            message = is_send, peer if peer >= 0 else failure["source"], tag
            other = failure["other_note"]
            return MembersDisagree("a message does not fit", number, message, other)
        if cause == known["DIED"] or (cause == known["ABORTED"] and _gone(failure)):
            return _lost(failure, message)
        if cause == known["CLOSED"]:
            return WireFailure("the communicator was closed")
        return WireAborted(text or "the communicator was aborted")


def _gone(failure: dict[str, Any]) -> list[int]:
    """The members that have ended or closed their part."""
    members = failure["members"]
    return [k for k, seen in enumerate(members) if seen["has_exited"] or seen["was_closed"]]


def _lost(failure: dict[str, Any], message: tuple[bool, int, int] | None) -> MemberLost:
    """Who has gone, and how; of a message its other side where nobody else is known to."""
    members, gone = failure["members"], _gone(failure)
    member = failure["culprit"]
    if message is not None and message[1] in gone:
        member = message[1]
    elif member < 0:
        member = gone[0]
    has_ended = members[member]["has_exited"] or not members[member]["was_closed"]
    return MemberLost("has ended" if has_ended else "has closed this group", member)


class ShmWire(Wire):
    """Shared memory: CPU tensors among the ranks of one host."""

    name = "shm"
    device_types = frozenset({"cpu"})
    stand_in = "gloo"
    across_hosts = "hierarchical"
    compares_calls = True
    communicator_kind = ShmCommunicator

    def is_available(self) -> bool:
        """Whether its native core was built."""
        return _core is not None

    def why_unavailable(self) -> tuple[str, str]:
        """Why this machine cannot use the wire, and what mends it."""
        folder = Path(__file__).parents[2]
        if (folder / "CMakeLists.txt").exists():
            return (
                f"meshdist is imported from its source folder {folder}, where nothing is built",
                f"pip install -e {folder}, or start the program in another folder",
            )
        return (
            "its native core was not built: that takes Linux and a C++ compiler",
            "on Linux, install a C++ compiler and then meshdist anew",
        )

    def open(self, opening: Opening) -> Communicator:
        """Open the group's memory; raises WireRefused on every member where one cannot."""
        if not opening.is_one_host:
            raise WireRefused("its ranks run on several hosts")
        made: list[Any] = []

        def attach(shared: Shared) -> None:
            try:
                made.append(_core.Communicator(shared.memory, opening.rank, shared.processes))
            finally:
                os.close(shared.memory)

        try:
            share(
                opening.store,
                opening.rank,
                opening.ranks,
                partial(_make_segment, len(opening.ranks), opening.num_local > num_cores()),
                attach,
                opening.timeout.total_seconds(),
            )
        except BaseException:
            made.clear()  # nothing of it stays, however long the error is kept
            raise
        communicator = ShmCommunicator(opening, made[0])
        # The first call measures which stores suit the path between the members.
        communicator.waiting.barrier(opening.timeout)
        return communicator


def _make_segment(size: int, is_crowded: bool) -> int:
    """New memory for a group of ``size``; returns its open file."""
    slot, ring = next((s, r) for most, s, r in _MEMORY if most is None or size <= most)
    _check_room(_core.segment_bytes(size, slot, ring))
    return int(_core.create_segment(size, slot, ring, is_crowded))


def _make_memory(num_bytes: int) -> int:
    """New memory for buffers; returns its open file."""
    _check_room(num_bytes)
    return int(_core.create_memory(num_bytes))


def _check_room(num_bytes: int) -> None:
    """Raise MemoryError where the system would have to end processes to make room."""
    free = free_bytes()
    if num_bytes > free:
        raise MemoryError(f"{num_bytes:,} bytes are asked for, and {free:,.0f} are free")


def _close_all(files: Sequence[int]) -> None:
    for file in files:
        if file >= 0:
            os.close(file)


_REDUCING = frozenset(
    {"all_reduce", "all_reduce_list", "reduce", "reduce_scatter", "reduce_scatter_list"}
)


@cache
def _codes(dtype: torch.dtype, op: ReduceKind) -> tuple[int, int] | None:
    """The core's numbers for a dtype and a reduction; None where it cannot reduce them."""
    code = _core.DTYPES.get(dtype_name(dtype))
    number = _core.OPS.get(op_name(op))
    if code is None or number is None or not _core.can_reduce(code, number):
        return None
    return code, number


@cache
def _plain_codes() -> dict[torch.dtype, int]:
    """The core's numbers for the dtypes of plain tensors. (Complex ones may hold conjugates.)"""
    codes = {getattr(torch, name, torch.complex64): code for name, code in _core.DTYPES.items()}
    return {dtype: code for dtype, code in codes.items() if not dtype.is_complex}


@cache
def _plain_reductions() -> list[tuple[ReduceKind, int, int, dict[torch.dtype, bool]]]:
    """What the core reduces: op, its number, the core's, and the dtypes. SUM comes first."""
    found = []
    for op in (_SUM, *_OTHER_OPS):
        number = _core.OPS[op_name(op)]
        allowed = [dtype for dtype in _plain_codes() if find_refusal(op, dtype) is None]
        dtypes = {dtype: True for dtype in allowed if _codes(dtype, op) is not None}
        found.append((op, op.value, number, dtypes))
    return found


class _Sums(dict[torch.dtype, tuple[int, int] | None]):
    """``_codes`` of SUM; hashing an op takes longer than to add a few numbers."""

    def __missing__(self, dtype: torch.dtype) -> tuple[int, int] | None:
        self[dtype] = codes = _codes(dtype, _SUM)
        return codes


_sums = _Sums()


@cache
def _dtype_code(dtype: torch.dtype) -> int | None:
    code: int | None = _core.DTYPES.get(dtype_name(dtype))
    return code


def _amount(tensor: torch.Tensor) -> tuple[int, int]:
    """How many elements of which code travel: a tensor's own, or its bytes."""
    code = _dtype_code(tensor.dtype)
    if code is None:
        return tensor.numel() * tensor.element_size(), _core.DTYPES["uint8"]
    return tensor.numel(), code


def _movable(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors, in a dtype that the core knows: their own, or their bytes."""
    if not tensors or _dtype_code(tensors[0].dtype) is not None:
        return tensors
    return [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]


def _places(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    return [tensor.data_ptr() for tensor in tensors], [tensor.numel() for tensor in tensors]


def _cuts(tensor: torch.Tensor, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Addresses and counts of consecutive parts."""
    item, address = tensor.itemsize, tensor.data_ptr()
    places = [address]
    for size in sizes:
        address += size * item
        places.append(address)
    del places[-1]
    if _dtype_code(tensor.dtype) is not None:
        return places, list(sizes)
    return places, [size * item for size in sizes]


register_wire(ShmWire())
