"""Which gradients travel together: pure assignment of parameters to buckets.

A bucket holds parameters of one dtype and device, so that it can be one flat tensor and one
all-reduce. Small buckets start early, large ones waste fewer calls: hence a small first bucket,
which is ready while most of the backward is still to come.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from ..errors import ArgumentError, KindError

__all__ = [
    "Item",
    "assign_buckets",
    "bucket_caps",
    "dense_stride",
    "items_of",
]

_MIB = 1024 * 1024


Item: TypeAlias = tuple[int, Hashable]
"""Of one parameter: the bytes of its gradient; its dtype and device, which its bucket shares."""


def items_of(parameters: Sequence[torch.Tensor]) -> list[Item]:
    """Return one item per parameter, in the same order."""
    return [(p.nbytes, (p.dtype, p.device)) for p in parameters]


def bucket_caps(bucket_cap_mb: float | None) -> tuple[int, int]:
    """Return the caps of the first bucket and of all others, in bytes.

    None stands for 1 MiB and 25 MiB; a given cap holds for the first bucket too.

    Raises:
        KindError: the cap is no number.
        ArgumentError: it is not above zero, or not finite.
    """
    if bucket_cap_mb is None:
        return _MIB, 25 * _MIB
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)):
        raise KindError(
            f"bucket_cap_mb is of type {type(bucket_cap_mb).__name__}",
            expected="a number of MiB, or None",
            fix="pass for example bucket_cap_mb=25",
        )
    if not bucket_cap_mb > 0 or not math.isfinite(bucket_cap_mb):
        raise ArgumentError(
            f"bucket_cap_mb is {bucket_cap_mb}",
            expected="a number of MiB above zero, or None for 25 with a first bucket of 1",
            fix="pass a small number such as 0.001 for one parameter a bucket",
        )
    cap = max(1, int(bucket_cap_mb * _MIB))
    return cap, cap


def assign_buckets(
    items: Sequence[Item], order: Sequence[int], caps: tuple[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Return the buckets as tuples of indices into ``items``.

    Args:
        items: one per parameter.
        order: every index once, in the order in which gradients are expected.
        caps: of the first bucket of each kind and of every later one, in bytes. A single larger
            item has a bucket of its own.

    Returns:
        The buckets in the order in which they are expected to be complete. Within one kind the
        buckets, one after the other, hold the indices in ``order``.

    Example:
        >>> items = [(4, "f32"), (8, "f32"), (2, "f16"), (4, "f32")]
        >>> assign_buckets(items, [3, 2, 1, 0], caps=(4, 12))
        ((3,), (2,), (1, 0))
    """
    done: list[_Filling] = []
    filling: dict[Hashable, _Filling] = {}
    for place, index in enumerate(order):
        num_bytes, kind = items[index]
        bucket = filling.get(kind)
        if bucket is None:
            bucket = filling[kind] = _Filling(caps[0])
        elif bucket.num_bytes + num_bytes > bucket.cap_bytes:
            done.append(bucket)
            bucket = filling[kind] = _Filling(caps[1])
        bucket.indices.append(index)
        bucket.num_bytes += num_bytes
        bucket.last_place = place
    done.extend(filling.values())
    done.sort(key=lambda bucket: bucket.last_place)
    return tuple(tuple(bucket.indices) for bucket in done)


@dataclass
class _Filling:
    """A bucket while it is being filled."""

    cap_bytes: int
    num_bytes: int = 0
    last_place: int = -1
    indices: list[int] = field(default_factory=list)


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a gradient's view into its bucket.

    They are the parameter's own where its elements fill their memory without gaps or overlaps
    (channels-last included), and row-major otherwise.

    Example:
        >>> dense_stride((2, 3), (1, 2)), dense_stride((2, 3), (6, 2))
        ((1, 2), (3, 1))
    """
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            break
        expected *= size
    else:
        return tuple(stride)
    return tuple(_row_major(shape))


def _row_major(shape: Sequence[int]) -> Iterator[int]:
    for dim in range(len(shape)):
        yield math.prod(max(size, 1) for size in shape[dim + 1 :])
