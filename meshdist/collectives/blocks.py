"""A dim cut into one block per member of a group, and blocks joined to a dim, without any sending.

Blocks are a tensor whose dim 0 counts the members. *Tiled*, a dim of k n is k blocks of n, and the
result has as many dims; else a dim of k is k blocks without it.
"""

from __future__ import annotations

from operator import index
from typing import Any

import torch

from ..arrays import describe
from ..errors import KindError, ShapeError
from ..groups.process_group import ProcessGroup

__all__ = ["cut", "get_dim", "joined"]


def get_dim(given: Any, num_dims: int, argument: str, verb: str) -> int:
    """Return a dim, which may be counted from the end, as a number from 0 below ``num_dims``."""
    try:
        dim = index(given)
    except TypeError:
        raise KindError(
            f"{verb}: {argument} must be a dim, a whole number",
            found=f"{given!r}, a {type(given).__name__}",
        ) from None
    if not -num_dims <= dim < num_dims:
        raise ShapeError(
            f"{verb}: {argument}={dim} is no dim of a tensor of {num_dims}",
            expected=f"a number from {-num_dims} to {num_dims - 1}"
            if num_dims
            else "an array of one dim at least",
        )
    return dim % num_dims


def cut(
    x: torch.Tensor, dim: int, group: ProcessGroup, verb: str, argument: str, *, tiled: bool
) -> torch.Tensor:
    """Return ``x`` as blocks along ``dim``, which ``get_dim`` has found."""
    length, size = x.shape[dim], group.size()
    if length % size if tiled else length != size:
        others = [
            str(other)
            for other, its_length in enumerate(x.shape)
            if other != dim and not (its_length % size if tiled else its_length != size)
        ]
        fix = f"pad dim {dim} to {-(-length // size) * size}" if tiled else None
        if others:
            fits = f"{argument}={others[0]} fits"
            fix = f"{fix}; {fits}" if fix else fits
        elif not tiled and length % size == 0:
            fix = "tiled=True cuts it into equal blocks"
        raise ShapeError(
            f"{verb} cannot cut dim {dim} of size {length} into {size} "
            + ("equal blocks" if tiled else "blocks of one index each"),
            where=f"rank {group.world.rank}, {group.name}; argument x, {describe(x)}",
            expected=f"x.shape[{dim}] "
            + (f"a multiple of {size}" if tiled else f"equal to {size}")
            + ", the number of ranks",
            fix=fix,
        )
    if tiled:
        x = x.unflatten(dim, (size, length // size))
    return x.movedim(dim, 0) if dim else x


def joined(blocks: torch.Tensor, dim: int, *, tiled: bool) -> torch.Tensor:
    """Return blocks as one tensor with their members' count in ``dim``; the inverse of ``cut``."""
    if dim:
        blocks = blocks.movedim(0, dim)
    return blocks.flatten(dim, dim + 1) if tiled else blocks
