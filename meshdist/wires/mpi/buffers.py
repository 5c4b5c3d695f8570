"""Memory as MPI's calls take it: an address, a count and a datatype.

An MPI before version 4 counts in 32 bits. There a larger message travels as one element of a
datatype made for its size, and the verbs cut reductions into several calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch

from ..packing import Tensors, parts_like, write_all
from ..scratch import Scratch

__all__ = ["Buffers", "packed", "unpacked"]

Afterwards: TypeAlias = Callable[[], None] | None
"""The rest to do when a verb is done, if there is any."""

_MOST_BEFORE_4 = (1 << 31) - 1
_MOST = (1 << 62) - 1
_PIECE = 1 << 30


class Buffers:
    """The arguments of MPI's calls for tensors, ``most`` elements each; None asks the library."""

    def __init__(self, MPI: Any, most: int | None = None) -> None:
        if most is None:
            most = _MOST if MPI.Get_version() >= (4, 0) else _MOST_BEFORE_4
        self.most = most
        self._MPI = MPI
        self._at = MPI.buffer.fromaddress
        self._byte = MPI.BYTE
        self.large_type = lru_cache(256)(self._new_large_type)

    def numbers(self, x: torch.Tensor, kind: Any, num_blocks: int = 1) -> tuple[Any, int, Any]:
        """The elements of ``x``, of MPI's datatype ``kind``, to be reduced; counted by blocks."""
        count = x.numel()
        return self._at(x.data_ptr(), count * x.itemsize), count // num_blocks, kind

    def moved(self, x: torch.Tensor, num_blocks: int = 1) -> tuple[Any, int, Any]:
        """The bytes of ``x``, to be moved; counted by blocks."""
        num_bytes = x.numel() * x.itemsize
        memory, count = self._at(x.data_ptr(), num_bytes), num_bytes // num_blocks
        if num_bytes <= self.most:
            return memory, count, self._byte
        return memory, 1, self.large_type(count)

    def cut(self, x: torch.Tensor, sizes: Sequence[int]) -> tuple[Any, Any, Any]:
        """Consecutive parts of ``x``, of so many elements each; all together within ``most``."""
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


def packed(tensors: Tensors, scratch: Scratch) -> tuple[torch.Tensor, Afterwards]:
    """One flat tensor of all, and what gives its memory back; a view where they lie in a row."""
    whole = _in_a_row(tensors)
    if whole is not None:
        return whole, None
    whole = scratch.take(sum(x.numel() for x in tensors), tensors[0])
    write_all(parts_like(whole, tensors), tensors)
    return whole, partial(scratch.give, whole)


def unpacked(outputs: Tensors, scratch: Scratch) -> tuple[torch.Tensor, Afterwards]:
    """One flat tensor for all, and what takes it apart; a view where they lie in a row."""
    whole = _in_a_row(outputs)
    if whole is not None:
        return whole, None
    whole = scratch.take(sum(x.numel() for x in outputs), outputs[0])

    def take_apart() -> None:
        write_all(outputs, parts_like(whole, outputs))
        scratch.give(whole)

    return whole, take_apart


def _in_a_row(tensors: Tensors) -> torch.Tensor | None:
    """One view of tensors that lie one after the other in one block of memory."""
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
