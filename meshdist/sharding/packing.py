"""Parts of local arrays to flat buffers and back, each by one strided copy, or by none.

What is made here is made once for a plan; its methods then take few steps of Python. A method that
returns a view of what it is given says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from ..mesh.splits import Box, index_of, shape_of, volume
from ..runtime.buffer_pool import new_like
from .steps import Arrangement

__all__ = ["Boxes", "Rearrangement", "fresh_copy"]


def fresh_copy(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of ``x`` in new memory."""
    return new_like(x).copy_(x)


class Rearrangement:
    """Carries out an ``Arrangement`` on tensors of one shape."""

    __slots__ = ("_index", "_is_plain", "_order", "_shape", "_sizes", "_view")

    def __init__(self, arrangement: Arrangement) -> None:
        self._is_plain = arrangement.is_plain
        self._view = arrangement.view
        self._shape = arrangement.shape
        taken = arrangement.taken
        self._index = None
        if any(one is not None for one in taken):
            self._index = tuple(slice(None) if one is None else one for one in taken)
        kept = [size for size, one in zip(arrangement.view, taken, strict=True) if one is None]
        self._order = arrangement.order
        self._sizes = tuple(kept[dim] for dim in arrangement.order)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` rearranged, contiguous: a view of it where that does, else new memory."""
        if self._is_plain and x.is_contiguous():
            return x.view(self._shape)
        out = new_like(x, self._shape)
        parts = x.reshape(self._view)
        if self._index is not None:
            parts = parts[self._index]
        out.view(self._sizes).copy_(parts.permute(self._order))
        return out

    def of_received(self, x: torch.Tensor) -> torch.Tensor:
        """The same of memory that was just received, which may be ``x`` with another shape.

        It is no view: autograd lets nobody write to views that a custom Function returns.
        """
        return x.resize_(self._shape) if self._is_plain else self(x)


class Boxes:
    """Some boxes of a local array, none empty, in order in a flat buffer of ``total`` numbers."""

    __slots__ = ("_boxes", "_parts", "_start", "total")

    def __init__(self, shape: Sequence[int], boxes: Sequence[Box]) -> None:
        strides = _row_major(shape)
        volumes = [volume(box) for box in boxes]
        self.total = sum(volumes)
        self._boxes = [index_of(box) for box in boxes]
        # Per box its sizes, its place in a contiguous array, and its place in the buffer.
        self._parts = []
        at = 0
        for box, size in zip(boxes, volumes, strict=True):
            sizes = shape_of(box)
            offset = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
            self._parts.append((sizes, strides, offset, _row_major(sizes), at))
            at += size
        offsets = [part[2] for part in self._parts]
        is_run = all(_is_run(box, shape) for box in boxes) and all(
            before + size == after
            for (before, after), size in zip(pairwise(offsets), volumes, strict=False)
        )
        self._start = offsets[0] if is_run and offsets else None

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """The buffer: a view of ``x`` where the boxes lie so in memory, else new memory."""
        run = self.find_run(x)
        if run is not None:
            return run
        flat = new_like(x, (self.total,))
        if x.is_contiguous():
            origin = x.storage_offset()
            for sizes, strides, offset, packed, at in self._parts:
                part = x.as_strided(sizes, strides, origin + offset)
                flat.as_strided(sizes, packed, at).copy_(part)
        else:
            for part, index in zip(self.parts(flat), self._boxes, strict=True):
                part.copy_(x[index])
        return flat

    def find_run(self, x: torch.Tensor) -> torch.Tensor | None:
        """A view of ``x`` that is the buffer; None where the boxes do not lie so in memory."""
        start = self._start
        if start is None or not x.is_contiguous():
            return None
        return x.view(-1).narrow(0, start, self.total)

    def unpack(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the boxes from the buffer into ``out``, which is contiguous and new."""
        for sizes, strides, offset, packed, at in self._parts:
            out.as_strided(sizes, strides, offset).copy_(flat.as_strided(sizes, packed, at))

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of the buffer, one for each box."""
        return [flat.as_strided(sizes, packed, at) for sizes, _, _, packed, at in self._parts]


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous array.

    Example:
        >>> _row_major((2, 3, 4))
        (12, 4, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _is_run(box: Box, shape: Sequence[int]) -> bool:
    """Whether the elements of a box follow one another in a contiguous array.

    Example:
        >>> _is_run(((1, 3), (0, 4)), (5, 4)), _is_run(((1, 3), (0, 2)), (5, 4))
        (True, False)
    """
    sizes = shape_of(box)
    first = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    return sizes[first + 1 :] == tuple(shape[first + 1 :])
