"""Shards gathered on one rank: each element leaves one owner once."""

from __future__ import annotations

from operator import index
from typing import Any

import torch

from ..error_text import ranks_text
from ..errors import GradientError, KindError, NotInGroupError
from ..mesh.device_mesh import DeviceMesh
from ..mesh.spec import NamedSharding, P
from ..mesh.splits import Placement, volume
from .carrying import Carrier
from .changes import extended
from .exchanges import relative
from .requests import Request, move_request
from .resharding import Resharding
from .steps import Exchange

__all__ = ["RootedGather", "checked_root"]


def checked_root(root: Any, verb: str, mesh: DeviceMesh) -> int:
    """Return the root, a rank of the mesh.

    Raises:
        KindError: no whole number. NotInGroupError: the mesh does not hold it.
    """
    if isinstance(root, bool) or not hasattr(root, "__index__"):
        raise KindError(f"{verb}: root is a rank, a whole number", found=repr(root))
    rank = index(root)
    if mesh.layout.coordinate_of(rank) is None:
        raise NotInGroupError(
            f"{verb}: the mesh does not hold the root, rank {rank}",
            where=f"rank {mesh.get_rank()}, mesh ({mesh.layout.axis_text()})",
            expected=f"one of {ranks_text(mesh.layout.ranks().ravel().tolist())}",
        )
    return rank


class RootedGather:
    """A request for the whole on every rank, carried out for one rank alone.

    Of ranks that hold equal parts those with the root's coordinates along the free axes send, so
    that the group is over the axes that cut dims. Summands are added first, scattered over the axes
    along which they lie.

    Args:
        request: of ``unshard``.
        root: the rank.
    """

    def __init__(self, request: Request, root: int) -> None:
        mesh, source, shape = request.mesh, request.source, request.plan.source.shape
        self._title = f"{request.plan.title} on rank {root}"
        self._sum = None
        if source.spec.unreduced:
            source = _scattered(source, shape)
            self._sum = Resharding(move_request("unshard", request.source, source, shape))
        placement = source.placement(shape)
        there = mesh.layout.coordinate_of(root) or ()
        here = mesh.get_coordinate() or ()
        free = placement.free_axes
        self._is_root = here == there
        self._carrier = None
        if all(here[axis] == there[axis] for axis in free):
            steps = _steps(placement, here, there)
            self._carrier = Carrier(steps, placement.local_shape(here), mesh, self._title)

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """The whole array on the root, in new memory; None on all other ranks.

        Raises:
            GradientError: ``x`` needs a gradient: ranks without a result have no backward.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise GradientError(
                "unshard with a root has no gradient",
                where=self._title,
                expected="a tensor that needs none: ranks without a result have no backward",
                fix="pass local.detach(), or leave root out: every rank then holds the whole",
            )
        if self._sum is not None:
            x = self._sum(x)
        if self._carrier is None:
            return None
        found = self._carrier(x)
        return found if self._is_root else None


def _scattered(source: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding in which sums lie: the longest cells are cut further by the unreduced axes."""
    entries = [*source.spec.partitions, *(None,) * (len(shape) - len(source.spec))]
    if not shape:  # nothing that could be cut
        return NamedSharding(source.mesh, P())
    dims = source.placement(shape).dims
    dim = max(range(len(shape)), key=lambda dim: shape[dim] / dims[dim].num_cells)
    names = source.layout.names or ()
    axes = tuple(sorted(source.layout.axis_indices(tuple(source.spec.unreduced))))
    cut = extended(dims[dim], axes, tuple(source.layout.sizes[axis] for axis in axes))
    entries[dim] = tuple(names[axis] for axis in cut.axes)
    sizes = {at: found for at, found in source.shard_sizes.items() if at != dim}
    if cut.cell_sizes is not None:
        sizes[dim] = cut.cell_sizes
    return NamedSharding(source.mesh, P(*entries), shard_sizes=sizes)


def _steps(
    placement: Placement, here: tuple[int, ...], there: tuple[int, ...]
) -> tuple[Exchange, ...]:
    """What a rank with the root's free coordinates does: it sends its shard, or receives all."""
    axes = tuple(sorted(placement.cut_axes))
    own = placement.box(here)
    local = relative(own, own)
    places = _coordinates(placement, axes, there)
    root, mine = places.index(there), places.index(here)
    if not axes:
        return ()
    if here != there:
        sends = ((root, local),) if volume(own) else ()
        nothing = (0,) * len(placement.shape)
        return (Exchange(axes, len(places), mine, sends, (), None, nothing),)
    boxes = [placement.box(coordinate) for coordinate in places]
    receives = tuple(
        (place, box) for place, box in enumerate(boxes) if place != root and volume(box)
    )
    kept = (local, own) if volume(own) else None
    return (Exchange(axes, len(places), mine, (), receives, kept, placement.shape),)


def _coordinates(
    placement: Placement, axes: tuple[int, ...], there: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """The members of the root's group over some axes, by place."""
    found = [there]
    for axis in axes:
        found = [
            (*at[:axis], number, *at[axis + 1 :])
            for at in found
            for number in range(placement.mesh_sizes[axis])
        ]
    return found
