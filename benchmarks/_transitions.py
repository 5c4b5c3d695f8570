"""Transitions of a matrix between placements: as our patterns, what each rank holds, and the fewest
bytes that they need.

A transition's name has one placement for each mesh axis on both sides: S0 and S1 for a dim that
the axis shards, R for replicas, P for partial sums. An array has integers in float32, so that sums
in any order are exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

AXES = ("dp", "tp")
TRANSITIONS = (
    "[S0,S1]->[S1,S0]",
    "[S0,R]->[R,S0]",
    "[S0,S0]->[S1,S1]",
    "[P,S0]->[S0,S0]",
    "[S0,R]->[S1,R]",
    "[S0,S0]->[R,S0]",
    "[P,P]->[R,R]",
    "[S0,S0]->[R,R]",
    "[P,S0]->[S1,R]",
)

Side = list[str]


def sides_of(transition: str) -> tuple[Side, Side]:
    """Return the placements before and after.

    Example:
        >>> sides_of("[S0,R]->[R,S0]")
        (['S0', 'R'], ['R', 'S0'])
    """
    before, after = (side[1:-1].split(",") for side in transition.split("->"))
    return before, after


def pattern_of(transition: str) -> str:
    """Return a transition as our pattern of a matrix with dims a and b.

    Example:
        >>> pattern_of("[P,S0]->[S0,S0]")
        'a@tp b {U:dp} -> a@(dp,tp) b'
    """
    return " -> ".join(_side_text(side) for side in sides_of(transition))


def _side_text(side: Side) -> str:
    def on(placement: str) -> str:
        return ",".join(axis for axis, one in zip(AXES, side, strict=True) if one == placement)

    dims = []
    for dim, name in enumerate("ab"):
        axes = on(f"S{dim}")
        dims.append(f"{name}@({axes})" if "," in axes else f"{name}@{axes}" if axes else name)
    return " ".join(dims) + (f" {{U:{on('P')}}}" if "P" in side else "")


# -- what each rank holds -------------------------------------------------------------------------


def shard_of(
    whole: torch.Tensor, side: Side, sizes: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """Return the part of ``whole`` that one rank holds, as a view; a partial sum is of all of
    it."""
    for placement, size, index in zip(side, sizes, coordinate, strict=True):
        if placement.startswith("S"):
            whole = whole.chunk(size, int(placement[1:]))[index]
    return whole


def partial_sum_of(
    whole: torch.Tensor, side: Side, sizes: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """Return what a rank holds where the sum is ``whole`` times the number of partial sums."""
    place, count = _place(side, sizes, coordinate)
    offset = 2 * place - count + 1  # of all partial sums these add up to zero
    return (shard_of(whole, side, sizes, coordinate) + offset).contiguous()


def _place(side: Side, sizes: Sequence[int], coordinate: Sequence[int]) -> tuple[int, int]:
    """The place of a rank among those whose partial sums are added, and their number."""
    place, count = 0, 1
    for placement, size, index in zip(side, sizes, coordinate, strict=True):
        if placement == "P":
            place, count = place * size + index, count * size
    return place, count


def num_partial_sums(side: Side, sizes: Sequence[int]) -> int:
    """Return how many ranks' values make up an element."""
    return _place(side, sizes, [0] * len(sizes))[1]


def bound(transition: str, sizes: Sequence[int]) -> float:
    """Return the fewest bytes that all ranks together can receive, over the bytes of the array.

    Without partial sums an element goes to every rank that shall hold it and does not. With them it
    takes as many messages as there are partial sums and destinations, less one, and less one more
    where a destination holds a partial sum.

    Example:
        >>> bound("[S0,S0]->[R,R]", (2, 2)), bound("[S0,S1]->[S1,S0]", (2, 2))
        (3.0, 0.5)
    """
    before, after = sides_of(transition)
    edge = math.prod(sizes)  # as many cells a dim as there are ranks: all shards are of whole cells
    cells = torch.arange(edge * edge).view(edge, edge)
    destinations, holders = torch.zeros(2, edge * edge, dtype=torch.int64)
    for coordinate in itertools.product(*map(range, sizes)):
        held, wanted = torch.zeros(2, edge * edge, dtype=torch.int64)
        held[shard_of(cells, before, sizes, coordinate).flatten()] = 1
        wanted[shard_of(cells, after, sizes, coordinate).flatten()] = 1
        destinations += wanted
        holders += held * wanted
    partial_sums = num_partial_sums(before, sizes)
    if partial_sums == 1:
        received = destinations - holders
    else:
        received = partial_sums + destinations - 1 - holders.clamp(max=1)
    return received.sum().item() / edge**2
