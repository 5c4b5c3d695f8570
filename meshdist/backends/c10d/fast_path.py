"""Describe torch's process groups to the native core for fast-path calls.

A *shortcut* consists of a method, c10d's options, a function ``prepare`` or None, and the most
bytes of a call. ``prepare`` gets the method's arguments, on the caller's memory, and returns their
replacements and a function that completes the result:

    all_reduce MAX of float32    allreduce of int32: a copy in the order of the floats, turned back
    reduce_scatter over Gloo     alltoall_base into new memory, whose parts are reduced

Members on the fast path and in Python make the same calls, with bitwise equal results, composed as
in ``composed_collectives``.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch.distributed import distributed_c10d as c10d

from ...dtypes import DTYPES
from ...reduce_ops import ReduceKind, ReduceOp, is_whole_mean
from ..communicator import ANY_SIZE, FAST_REDUCTIONS, NUMBERED_OPS, Explain, explained
from ..composed_collectives import (
    ComposingCommunicator,
    divide,
    in_order,
    reduce_parts,
    reduce_scratch,
)
from ..native_core import DTYPE_CODES, core
from ..operation_args import OperationArgs, Tensors, write, writing
from .dtype_fallbacks import DtypeFallback

if TYPE_CHECKING:
    from ..native import FastPath

Finished: TypeAlias = Callable[[], None] | None
Prepared: TypeAlias = tuple[tuple[Any, ...], Finished]
Shortcut: TypeAlias = tuple[str, Any, Callable[..., Prepared] | None, int]

_SMALL_BYTES = 1 << 16
"""Smaller buffers are not pooled, because a new allocation is faster."""

_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


class _FastOperation(NamedTuple):
    """The method and options of torch's class for an operation of the native core.

    Args:
        backend_operation, method: the communicator's operation and the class's method.
        options: c10d's class of options for the method.
        needs_data: whether some classes reject empty tensors.
        is_substituted: whether missing reductions are composed here.
    """

    backend_operation: str
    method: str
    options: Any
    needs_data: bool = False
    is_substituted: bool = False


_FAST_OPERATIONS = {
    "broadcast": _FastOperation("broadcast", "broadcast", c10d.BroadcastOptions),
    "all_gather": _FastOperation(
        "all_gather", "_allgather_base", c10d.AllgatherOptions, needs_data=True
    ),
    "all_gather_v": _FastOperation("all_gather_list", "allgather", c10d.AllgatherOptions),
    "gather": _FastOperation("gather", "gather", c10d.GatherOptions),
    "scatter": _FastOperation("scatter", "scatter", c10d.ScatterOptions),
    "all_to_all": _FastOperation("all_to_all_single", "alltoall_base", c10d.AllToAllOptions),
    "barrier": _FastOperation("barrier", "barrier", c10d.BarrierOptions),
    "all_reduce": _FastOperation(
        "all_reduce", "allreduce", c10d.AllreduceOptions, is_substituted=True
    ),
    "reduce": _FastOperation("reduce", "reduce", c10d.ReduceOptions),
    "reduce_scatter": _FastOperation(
        "reduce_scatter", "_reduce_scatter_base", c10d.ReduceScatterOptions, needs_data=True
    ),
}
"""Keyed by the core's operation."""


class FastPathCommunicator(ComposingCommunicator, Protocol):
    """The attributes and methods of a communicator that shortcuts use."""

    lacking: ClassVar[frozenset[str]]
    spoils_others: ClassVar[bool]
    most_gathered_bytes: ClassVar[int]
    operation_kind: ClassVar[type[Any] | None]

    def find_substitute(self, op: ReduceKind, dtype: torch.dtype) -> DtypeFallback | None: ...
    def options_for(
        self, kind: Any, prepared: OperationArgs, op: ReduceKind | None = None
    ) -> Any: ...


class _EqualCalls(NamedTuple):
    """Fields that are equal in all calls of a shortcut.

    Args:
        operation, dtype: as the core names them; ``op`` and ``root`` are numbers, -1 for none.
        is_list: whether an all-to-all takes lists.
    """

    operation: str
    op: int
    dtype: int
    root: int
    is_list: bool
    is_empty: bool


def open_fast_path(
    backend: FastPathCommunicator,
    finish: Callable[..., Any],
    entry: Any,
    explain: Explain,
    timeout: timedelta,
    works: tuple[Any, ...],
) -> FastPath | None:
    """Return the native object for a communicator's fast-path calls, or None.

    Args:
        finish: finishes a call, given its arguments, work and record number.
        entry, explain, timeout, works: as ``Communicator.fast_path`` takes them.
    """
    kind: Callable[..., Any] | None = backend.operation_kind
    if kind is None or core is None:
        return None
    waiting = OperationArgs("", "", (), ()).as_own(timeout)
    going_on = OperationArgs("", "", (), ()).as_own(timeout).as_async()
    failing = partial(explained, explain, timeout)
    find = partial(_find_shortcut, backend, waiting)
    runner = core.PythonRunner(backend, find, partial(finish, waiting), failing)
    path: FastPath = core.FastPath(entry, runner, FAST_REDUCTIONS)
    find = partial(_find_shortcut, backend, going_on)
    runner = core.PythonRunner(backend, find, partial(kind, backend, timeout), failing)
    path.starting = core.FastPath(entry, runner, FAST_REDUCTIONS, works)
    return path


def _find_shortcut(backend: FastPathCommunicator, like: OperationArgs, *of: Any) -> Shortcut | None:
    """Return the shortcut of equal calls; None: use Python.

    Args:
        like: has their timeout, and whether the caller waits.
        of: ``_EqualCalls`` fields.
    """
    kind = _EqualCalls(*of)
    spec, dtype = _FAST_OPERATIONS[kind.operation], _DTYPES[kind.dtype]
    call = like.by(
        spec.backend_operation,
        (),
        (),
        NUMBERED_OPS.get(kind.op),
        None if kind.root < 0 else kind.root,
    )
    if not DTYPES[dtype].is_in_c10d or (kind.is_empty and spec.needs_data):
        return None
    if call.op is not None:
        shortcut = _find_reduction(backend, call, spec, dtype)
        is_gathered = shortcut is not None and shortcut[0] == "_allgather_base"
        return None if kind.is_empty and is_gathered else shortcut
    options = backend.options_for(spec.options, call)
    if not kind.is_list:
        return spec.method, options, None, ANY_SIZE
    if "all_to_all" in backend.lacking:
        return spec.method, options, _pack, ANY_SIZE
    return "alltoall", options, None, ANY_SIZE


def _find_reduction(
    backend: FastPathCommunicator, call: OperationArgs, spec: _FastOperation, dtype: torch.dtype
) -> Shortcut | None:
    op, method, kind, prepare = call.op, spec.method, spec.options, None
    assert op is not None
    if call.backend_operation in backend.lacking:  # the reduce-scatter
        options = backend.options_for(c10d.AllToAllOptions, call)
        return "alltoall_base", options, partial(_exchange, backend, op), ANY_SIZE
    substitute = backend.find_substitute(op, dtype)
    if substitute is not None and substitute.dtype is dtype:
        if call.root is not None and backend.spoils_others and call.root != backend.rank:
            prepare = partial(_copy_to_overwrite, backend)
        return method, backend.options_for(kind, call, substitute.op), prepare, ANY_SIZE
    if not spec.is_substituted:
        return None
    if substitute is None:
        total = backend.find_substitute(ReduceOp.SUM, dtype)
        if not is_whole_mean(op, dtype) or total is None or total.dtype is not dtype:
            return None
        options = backend.options_for(kind, call, ReduceOp.SUM)
        return method, options, partial(_divided, backend.size), ANY_SIZE
    if substitute.is_view:
        return None
    if DTYPES[substitute.dtype].is_whole:
        if DTYPES[dtype].is_whole:
            return None
        return method, backend.options_for(kind, call, op), partial(in_order, op), ANY_SIZE
    options = backend.options_for(c10d.AllgatherOptions, call)
    most = backend.most_gathered_bytes // backend.size
    return "_allgather_base", options, partial(_gathered, backend.size, op), most


def _divided(size: int, tensors: Tensors) -> Prepared:
    return (tensors,), partial(divide, tensors[0], size)


def _copy_to_overwrite(backend: FastPathCommunicator, tensors: Tensors) -> Prepared:
    """Return a copy to overwrite, and a function that frees it (None if small)."""
    if tensors[0].nbytes <= _SMALL_BYTES:
        return ([tensors[0].clone()],), None
    target = backend.scratch.take(tensors[0].numel(), tensors[0])
    write(target, tensors[0])
    return ([target],), partial(backend.scratch.give, target)


def _gathered(size: int, op: ReduceKind, tensors: Tensors) -> Prepared:
    """Return an all-gather's arguments, and a function to reduce the result."""
    tensor = tensors[0].view(-1)
    whole = tensor.new_empty(size * tensor.numel())
    return (whole, tensor), partial(reduce_parts, tensor, whole, size, op)


def _exchange(
    backend: FastPathCommunicator, op: ReduceKind, output: torch.Tensor, tensor: torch.Tensor
) -> Prepared:
    """Return an all-to-all's arguments, and a function to reduce the received parts."""
    sizes = [output.numel()] * backend.size
    if tensor.nbytes <= _SMALL_BYTES:
        mine = torch.empty_like(tensor)
        return (mine, tensor, sizes, sizes), partial(reduce_parts, output, mine, backend.size, op)
    mine = backend.scratch.take(tensor.numel(), tensor)
    return (mine, tensor, sizes, sizes), partial(reduce_scratch, backend, output, mine, op)


def _pack(outputs: Tensors, inputs: Tensors) -> Prepared:
    """Return an all-to-all's arguments on packed tensors, and a function to unpack."""
    together = torch.cat(inputs)  # type: ignore[arg-type]
    gives = list(map(torch.Tensor.numel, inputs))
    takes = list(map(torch.Tensor.numel, outputs))
    whole = together.new_empty(sum(takes))
    parts = whole.split_with_sizes(takes)
    return (whole, together, takes, gives), partial(_unpack, outputs, parts)


def _unpack(outputs: Tensors, parts: Tensors) -> None:
    with writing():
        for output, part in zip(outputs, parts, strict=True):
            output.copy_(part)
