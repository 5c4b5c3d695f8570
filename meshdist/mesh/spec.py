"""Provide ``NamedSharding``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn, cast

import numpy as np

from ..arguments import find_integers, get_integer, get_shape
from ..error_text import explain, with_article
from ..errors import AxisError, KindError, LengthError, ShapeError
from .layout import Layout, get_layout
from .partition_spec import Entry, PartitionSpec, axes_of, fix_of_entries, sharding_axes
from .pattern import Pattern, PatternSide
from .pattern_sizes import Parts, Sizing, checked_sizes, parse_side, parse_sides, shape_of_side
from .placement import Box, DimSplit, Placement, index_along, index_of, split_dim

__all__ = ["NamedSharding"]

_MAX_PLACEMENTS = 256


class NamedSharding:
    """The sharding of arrays: a mesh and a spec; immutable and hashable.

    Args:
        mesh: a ``DeviceMesh``, or a bare ``Layout``, which needs no processes.
        spec: the axes that cut each dim, and the unreduced and reduced axes.
        shard_sizes: for dims without balanced parts, by dim: the size of the part at each
            combination of coordinates along the dim's axes, the last axis the fastest.

    Raises:
        KindError: no mesh, no ``PartitionSpec``, sizes that are no integers by dim.
        AxisError: an axis that the mesh does not have, or an axis twice.
        LengthError: not one size for each part.
        ShapeError: sizes for a dim that no axis cuts, or below 0.

    Example:
        >>> from meshdist import P
        >>> mesh = Layout.from_shape((2, 4), ("dp", "tp"))
        >>> rows = NamedSharding(mesh, P("tp", None))
        >>> rows.box(5, (10, 8)), rows.shard_shape((10, 8), rank=7), rows.replica(5)
        (((3, 6), (0, 8)), (2, 8), 1)
        >>> NamedSharding(mesh, P("dp"), shard_sizes={0: (7, 3)}).box(4, (10,))
        ((7, 10),)
    """

    mesh: Any
    spec: PartitionSpec
    shard_sizes: Mapping[int, tuple[int, ...]]
    layout: Layout
    parts: Parts = Parts((), (), Placement((), (), ()))
    """The names and sizes of the dims, of a sharding made by ``from_pattern``; else no parts."""

    def __init__(
        self,
        mesh: Any,
        spec: PartitionSpec,
        *,
        shard_sizes: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        layout = get_layout(mesh, "NamedSharding")
        if not isinstance(spec, PartitionSpec):
            is_entries = isinstance(spec, (tuple, list))
            raise KindError(
                "NamedSharding takes a PartitionSpec",
                found=f"{spec!r}, {with_article(type(spec).__name__)}",
                fix=f"write P({', '.join(map(repr, spec))})" if is_entries else None,
            )
        dims = _indices_of_dims(layout, spec)
        sizes = _checked_shard_sizes(layout, dims, shard_sizes)
        vars(self).update(
            mesh=mesh,
            spec=spec,
            shard_sizes=dict(sizes),
            layout=layout,
            _dims=dims,
            _unreduced=_indices_of_set(layout, spec.unreduced),
            _reduced=_indices_of_set(layout, spec.reduced),
            _placements={},
            _hash=hash((layout, spec, sizes)),
        )

    @classmethod
    def from_pattern(
        cls,
        pattern: str,
        mesh: Any,
        shape: Sequence[int] | None = None,
        sizes: Mapping[str, int] | None = None,
        *,
        local_shape: Sequence[int] | None = None,
        rank: int | None = None,
    ) -> NamedSharding:
        """Return the sharding that a pattern of one side describes, for an array of known shape.

        Args:
            pattern: such as ``"b@dp (h k)@tp"``.
            mesh: a ``DeviceMesh`` or a ``Layout`` that has the axes.
            shape: of the global array; None takes each dim's size from ``sizes``, else the size of
                ``local_shape`` times the number of shards.
            sizes: global sizes of dims by name, also inside groups.
            local_shape: of the shard of ``rank``; it must fit the other arguments.

        Returns:
            The sharding; its ``parts`` have the names and sizes of the dims. A group is cut along
            its first dim, so that no part is split between shards.

        Raises:
            PatternError, AxisError, ShapeError: the pattern does not fit the mesh, the shape or the
                sizes.

        Example:
            >>> mesh = Layout.from_shape((4,), ("tp",))
            >>> heads = NamedSharding.from_pattern("(h k)@tp d", mesh, (20, 5), {"h": 10})
            >>> heads.spec, heads.shard_sizes, heads.parts.names, heads.parts.sizes
            (P('tp', None), {0: (6, 6, 4, 4)}, ('h', 'k', 'd'), (10, 2, 5))
        """
        parsed, side = parse_side(pattern)
        return sharding_of_side(
            parsed,
            side,
            mesh,
            checked_sizes(parsed, {} if sizes is None else sizes),
            shape=None if shape is None else get_shape(shape, "NamedSharding.from_pattern"),
            local_shape=None if local_shape is None else _sizes_of(local_shape, repr(pattern)),
            rank=rank,
            needs_parts=False,
            as_keywords=False,
        )

    def __setattr__(self, name: str, value: object = None) -> NoReturn:
        raise AttributeError(
            explain(
                f"a NamedSharding is immutable: its attribute {name!r} cannot be set or deleted",
                fix="create another: NamedSharding(mesh, spec)",
            )
        )

    __delattr__ = __setattr__

    _dims: tuple[tuple[int, ...], ...]
    _unreduced: tuple[int, ...]
    _reduced: tuple[int, ...]
    _placements: dict[tuple[int, ...], Placement]
    _hash: int

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.spec == other.spec
            and self.shard_sizes == other.shard_sizes
            and (self.mesh is other.mesh or bool(self.mesh == other.mesh))
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_parts, (self.mesh, self.spec, self.shard_sizes, self.parts)

    def __repr__(self) -> str:
        sizes = f", shard_sizes={self.shard_sizes!r}" if self.shard_sizes else ""
        return f"NamedSharding({self.mesh!r}, {self.spec!r}{sizes})"

    # ---------------------------------------------------------------- at a shape

    def placement(self, shape: Sequence[int]) -> Placement:
        """Return the placement of an array of this shape, cached by shape.

        Raises:
            ShapeError: fewer dims than the spec has entries, or a dim whose size is not the sum of
                its ``shard_sizes``.
            KindError: no shape.
        """
        key = _sizes_of(shape, self)
        found = self._placements.get(key)
        if found is None:
            found = self._new_placement(key)
            if len(self._placements) >= _MAX_PLACEMENTS:
                self._placements.clear()
            self._placements[key] = found
        return found

    def shard_shape(self, shape: Sequence[int], rank: int | None = None) -> tuple[int, ...]:
        """Return the shape of a rank's shard of an array of this shape.

        Args:
            shape: of the global array.
            rank: None means this process on a ``DeviceMesh``, and any rank on a ``Layout``.

        Raises:
            ShapeError: the spec does not fit the shape, or no rank was given and shards differ.
            NotInGroupError: the mesh does not hold the rank.
        """
        placement = self.placement(shape)
        if rank is None and self.mesh is self.layout:
            if not all(dim.is_even for dim in placement.dims):
                raise ShapeError(
                    f"shards of an array of shape {tuple(shape)} differ in shape",
                    where=repr(self),
                    fix="pass a rank: shard_shape(shape, rank=0)",
                )
            return placement.local_shape((0,) * self.layout.ndim)
        return placement.local_shape(
            self.layout.get_coordinate(self.mesh.get_rank() if rank is None else rank)
        )

    def whole_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the global shape for a shard's shape; dims without ``shard_sizes`` count as even.

        Example:
            >>> from meshdist import P
            >>> rows = NamedSharding(Layout.from_shape((2,), ("dp",)), P("dp"))
            >>> rows.whole_shape((3, 5))
            (6, 5)
        """
        # The placement rejects a spec with more entries than the array has dims.
        sizes, dims = self.layout.sizes, self._dims
        return tuple(
            sum(self.shard_sizes[dim])
            if dim in self.shard_sizes
            else size * math.prod([sizes[axis] for axis in dims[dim]] if dim < len(dims) else ())
            for dim, size in enumerate(_sizes_of(local_shape, self))
        )

    def box(self, rank: int, shape: Sequence[int]) -> Box:
        """Return a rank's part of an array of this shape: (start, stop) per dim.

        Raises:
            ShapeError: the spec does not fit the shape.
            NotInGroupError: the mesh does not hold the rank.
        """
        return self.placement(shape).box(self.layout.get_coordinate(rank))

    def indices_map(self, shape: Sequence[int]) -> dict[int, tuple[slice, ...]]:
        """Return the index of each rank's shard in an array of this shape, in mesh order.

        Example:
            >>> from meshdist import P
            >>> mesh = Layout.from_shape((2,), ("dp",))
            >>> NamedSharding(mesh, P("dp")).indices_map((3,))
            {0: (slice(0, 2, None),), 1: (slice(2, 3, None),)}
        """
        placement = self.placement(shape)
        return {
            int(rank): index_of(placement.box(coordinate))
            for coordinate, rank in np.ndenumerate(self.layout.ranks())
        }

    # ---------------------------------------------------------------- at any shape

    def replica(self, rank: int) -> int:
        """Return which copy of its shard a rank holds: 0 for the copy that is saved.

        Copies are on ranks along the axes that neither cut a dim nor are unreduced, in mesh order.

        Raises:
            NotInGroupError: the mesh does not hold the rank.
        """
        return index_along(self._free, self.layout.sizes, self.layout.get_coordinate(rank))

    @property
    def replicated_axes(self) -> frozenset[str]:
        """The axes that the spec omits: along them, values and gradients are equal."""
        names = self.layout.names or ()
        return frozenset(names[axis] for axis in self._free if axis not in self._reduced)

    @property
    def is_fully_replicated(self) -> bool:
        """Return whether every rank holds all values of the array."""
        cut = (axis for axes in self._dims for axis in axes)
        return all(self.layout.sizes[axis] == 1 for axis in (*cut, *self._unreduced))

    def is_equivalent_to(self, other: NamedSharding, ndim: int) -> bool:
        """Return whether each rank holds the same part, of equal kind, of arrays of ``ndim`` dims.

        Meshes may differ in names and axes, and specs in omitted entries or axes of size 1.

        Raises:
            ShapeError: fewer dims than a spec has entries.
            KindError: ``other`` is no ``NamedSharding``.
        """
        if not isinstance(other, NamedSharding):
            raise KindError(
                "is_equivalent_to takes a NamedSharding",
                where=repr(self),
                found=with_article(type(other).__name__),
                fix="NamedSharding(mesh, spec)",
            )
        ndim = get_integer(ndim, "is_equivalent_to: ndim", 0)
        for sharding in (self, other):
            sharding._check_ndim((None,) * ndim)
        return self._arrangement(ndim) == other._arrangement(ndim)

    # ---------------------------------------------------------------- internals

    @cached_property
    def _free(self) -> tuple[int, ...]:
        used = {*self._unreduced, *(axis for axes in self._dims for axis in axes)}
        return tuple(axis for axis in range(self.layout.ndim) if axis not in used)

    def _check_ndim(self, shape: Sequence[object]) -> None:
        if len(shape) < len(self.spec):
            raise ShapeError(
                f"{self.spec!r} has entries for {len(self.spec)} dims, the array has {len(shape)}",
                where=repr(self),
                expected=f"an array of at least {len(self.spec)} dims",
                found=f"shape {tuple(shape)}" if None not in shape else None,
                fix=fix_of_entries(len(shape)),
            )

    def _new_placement(self, shape: tuple[int, ...]) -> Placement:
        self._check_ndim(shape)
        sizes = self.layout.sizes
        dims = []
        for dim, size in enumerate(shape):
            axes = self._dims[dim] if dim < len(self._dims) else ()
            given = self.shard_sizes.get(dim)
            if size < 0:
                raise ShapeError(
                    f"a dim of an array cannot have size {size}", found=f"shape {shape}"
                )
            if given is not None and sum(given) != size:
                raise ShapeError(
                    f"the shard sizes of dim {dim} do not add up to its size",
                    where=repr(self),
                    expected=f"{' + '.join(map(str, given))} = {sum(given)}",
                    found=f"{size} in shape {shape}",
                )
            dims.append(split_dim(size, axes, tuple([sizes[axis] for axis in axes]), given))
        return Placement(sizes, shape, tuple(dims), self._unreduced, self._reduced)

    def _arrangement(self, ndim: int) -> tuple[object, ...]:
        """Return a key that equivalent shardings share."""
        layout = self.layout
        dims = (*self._dims, *((),) * (ndim - len(self._dims)))
        cuts = tuple(
            tuple(layout.sizes[axis] for axis in axes if layout.sizes[axis] > 1) for axes in dims
        )
        sizes = tuple(self.shard_sizes.get(dim) for dim in range(ndim))
        cut = [axis for axes in dims for axis in axes]
        others = [axis for axis in range(layout.ndim) if axis not in cut]
        # The key lists, for each block, the ranks with equal values, then with equal cotangents.
        blocks = []
        for apart in (self._unreduced, self._reduced):
            alike = [axis for axis in others if axis not in apart]
            ranks = layout.ranks().transpose(*cut, *apart, *alike)
            num_blocks = math.prod(layout.sizes[axis] for axis in cut)
            count = math.prod(layout.sizes[axis] for axis in apart)
            rows = np.sort(ranks.reshape(num_blocks, count, -1), axis=-1)
            order = np.argsort(rows[:, :, 0], axis=1)
            rows = np.take_along_axis(rows, order[:, :, None], axis=1)
            blocks.append((rows.shape, rows.tobytes()))
        return cuts, sizes, tuple(blocks)


def _indices_of_dims(layout: Layout, spec: PartitionSpec) -> tuple[tuple[int, ...], ...]:
    dims = tuple(tuple(map(layout.axis_index, axes_of(entry))) for entry in spec.partitions)
    named = sharding_axes(spec)
    if len(set(named)) != len(named):
        twice = next(axis for axis in named if named.count(axis) > 1)
        raise AxisError(
            f"axis {twice!r} is named twice",
            where=f"{spec!r} on mesh ({layout.axis_text()})",
            expected="each axis at most once",
        )
    return dims


def _indices_of_set(layout: Layout, axes: frozenset[str]) -> tuple[int, ...]:
    return tuple(sorted(map(layout.axis_index, sorted(axes))))


def _checked_shard_sizes(
    layout: Layout,
    dims: tuple[tuple[int, ...], ...],
    shard_sizes: Mapping[int, Sequence[int]] | None,
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    try:
        rows = [find_integers([dim, *sizes]) for dim, sizes in (shard_sizes or {}).items()]
    except (TypeError, AttributeError):
        rows = [None]
    if None in rows:
        raise KindError(
            "shard_sizes must be a mapping from dims to the sizes of their parts",
            expected="such as {0: (7, 3)}",
            found=repr(shard_sizes),
        )
    checked = sorted((dim, tuple(sizes)) for dim, *sizes in cast("list[list[int]]", rows))
    for dim, sizes in checked:
        if not 0 <= dim < len(dims) or not dims[dim]:
            raise ShapeError(
                f"shard_sizes names dim {dim}, which no axis cuts",
                expected=f"one of dims {[dim for dim, axes in enumerate(dims) if axes]}",
                found=f"shard_sizes={shard_sizes!r}",
            )
        parts = math.prod(layout.sizes[axis] for axis in dims[dim])
        if len(sizes) != parts:
            raise LengthError(
                f"shard_sizes has {len(sizes)} sizes for dim {dim}, cut into {parts} parts",
                where=f"mesh ({layout.axis_text()})",
                expected=f"{parts} sizes",
                found=f"{sizes}",
            )
        if min(sizes) < 0:
            raise ShapeError(f"a part of dim {dim} cannot have size {min(sizes)}", found=f"{sizes}")
    return tuple(checked)


def _with_parts(
    mesh: Any,
    spec: PartitionSpec,
    shard_sizes: Mapping[int, tuple[int, ...]],
    parts: Parts,
) -> NamedSharding:
    sharding = NamedSharding(mesh, spec, shard_sizes=shard_sizes)
    vars(sharding).update(parts=parts)
    return sharding


def _sizes_of(shape: Any, where: object) -> tuple[int, ...]:
    """Return ``shape`` as a tuple of ints; else raise with ``where``."""
    try:
        sizes = find_integers(tuple(shape))
    except TypeError:
        sizes = None
    if sizes is None:
        raise KindError(
            "a shape must have an integer for each dim",
            where=str(where),
            expected="for example (8, 16)",
            found=repr(shape),
        )
    return tuple(sizes)


def sharding_of_side(
    pattern: Pattern,
    side: PatternSide,
    mesh: Any,
    sizes: Mapping[str, int],
    *,
    shape: Sequence[int] | None = None,
    local_shape: Sequence[int] | None = None,
    rank: int | None = None,
    needs_parts: bool = True,
    as_keywords: bool = True,
) -> NamedSharding:
    """Return the sharding of one side of a pattern; see ``NamedSharding.from_pattern``.

    Args:
        needs_parts: whether all sizes inside groups must be known.
        as_keywords: whether the caller takes sizes as keywords, not as ``sizes=``.
    """
    layout = get_layout(mesh, "NamedSharding")
    whole, local = (None if each is None else tuple(each) for each in (shape, local_shape))
    sizing = Sizing(
        pattern,
        side,
        layout,
        sizes,
        shape=whole,
        local_shape=local,
        rank=rank,
        as_keywords=as_keywords,
    )
    parts = sizing.parts(needs_parts=needs_parts)
    return _with_parts(mesh, sizing.spec, _sizes_of_blocks(parts.dims), parts)


def shardings_of_sides(
    text: str,
    mesh: Any,
    shape: tuple[int, ...] | None,
    sizes: Mapping[str, int],
    *,
    local_shape: tuple[int, ...] | None = None,
    rank: int | None = None,
) -> tuple[NamedSharding, NamedSharding]:
    """Return both sides' shardings of a pattern with "->"; the arguments are the left's.

    Example:
        >>> mesh = Layout.from_shape((2,), ("tp",))
        >>> left, right = shardings_of_sides("(h k) d@tp -> d h@tp k", mesh, (12, 5), {"k": 4})
        >>> left.parts.names, right.parts.names, right.parts.shape
        (('h', 'k', 'd'), ('d', 'h', 'k'), (5, 3, 4))
    """
    pattern, left, right = parse_sides(text)
    known = checked_sizes(pattern, sizes)
    source = sharding_of_side(
        pattern, left, mesh, known, shape=shape, local_shape=local_shape, rank=rank
    )
    known = source.parts.by_name
    there = shape_of_side(right, known)
    return source, sharding_of_side(pattern, right, mesh, known, shape=there)


def sharding_of(
    mesh: Any,
    dims: Sequence[DimSplit],
    *,
    unreduced: Iterable[str] = (),
    reduced: Iterable[str] = (),
) -> NamedSharding:
    """Return the sharding with these dims; the inverse of ``NamedSharding.placement``.

    Example:
        >>> mesh = Layout.from_shape((2, 2), ("dp", "tp"))
        >>> rows = sharding_of(mesh, [DimSplit(8, (0,), (2,), (5, 3)), DimSplit(4)])
        >>> rows.spec, rows.shard_sizes
        (P('dp',), {0: (5, 3)})
    """
    names = get_layout(mesh, "NamedSharding").names or ()
    entries: list[Entry] = [tuple(names[axis] for axis in split.axes) for split in dims]
    while entries and not entries[-1]:
        entries.pop()
    spec = PartitionSpec(*entries, unreduced=frozenset(unreduced), reduced=frozenset(reduced))
    return NamedSharding(mesh, spec, shard_sizes=_sizes_of_blocks(dims))


def _sizes_of_blocks(dims: Sequence[DimSplit]) -> dict[int, tuple[int, ...]]:
    return {
        dim: split.block_sizes for dim, split in enumerate(dims) if split.block_sizes is not None
    }


def sized_by_shards(
    sharding: NamedSharding, shapes: Mapping[int, Sequence[int]]
) -> tuple[NamedSharding, tuple[int, ...]]:
    """Return a sharding with the sizes of its parts, and the global shape.

    Args:
        shapes: of the shards, by rank.

    Example: along 'i' of a mesh (i=2, j=2) ranks 0 and 1 hold part 0, ranks 2 and 3 part 1. The
        shapes of ranks 0 and 2 give the sizes; ranks 1 and 3 must match.
    """
    layout, mesh, spec = sharding.layout, sharding.mesh, sharding.spec
    sizes = dict(sharding.shard_sizes)
    for dim, entry in enumerate(spec.partitions):
        axes = layout.axis_indices(axes_of(entry)) if entry else ()
        if axes and dim not in sizes:
            count = math.prod(layout.sizes[axis] for axis in axes)
            ranks = np.moveaxis(layout.ranks(), axes, range(len(axes))).reshape(count, -1)
            sizes[dim] = tuple([shapes[rank][dim] for rank in ranks[:, 0].tolist()])
    sized = NamedSharding(mesh, spec, shard_sizes=sizes)
    shape = sized.whole_shape(next(iter(shapes.values())))
    blocks = _sizes_of_blocks(sized.placement(shape).dims)  # Balanced dims have no sizes.
    return NamedSharding(mesh, spec, shard_sizes=blocks), shape
