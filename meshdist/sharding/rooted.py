"""One rank that holds a whole array, the root: its shards gathered there, or sent from there.

Each element travels once, between the root and one rank that holds it.
"""

from __future__ import annotations

from typing import Any

import torch

from ..arguments import get_whole_number
from ..collectives.torch_private import call_function
from ..error_text import ranks_text
from ..errors import GradientError, NotInGroupError
from ..functional.linear_function import LinearFunction
from ..mesh.device_mesh import DeviceMesh
from ..mesh.placement import Placement, place_along, volume
from ..mesh.spec import NamedSharding, P
from .carrying import Carrier
from .change_steps import group_at, relative
from .requests import ReshardRequest, move_request
from .resharding import Resharding
from .shardings import cut_further
from .steps import Exchange

__all__ = ["RootedGather", "checked_root", "scatter"]


def checked_root(root: Any, verb: str, mesh: DeviceMesh) -> int:
    """Return the root, a rank of the mesh."""
    rank = get_whole_number(root, f"{verb}: root", expected="a rank")
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

    def __init__(self, request: ReshardRequest, root: int) -> None:
        mesh, source, shape = request.mesh, request.source, request.plan.source.shape
        self._title = f"{request.plan.title} on rank {root}"
        self._sum = None
        if source.spec.unreduced:
            source = _scattered(source, shape)
            self._sum = Resharding(move_request("unshard", request.source, source, shape))
        placement = source.placement(shape)
        there = mesh.layout.coordinate_of(root) or ()
        here = mesh.get_coordinate() or ()
        self._is_root = here == there
        self._carrier = None
        if all(here[axis] == there[axis] for axis in placement.free_axes):
            steps = (_exchanges(placement, here, there)[0],) if placement.cut_axes else ()
            self._carrier = Carrier(steps, placement.local_shape(here), mesh, self._title)

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """The whole array on the root, in new memory; None on all other ranks."""
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
    if not shape:  # nothing that could be cut
        return NamedSharding(source.mesh, P())
    axes = source.layout.axis_indices(tuple(source.spec.unreduced))
    return cut_further(source, shape, tuple(sorted(axes)))


def scatter(
    x: torch.Tensor, mesh: DeviceMesh, placement: Placement, root: int, title: str
) -> torch.Tensor:
    """This rank's part of an array that the root holds; collective over the mesh.

    Args:
        x: the whole, on the root; elsewhere a tensor without elements, of its dtype and device.
        mesh: the ranks.
        placement: where each element shall lie, on one rank each: no axis is free. Where an axis
            is unreduced, coordinate 0 gets the values, and the others zeros.
        root: the rank that holds the whole.
        title: what reports call it, equal on all ranks.

    Gradient: gathered on the root; every rank takes part in the backward.
    """
    here = mesh.get_coordinate() or ()
    gather, send = _exchanges(placement, here, mesh.layout.coordinate_of(root) or ())
    carriers = (
        Carrier((send,), tuple(x.shape), mesh, title),
        Carrier((gather,), send.shape, mesh, f"gradient of {title}"),
    )
    return call_function(_Rooted, x, *carriers)


class _Rooted(LinearFunction):
    @staticmethod
    def forward(x: torch.Tensor, carrier: Carrier, transpose: Carrier) -> torch.Tensor:
        return carrier(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return call_function(_Rooted, grad, *reversed(ctx.rest)), None, None


def _exchanges(
    placement: Placement, here: tuple[int, ...], there: tuple[int, ...]
) -> tuple[Exchange, Exchange]:
    """The step of the rank ``here`` that gathers the whole on the root, and its transpose.

    The group has the ranks with the coordinates of ``there``, the root's, along the free axes.
    Ranks other than the root gather, and scatter, an array without elements.
    """
    axes = tuple(sorted((*placement.cut_axes, *placement.unreduced)))
    group = group_at(axes, placement.mesh_sizes, here)
    mine, root = group[2], place_along(axes, placement.mesh_sizes, there)
    boxes = [
        placement.box(at) if placement.has_values(at) else None
        for at in _members(placement, axes, there)
    ]
    parts = tuple((at, box) for at, box in enumerate(boxes) if box is not None and volume(box))
    shape, own = placement.local_shape(here), placement.box(here)
    local = relative(own, own)
    is_covered = boxes[mine] is not None
    if mine != root:
        part = ((root, local),) if any(place == mine for place, _ in parts) else ()
        return (
            Exchange((0,), *group, part, (), None),
            Exchange(shape, *group, (), part, None, is_covered=is_covered),
        )
    others = tuple(part for part in parts if part[0] != root)
    is_kept = len(others) < len(parts)
    return (
        Exchange(placement.shape, *group, (), others, (local, own) if is_kept else None),
        Exchange(
            shape, *group, others, (), (own, local) if is_kept else None, is_covered=is_covered
        ),
    )


def _members(
    placement: Placement, axes: tuple[int, ...], there: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """The coordinates of the root's group over some axes, by place."""
    found = [there]
    for axis in axes:
        found = [
            (*at[:axis], number, *at[axis + 1 :])
            for at in found
            for number in range(placement.mesh_sizes[axis])
        ]
    return found
