"""Tensors and reductions as MPI sees them.

MPI's calls take memory as an address, a count and a datatype. An MPI before version 4 counts in 32
bits. There a larger message travels as one element of a datatype made for its size, and the
collectives cut reductions into several calls.

MPI reduces integers, float32, float64 and complex numbers of those. The rest is done in one of
these. Narrower floats are widened, and rounded once at the end; so are integers of 8 and 16
bits to be added up, where Open MPI 5 stops at the largest instead of wrapping. Of a bool's byte the
bits are joined. The smallest and largest of
floats are found among integers in the same order: whether NaN is larger than 1, and 0 than -0,
is else for each step of an algorithm to say, and members end up with different results (seen with
Open MPI 5 and MPICH 5).
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
"""The rest to do when a collective is done, if there is any."""

_MOST_BEFORE_4 = (1 << 31) - 1
_MOST = (1 << 62) - 1
_PIECE = 1 << 30


class MpiBuffers:
    """Maker of the arguments of MPI's calls for tensors; ``most`` is a call's largest count."""

    def __init__(self, MPI: Any) -> None:
        self.most = _MOST if MPI.Get_version() >= (4, 0) else _MOST_BEFORE_4
        self._MPI = MPI
        self._at = MPI.buffer.fromaddress
        self._byte = MPI.BYTE
        self.large_type = lru_cache(256)(self._new_large_type)

    def numbers(self, x: torch.Tensor, kind: Any, num_blocks: int = 1) -> tuple[Any, int, Any]:
        """Return MPI's argument to reduce elements of ``x``: memory, count per block, ``kind``."""
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
    """Return a flat tensor of all ``tensors``, and a function that frees it; None for a view."""
    whole = _in_a_row(tensors)
    if whole is not None:
        return whole, None
    whole = scratch.take(sum(x.numel() for x in tensors), tensors[0])
    write_all(parts_like(whole, tensors), tensors)
    return whole, partial(scratch.give, whole)


def view_or_unpack(outputs: Tensors, scratch: Scratch) -> tuple[torch.Tensor, Afterwards]:
    """Return a view of ``outputs`` and None; or other memory and a function to copy it there."""
    whole = _in_a_row(outputs)
    if whole is not None:
        return whole, None
    whole = scratch.take(sum(x.numel() for x in outputs), outputs[0])

    def take_apart() -> None:
        write_all(outputs, parts_like(whole, outputs))
        scratch.give(whole)

    return whole, take_apart


def _in_a_row(tensors: Tensors) -> torch.Tensor | None:
    """Return a flat view of tensors that lie in a row in a block of memory; else None."""
    first = next((x for x in tensors if x.numel()), tensors[0])
    item, start = first.itemsize, first.data_ptr()
    end = start
    for x in tensors:
        count = x.numel()
        if count and x.data_ptr() != end:  # what is empty lies nowhere
            return None
        end += count * item
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():
        return None  # the next block of memory follows by chance
    flat = first.detach() if first.requires_grad else first
    return flat.as_strided(((end - start) // item,), (1,))


@dataclass(frozen=True)
class MpiReduction:
    """Way to do one reduction of one dtype.

    Args:
        op: the reduction that MPI does.
        wide: the dtype to which the elements are converted before MPI reduces them, or None.
        in_order: the integer dtype to which floats are mapped in their order for MIN or MAX, or
            None.
        divides: whether the result is divided by the number of members.
    """

    op: ReduceKind
    wide: torch.dtype | None = None
    in_order: torch.dtype | None = None
    divides: bool = False

    @cached_property
    def is_plain(self) -> bool:
        """Return whether MPI reduces the tensor's own memory, and nothing else is to do."""
        return self.wide is None and self.in_order is None and not self.divides

    def encode(self, x: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        """Return the flat array that MPI reduces for ``x``: a view, a copy, or from ``scratch``."""
        x = x.detach().view(-1)
        if self.wide is not None:
            narrow, x = x, scratch.take(x.numel(), x.new_empty(0, dtype=self.wide))
            x.copy_(narrow)
        if self.in_order is None:
            return x
        return to_order(x if self.wide or x.is_cuda else x.clone(), self.op)

    @property
    def is_in_place(self) -> bool:
        """Return whether ``encode`` gives the tensor's own memory."""
        return self.wide is None and self.in_order is None

    def decode(self, result: torch.Tensor, output: torch.Tensor, size: int) -> None:
        """Write MPI's reduction into ``output`` in its dtype; for a mean, divided by ``size``."""
        with writing():
            if self.in_order is not None:
                result = flip(result).view(self.wide or output.dtype)
            target, is_whole = output.view(-1), self.divides and DTYPES[output.dtype].is_whole
            if self.divides and not is_whole:
                result.div_(size)
            if target.data_ptr() != result.data_ptr():
                target.copy_(result)
            if is_whole:  # where the sum has wrapped in their own dtype
                divide(target, size)


@cache
def find_plan(op: ReduceKind, dtype: torch.dtype) -> MpiReduction:
    """Return the way to reduce ``dtype`` with ``op``; raise DtypeError where there is none."""
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
    """Return MPI's datatypes for the dtypes that it adds up itself."""
    kinds = [dtype for dtype in DTYPES if find_plan(ReduceOp.SUM, dtype).is_plain]
    return {dtype: mpi_type(MPI, dtype) for dtype in kinds if dtype is not torch.bool}


@cache
def mpi_type(MPI: Any, dtype: torch.dtype) -> Any:
    """Return MPI's datatype for a dtype that it computes in."""
    return getattr(MPI, DTYPES[dtype].mpi)


@cache
def mpi_op(MPI: Any, op: ReduceKind) -> Any:
    """Return MPI's predefined operation for ``op``."""
    return getattr(MPI, "PROD" if op == ReduceOp.PRODUCT else op.name)
