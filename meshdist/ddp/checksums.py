"""A number for the bits of tensors: integers add up to one sum in any order.

The words of 32 bits have odd weights, each its own, so that the sum tells of a bit that flipped and
of values that changed places:

    words 3 5 6, weights 1 7 9:  3 + 35 + 54 = 92        5 3 6:  5 + 21 + 54 = 80
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._utils import _flatten_dense_tensors, _take_tensors

__all__ = ["checksum"]

_ROW = 1 << 16  # words, and as many sums, which stay in a core's cache
_FACTOR, _SPREAD = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd: nothing is lost modulo 2^64
_WORDS = {1: torch.int8, 2: torch.int16}  # of smaller elements; else 32 bits


@torch.no_grad()
def checksum(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return 64 bits on ``device`` for dense tensors on any devices, none of which is awaited.

    Example:
        >>> one, other = torch.tensor([1.0, -1.0]), torch.tensor([-1.0, 1.0])
        >>> bool(checksum([one], one.device) == checksum([other], one.device))
        False
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for place in dict.fromkeys(one.device for one in tensors):
        length = _ROW if place.type == "cpu" else 64 * _ROW  # else: by few kernels
        sums = torch.zeros(length, dtype=torch.int64, device=place)
        here = [one.resolve_conj().resolve_neg() for one in tensors if one.device == place]
        for alike in _take_tensors(here, 4 * _ROW):  # a large tensor alone, small ones together
            words = _WORDS.get(alike[0].itemsize, torch.int32)
            for row in _flatten_dense_tensors(alike).view(words).split(length):
                part = sums[: len(row)]  # times a factor, plus the row: one pass, little memory
                torch.add(row, part, alpha=_FACTOR, out=part)
        weights = torch.arange(1, length + 1, device=place).mul_(_FACTOR)
        weights = (weights ^ (weights >> 29)).mul_(_SPREAD).bitwise_or_(1)
        total = total * _FACTOR + sums.mul_(weights).sum().to(device, non_blocking=True)
    return total
