"""Provide ``Layout``: ranks arranged along named axes, as strides, without processes.

Each axis is a tuple of modes (size, stride), major to minor. The place of a coordinate is
``offset`` plus the sum of its strides; its rank is ``rank_map[place]``, or without a rank map the
place. Ranks are listed only on request, so a mesh of 16,384 ranks costs microseconds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..arguments import find_integers, get_integer, mesh_kind_error
from ..errors import AxisError, KindError, MeshError, NotInGroupError
from .layout_arguments import (
    checked_modes,
    checked_names,
    checked_ranks,
    checked_sizes,
    inferred_sizes,
    no_axis,
    num_ranks_text,
)
from .strides import (
    AxisModes,
    coalesced,
    common_origin,
    displacement,
    is_nested,
    positions_of,
    size_of,
    split,
    strided_modes,
)
from .visualize import draw, draw_svg

__all__ = ["Layout"]

AxisName = str
Axis = str | int

# The repr of a larger layout that is not row-major shows strides, because ranks would fill pages.
_REPR_RANKS = 64


class _RankMap(tuple[int, ...]):
    """The global rank at each place, shared by derived layouts."""

    @cached_property
    def positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self)}


@dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """Global ranks at the points of a grid with named axes; immutable, hashable, process-free.

    Layouts are equal if their names and the rank at every coordinate are equal.

    Args:
        modes: per axis the (size, stride) pairs, major to minor. They are normalized: pairs of size
            1 are dropped and neighbours whose strides continue are merged.
        names: one name per axis, or None.
        offset: the place of coordinate (0, 0, ...).
        rank_map: the global rank at each place; None if every place is its rank.

    Raises:
        MeshError: sizes or strides below 1, axes that overlap, places outside the rank map.
        AxisError: names that are no identifiers, repeat, or do not match the axes in number.

    Example:
        >>> mesh = Layout.from_shape((2, 4), ("dp", "tp"))
        >>> mesh.coordinate_of(6), mesh.ranks_of_axis("dp", 6), mesh.ranks_of_axis("tp", 6)
        ((1, 2), (2, 6), (4, 5, 6, 7))
        >>> mesh.slice(("dp",), rank=6)
        Layout.from_ranks([2, 6], names=('dp',))
    """

    modes: tuple[AxisModes, ...]
    names: tuple[AxisName, ...] | None = None
    offset: int = 0
    rank_map: tuple[int, ...] | None = None

    # ---------------------------------------------------------------- constructors

    def __post_init__(self) -> None:
        try:
            axes, offset = tuple(self.modes), operator.index(self.offset)
        except TypeError as error:
            raise KindError(
                "a Layout takes a sequence of axes and an integer offset",
                found=f"modes {self.modes!r}, offset {self.offset!r}",
            ) from error
        modes = tuple(map(checked_modes, axes))
        if not modes:
            raise MeshError("a mesh must have at least one axis", found="no axes")
        names = checked_names(self.names, len(modes))
        if offset < 0:
            raise MeshError(f"the offset of a layout cannot be negative: {offset}")
        rank_map = self.rank_map
        if rank_map is not None and not isinstance(rank_map, _RankMap):
            rank_map = _RankMap(checked_ranks(rank_map).tolist())
        vars(self).update(modes=modes, names=names, offset=offset, rank_map=rank_map)
        if not is_nested(mode for axis in modes for mode in axis):
            raise MeshError(
                "the axes of a layout overlap or interleave",
                expected="each stride to be larger than the reach of all smaller strides",
                found=f"modes {modes}",
                fix="build it from the array of ranks: Layout.from_ranks(ranks)",
            )
        if rank_map is not None and self._last >= len(rank_map):
            raise MeshError(
                "a layout reaches beyond its rank map",
                expected=f"positions below {len(rank_map)}",
                found=f"position {self._last}",
            )

    @staticmethod
    def from_shape(
        shape: Sequence[int],
        names: Sequence[AxisName] | None = None,
        *,
        world_size: int | None = None,
    ) -> Layout:
        """Return ranks 0, 1, 2, ... in row-major order.

        Args:
            shape: the size of each axis; one size may be -1, which is inferred from ``world_size``.
            names: one name per axis, or None.
            world_size: the maximum number of ranks, or None.

        Raises:
            MeshError: a size of 0 or below -1, two sizes of -1, a -1 that ``world_size`` does not
                determine, a mesh larger than the world.

        Example:
            >>> Layout.from_shape((2, -1), ("dp", "tp"), world_size=8)
            Layout.from_shape((2, 4), names=('dp', 'tp'))
        """
        text = "mesh shape"
        sizes = checked_sizes(shape, text)
        if -1 in sizes:
            if world_size is None:
                raise MeshError(
                    f"{text} {sizes} has a -1, and world_size is not given",
                    fix="write the size out, or pass world_size=",
                )
            world_text = f"a world of {num_ranks_text(world_size)}"
            sizes = inferred_sizes(sizes, world_size, text, world_text)
        num_ranks = math.prod(sizes)
        if world_size is not None and num_ranks > world_size:
            raise MeshError(
                f"{text} {sizes} needs {num_ranks} ranks, more than the world has",
                expected=f"at most {num_ranks_text(world_size)}",
                found=f"{' x '.join(map(str, sizes))} = {num_ranks}",
                fix=f"start {num_ranks} ranks, or make an axis smaller (one may be -1)",
            )
        modes: list[AxisModes] = []
        stride = 1
        for size in reversed(sizes):
            modes.append(((size, stride),) if size > 1 else ())
            stride *= size
        return _build(tuple(reversed(modes)), checked_names(names, len(sizes)), 0, None)

    @staticmethod
    def from_ranks(
        ranks: Any,
        names: Sequence[AxisName] | None = None,
        *,
        world_size: int | None = None,
    ) -> Layout:
        """Return the layout whose coordinate c holds rank ``ranks[c]``, in any order.

        Args:
            ranks: global ranks, one dim per axis: an array, tensor or nested sequence of ints.
            names: one name per axis, or None.
            world_size: if given, every rank must be below it.

        Raises:
            KindError: not an array of integers.
            MeshError: no ranks, no axis, a rank twice, negative, or outside the world.

        Example:
            >>> Layout.from_ranks([[0, 2], [1, 3]]) == Layout.from_shape((2, 2)).transpose((1, 0))
            True
        """
        array = checked_ranks(ranks, world_size)
        checked = checked_names(names, array.ndim)
        strided = strided_modes(array)
        if strided is not None:
            return _build(strided, checked, int(array.flat[0]), None)
        dense = Layout.from_shape(array.shape)
        return _build(dense.modes, checked, 0, _RankMap(array.ravel().tolist()))

    # ---------------------------------------------------------------- properties

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The size of each axis."""
        return tuple(size_of(axis) for axis in self.modes)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.modes)

    @cached_property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    @cached_property
    def largest_rank(self) -> int:
        """The largest rank of the mesh."""
        if self.rank_map is None:  # Strides are positive.
            return self._last
        return int(self.ranks().max())

    @property
    def axis_sizes(self) -> dict[AxisName, int]:
        """The size of each axis by name, in axis order.

        Raises:
            AxisError: the mesh has no names.
        """
        if self.names is None:
            raise AxisError(
                "the mesh has no axis names",
                where=self._text,
                fix="use .sizes, which is in axis order",
            )
        return dict(zip(self.names, self.sizes, strict=True))

    def axis_text(self) -> str:
        """Return ``"dp=2, tp=4"``, or ``"2, 4"`` without names."""
        return self._named(self.sizes)

    def coordinate_text(self, rank: int) -> str:
        """Return ``"dp=1, tp=0"``, or ``"outside the mesh"``."""
        coordinate = self.coordinate_of(rank)
        return "outside the mesh" if coordinate is None else self._named(coordinate)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        if self is other:
            return True
        if self.names != other.names or self.sizes != other.sizes:
            return False
        if self.modes == other.modes and self.offset == other.offset:
            if self.rank_map is other.rank_map:
                return True
        elif self.rank_map is None and other.rank_map is None:
            return False  # If places are ranks, the normal form is unique.
        return bool(np.array_equal(self.ranks(), other.ranks()))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        steps = tuple(self._rank_of(self.offset + axis[-1][1]) for axis in self.modes if axis)
        ends = (self._rank_of(self.offset), self._rank_of(self._last))
        return hash((self.names, self.sizes, ends, steps))

    def __repr__(self) -> str:
        names = "" if self.names is None else f", names={self.names!r}"
        dense = Layout.from_shape(self.sizes)
        if self.rank_map is None and self.offset == 0 and self.modes == dense.modes:
            return f"Layout.from_shape({self.sizes!r}{names})"
        if self.rank_map is not None or self.num_ranks <= _REPR_RANKS:
            return f"Layout.from_ranks({self.ranks().tolist()!r}{names})"
        return f"Layout({self.modes!r}{names}, offset={self.offset})"

    def __str__(self) -> str:
        return draw(self)

    def _repr_svg_(self) -> str:
        """The SVG drawing for notebooks."""
        return draw_svg(self)

    def __reduce__(self) -> tuple[Any, ...]:
        plain = None if self.rank_map is None else tuple(self.rank_map)
        return Layout, (self.modes, self.names, self.offset, plain)

    # ---------------------------------------------------------------- ranks and coordinates

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of a rank, or None outside the mesh. Inverse of ``rank_at``."""
        if self.rank_map is None:
            position: int | None = rank if type(rank) is int else get_integer(rank, "rank")
        else:
            position = self.rank_map.positions.get(rank)  # type: ignore[attr-defined]
        return None if position is None else self._coordinate_at(position)

    def get_coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the coordinate of a global rank; raises NotInGroupError outside the mesh."""
        coordinate = self.coordinate_of(rank)
        if coordinate is None:
            raise NotInGroupError(
                f"the mesh does not contain rank {rank}",
                where=self._text,
                expected=f"one of its ranks: {self._some_ranks()}",
                fix="skip the call on ranks outside the mesh",
            )
        return coordinate

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Return the global rank at a coordinate. Inverse of ``coordinate_of``.

        Raises:
            MeshError: not one index per axis, or an index outside its axis.
        """
        if len(coordinate) != self.ndim or not all(
            0 <= index < size for index, size in zip(coordinate, self.sizes, strict=True)
        ):
            raise MeshError(
                f"no coordinate {tuple(coordinate)} in the mesh",
                where=self._text,
                expected="one index from 0 to size - 1 per axis",
            )
        return self._rank_of(self.offset + sum(map(displacement, self.modes, coordinate)))

    def ranks(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return all global ranks as a fresh array of shape ``sizes``."""
        positions = positions_of(self.offset, self.modes)
        if self.rank_map is None:
            return positions
        by_position = np.array(self.rank_map, dtype=np.int64)
        return np.take(by_position, positions)

    def ranks_of_axis(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the group along ``axis`` that holds ``rank``, in the order of the axis's indices.

        Raises:
            AxisError: no such axis.
            NotInGroupError: the mesh does not hold ``rank``.
        """
        return self.ranks_of_axes((axis,), rank)

    def ranks_of_axes(self, axes: Sequence[Axis], rank: int) -> tuple[int, ...]:
        """Return the group over several axes that holds ``rank``, row-major in the order given.

        Raises:
            AxisError: no such axis, an axis twice, no axes.
            NotInGroupError: the mesh does not hold ``rank``.

        Example:
            >>> mesh = Layout.from_shape((2, 2, 2), ("pp", "dp", "tp"))
            >>> mesh.ranks_of_axes(("dp", "pp"), 1)
            (1, 5, 3, 7)
        """
        indices = self.axis_indices(axes)
        start = self._start_of(indices, rank)
        modes = [mode for index in indices for mode in self.modes[index]]
        positions: Iterable[int] = (start,)
        for size, stride in modes:
            reach = size * stride
            positions = [
                at for position in positions for at in range(position, position + reach, stride)
            ]
        if self.rank_map is None:
            return tuple(positions)
        return tuple(map(self.rank_map.__getitem__, positions))

    def groups_of_axis(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return every group along ``axis``, ordered by the other axes' coordinates, row-major.

        It lists all ranks, so it is slow for large meshes.
        """
        return self.groups_of_axes((axis,))

    def groups_of_axes(self, axes: Sequence[Axis]) -> tuple[tuple[int, ...], ...]:
        """Return every group over several axes; see ``groups_of_axis``.

        Example:
            >>> Layout.from_shape((2, 2, 2), ("pp", "dp", "tp")).groups_of_axes(("pp", "tp"))
            ((0, 1, 4, 5), (2, 3, 6, 7))
        """
        indices = self.axis_indices(axes)
        others = tuple(index for index in range(self.ndim) if index not in indices)
        size = math.prod(self.sizes[index] for index in indices)
        rows = self.ranks().transpose(others + indices).reshape(-1, size)
        return tuple(map(tuple, rows.tolist()))

    # ---------------------------------------------------------------- axes by name or index

    def axis_index(self, axis: Axis) -> int:
        """Return the index of an axis from its name or an index, which may be negative.

        Raises:
            AxisError: no such axis; the error lists the axes and suggests the nearest.
        """
        if isinstance(axis, str):
            if self.names is None:
                raise AxisError(
                    f"no axis {axis!r}: the mesh has no axis names",
                    where=self._text,
                    fix="name the axes when you create the mesh, or pass an index",
                )
            try:
                return self.names.index(axis)
            except ValueError:
                pass
            raise no_axis(axis, self.names, self._text)
        numbers = find_integers([axis])
        if numbers is None:
            raise AxisError(
                f"an axis must be a name or an index, not {axis!r}",
                where=self._text,
                found=type(axis).__name__,
            )
        (index,) = numbers
        if not -self.ndim <= index < self.ndim:
            raise AxisError(
                f"no axis {index} in the mesh",
                where=self._text,
                expected=f"an index from {-self.ndim} to {self.ndim - 1}",
            )
        return index % self.ndim

    def axis_indices(self, axes: Sequence[Axis]) -> tuple[int, ...]:
        """Return the indices of several axes, in the order given; a name counts as one axis.

        Raises:
            AxisError: no such axis, an axis twice, no axes.
        """
        if isinstance(axes, str):
            axes = (axes,)
        try:
            axes = tuple(axes)
        except TypeError as error:
            raise AxisError(
                f"axes must be a sequence of names or indices, not {axes!r}", where=self._text
            ) from error
        indices = tuple(map(self.axis_index, axes))
        if not indices:
            raise AxisError("no axes given", where=self._text, expected="at least one axis")
        if len(set(indices)) != len(indices):
            raise AxisError(
                "an axis is given twice",
                where=self._text,
                expected="each axis at most once",
                found=f"axes {tuple(axes)}",
            )
        return indices

    # ---------------------------------------------------------------- operations

    def slice(self, axes: Sequence[Axis], rank: int) -> Layout:
        """Return the part with only ``axes``, in the order given, that contains ``rank``.

        Raises:
            AxisError: no such axis, an axis twice, no axes.
            NotInGroupError: the mesh does not hold ``rank``.

        Example:
            >>> Layout.from_shape((2, 2, 2), ("pp", "dp", "tp")).slice(("tp", "pp"), rank=3)
            Layout.from_ranks([[2, 6], [3, 7]], names=('tp', 'pp'))
        """
        indices = self.axis_indices(axes)
        start = self._start_of(indices, rank)
        modes = tuple(self.modes[index] for index in indices)
        return _build(modes, self._names_of(indices), start, self.rank_map)

    def transpose(self, axes: Sequence[Axis]) -> Layout:
        """Return the same ranks with the axes in the order given.

        Raises:
            AxisError: not each axis exactly once.

        Example:
            >>> Layout.from_shape((2, 3), ("dp", "tp")).transpose(("tp", "dp")).ranks().tolist()
            [[0, 3], [1, 4], [2, 5]]
        """
        indices = self.axis_indices(axes)
        if len(indices) != self.ndim:
            raise AxisError(
                "transpose leaves out an axis",
                where=self._text,
                expected=f"all {self.ndim} axes, each once",
                found=f"axes {(axes,) if isinstance(axes, str) else tuple(axes)}",
                fix="name every axis once; to choose some of the axes, call slice()",
            )
        modes = tuple(self.modes[index] for index in indices)
        return _build(modes, self._names_of(indices), self.offset, self.rank_map)

    def flatten(self, axes: Sequence[Axis], name: AxisName | None = None) -> Layout:
        """Return the layout with ``axes`` merged into one axis, which replaces the first of them.

        The axes need not be neighbours. If they are, in this order, ``unflatten`` is the inverse.

        Args:
            axes: major to minor.
            name: the new axis's name; by default their names, joined by "_".

        Raises:
            AxisError: no such axis, an axis twice, a name that is taken, or a name for an unnamed
                mesh.

        Example:
            >>> mesh = Layout.from_shape((2, 2, 2), ("pp", "dp", "tp"))
            >>> mesh.flatten(("pp", "tp")).ranks().tolist()
            [[0, 2], [1, 3], [4, 6], [5, 7]]
            >>> mesh.flatten(("pp", "tp")).axis_text()
            'pp_tp=4, dp=2'
        """
        indices = self.axis_indices(axes)
        if self.names is not None and name is None:
            name = "_".join(self.names[index] for index in indices)
        joined = coalesced(mode for index in indices for mode in self.modes[index])
        kept = [index for index in range(self.ndim) if index == indices[0] or index not in indices]
        modes = tuple(joined if index == indices[0] else self.modes[index] for index in kept)
        names = self._renamed(
            kept, {indices[0]: () if name is None else (name,)}, f"flatten of {self._text}"
        )
        return _build(modes, names, self.offset, self.rank_map)

    def unflatten(
        self, axis: Axis, sizes: Sequence[int], names: Sequence[AxisName] | None = None
    ) -> Layout:
        """Return the layout with ``axis`` split, row-major, into axes of these sizes.

        Inverse of ``flatten``. One size may be -1.

        Raises:
            AxisError: no such axis, names that are taken, or not one name per size.
            MeshError: sizes whose product is not the axis's size.

        Example:
            >>> mesh = Layout.from_shape((2, 8), ("dp", "tp"))
            >>> mesh.unflatten("tp", (-1, 2), ("ep", "etp")).axis_text()
            'dp=2, ep=4, etp=2'
        """
        index = self.axis_index(axis)
        whole = self.sizes[index]
        what = f"unflatten of axis {self._label(index)} into"
        checked = checked_sizes(sizes, what)
        checked = inferred_sizes(checked, whole, what, f"an axis of size {whole}")
        if math.prod(checked) != whole:
            raise MeshError(
                f"{what} {checked} does not match its size",
                where=self._text,
                expected=f"sizes whose product is {whole}",
                found=f"{' x '.join(map(str, checked))} = {math.prod(checked)}",
                fix="correct the sizes, or pass -1 as one of them",
            )
        if isinstance(names, str):
            names = (names,)
        new_names = self._renamed(
            range(self.ndim),
            {index: tuple(names or ())},
            f"unflatten of {self._text}",
            counts={index: len(checked)},
        )
        parts = split(self.modes[index], checked)
        if parts is None:  # No strides describe the axes, so a rank map must list the ranks.
            shape = (*self.sizes[:index], *checked, *self.sizes[index + 1 :])
            return Layout.from_ranks(self.ranks().reshape(shape), new_names)
        modes = (*self.modes[:index], *parts, *self.modes[index + 1 :])
        return _build(modes, new_names, self.offset, self.rank_map)

    @staticmethod
    def concatenate(layouts: Sequence[Layout]) -> Layout:
        """Return the layout with the axes of all, in order, through the rank that they share.

        The layouts are slices of one mesh, or of views of it.

        Raises:
            MeshError: no layouts, parts of different meshes, parts that share no rank, axes that
                overlap.
            AxisError: a name twice, or named and unnamed parts.

        Example:
            >>> mesh = Layout.from_shape((2, 2, 2), ("pp", "dp", "tp"))
            >>> parts = mesh.slice(("tp",), rank=3), mesh.slice(("pp",), rank=3)
            >>> Layout.concatenate(parts) == mesh.slice(("tp", "pp"), rank=3)
            True
        """
        layouts = tuple(layouts)
        if not layouts:
            raise MeshError("concatenate needs at least one layout", found="none")
        first = layouts[0]
        where = " and ".join(layout._text for layout in layouts)
        if any((layout.names is None) != (first.names is None) for layout in layouts):
            raise AxisError(
                "concatenate cannot join named axes and unnamed axes",
                where=where,
                fix="name all of the parts, or none",
            )
        if any(
            layout.rank_map is not first.rank_map and layout.rank_map != first.rank_map
            for layout in layouts
        ):
            raise MeshError(
                "concatenate cannot join parts of different meshes",
                where=where,
                expected="slices of one mesh",
                fix="slice all parts from one mesh, or arrange the ranks with Layout.from_ranks",
            )
        modes = tuple(axis for layout in layouts for axis in layout.modes)
        names = None
        if first.names is not None:
            joined = tuple(name for layout in layouts for name in layout.names or ())
            names = checked_names(joined, len(joined), f"concatenate of {where}")
        if not is_nested(mode for axis in modes for mode in axis):
            raise MeshError(
                "concatenate cannot join axes that overlap",
                where=where,
                expected="axes that share exactly one rank",
                fix="slice the parts so that each axis of the mesh is in only one of them",
            )
        offset, so_far = first.offset, list(first.modes)
        for layout in layouts[1:]:
            origin = common_origin(offset, so_far, layout.offset, layout.modes)
            if origin is None:
                raise MeshError(
                    "concatenate cannot join parts that share no rank",
                    where=where,
                    expected="parts through one rank",
                    found="; ".join(layout._some_ranks() for layout in layouts),
                    fix="slice all parts with the same rank",
                )
            offset = origin
            so_far.extend(layout.modes)
        return _build(modes, names, offset, first.rank_map)

    # ---------------------------------------------------------------- internals

    @property
    def _text(self) -> str:
        return f"mesh ({self.axis_text()})"

    def _named(self, numbers: Iterable[int]) -> str:
        if self.names is None:
            return ", ".join(map(str, numbers))
        return ", ".join(map("{}={}".format, self.names, numbers))

    def _label(self, index: int) -> str:
        return str(index) if self.names is None else repr(self.names[index])

    def _names_of(self, indices: Iterable[int]) -> tuple[AxisName, ...] | None:
        names = self.names
        return None if names is None else tuple(names[index] for index in indices)

    def _renamed(
        self,
        indices: Iterable[int],
        new: dict[int, tuple[AxisName, ...]],
        where: str,
        counts: dict[int, int] | None = None,
    ) -> tuple[AxisName, ...] | None:
        """Return the names of the axes ``indices``, replaced as in ``new``."""
        given = tuple(name for part in new.values() for name in part)
        if self.names is None:
            if given:
                raise AxisError(
                    "an unnamed mesh cannot take a name for one axis",
                    where=where,
                    found=f"name {given[0]!r}",
                    fix="name all axes when you create the mesh",
                )
            return None
        for index, count in (counts or {}).items():
            if len(new[index]) != count:
                raise AxisError(
                    "the number of names does not match the number of new axes",
                    where=where,
                    expected=f"{count} names, one per size",
                    found=f"names {new[index]}",
                )
        names: list[AxisName] = []
        for index in indices:
            names.extend(new.get(index, (self.names[index],)))
        return checked_names(names, len(names), where)

    @cached_property
    def _last(self) -> int:
        return self.offset + sum(
            (size - 1) * stride for axis in self.modes for size, stride in axis
        )

    @cached_property
    def _digits(self) -> tuple[tuple[int, int, int, int], ...]:
        """Every mode's (stride, size, axis, weight within the axis), largest stride first."""
        digits = []
        for index, axis in enumerate(self.modes):
            weight = 1
            for size, stride in reversed(axis):
                digits.append((stride, size, index, weight))
                weight *= size
        return tuple(sorted(digits, reverse=True))

    def _coordinate_at(self, position: int) -> tuple[int, ...] | None:
        rest = position - self.offset
        if rest < 0:
            return None
        coordinate = [0] * len(self.modes)
        for stride, size, axis, weight in self._digits:
            digit, rest = divmod(rest, stride)
            if digit >= size:
                return None
            coordinate[axis] += digit * weight
        return None if rest else tuple(coordinate)

    def _rank_of(self, position: int) -> int:
        return position if self.rank_map is None else self.rank_map[position]

    def _some_ranks(self, shown: int = 8) -> str:
        """Return at most ``shown`` ranks as text."""
        if self.num_ranks <= shown:
            return ", ".join(map(str, self.ranks().ravel().tolist()))
        first = (np.unravel_index(index, self.sizes) for index in range(shown - 2))
        head = ", ".join(str(self.rank_at([int(i) for i in at])) for at in first)
        return f"{head}, ..., {self._rank_of(self._last)}"

    def _start_of(self, indices: tuple[int, ...], rank: int) -> int:
        """Return the place of ``rank`` if its coordinates along ``indices`` were 0."""
        coordinate, start = self.get_coordinate(rank), self.offset
        for index, axis in enumerate(self.modes):
            if index not in indices:
                start += displacement(axis, coordinate[index])
        return start


def get_layout(mesh: Any, call: str) -> Layout:
    """Return the layout of a mesh or Layout; else raise."""
    if isinstance(mesh, Layout):
        return mesh
    layout = getattr(mesh, "layout", None)
    if isinstance(layout, Layout) and hasattr(mesh, "get_rank"):  # Shardings have a layout, too.
        return layout
    raise mesh_kind_error(f"{call} takes a mesh", mesh, expected="a DeviceMesh or a Layout")


def _build(
    modes: tuple[AxisModes, ...],
    names: tuple[AxisName, ...] | None,
    offset: int,
    rank_map: tuple[int, ...] | None,
) -> Layout:
    """Return a Layout without checks or normalization."""
    layout = object.__new__(Layout)
    vars(layout).update(modes=modes, names=names, offset=offset, rank_map=rank_map)
    return layout
