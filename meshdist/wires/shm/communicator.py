"""The shared-memory wire: the ranks of one host, through memory that they share.

The native core (``native/``) does the work; it takes addresses, counts and codes. Every call is
compared with the other members' before a result is returned, a member that ends is noticed by its
pidfd, and waiting ends at an abort. ``handshake`` brings the members together.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from ...checking.calls import GroupFacts, Note, get_call
from ...dtypes import DTYPES
from ...reduce_ops import PLAIN_OPS, ReduceKind, ReduceOp
from ...runtime.deadlines import clock
from ...runtime.hosts import free_bytes, num_cores
from ...verb_table import REDUCING_VERBS
from .. import fallbacks
from ..communicator import LARGEST_TAG, Communicator, Explain, handed_to
from ..core import core as _core
from ..failures import Interrupted, WireRefused
from ..operations import DONE, Done, Operation, Terms
from ..packing import ROW_MAJOR, Layout, Sizes, Tensors, find_layout
from ..registry import Opening, Wire, register_wire
from .failures import failure_of
from .handshake import Shared, share

if TYPE_CHECKING:
    from ..native import FastPath

__all__ = ["ShmCommunicator", "ShmWire"]

if _core is not None:
    clock.follow(_core.let_timeouts_stand)

_SUM = ReduceOp.SUM
_KIB = 1024
# Per member there are four slots, and per pair of members two rings. With two members larger ones
# measured faster: what is written anew has left the cores' own caches by then (messages of 4 MiB
# took 148 us through 2 MiB, 177 through 1). Many members get smaller ones, so that their slots
# together stay in the shared cache, and a group takes no more than some MiB.
_MEMORY = ((2, 512 * _KIB, 2048 * _KIB), (4, 256 * _KIB, 256 * _KIB), (None, 128 * _KIB, 64 * _KIB))
_ALIGNMENT = 4096
_UNKNOWN = GroupFacts("", (), 0)

Places = Sequence[tuple[int, int]]
"""Of each buffer its address, and how many elements it has."""


@dataclass(eq=False, slots=True)
class ShmOperation(Operation):
    """A collective or message in flight.

    Args:
        ticket: the core's.
        in_flight: by ticket the tensors whose memory is in use.
        number: under which the group has noted it.
        message: of a message whether it is a send, the peer and the tag.
    """

    ticket: Any
    in_flight: dict[Any, Any]
    number: int
    message: tuple[bool, int, int] | None

    def finish(self, timeout: timedelta) -> None:
        ticket = self.ticket
        status = ticket.wait(timeout.total_seconds())
        self.in_flight.pop(ticket, None)
        if status:
            raise failure_of(status, ticket.failure(), self.number, self.message)

    def poll(self) -> bool:
        return bool(self.ticket.is_done())

    def source(self) -> int:
        if self.message is None or self.message[0]:
            return Operation.source(self)
        return int(self.ticket.source)


class ShmCommunicator(Communicator):
    """One member's part of a group in shared memory, over the native communicator ``core``."""

    averages_at_once = True
    shows_calls = True

    def __init__(self, opening: Opening, core: Any) -> None:
        super().__init__("shm", opening.rank, len(opening.ranks))
        self._opening = opening
        self._num_buffers = 0
        self._core = core
        self._run = core.run
        self._in_flight: dict[Any, Any] = {}
        _open.add(self)

    @classmethod
    def support(cls, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        """Everything is native but what the core cannot reduce."""
        if _core is None:
            return ""
        if verb in REDUCING_VERBS and _codes(dtype, op) is None:
            return "built"
        return super().support(verb, device_type, dtype, op)

    def takes_layouts(self, verb: str, tensors: Tensors, op: ReduceKind | None) -> bool:
        if verb == "all_reduce_list" and len({tensor.dtype for tensor in tensors}) > 1:
            return False
        return op is None or all(_codes(tensor.dtype, op) is not None for tensor in tensors)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceKind, terms: Terms) -> Operation:
        codes = _sums.get(tensor.dtype) if op is _SUM else _codes(tensor.dtype, op)
        if codes is None:
            return fallbacks.all_reduce_by_gathering(
                self, tensor, op, _noted(terms, "all_reduce", tensor, op)
            )
        # What `_start` does, without its call: this verb is the most frequent.
        layouts = () if tensor.is_contiguous() else _layouts([tensor])
        more = (0, tensor.data_ptr(), 0, (), (), _fingerprint(terms), layouts)
        call = (_core.VERBS["all_reduce"], tensor.numel(), *codes, *more)
        if not terms.waits:
            return self._started(
                self._core.start(*call, terms.timeout.total_seconds()), tensor, terms
            )
        return self._do(*call, terms.timeout.total_seconds())

    def all_reduce_list(self, tensors: Tensors, op: ReduceKind, terms: Terms) -> Operation:
        codes = _codes(tensors[0].dtype, op)
        if codes is None or any(tensor.dtype != tensors[0].dtype for tensor in tensors):
            return super().all_reduce_list(tensors, op, terms)
        return self._start(
            "all_reduce_list",
            tensors,
            terms,
            0,
            *codes,
            outs=_places(tensors),
            layouts=_layouts(tensors),
        )

    def reduce(self, tensor: torch.Tensor, op: ReduceKind, root: int, terms: Terms) -> Operation:
        codes = _codes(tensor.dtype, op)
        if codes is None:
            return super().reduce(tensor, op, root, _noted(terms, "reduce", tensor, op, root))
        place, layouts = tensor.data_ptr(), _layouts([tensor])
        count = tensor.numel()
        return self._start("reduce", tensor, terms, count, *codes, root, place, layouts=layouts)

    def broadcast(self, tensor: torch.Tensor, root: int, terms: Terms) -> Operation:
        place, layouts = tensor.data_ptr(), _layouts([tensor])
        amount = _amount(tensor)
        return self._start("broadcast", tensor, terms, *amount, 0, root, place, layouts=layouts)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, terms: Terms) -> Operation:
        places = (output.data_ptr(), tensor.data_ptr())
        return self._start("all_gather", (output, tensor), terms, *_amount(tensor), 0, 0, *places)

    def all_gather_list(self, outputs: Tensors, tensor: torch.Tensor, terms: Terms) -> Operation:
        outs, ins = _places(outputs), _places([tensor])
        code, kept = _amount(tensor)[1], (outputs, tensor)
        return self._start("all_gather_v", kept, terms, 0, code, outs=outs, ins=ins)

    def gather(self, outputs: Tensors, tensor: torch.Tensor, root: int, terms: Terms) -> Operation:
        place, outs = tensor.data_ptr(), _places(outputs)
        return self._start(
            "gather", (outputs, tensor), terms, *_amount(tensor), 0, root, 0, place, outs
        )

    def scatter(self, tensor: torch.Tensor, inputs: Tensors, root: int, terms: Terms) -> Operation:
        place, ins = tensor.data_ptr(), _places(inputs)
        return self._start(
            "scatter", (inputs, tensor), terms, *_amount(tensor), 0, root, place, ins=ins
        )

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceKind, terms: Terms
    ) -> Operation:
        codes = _codes(tensor.dtype, op)
        if codes is None:
            noted = _noted(terms, "reduce_scatter", tensor, op)
            return super().reduce_scatter(output, tensor, op, noted)
        places = (output.data_ptr(), tensor.data_ptr())
        kept = (output, tensor)
        return self._start("reduce_scatter", kept, terms, output.numel(), *codes, 0, *places)

    def reduce_scatter_list(
        self, output: torch.Tensor, inputs: Tensors, op: ReduceKind, terms: Terms
    ) -> Operation:
        codes = _codes(output.dtype, op)
        if codes is None:
            noted = _noted(terms, "reduce_scatter_list", inputs, op)
            return super().reduce_scatter_list(output, inputs, op, noted)
        outs, ins = _places([output]), _places(inputs)
        return self._start(
            "reduce_scatter_v", (output, inputs), terms, 0, *codes, outs=outs, ins=ins
        )

    def all_to_all(self, outputs: Tensors, inputs: Tensors, terms: Terms) -> Operation:
        outs, ins, code = _places(outputs), _places(inputs), _amount(inputs[0])[1]
        return self._start("all_to_all", (outputs, inputs), terms, 0, code, outs=outs, ins=ins)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, takes: Sizes, gives: Sizes, terms: Terms
    ) -> Operation:
        outs, ins, code = _cuts(output, takes), _cuts(tensor, gives), _amount(tensor)[1]
        return self._start("all_to_all", (output, tensor), terms, 0, code, outs=outs, ins=ins)

    def barrier(self, terms: Terms, device: torch.device | None = None) -> Operation:
        return self._start("barrier", None, terms)

    def shared_bytes(self, num_bytes: int, timeout: timedelta) -> torch.Tensor:
        stride = -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        self._num_buffers += 1
        opening = self._opening.below(f"buffer {self._num_buffers}", timeout=timeout)
        memory = _share(opening, partial(_make_memory, stride * self.size), _attach_memory)
        self._core.add_memory(memory)
        start = self.rank * stride
        # Cut before torch sees it: the storage of the tensor is this member's part alone.
        return torch.from_numpy(memory.array()[start : start + num_bytes])

    def send(self, tensor: torch.Tensor, peer: int, tag: int, terms: Terms) -> Operation:
        return self._start_message(tensor, terms, (True, peer, tag))

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, terms: Terms) -> Operation:
        return self._start_message(tensor, terms, (False, -1 if peer is None else peer, tag))

    def fast_path(self, entry: Any, explain: Explain, timeout: timedelta) -> FastPath:
        core = self._core

        def fail(
            status: int, note: int | None, message: tuple[bool, int, int] | None
        ) -> BaseException:
            failure = core.last_failure() if message is None else core.last_transfer_failure()
            return explain(failure_of(status, failure, note, message), note)

        def give_up(error: BaseException) -> None:
            explain(Interrupted(error), None)

        runner = _core.ShmRunner(core, fail, give_up, LARGEST_TAG, timeout.total_seconds())
        return _core.FastPath(entry, runner, _reductions())  # type: ignore[no-any-return]

    abort = handed_to("_core", "abort")
    leave = handed_to("_core", "announce_end")
    close = handed_to("_core", "close")

    def is_awaited(self, verb: str | None = None) -> bool:
        return bool(self._core.is_awaited())

    def _start(
        self,
        verb: str,
        kept: Any,
        terms: Terms,
        count: int = 0,
        dtype: int = 0,
        op: int = 0,
        root: int = 0,
        out: int = 0,
        data: int = 0,
        outs: Places = (),
        ins: Places = (),
        layouts: Sequence[Layout] = (),
    ) -> Operation:
        """Do a collective, or start it in the background."""
        places = (out, data, outs, ins)
        call = (_core.VERBS[verb], count, dtype, op, root, *places, _fingerprint(terms), layouts)
        seconds = terms.timeout.total_seconds()
        if not terms.waits:
            return self._started(self._core.start(*call, seconds), kept, terms)
        return self._do(*call, seconds)

    def _do(self, *call: Any) -> Operation:
        """Do a collective: the arguments are those of the core's ``run``."""
        try:
            status = self._run(*call)
        except BaseException as error:  # of a signal's handler
            raise Interrupted(error) from None
        if status:
            raise failure_of(status, self._core.last_failure())
        return DONE

    def _start_message(
        self, tensor: torch.Tensor, terms: Terms, message: tuple[bool, int, int]
    ) -> Operation:
        """Do a message, or start it: whether it is sent, its peer (-1 for any) and its tag."""
        is_send, peer, tag = message
        call = (is_send, tensor.data_ptr(), *_amount(tensor), peer, tag, terms.number)
        if not terms.waits:
            return self._started(self._core.start_transfer(*call), tensor, terms, message)
        status = self._core.run_transfer(*call, terms.timeout.total_seconds())
        if status:
            raise failure_of(status, self._core.last_transfer_failure(), terms.number, message)
        return DONE if is_send else Done(self._core.last_source)

    def _started(
        self, ticket: Any, kept: Any, terms: Terms, message: tuple[bool, int, int] | None = None
    ) -> Operation:
        """The operation of a ticket, whose tensors live as long, also where its Work is dropped."""
        in_flight = self._in_flight
        for _ in range(2):  # so that tickets whose Work was dropped are freed in time
            oldest = next(iter(in_flight), None)
            if oldest is None:
                break
            tensors = in_flight.pop(oldest, None)
            if not oldest.is_done():
                in_flight[oldest] = tensors
        in_flight[ticket] = kept
        return ShmOperation(ticket, in_flight, terms.number, message)


_open: WeakSet[ShmCommunicator] = WeakSet()


@atexit.register
def _keep_what_is_in_flight() -> None:
    """Let the interpreter that ends free no memory that a native thread may still write to."""
    for communicator in list(_open):
        for tensors in list(communicator._in_flight.values()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensors))


class ShmWire(Wire):
    """Shared memory: CPU tensors among the ranks of one host."""

    name = "shm"
    device_types = frozenset({"cpu"})
    replacement = "gloo"
    across_hosts = "hierarchical"
    compares_calls = True
    communicator_kind = ShmCommunicator
    descriptors_per_peer = 2  # its process's handle, and while members meet a connection

    def is_available(self) -> bool:
        """Whether its native core was built."""
        return _core is not None

    def why_unavailable(self) -> tuple[str, str]:
        """Why this machine cannot use the wire, and the fix."""
        folder = Path(__file__).parents[3]
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
        core = _share(
            opening,
            partial(_make_segment, len(opening.ranks), opening.num_local > num_cores()),
            lambda shared: _core.Communicator(shared.memory, opening.rank, shared.processes),
        )
        communicator = ShmCommunicator(opening, core)
        # The first call measures which stores suit the path between the members.
        communicator.barrier(Terms(opening.timeout, waits=True))
        return communicator


def _fingerprint(terms: Terms) -> int:
    """The number by which the core compares a call beside the arguments that it is given."""
    return 0 if terms.call is None else terms.call.call.fingerprint


def _noted(terms: Terms, verb: str, tensor: Any, op: ReduceKind, root: int | None = None) -> Terms:
    """The terms of a reduction that is done by moving data, which shows neither verb nor op."""
    if terms.call is not None:
        return terms
    return terms._replace(call=Note(terms.number, _UNKNOWN, get_call(verb, tensor, op, root)))


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


def _attach_memory(shared: Shared) -> Any:
    """Memory for buffers, which needs no handles of processes."""
    for handle in shared.processes:
        if handle >= 0:
            os.close(handle)
    return _core.Memory(shared.memory)


def _share(opening: Opening, make: Callable[[], int], attach: Callable[[Shared], Any]) -> Any:
    """The result of ``attach`` on memory that all members share; ``make`` opens it on the first."""
    made: list[Any] = []

    def attach_and_close(shared: Shared) -> None:
        try:
            made.append(attach(shared))
        finally:
            os.close(shared.memory)

    seconds = opening.timeout.total_seconds()
    try:
        share(opening.store, opening.rank, opening.ranks, make, attach_and_close, seconds)
    except BaseException:
        made.clear()  # nothing of it stays, however long the error is kept
        raise
    return made[0]


_known: dict[str, int] = {} if _core is None else _core.DTYPES
_CODES = {dtype: _known[one.name] for dtype, one in DTYPES.items() if one.name in _known}
"""The core's number of each dtype that it has; others travel as bytes."""


@cache
def _codes(dtype: torch.dtype, op: ReduceKind) -> tuple[int, int] | None:
    """The core's numbers for a dtype and a reduction; None where it cannot reduce them."""
    code, number = _CODES.get(dtype), _core.OPS.get(op.name)
    if code is None or number is None or not _core.can_reduce(code, number):
        return None
    return code, number


# Hashing an op takes longer than to add a few numbers.
_sums = {dtype: _codes(dtype, _SUM) for dtype in _CODES}


@cache
def _reductions() -> list[tuple[ReduceKind, int, dict[torch.dtype, tuple[int, int]]]]:
    """The core's reductions: op, its number, and its codes for each dtype. SUM comes first."""
    found = []
    for op in PLAIN_OPS:
        codes = {dtype: _codes(dtype, op) for dtype in _CODES}
        found.append((op, op.value, {one: pair for one, pair in codes.items() if pair}))
    return found


def _amount(tensor: torch.Tensor) -> tuple[int, int]:
    """How many elements of which code travel: a tensor's own, or its bytes."""
    code = _CODES.get(tensor.dtype)
    if code is None:
        return tensor.numel() * tensor.element_size(), _core.DTYPES["uint8"]
    return tensor.numel(), code


def _places(tensors: Tensors) -> Places:
    """Where each lies, and how much of it travels."""
    return [(tensor.data_ptr(), _amount(tensor)[0]) for tensor in tensors]


def _layouts(tensors: Tensors) -> Sequence[Layout]:
    """How each lies, in units of what travels; () where all are in row-major order."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return ()
    return [_layout(tensor) for tensor in tensors]


def _layout(tensor: torch.Tensor) -> Layout:
    found = find_layout(tensor)
    assert found is not None  # as takes_layouts demands
    item = tensor.itemsize
    if found == ROW_MAJOR or tensor.dtype in _CODES:
        return found
    sizes, strides = found  # others travel as bytes
    return (*sizes, item), (*(step * item for step in strides), 1)


def _cuts(tensor: torch.Tensor, sizes: Sizes) -> Places:
    """The same of consecutive parts."""
    item = tensor.itemsize
    scale = 1 if tensor.dtype in _CODES else item  # others travel as bytes
    starts = accumulate((size * item for size in sizes), initial=tensor.data_ptr())
    return [(start, size * scale) for start, size in zip(starts, sizes, strict=False)]


register_wire(ShmWire())
