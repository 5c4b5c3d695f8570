"""What tests of resharding share: shards cut by NumPy, one coordinate at a time; random cases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import meshdist as md
from meshdist.mesh.partition_spec import P
from meshdist.mesh.spec import NamedSharding

Coordinate = tuple[int, ...]


@dataclass(frozen=True)
class Lie:
    """How an array lies: per dim the axes that cut it, and the kinds of the other axes."""

    dims: tuple[tuple[int, ...], ...]
    unreduced: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()
    cells: tuple[tuple[int, tuple[int, ...]], ...] = ()  # sizes of a dim's parts, by dim

    def sharding(self, mesh: Any) -> NamedSharding:
        names = mesh.axis_names
        return NamedSharding(
            mesh,
            P(
                *(tuple(names[axis] for axis in axes) for axes in self.dims),
                unreduced={names[axis] for axis in self.unreduced},
                reduced={names[axis] for axis in self.reduced},
            ),
            shard_sizes=dict(self.cells),
        )

    @property
    def cotangent(self) -> Lie:
        return Lie(self.dims, self.reduced, self.unreduced, self.cells)


def kept(lie: Lie, shape: Sequence[int], sizes: Sequence[int], at: Coordinate) -> tuple[Any, ...]:
    """The oracle: per dim the indices that the rank at a coordinate holds, as for ``np.ix_``."""
    found = []
    for dim, (size, axes) in enumerate(zip(shape, lie.dims, strict=True)):
        indices = np.arange(size)
        if dim in dict(lie.cells):
            cell = np.ravel_multi_index(
                tuple(at[axis] for axis in axes), tuple(sizes[axis] for axis in axes)
            )
            indices = np.split(indices, np.cumsum(dict(lie.cells)[dim])[:-1])[cell]
        else:
            for axis in axes:
                indices = np.array_split(indices, sizes[axis])[at[axis]]
        found.append(indices)
    return tuple(found)


def along(lie: Lie, at: Coordinate) -> Coordinate:
    """The partial sum that a rank holds: its coordinates along the unreduced axes."""
    return tuple(at[axis] for axis in lie.unreduced)


def integers(shape: Sequence[int], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8, 9, tuple(shape)).astype(np.float64)


def partial_sums(lie: Lie, shape: Sequence[int], sizes: Sequence[int], seed: int) -> dict[Any, Any]:
    """A whole array of integers for each place along the unreduced axes; the value is their sum."""
    places = list(np.ndindex(*(sizes[axis] for axis in lie.unreduced)))
    return {place: integers(shape, seed + number) for number, place in enumerate(places)}


def shards(
    lie: Lie, shape: Sequence[int], sizes: Sequence[int], wholes: Mapping[Any, np.ndarray]
) -> dict[Coordinate, np.ndarray]:
    """What each rank holds of an array with these partial sums."""
    return {
        at: np.asarray(wholes[along(lie, at)][np.ix_(*kept(lie, shape, sizes, at))])
        for at in np.ndindex(*sizes)
    }


def value(
    lie: Lie,
    shape: Sequence[int],
    sizes: Sequence[int],
    found: Mapping[Coordinate, np.ndarray],
) -> np.ndarray:
    """The array that shards stand for; raises unless ranks that are equal hold equal bits."""
    seen: dict[Any, np.ndarray] = {}
    whole = np.zeros(tuple(shape))
    for at, local in found.items():
        indices = kept(lie, shape, sizes, at)
        assert local.shape == tuple(map(len, indices))
        key = (along(lie, at), *(tuple(one.tolist()) for one in indices))
        place = tuple(at[axis] for axes in lie.dims for axis in axes)
        first = seen.setdefault((key, place), local)
        assert first.tobytes() == local.tobytes(), f"replicas differ at {at}"
        if first is local:
            whole[np.ix_(*indices)] += local
    return whole


@st.composite
def transitions(draw: Any, max_ranks: int = 8) -> tuple[tuple[int, ...], tuple[int, ...], Lie, Lie]:
    """A mesh, a shape, and how an array lies before and after."""
    sizes = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(
            lambda found: 1 < math.prod(found) <= max_ranks
        )
    )
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    return tuple(sizes), tuple(shape), *(draw(lies(sizes, shape)) for _ in range(2))


@st.composite
def lies(draw: Any, sizes: Sequence[int], shape: Sequence[int]) -> Lie:
    order = draw(st.permutations(range(len(sizes))))
    dims: list[list[int]] = [[] for _ in shape]
    kinds: dict[str, list[int]] = {"U": [], "R": [], "": []}
    for axis in order:
        home = draw(st.sampled_from([*range(len(shape)), *range(len(shape)), "U", "R", ""]))
        (kinds[home] if isinstance(home, str) else dims[home]).append(axis)
    cells = []
    for dim, axes in enumerate(dims):
        if axes and draw(st.integers(0, 3)) == 0:
            count = math.prod(sizes[axis] for axis in axes)
            cuts = sorted(draw(st.integers(0, shape[dim])) for _ in range(count - 1))
            cells.append((dim, tuple(np.diff([0, *cuts, shape[dim]]).tolist())))
    return Lie(
        tuple(map(tuple, dims)), tuple(sorted(kinds["U"])), tuple(sorted(kinds["R"])), tuple(cells)
    )


def mesh_of(sizes: Sequence[int]) -> md.DeviceMesh:
    return md.init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple("abc"[: len(sizes)]))


def move(
    sizes: Sequence[int], shape: Sequence[int], source: Lie, target: Lie, seed: int
) -> tuple[Any, ...]:
    """On one rank: a shard of integers from source to target, its gradient and second derivatives.

    Returns the coordinate, the result, the cotangent of the result, the gradient, the tangent's
    image, and the double backward's.
    """
    mesh = mesh_of(sizes)
    at = mesh.get_coordinate()
    assert at is not None
    there, here = target.sharding(mesh), source.sharding(mesh)
    local = shards(source, shape, sizes, partial_sums(source, shape, sizes, seed))[at]
    back = target.cotangent
    given = shards(back, shape, sizes, partial_sums(back, shape, sizes, seed + 100))[at]
    x = torch.from_numpy(local.copy()).requires_grad_()
    before = x.detach().clone()
    cotangent = torch.from_numpy(given.copy()).requires_grad_()
    y = md.reshard(x, here, there, shape=shape)
    (grad,) = torch.autograd.grad(y, x, cotangent, create_graph=True)
    (again,) = torch.autograd.grad(grad, cotangent, before)
    assert torch.equal(x, before)
    assert y.is_contiguous() and y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert not grad.numel() or grad.data_ptr() != cotangent.data_ptr()
    return at, *(one.detach().numpy() for one in (y, cotangent, grad, again))


def check_move(
    sizes: Sequence[int],
    shape: Sequence[int],
    source: Lie,
    target: Lie,
    seed: int,
    results: Sequence[tuple[Any, ...]],
) -> None:
    """Check what ``move`` returned on all ranks against whole arrays, exactly."""
    found = {result[0]: result for result in results}
    x = partial_sums(source, shape, sizes, seed)
    moved = value(target, shape, sizes, {at: one[1] for at, one in found.items()})
    assert np.array_equal(moved, sum(x.values()))
    back = partial_sums(target.cotangent, shape, sizes, seed + 100)
    grad = value(source.cotangent, shape, sizes, {at: one[3] for at, one in found.items()})
    assert np.array_equal(grad, sum(back.values()))
    for _, y, _, _, again in results:
        assert y.tobytes() == again.tobytes()
    # <Ax, y> = <x, A'y>, of the values that shards stand for.
    assert np.vdot(moved, sum(back.values())) == np.vdot(sum(x.values()), grad)
