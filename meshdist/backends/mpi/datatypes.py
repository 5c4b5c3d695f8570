"""Map tensors and reductions to MPI datatypes and operations.

Before MPI 4, counts have 32 bits: a larger message is sent as one element of a datatype of its
size, and reductions are split into several calls.

MPI reduces integers, float32, float64 and their complex dtypes. Narrower floats are widened, and
rounded once at the end; so are sums of 8- and 16-bit integers, because Open MPI 5 saturates instead
of wrapping. A bool is reduced bitwise. MIN and MAX of floats run on integers of the same order:
otherwise an algorithm's steps may order NaN and 1, or 0 and -0, differently, and members' results
differ (seen with Open MPI 5 and MPICH 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from typing import Any, TypeAlias

import torch

from ...dtypes import DTYPES, IN_ORDER
from ...reduce_ops import ON_BOOL, ReduceKind, ReduceOp
from ...runtime.memory import Scratch
from ..composed_collectives import check_reducible, divide, flip, to_order
from ..operation_args import Tensors, parts_like, write_all, writing

Afterwards: TypeAlias = Callable[[], None] | None
"""A function to call when a collective is done, if any."""

_MOST_BEFORE_4 = (1 << 31) - 1
_MOST = (1 << 62) - 1
_PIECE = 1 << 30


class MpiBuffers:
    """Builder of MPI call arguments; ``most`` is a call's largest count."""

    def __init__(self, MPI: Any) -> None:
        self.most = _MOST if MPI.Get_version() >= (4, 0) else _MOST_BEFORE_4
        self._MPI = MPI
        self._at = MPI.buffer.fromaddress
        self._byte = MPI.BYTE
        self.large_type = lru_cache(256)(self._new_large_type)

    def numbers(self, x: torch.Tensor, kind: Any, num_blocks: int = 1) -> tuple[Any, int, Any]:
        """Return MPI's argument to reduce ``x``: memory, count per block, ``kind``."""
        count = x.numel()
        return self._at(x.data_ptr(), count * x.itemsize), count // num_blocks, kind

    def moved(self, x: torch.Tensor, num_blocks: int = 1) -> tuple[Any, int, Any]:
        """Return MPI's argument to move bytes of ``x``: memory, count per block, datatype."""
        num_bytes = x.numel() * x.itemsize
        memory, count = self._at(x.data_ptr(), num_bytes), num_bytes // num_blocks
        if num_bytes <= self.most:
            return memory, count, self._byte
        return memory, 1, self.large_type(count)

    def cut(self, x: torch.Tensor, sizes: Sequence[int]) -> tuple[Any, Any, Any]:
        """Return MPI's argument to move parts of ``x``, of ``sizes`` elements, as bytes."""
        item = x.itemsize
        counts = [size * item for size in sizes]
        starts, end = [], 0
        for count in counts:
            starts.append(end)
            end += count
        return self._at(x.data_ptr(), end), (counts, starts), self._byte

    def _new_large_type(self, num_bytes: int) -> Any:
        piece = min(_PIECE, max(1, self.most // 2))
        count, rest = divmod(num_bytes, piece)
        pieces = self._byte.Create_contiguous(piece).Create_contiguous(count)
        more = self._byte.Create_contiguous(rest)
        whole = self._MPI.Datatype.Create_struct([1, 1], [0, count * piece], [pieces, more])
        return whole.Commit()


def view_or_pack(tensors: Tensors, scratch: Scratch) -> tuple[torch.Tensor, Afterwards]:
    """Return all ``tensors`` in a flat tensor, and a function to free it (None: a view)."""
    whole = _in_a_row(tensors)
    if whole is not None:
        return whole, None
    whole = scratch.take(sum(x.numel() for x in tensors), tensors[0])
    write_all(parts_like(whole, tensors), tensors)
    return whole, partial(scratch.give, whole)


def view_or_unpack(outputs: Tensors, scratch: Scratch) -> tuple[torch.Tensor, Afterwards]:
    """Return a view of ``outputs`` and None, or a buffer and a function to unpack it."""
    whole = _in_a_row(outputs)
    if whole is not None:
        return whole, None
    whole = scratch.take(sum(x.numel() for x in outputs), outputs[0])

    def take_apart() -> None:
        write_all(outputs, parts_like(whole, outputs))
        scratch.give(whole)

    return whole, take_apart


def _in_a_row(tensors: Tensors) -> torch.Tensor | None:
    """Return a flat view of tensors that are consecutive in one storage, else None."""
    first = next((x for x in tensors if x.numel()), tensors[0])
    item, start = first.itemsize, first.data_ptr()
    end = start
    for x in tensors:
        count = x.numel()
        if count and x.data_ptr() != end:  # an empty tensor has no address
            return None
        end += count * item
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():
        return None  # adjacent storages, by chance
    flat = first.detach() if first.requires_grad else first
    return flat.as_strided(((end - start) // item,), (1,))


@dataclass(frozen=True)
class MpiReduction:
    """Plan for an op on a dtype.

    Args:
        op: MPI's op.
        wide: the dtype in which MPI reduces, or None for the own dtype.
        in_order: the integer dtype that orders floats for MIN or MAX, or None.
        divides: whether the result is divided by the number of members.
    """

    op: ReduceKind
    wide: torch.dtype | None = None
    in_order: torch.dtype | None = None
    divides: bool = False

    @cached_property
    def is_plain(self) -> bool:
        """Return whether MPI reduces the tensor's own memory."""
        return self.wide is None and self.in_order is None and not self.divides

    def encode(self, x: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        """Return the flat array that MPI reduces for ``x``: a view, a copy or ``scratch``."""
        x = x.detach().view(-1)
        if self.wide is not None:
            narrow, x = x, scratch.take(x.numel(), x.new_empty(0, dtype=self.wide))
            x.copy_(narrow)
        if self.in_order is None:
            return x
        return to_order(x if self.wide or x.is_cuda else x.clone(), self.op)

    @property
    def is_in_place(self) -> bool:
        """Return whether ``encode`` returns a view."""
        return self.wide is None and self.in_order is None

    def decode(self, result: torch.Tensor, output: torch.Tensor, size: int) -> None:
        """Write MPI's reduction into ``output`` in its dtype, for a mean divided by ``size``."""
        with writing():
            if self.in_order is not None:
                result = flip(result).view(self.wide or output.dtype)
            target, is_whole = output.view(-1), self.divides and DTYPES[output.dtype].is_whole
            if self.divides and not is_whole:
                result.div_(size)
            if target.data_ptr() != result.data_ptr():
                target.copy_(result)
            if is_whole:  # the sum wraps in the narrow dtype
                divide(target, size)


@cache
def find_plan(op: ReduceKind, dtype: torch.dtype) -> MpiReduction:
    """Return the plan for ``op`` on ``dtype``, or raise DtypeError."""
    check_reducible("mpi", op, dtype)
    if dtype is torch.bool:
        return MpiReduction(ON_BOOL[op])
    facts = DTYPES[dtype]
    divides = op == ReduceOp.AVG
    op = ReduceOp.SUM if divides else op
    stops_at_largest = op == ReduceOp.SUM and dtype.itemsize < 4
    wide = facts.wide if stops_at_largest or not facts.mpi else None
    computed = wide or dtype
    is_ordering = op in (ReduceOp.MIN, ReduceOp.MAX) and computed.is_floating_point
    in_order = IN_ORDER[computed] if is_ordering else None
    return MpiReduction(op, wide, in_order, divides)


@cache
def plain_sums(MPI: Any) -> dict[torch.dtype, Any]:
    """Return MPI's datatypes of the dtypes that it sums."""
    kinds = [dtype for dtype in DTYPES if find_plan(ReduceOp.SUM, dtype).is_plain]
    return {dtype: mpi_type(MPI, dtype) for dtype in kinds if dtype is not torch.bool}


@cache
def mpi_type(MPI: Any, dtype: torch.dtype) -> Any:
    """Return MPI's datatype for computing in ``dtype``."""
    return getattr(MPI, DTYPES[dtype].mpi)


@cache
def mpi_op(MPI: Any, op: ReduceKind) -> Any:
    """Return MPI's predefined ``op``."""
    return getattr(MPI, "PROD" if op == ReduceOp.PRODUCT else op.name)
