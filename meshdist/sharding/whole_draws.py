"""Shards of random arrays: what one device would draw for the whole, of which a rank keeps its box.

Random generators draw one number after the other, so every rank draws them all. On the CPU it does
so in pieces: the numbers come out the same where each piece but the last is a multiple of 16 long,
and none is shorter, as torch draws normal numbers in blocks of 16 and draws the last 16 anew where
the length is no multiple. CUDA's numbers depend on the length of the whole, drawn at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..mesh.splits import Box, index_of, shape_of

__all__ = ["draw_box"]

_BLOCK = 16
_PIECE = 1 << 18
"""Numbers in one piece: some MiB, many blocks."""


def draw_box(
    draw: Callable[[int], torch.Tensor],
    shape: Sequence[int],
    box: Box,
    *,
    piece: int | None = _PIECE,
) -> torch.Tensor:
    """The part ``box`` of an array of ``shape`` whose numbers ``draw`` draws, in row-major order.

    ``draw`` returns so many new numbers, in one dim. They are drawn by ``piece``, a multiple of 16;
    for None, all at once.

    Example:
        >>> numbers = iter(range(100))
        >>> def draw(count):
        ...     return torch.tensor([next(numbers) for _ in range(count)])
        >>> draw_box(draw, (20, 4), ((3, 5), (1, 3)), piece=16)
        tensor([[13, 14],
                [17, 18]])
    """
    count = math.prod(shape)
    if piece is None or count < piece + _BLOCK:
        return draw(count).view(tuple(shape))[index_of(box)].clone()
    sizes = shape_of(box)
    kept: list[torch.Tensor] = []
    begin = 0
    while begin < count:
        end = begin + piece if count - begin - piece >= _BLOCK else count
        drawn = draw(end - begin)
        first, stop = _num_before(begin, shape, box), _num_before(end, shape, box)
        if first < stop:
            kept.append(drawn[_places(first, stop, shape, box) - begin])
        begin = end
    return torch.cat(kept).view(sizes) if kept else drawn[:0].clone().view(sizes)


def _num_before(place: int, shape: Sequence[int], box: Box) -> int:
    """How many elements of a box come before ``place`` in the row-major order of the whole.

    Example:
        >>> _num_before(7, (3, 4), ((0, 3), (1, 3)))
        4
    """
    count = 0
    for dim, (start, stop) in enumerate(box):
        stride = math.prod(shape[dim + 1 :])
        index, place = divmod(place, stride)
        inner = math.prod(end - begin for begin, end in box[dim + 1 :])
        count += (min(max(index, start), stop) - start) * inner
        if not start <= index < stop:
            break
    return count


def _places(first: int, stop: int, shape: Sequence[int], box: Box) -> torch.Tensor:
    """Where the elements ``first`` to ``stop`` of a box lie in the row-major order of the whole."""
    rest = torch.arange(first, stop)
    places = torch.zeros_like(rest)
    stride = 1
    for (start, end), size in zip(reversed(box), reversed(shape), strict=True):
        places += (rest % (end - start) + start) * stride
        rest //= end - start
        stride *= size
    return places
