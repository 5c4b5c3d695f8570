"""Run operations in shared memory among one host's ranks.

The native core (``native/``) takes addresses, counts and codes. It compares every call with the
other members' before it returns a result, detects exited members by their pidfds, and ends waits at
an abort.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...operation_table import BACKEND_OPERATIONS, REDUCING_OPERATIONS, TensorLayout
from ...reduce_ops import PLAIN_OPS, ReduceKind
from ...runtime.hosts import free_bytes, num_cores
from ..communicator import Communicator, Explain
from ..composed_collectives import COMPOSED, all_reduce_by_gathering
from ..native_core import DTYPE_CODES, REDUCTION_CODES, core as _core
from ..operation_args import (
    LARGEST_TAG,
    ROW_MAJOR,
    Layout,
    OperationArgs,
    Sizes,
    Tensors,
    find_layout,
)
from ..registry import BackendType, Opening, register_backend
from ..requests import (
    DONE,
    BackendAborted,
    BackendFailure,
    BackendTimeout,
    BackendUnsupported,
    Done,
    Interrupted,
    MemberLost,
    MemberStopped,
    RanksMismatch,
    Request,
)
from .attach import Shared, share

if TYPE_CHECKING:
    from ..native import FastPath

if _core is not None:
    Request.register(_core.Started)

_KIB = 1024
# Each member has four slots, and each pair of members two rings. For two members, larger sizes are
# faster, because reused memory has left the cores' private caches (messages of 4 MiB took 148 us
# through 2 MiB, 177 us through 1 MiB). Many members get smaller sizes, so that all slots stay in
# the shared cache and a group takes only a few MiB.
_MEMORY = ((2, 512 * _KIB, 2048 * _KIB), (4, 256 * _KIB, 256 * _KIB), (None, 128 * _KIB, 64 * _KIB))
_ALIGNMENT = 4096

Places = Sequence[tuple[int, int]]
"""The address of each buffer, and how many elements it has."""


class ShmCommunicator(Communicator):
    """Communicator over the native communicator ``core``."""

    implementations: ClassVar[Mapping[str, str]] = dict.fromkeys(BACKEND_OPERATIONS, "start")
    averages_at_once = True

    def __init__(self, opening: Opening, core: Any) -> None:
        super().__init__("shm", opening.rank, len(opening.ranks))
        self._opening = opening
        self._num_buffers = 0
        self._core = core
        self._run = core.run

    @classmethod
    def support(cls, operation: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        if _core is None:
            return ""
        if operation in REDUCING_OPERATIONS and (dtype, op.value) not in REDUCTION_CODES:
            return "built"
        if operation in COMPOSED and operation not in _CORE_OPERATIONS:
            return "built"
        return super().support(operation, device_type, dtype, op)

    def takes_layouts(self, operation: str, tensors: Tensors, op: ReduceKind | None) -> bool:
        if (
            BACKEND_OPERATIONS[operation].gives is TensorLayout.ANY
            and len({tensor.dtype for tensor in tensors}) > 1
        ):
            return False
        return op is None or all((tensor.dtype, op.value) in REDUCTION_CODES for tensor in tensors)

    def start(self, prepared: OperationArgs) -> Request:
        backend_operation, op, inputs, outputs = (
            prepared.backend_operation,
            prepared.op,
            prepared.inputs,
            prepared.outputs,
        )
        if backend_operation not in _CORE_OPERATIONS:
            return (
                self.build(prepared) if backend_operation in COMPOSED else self._message(prepared)
            )
        operation, takes, gives = _CORE_OPERATIONS[backend_operation]
        tensors = outputs or inputs
        codes: tuple[int, int] | None = (0, 0)
        scale = 1  # what an element counts in the core
        if tensors:
            dtype = tensors[0].dtype
            if op is not None:
                codes = REDUCTION_CODES.get((dtype, op.value))
                if len(tensors) > 1 and len({x.dtype for x in tensors}) > 1:
                    codes = None
            elif dtype in DTYPE_CODES:
                codes = DTYPE_CODES[dtype], 0
            else:
                codes, scale = _BYTES, dtype.itemsize
        if codes is None:
            return COMPOSED.get(backend_operation, all_reduce_by_gathering)(self, prepared)
        layouts: Sequence[Layout] = ()
        if takes is _IN_PLACE:
            out, count, outs = _placed(gives, outputs, (), scale)
            data, _, ins = _NOWHERE
            if not all(map(torch.Tensor.is_contiguous, outputs)):  # in row-major order
                layouts = list(map(_layout, outputs))
        else:
            sent, received = prepared.sizes or ((), ())
            out, num_out, outs = _placed(gives, outputs, received, scale)
            data, num_in, ins = _placed(takes, inputs, sent, scale)
            count = min(num_out, num_in) if num_in and num_out else num_in or num_out
        fingerprint = 0
        if (call := prepared.call) is not None:
            fingerprint = call.unseen if prepared.shows_all else call.fingerprint
        code, number = codes
        root, seconds = prepared.root or 0, prepared.timeout.total_seconds()
        more = data, outs, ins, fingerprint, layouts, seconds
        if not prepared.waits:
            kept = outputs, inputs
            return self._core.start(  # type: ignore[no-any-return]
                operation, count, code, number, root, out, *more, kept, prepared.sequence
            )
        try:
            status = self._run(operation, count, code, number, root, out, *more)
        except BaseException as error:  # of a signal's handler
            raise Interrupted(error) from None
        if status:
            raise failure_of(status, self._core.last_failure())
        return DONE

    def _message(self, prepared: OperationArgs) -> Request:
        """Run a send or receive if the caller waits, else start it."""
        is_send, peer = not prepared.outputs, prepared.root
        (tensor,) = prepared.inputs or prepared.outputs
        message = is_send, -1 if peer is None else peer, prepared.tag
        number, code = prepared.sequence, DTYPE_CODES.get(tensor.dtype)
        amount = (tensor.nbytes, _BYTES[0]) if code is None else (tensor.numel(), code)
        call = (is_send, tensor.data_ptr(), *amount, *message[1:], number)
        if not prepared.waits:
            return self._core.start_transfer(*call, tensor, message)  # type: ignore[no-any-return]
        status = self._core.run_transfer(*call, prepared.timeout.total_seconds())
        if status:
            raise failure_of(status, self._core.last_transfer_failure(), number, message)
        return DONE if is_send else Done(self._core.last_source)

    def shared_bytes(self, num_bytes: int, timeout: timedelta) -> torch.Tensor:
        stride = -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        self._num_buffers += 1
        opening = self._opening.below(f"buffer {self._num_buffers}", timeout=timeout)
        memory = _share(opening, partial(_make_memory, stride * self.size), _attach_memory)
        self._core.add_memory(memory)
        start = self.rank * stride
        # Slice it before torch wraps it, so that the tensor's storage is only this member's part.
        return torch.from_numpy(memory.array()[start : start + num_bytes])

    def fast_path(
        self, entry: Any, explain: Explain, timeout: timedelta, works: tuple[Any, ...]
    ) -> FastPath:
        core = self._core

        def fail(
            status: int, note: int | None, message: tuple[bool, int, int] | None
        ) -> BaseException:
            failure = core.last_failure() if message is None else core.last_transfer_failure()
            return explain(failure_of(status, failure, note, message), note)

        def give_up(error: BaseException) -> None:
            explain(Interrupted(error), None)

        runner = _core.ShmRunner(core, fail, give_up, LARGEST_TAG, timeout.total_seconds())
        path: FastPath = _core.FastPath(entry, runner, _reductions())
        path.starting = _core.FastPath(entry, runner, _reductions(), works)
        return path

    def abort(self) -> None:
        self._core.abort()

    def leave(self) -> None:
        self._core.announce_end()

    def close(self) -> None:
        self._core.close()


class ShmBackend(BackendType):
    """Shared memory: CPU tensors among the ranks of one host."""

    name = "shm"
    device_types = frozenset({"cpu"})
    replacement = "gloo"
    compares_calls = True
    communicator_kind = ShmCommunicator
    descriptors_per_peer = 2  # its process's pidfd, and while members meet a connection

    def is_available(self) -> bool:
        return _core is not None

    def why_unavailable(self) -> tuple[str, str]:
        folder = Path(__file__).parents[3]
        if (folder / "CMakeLists.txt").exists():
            return (
                f"meshdist is imported from its source folder {folder}, without a native core",
                f"run `pip install -e {folder}`, or start the program in another folder",
            )
        return (
            "the native core was not built: it requires Linux and a C++ compiler",
            "on Linux, install a C++ compiler and reinstall meshdist",
        )

    def open(self, opening: Opening) -> Communicator:
        """Open the group's memory; raise BackendUnsupported on all members if one cannot."""
        if not opening.is_one_host:
            raise BackendUnsupported("its ranks run on several hosts")
        core = _share(
            opening,
            partial(_make_segment, len(opening.ranks), opening.num_local > num_cores()),
            lambda shared: _core.Communicator(shared.memory, opening.rank, shared.processes),
        )
        communicator = ShmCommunicator(opening, core)
        # The first call measures which store instructions are fastest between the members.
        communicator.start(OperationArgs("", "barrier", (), ()).as_own(opening.timeout))
        return communicator


def _make_segment(size: int, is_crowded: bool) -> int:
    """Create the memory of a group of ``size``; return its file descriptor.

    Args:
        is_crowded: whether ranks outnumber the host's cores: then waits do not spin.
    """
    slot, ring = next((s, r) for most, s, r in _MEMORY if most is None or size <= most)
    _check_free_memory(_core.segment_bytes(size, slot, ring))
    return int(_core.create_segment(size, slot, ring, is_crowded))


def _make_memory(num_bytes: int) -> int:
    """Create shared memory of ``num_bytes``; return its file descriptor."""
    _check_free_memory(num_bytes)
    return int(_core.create_memory(num_bytes))


def _check_free_memory(num_bytes: int) -> None:
    """Raise MemoryError if the system has fewer than ``num_bytes`` free."""
    free = free_bytes()
    if num_bytes > free:
        raise MemoryError(f"{num_bytes:,} bytes are needed, but only {free:,.0f} are free")


def _attach_memory(shared: Shared) -> Any:
    """Map memory for buffers; close the unneeded process handles."""
    for pidfd in shared.processes:
        if pidfd >= 0:
            os.close(pidfd)
    return _core.Memory(shared.memory)


def _share(opening: Opening, make: Callable[[], int], attach: Callable[[Shared], Any]) -> Any:
    """Return ``attach``'s result on memory that ``make`` opened on the first member."""
    made: list[Any] = []

    def attach_and_close(shared: Shared) -> None:
        try:
            made.append(attach(shared))
        finally:
            os.close(shared.memory)

    seconds = opening.timeout.total_seconds()
    try:
        of_group = opening.store, opening.rank, opening.ranks
        share(*of_group, make, attach_and_close, seconds, opening.find_lost)
    except BaseException:
        made.clear()  # the error may be kept, and must not keep the memory
        raise
    return made[0]


_BYTES = (DTYPE_CODES.get(torch.uint8, 0), 0)


@cache
def _reductions() -> list[tuple[ReduceKind, int, dict[torch.dtype, int]]]:
    """Return the core's reductions: op, number, and code by dtype."""
    codes = [(number, dtype, code) for (dtype, number), (_, code) in REDUCTION_CODES.items()]
    return [
        (op, op.value, {dtype: code for number, dtype, code in codes if number == op.value})
        for op in PLAIN_OPS
    ]


def _core_operations() -> dict[str, tuple[int, TensorLayout, TensorLayout]]:
    """Return each operation's number in the core and its tensor layouts."""
    found = {}
    for backend_operation, operation in BACKEND_OPERATIONS.items():
        name, layouts = (
            backend_operation.removesuffix("_single"),
            [operation.takes, operation.gives],
        )
        if TensorLayout.EACH in layouts:  # sizes may vary, as the core says
            name = backend_operation.replace("_list", "_v")
            layouts = [
                TensorLayout.EACH if layout is TensorLayout.ONE else layout for layout in layouts
            ]
        if _core is not None and name in _core.OPERATIONS:
            found[backend_operation] = (_core.OPERATIONS[name], *layouts)
    return found


_CORE_OPERATIONS = _core_operations()


_IN_PLACE, _ONE, _NONE, _PARTS = (
    TensorLayout.IN_PLACE,
    TensorLayout.ONE,
    TensorLayout.NONE,
    TensorLayout.PARTS,
)
_NOWHERE: tuple[int, int, Places] = (0, 0, ())


def _placed(
    layout: TensorLayout, tensors: Tensors, sizes: Sizes, scale: int
) -> tuple[int, int, Places]:
    """Return ``(address, count, ())`` of a tensor, ``(0, 0, [(address, count), ...])`` of several.

    Args:
        sizes: the elements of each part, if a tensor is sent in parts.
        scale: the core's elements per element: 1, or its bytes.
    """
    if layout is _ONE:
        tensor = tensors[0]
        return tensor.data_ptr(), tensor.numel() * scale, ()
    if layout is _NONE:
        return _NOWHERE
    if layout is _PARTS:
        start, item = tensors[0].data_ptr(), tensors[0].itemsize
        spans = zip(accumulate(sizes, initial=0), sizes, strict=False)
        return 0, 0, [(start + before * item, size * scale) for before, size in spans]
    return 0, 0, [(tensor.data_ptr(), tensor.numel() * scale) for tensor in tensors]


def _layout(tensor: torch.Tensor) -> Layout:
    found = find_layout(tensor)
    assert found is not None  # as takes_layouts demands
    item = tensor.itemsize
    if found == ROW_MAJOR or tensor.dtype in DTYPE_CODES:
        return found
    sizes, strides = found  # others travel as bytes
    return (*sizes, item), (*(step * item for step in strides), 1)


register_backend(ShmBackend())


def failure_of(
    status: int,
    failure: Any,
    number: int | None = None,
    message: tuple[bool, int, int] | None = None,
) -> BackendFailure:
    """Return the BackendFailure for the native core's ``status`` and record ``failure``.

    Args:
        number: the call's or message's, for RanksMismatch.
        message: (is_send, peer, tag).
    """
    known = _core.STATUSES
    cause = failure.status if status == known["ABORTED"] else status
    text = failure.text
    if cause == known["TIMEOUT"]:
        return BackendTimeout(text or "its timeout has passed")
    if cause == known["MISMATCH"]:
        if message is None:
            return RanksMismatch(text or "the members' calls differ", number)
        is_send, peer, tag = message
        message = is_send, peer if peer >= 0 else failure.source, tag
        other = failure.other_note
        return RanksMismatch("a message does not fit", number, message, other)
    if cause == known["DIED"] or (cause == known["ABORTED"] and _gone(failure)):
        return _lost(failure, message)
    if cause == known["CLOSED"]:
        return BackendFailure("the communicator was closed")
    if cause == known["INTERRUPTED"] and failure.culprit >= 0:
        return MemberStopped("has stopped waiting in this call", failure.culprit)
    if cause == known["CANCELLED"] and message is not None:
        peer = message[1] if message[1] >= 0 else failure.source
        return MemberStopped("has cancelled this message", peer)
    return BackendAborted(text or "the communicator was aborted")


def _gone(failure: Any) -> list[int]:
    """Return the members that have exited or closed, by the core's ``failure``."""
    pairs = zip(failure.has_exited, failure.was_closed, strict=True)
    return [member for member, seen in enumerate(pairs) if any(seen)]


def _lost(failure: Any, message: tuple[bool, int, int] | None) -> MemberLost:
    """Return MemberLost for ``message``'s peer if gone, else for another member."""
    member, gone = failure.culprit, _gone(failure)
    if message is not None and message[1] in gone:
        member = message[1]
    elif member < 0:
        member = gone[0]
    has_ended = failure.has_exited[member] or not failure.was_closed[member]
    return MemberLost("has ended" if has_ended else "has closed this group", member)


if _core is not None:
    _core.explain_failures_by(failure_of)
