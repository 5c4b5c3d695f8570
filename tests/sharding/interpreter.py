"""Plans of all ranks carried out on NumPy arrays, without a backend: what each step means."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from meshdist.mesh.placement import Box
from meshdist.sharding.steps import (
    Arrangement,
    Exchange,
    GroupStep,
    Pad,
    Step,
    Take,
)

Array = np.ndarray[Any, np.dtype[Any]]
Coordinate = tuple[int, ...]


def coordinates(sizes: tuple[int, ...]) -> Iterator[Coordinate]:
    return product(*map(range, sizes))


def index_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def arranged(array: Array, how: Arrangement) -> Array:
    taken = tuple(slice(None) if index is None else index for index in how.taken)
    return array.reshape(how.view)[taken].transpose(how.order).reshape(how.shape)


def run(
    plans: dict[Coordinate, tuple[Step, ...]],
    locals_: dict[Coordinate, Array],
    sizes: tuple[int, ...],
) -> dict[Coordinate, Array]:
    """Carry out the steps of every rank; ranks meet in the groups that their steps name."""
    state = dict(locals_)
    at = dict.fromkeys(plans, 0)
    while True:
        for rank, steps in plans.items():
            while at[rank] < len(steps) and not isinstance(steps[at[rank]], GroupStep):
                state[rank] = alone(steps[at[rank]], state[rank])
                at[rank] += 1
        waiting = [rank for rank, steps in plans.items() if at[rank] < len(steps)]
        if not waiting:
            return state
        met = False
        for rank in waiting:
            if at[rank] == len(plans[rank]):
                continue
            step = plans[rank][at[rank]]
            if not isinstance(step, GroupStep):
                continue
            members = group(rank, step.axes, sizes)
            theirs = [plans[m][at[m]] if at[m] < len(plans[m]) else None for m in members]
            kind = step.name, step.axes
            if any(not isinstance(s, GroupStep) or (s.name, s.axes) != kind for s in theirs):
                continue
            assert members.index(rank) == step.group_rank
            assert step.size == len(members)
            results = together(theirs, [state[m] for m in members])
            for member, other, result in zip(members, theirs, results, strict=True):
                assert result.shape == other.shape
                state[member] = result
                at[member] += 1
            met = True
        assert met, "ranks wait for each other"


def kinds_of(steps: tuple[Step, ...]) -> tuple[str, ...]:
    """The name of each step; a sum of boxes is told from their exchange."""
    return tuple("summed " * getattr(step, "is_summed", False) + step.name for step in steps)


def group(rank: Coordinate, axes: tuple[int, ...], sizes: tuple[int, ...]) -> list[Coordinate]:
    assert list(axes) == sorted(set(axes))
    ranges = [range(n) if axis in axes else (rank[axis],) for axis, n in enumerate(sizes)]
    return list(product(*ranges))


def alone(step: Step, local: Array) -> Array:
    if isinstance(step, Take):
        assert all(0 <= a <= b <= n for (a, b), n in zip(step.box, local.shape, strict=True))
        return local[index_of(step.box)]
    assert isinstance(step, Pad)
    result = np.zeros(step.shape, local.dtype)
    if step.box is not None:
        assert local.shape == tuple(b - a for a, b in step.box)
        result[index_of(step.box)] = local
    return result


def together(steps: list[Any], arrays: list[Array]) -> list[Array]:
    if isinstance(steps[0], Exchange):
        assert len({step.is_summed for step in steps}) == 1
        return [exchanged(step, steps, arrays) for step in steps]
    packed = [
        array if step.pack is None else arranged(array, step.pack)
        for array, step in zip(arrays, steps, strict=True)
    ]
    match steps[0].name:
        case "all-reduce":
            received = [sum(packed[1:], packed[0])] * len(steps)
        case "all-gather":
            received = [np.stack(packed)] * len(steps)
        case "reduce-scatter":
            received = [sum(p[step.group_rank] for p in packed) for step in steps]
        case "all-to-all":
            received = [np.stack([p[step.group_rank] for p in packed]) for step in steps]
    for array, step in zip(received, steps, strict=True):
        own = array if step.name in ("all-reduce", "reduce-scatter") else array[step.group_rank]
        assert own.shape == step.part
    return [
        (array if step.unpack is None else arranged(array, step.unpack)).reshape(step.shape)
        for array, step in zip(received, steps, strict=True)
    ]


def exchanged(step: Exchange, steps: list[Exchange], arrays: list[Array]) -> Array:
    result = np.zeros(step.shape, arrays[0].dtype)
    times = np.zeros(step.shape, int)
    comes = {}
    for place, box in step.receives:
        assert place != step.group_rank
        assert place not in comes
        (sent,) = [b for at, b in steps[place].sends if at == step.group_rank]
        comes[place] = arrays[place][index_of(sent)]
        times[index_of(box)] += 1
        result[index_of(box)] += comes[place]
    # sends mirror receives: nothing is sent that is not received
    sent_here = [
        p for p, other in enumerate(steps) if any(at == step.group_rank for at, _ in other.sends)
    ]
    assert sorted(sent_here) == sorted(comes)
    if step.own is not None:
        here, there = step.own
        times[index_of(there)] += 1
        result[index_of(there)] += arrays[step.group_rank][index_of(here)]
    if step.is_summed:
        own = [] if step.own is None else [(step.group_rank, step.own[1])]
        listed = {(place, box) for box, places in step.sums for place in places}
        assert listed == {*step.receives, *own}
    if not step.is_summed:
        assert times.max(initial=0) <= 1
        if step.is_covered:
            assert times.min(initial=1) == 1
    return result
