"""How a class of torch's does plain calls, so that the native core can let it.

A *shortcut* of some calls is the method of the class that carries them, c10d's options for it, what
prepares its arguments, or None, and how many bytes such a call may have. ``prepare`` is given what
the method takes before its options, on the caller's memory, and returns what it takes in place of
that, and what completes the result once the class has done it:

    all_reduce MAX of float32    allreduce of int32: a copy in the order of the floats, turned back
    reduce_scatter over Gloo     alltoall_base into memory of its own, whose parts are reduced

Members on the fast path and on Python's meet in the same calls of the class, with the same bits:
what is built here is what ``built_verbs`` builds.
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
    BuildingCommunicator,
    divide,
    in_order,
    reduce_parts,
    reduce_scratch,
)
from ..native_core import DTYPE_CODES, core
from ..operation_args import PreparedCall, Tensors, write, writing
from .dtype_fallbacks import Substitute

if TYPE_CHECKING:
    from ..native import FastPath

Finished: TypeAlias = Callable[[], None] | None
Prepared: TypeAlias = tuple[tuple[Any, ...], Finished]
Shortcut: TypeAlias = tuple[str, Any, Callable[..., Prepared] | None, int]

_SMALL_BYTES = 1 << 16
"""Of so few no memory is kept, which takes longer than to get some anew."""

_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


class _Carried(NamedTuple):
    """The method and options of torch's class by which a verb of the native core travels.

    Args:
        way, method: the verb of a communicator, and the method of the class.
        options: c10d's, which the method takes.
        needs_data: whether some classes refuse it where nothing is moved.
        is_substituted: whether a reduction that the class lacks is built of others here.
    """

    way: str
    method: str
    options: Any
    needs_data: bool = False
    is_substituted: bool = False


_CARRIED = {
    "broadcast": _Carried("broadcast", "broadcast", c10d.BroadcastOptions),
    "all_gather": _Carried("all_gather", "_allgather_base", c10d.AllgatherOptions, needs_data=True),
    "all_gather_v": _Carried("all_gather_list", "allgather", c10d.AllgatherOptions),
    "gather": _Carried("gather", "gather", c10d.GatherOptions),
    "scatter": _Carried("scatter", "scatter", c10d.ScatterOptions),
    "all_to_all": _Carried("all_to_all_single", "alltoall_base", c10d.AllToAllOptions),
    "barrier": _Carried("barrier", "barrier", c10d.BarrierOptions),
    "all_reduce": _Carried("all_reduce", "allreduce", c10d.AllreduceOptions, is_substituted=True),
    "reduce": _Carried("reduce", "reduce", c10d.ReduceOptions),
    "reduce_scatter": _Carried(
        "reduce_scatter", "_reduce_scatter_base", c10d.ReduceScatterOptions, needs_data=True
    ),
}
"""By the core's verb."""


class ShortCommunicator(BuildingCommunicator, Protocol):
    """The attributes and methods of a communicator that its shortcuts use."""

    lacking: ClassVar[frozenset[str]]
    spoils_others: ClassVar[bool]
    most_gathered_bytes: ClassVar[int]
    operation_kind: ClassVar[type[Any] | None]

    def find_substitute(self, op: ReduceKind, dtype: torch.dtype) -> Substitute | None: ...
    def options_for(
        self, kind: Any, prepared: PreparedCall, op: ReduceKind | None = None
    ) -> Any: ...


class _CallsAlike(NamedTuple):
    """Fields that are equal in all calls of the same shortcut.

    Args:
        verb, dtype: as the core names them; ``op`` and ``root`` are numbers, -1 for none.
        is_list: whether an all-to-all is of lists of tensors.
        is_empty: whether nothing is moved.
    """

    verb: str
    op: int
    dtype: int
    root: int
    is_list: bool
    is_empty: bool


def open_fast_path(
    wire: ShortCommunicator,
    finish: Callable[..., Any],
    entry: Any,
    explain: Explain,
    timeout: timedelta,
    works: tuple[Any, ...],
) -> FastPath | None:
    """Return the native object that runs a communicator's plain calls; None without any.

    Args:
        finish: makes the operation of a prepared call that waits, its work and its note.
        entry, explain, timeout, works: as ``Communicator.fast_path`` takes them.
    """
    kind: Callable[..., Any] | None = wire.operation_kind
    if kind is None or core is None:
        return None
    waiting = PreparedCall("", "", (), ()).as_own(timeout)
    going_on = PreparedCall("", "", (), ()).as_own(timeout).as_async()
    failing = partial(explained, explain, timeout)
    find = partial(_find_shortcut, wire, waiting)
    runner = core.PythonRunner(wire, find, partial(finish, waiting), failing)
    path: FastPath = core.FastPath(entry, runner, FAST_REDUCTIONS)
    find = partial(_find_shortcut, wire, going_on)
    runner = core.PythonRunner(wire, find, partial(kind, wire, timeout), failing)
    path.starting = core.FastPath(entry, runner, FAST_REDUCTIONS, works)
    return path


def _find_shortcut(wire: ShortCommunicator, like: PreparedCall, *of: Any) -> Shortcut | None:
    """Return the method and options of torch's class for calls that are alike; None: use Python.

    Args:
        like: has the timeout of each, and whether its caller waits.
        of: the fields of a ``_CallsAlike``.
    """
    kind = _CallsAlike(*of)
    row, dtype = _CARRIED[kind.verb], _DTYPES[kind.dtype]
    call = like.by(row.way, (), (), NUMBERED_OPS.get(kind.op), None if kind.root < 0 else kind.root)
    if not DTYPES[dtype].is_in_c10d or (kind.is_empty and row.needs_data):
        return None
    if call.op is not None:
        shortcut = _find_reduction(wire, call, row, dtype)
        is_gathered = shortcut is not None and shortcut[0] == "_allgather_base"
        return None if kind.is_empty and is_gathered else shortcut
    options = wire.options_for(row.options, call)
    if not kind.is_list:
        return row.method, options, None, ANY_SIZE
    if "all_to_all" in wire.lacking:
        return row.method, options, _pack, ANY_SIZE
    return "alltoall", options, None, ANY_SIZE


def _find_reduction(
    wire: ShortCommunicator, call: PreparedCall, row: _Carried, dtype: torch.dtype
) -> Shortcut | None:
    op, method, kind, prepare = call.op, row.method, row.options, None
    assert op is not None
    if call.way in wire.lacking:  # the reduce-scatter
        options = wire.options_for(c10d.AllToAllOptions, call)
        return "alltoall_base", options, partial(_exchange, wire, op), ANY_SIZE
    substitute = wire.find_substitute(op, dtype)
    if substitute is not None and substitute.dtype is dtype:
        if call.root is not None and wire.spoils_others and call.root != wire.rank:
            prepare = partial(_copy_to_overwrite, wire)
        return method, wire.options_for(kind, call, substitute.op), prepare, ANY_SIZE
    if not row.is_substituted:
        return None
    if substitute is None:
        total = wire.find_substitute(ReduceOp.SUM, dtype)
        if not is_whole_mean(op, dtype) or total is None or total.dtype is not dtype:
            return None
        options = wire.options_for(kind, call, ReduceOp.SUM)
        return method, options, partial(_divided, wire.size), ANY_SIZE
    if substitute.is_view:
        return None
    if DTYPES[substitute.dtype].is_whole:
        if DTYPES[dtype].is_whole:
            return None
        return method, wire.options_for(kind, call, op), partial(in_order, op), ANY_SIZE
    options = wire.options_for(c10d.AllgatherOptions, call)
    most = wire.most_gathered_bytes // wire.size
    return "_allgather_base", options, partial(_gathered, wire.size, op), most


def _divided(size: int, tensors: Tensors) -> Prepared:
    return (tensors,), partial(divide, tensors[0], size)


def _copy_to_overwrite(wire: ShortCommunicator, tensors: Tensors) -> Prepared:
    """Return a copy for the class to overwrite, and a function that frees it, None if small."""
    if tensors[0].nbytes <= _SMALL_BYTES:
        return ([tensors[0].clone()],), None
    target = wire.scratch.take(tensors[0].numel(), tensors[0])
    write(target, tensors[0])
    return ([target],), partial(wire.scratch.give, target)


def _gathered(size: int, op: ReduceKind, tensors: Tensors) -> Prepared:
    """Return an all-gather's arguments on ``size`` members, and a function to reduce the result."""
    tensor = tensors[0].view(-1)
    whole = tensor.new_empty(size * tensor.numel())
    return (whole, tensor), partial(reduce_parts, tensor, whole, size, op)


def _exchange(
    wire: ShortCommunicator, op: ReduceKind, output: torch.Tensor, tensor: torch.Tensor
) -> Prepared:
    """Return the arguments of an all-to-all, and a function that reduces the parts that came."""
    sizes = [output.numel()] * wire.size
    if tensor.nbytes <= _SMALL_BYTES:
        mine = torch.empty_like(tensor)
        return (mine, tensor, sizes, sizes), partial(reduce_parts, output, mine, wire.size, op)
    mine = wire.scratch.take(tensor.numel(), tensor)
    return (mine, tensor, sizes, sizes), partial(reduce_scratch, wire, output, mine, op)


def _pack(outputs: Tensors, inputs: Tensors) -> Prepared:
    """Return the arguments of an all-to-all on packed tensors, and a function that unpacks."""
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
