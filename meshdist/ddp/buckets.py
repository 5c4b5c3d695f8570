"""Which gradients travel together: pure assignment of parameters to buckets.

A bucket holds parameters of one dtype and device, so that it can be one flat tensor and one
all-reduce. Small buckets start early, large ones waste fewer calls: hence a small first bucket,
which is ready while most of the backward is still to come.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
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
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}  # the latest of each kind, its room
    for index in order:
        num_bytes, kind = items[index]
        bucket, room = filling.get(kind, ([], caps[0]))
        if bucket and num_bytes > room:
            bucket, room = [], caps[1]
        if not bucket:
            buckets.append(bucket)
        bucket.append(index)
        filling[kind] = bucket, room - num_bytes
    places = {index: place for place, index in enumerate(order)}
    return tuple(sorted(map(tuple, buckets), key=lambda bucket: places[bucket[-1]]))


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
    return torch.empty(tuple(shape), device="meta").stride()
