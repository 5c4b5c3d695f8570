"""Sums and means of sharded arrays: what was spread over ranks becomes summands, which stay."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..arrays import Array
from ..dtypes import dtype_name
from ..errors import ArgumentError, DtypeError, KindError
from ..mesh.spec import NamedSharding
from ..mesh.splits import DimSplit
from .shardings import sharding_of

__all__ = ["checked_dims", "mean_of_shard", "sum_of_shard", "summed_sharding"]


def checked_dims(dims: Any, ndim: int, call: str) -> tuple[int, ...]:
    """The dims to sum over, sorted; None stands for all of them.

    Raises:
        KindError: no whole numbers.
        ArgumentError: no such dim, or one twice.

    Example:
        >>> checked_dims(-1, 3, "sum"), checked_dims(None, 2, "sum")
        ((2,), (0, 1))
    """
    if dims is None:
        return tuple(range(ndim))
    try:
        several = dims if isinstance(dims, (tuple, list)) else (dims,)
        given = [operator.index(dim) for dim in several]
    except TypeError:
        raise KindError(f"{call} takes dims by number", found=repr(dims)) from None
    found = [dim + ndim if dim < 0 else dim for dim in given]
    if len(set(found)) < len(found) or not all(0 <= dim < ndim for dim in found):
        raise ArgumentError(
            f"{call} over dims {dims!r} of an array of {ndim} dims",
            expected=f"different numbers from {-ndim} to {ndim - 1}",
        )
    return tuple(sorted(found))


def summed_sharding(
    shape: tuple[int, ...], sharding: NamedSharding, dims: Sequence[int], *, keepdim: bool
) -> tuple[tuple[int, ...], NamedSharding]:
    """The shape and sharding of the sum over ``dims``: unreduced over the axes that cut them."""
    placement = sharding.placement(shape)
    names = sharding.layout.names or ()
    kept = [
        DimSplit(1) if dim in dims else split
        for dim, split in enumerate(placement.dims)
        if keepdim or dim not in dims
    ]
    summed = {names[axis] for dim in dims for axis in placement.dims[dim].axes}
    return tuple(split.size for split in kept), sharding_of(
        sharding.mesh,
        kept,
        unreduced={*sharding.spec.unreduced, *summed},
        reduced=sharding.spec.reduced,
    )


def sum_of_shard(local: Array, dims: tuple[int, ...], *, keepdim: bool, dtype: Any) -> Array:
    """The sum of a shard over ``dims``; over none of them, where there are none."""
    if isinstance(local, torch.Tensor):
        if not dims:  # to torch, no dims are all dims
            return local.sum(dtype=dtype) if local.ndim == 0 else local.to(dtype or local.dtype)
        return local.sum(dims, keepdim=keepdim, dtype=dtype)
    return local.sum(axis=dims, keepdims=keepdim, dtype=dtype)


def mean_of_shard(
    local: Array, dims: tuple[int, ...], count: int, *, keepdim: bool, dtype: Any
) -> Array:
    """The sum of a shard over ``dims``, divided by the number of elements of the whole there.

    Halves are summed as float32, as the libraries do: the sum may be larger than any half.
    """
    if isinstance(local, torch.Tensor):
        result = dtype or local.dtype
        if not (result.is_floating_point or result.is_complex):
            raise DtypeError(
                f"mean of {dtype_name(result)}: torch takes means of floating dtypes only",
                fix="say which: x.mean(dtype=torch.float32)",
            )
        wide = torch.float32 if result in (torch.float16, torch.bfloat16) else result
        return (sum_of_shard(local, dims, keepdim=keepdim, dtype=wide) / count).to(result)
    result = np.dtype(dtype) if dtype is not None else local.dtype
    if result.kind in "biu":
        result = np.dtype(np.float64)
    wide = np.dtype(np.float32) if result == np.float16 else result
    total = sum_of_shard(local, dims, keepdim=keepdim, dtype=wide)
    return (total / wide.type(count)).astype(result)
