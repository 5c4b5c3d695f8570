"""Combine two meshes over the same ranks into their common refinement by strides.

With ranks counted in the source's order, each axis has a size and a stride. The strides and ends of
all axes are cuts. If each cut divides the next, the ranges between them are axes that make up every
axis of both meshes. (dp=2, tp=4) and (ep=4, etp=2) are refined by sizes 2, 2, 2; (2, 3) and (3, 2)
have no refinement.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from ..error_text import ranks_text
from ..errors import MeshError
from ..mesh.layout import Layout
from ..mesh.placement import DimSplit, Placement, split_dim
from ..mesh.strides import AxisModes, strided_modes

# Messages list up to this many ranks.
_SHOWN = 16


@dataclass(frozen=True)
class Refinement:
    """The common axes of two meshes over the same ranks.

    Args:
        layout: the ranks along the common axes, in the source's order.
        source_axes: for each source axis, the common axes that make it up, major to minor.
        target_axes: the same for the target.
    """

    layout: Layout
    source_axes: tuple[tuple[int, ...], ...]
    target_axes: tuple[tuple[int, ...], ...]

    @cached_property
    def source_axis_of_each(self) -> tuple[int, ...]:
        """The source axis that contains each common axis; 0 if there is none."""
        found = {part: axis for axis, parts in enumerate(self.source_axes) for part in parts}
        # No source axis contains the only common axis of a mesh of one rank.
        return tuple(found.get(axis, 0) for axis in range(self.layout.ndim))

    def source_placement(self, placement: Placement) -> Placement:
        return _refined(placement, self.source_axes, self.layout.sizes)

    def target_placement(self, placement: Placement) -> Placement:
        return _refined(placement, self.target_axes, self.layout.sizes)


@lru_cache(maxsize=256)
def refine(source: Layout, target: Layout) -> Refinement:
    """Return the coarsest common axes; raise MeshError if there are none.

    Example:
        >>> found = refine(
        ...     Layout.from_shape((2, 4), ("dp", "tp")), Layout.from_shape((4, 2), ("ep", "etp"))
        ... )
        >>> found.layout.axis_text(), found.source_axes, found.target_axes
        ('dp=2, tp_ep=2, etp=2', ((0,), (1, 2)), ((0, 1), (2,)))
    """
    where = f"from mesh ({source.axis_text()}) to mesh ({target.axis_text()})"
    if source == target:
        axes = tuple((axis,) for axis in range(source.ndim))
        return Refinement(source, axes, axes)
    positions = _positions_in(source, target, where)
    modes = strided_modes(positions)
    if modes is None:
        raise MeshError(
            "two meshes order their ranks so differently that no common axes describe both",
            where=where,
            expected="each axis of the target to have fixed strides in the order of the source's "
            "ranks",
            found=f"{_order_text(source)}; and {_order_text(target)}",
            fix="derive one mesh from the other with unflatten, flatten and transpose",
        )
    own = Layout.from_shape(source.sizes).modes
    cuts = {1, source.num_ranks}
    cuts.update(
        cut for axis in (*own, *modes) for n, stride in axis for cut in (stride, stride * n)
    )
    ascending = sorted(cuts)
    for smaller, larger in pairwise(ascending):
        if larger % smaller:
            raise MeshError(
                "two meshes have no common refinement",
                where=where,
                expected="sizes whose products, from the last axis on, divide one another",
                found=f"axes that end after {smaller} ranks and after {larger}",
                fix="reshard in two steps: first replicate the array on a mesh with one axis over "
                "all ranks",
            )
    strides = ascending[-2::-1] or [1]
    sizes = tuple(larger // smaller for smaller, larger in pairwise(ascending))[::-1] or (1,)
    source_axes = tuple(_parts(axis, strides) for axis in own)
    target_axes = tuple(_parts(axis, strides) for axis in modes)
    names = _names(source, source_axes, target, target_axes, len(sizes))
    layout = Layout.from_ranks(source.ranks().reshape(sizes), names)
    return Refinement(layout, source_axes, target_axes)


def _positions_in(
    source: Layout, target: Layout, where: str
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return the index of each target rank in the source's row-major order."""
    ranks, wanted = source.ranks().ravel(), target.ranks()
    order = np.argsort(ranks)
    if not np.array_equal(ranks[order], np.sort(wanted.ravel())):
        raise MeshError(
            "cannot move an array between meshes over different ranks",
            where=where,
            expected=ranks_text(sorted(ranks.tolist())),
            found=ranks_text(sorted(wanted.ravel().tolist())),
        )
    return order[np.searchsorted(ranks, wanted, sorter=order)]


def _order_text(layout: Layout) -> str:
    ranks = layout.ranks().ravel().tolist()
    return ranks_text(ranks[:_SHOWN]) + (", ..." if len(ranks) > _SHOWN else "")


def _parts(axis: AxisModes, strides: list[int]) -> tuple[int, ...]:
    """Return the common axes, given by ``strides``, that make up the mesh axis ``axis``."""
    return tuple(
        number
        for size, stride in axis
        for number, common in enumerate(strides)
        if stride <= common < stride * size
    )


def _names(
    source: Layout,
    source_axes: tuple[tuple[int, ...], ...],
    target: Layout,
    target_axes: tuple[tuple[int, ...], ...],
    count: int,
) -> tuple[str, ...] | None:
    """Return a name per common axis, from its mesh axes' names; or None."""
    if source.names is None or target.names is None:
        return None
    found = [""] * count
    for number in range(count):
        ours, theirs = (
            next(
                (
                    (name, len(axes))
                    for name, axes in zip(names, lists, strict=True)
                    if number in axes
                ),
                ("", 0),
            )
            for names, lists in ((source.names, source_axes), (target.names, target_axes))
        )
        if ours[1] <= 1 or theirs[1] != 1:
            found[number] = ours[0] if ours[1] <= 1 else f"{ours[0]}_{theirs[0]}"
        else:
            found[number] = theirs[0]
    times = Counter(found)
    return tuple(
        name if name and times[name] == 1 else f"{name}_{number}"
        for number, name in enumerate(found)
    )


def _refined(
    placement: Placement, axes: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]
) -> Placement:
    def parts(given: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(part for axis in given for part in axes[axis])

    def dim_of(dim: DimSplit) -> DimSplit:
        finer = parts(dim.axes)
        blocks = None if dim.is_even else tuple(np.diff(dim.boundary_array).tolist())
        return split_dim(dim.size, finer, tuple(sizes[part] for part in finer), blocks)

    return Placement(
        sizes,
        placement.shape,
        tuple(map(dim_of, placement.dims)),
        tuple(sorted(parts(placement.unreduced))),
        tuple(sorted(parts(placement.reduced))),
    )
