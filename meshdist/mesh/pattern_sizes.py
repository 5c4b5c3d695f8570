"""Patterns on a mesh, for arrays of known shape: how an array lies, and how one becomes another.

A group of a pattern is one dim of the array that stands for several **parts**, the names in it;
plain dims are parts of their own. What a pattern moves are parts: they are cut, put in another
order and grouped anew. Of a group only the first part is cut, so a shard comes apart into parts
without a copy.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NoReturn

from ..arguments import get_whole_number
from ..error_text import first_texts
from ..errors import AxisError, PatternError, ShapeError
from .layout import Layout
from .partition_spec import Entry, PartitionSpec
from .pattern import Dim, Pattern, PatternSide, column_error, parse
from .placement import DimSplit, Placement, split_dim
from .spec import NamedSharding


@dataclass(frozen=True)
class SizedSide:
    """A side of a pattern on a mesh, for an array of known shape.

    Args:
        sharding: of the array, on the bare layout.
        names: the name of each part in order; those that "..." stands for are "...0", "...1".
        part_sizes: the whole size of each part.
        counts: the number of parts that each dim of the array stands for: 0 for "1", 1 for a plain
            dim.
        placement: of the parts, as dims of their own.
    """

    sharding: NamedSharding
    shape: tuple[int, ...]
    names: tuple[str, ...]
    part_sizes: tuple[int, ...]
    counts: tuple[int, ...]
    placement: Placement


def spec_of(
    pattern: Pattern,
    side: PatternSide,
    layout: Layout | None,
    ndim: int,
    known_axes: Collection[str] = (),
) -> PartitionSpec:
    """Return the spec of one side of a pattern for an array of ``ndim`` dims.

    Args:
        layout: has the axes; None checks none.
        known_axes: names that no whole dim may have, where there is no layout.
    """
    entries: list[Entry] = []
    cutting = {axis for dim in side.dims for axis in dim.axes}
    axes = set(known_axes if layout is None else layout.names or ()) - cutting
    # A pattern with "->" names each dim on both sides, which tells a dim from an axis.
    for dim in side.dims if pattern.result is None else ():
        name = next((name for name in dim.names if name in axes), None)
        if name is not None and not dim.axes:
            raise column_error(
                pattern.text,
                dim.column,
                expected="names of dims that are not names of mesh axes",
                found=f"{name!r}, an axis of the mesh, as the name of a dim that no axis cuts",
                fix=f'where {name!r} cuts the dim, write "f@{name}"; to annotate that ranks along '
                f"it hold their own values, md.annotate(x, varying={name!r}); else name the dim "
                "otherwise",
                summary="this pattern names a whole dim as an axis",
            )
    for dim in _dims_of_array(pattern, side, ndim):
        for axis in dim.axes:
            _check_axis(pattern, axis, layout, dim.column)
        entries.append(dim.axes if len(dim.axes) > 1 else dim.axes[0] if dim.axes else None)
    for axis in (*side.unreduced, *side.reduced):
        _check_axis(pattern, axis, layout, pattern.text.find("{"))
    return PartitionSpec(
        *entries, unreduced=frozenset(side.unreduced), reduced=frozenset(side.reduced)
    )


def _check_axis(pattern: Pattern, axis: str, layout: Layout | None, start: int) -> None:
    if layout is None:
        return
    try:
        layout.axis_index(axis)
    except AxisError as error:
        found = re.compile(rf"[@,:]\s*\(?\s*({re.escape(axis)})\b").search(pattern.text, start)
        column = start if found is None else found.start(1)
        here = AxisError(
            error.summary,
            where=f"{error.where}; column {column + 1} of {pattern.text!r}",
            expected=error.expected,
            fix=error.fix,
        )
        here.axis = error.axis
        raise here from None


def _fix_of_dims(side: PatternSide, ndim: int) -> str | None:
    """Return the fix of a side whose number of dims is not ``ndim``; None if it has ``...``."""
    if any(dim.is_rest for dim in side.dims):
        return None
    name = " ".join(side.names)
    if len(side.dims) == 1 and len(name) == ndim and name.isalpha():
        return f"dims stand apart, unlike torch.einsum's: {' '.join(name)}"
    return 'name each dim, or write "..." for those that are not cut'


def _dims_of_array(pattern: Pattern, side: PatternSide, ndim: int) -> list[Dim]:
    """Return the dims of ``side``, "..." replaced by as many dims as fit ``ndim``; or raise."""
    rest = [place for place, dim in enumerate(side.dims) if dim.is_rest]
    missing = ndim - len(side.dims) + len(rest)
    if missing < 0 or (missing and not rest):
        at_least = "at least " if rest else ""
        count = len(side.dims) - len(rest)
        raise ShapeError(
            f"the pattern names {at_least}{count} dims, the array has {ndim}",
            where=f"pattern {pattern.text!r}",
            expected=f"{at_least}{count} dims: {side}",
            found=f"{ndim} dims",
            fix=_fix_of_dims(side, ndim),
        )
    dims: list[Dim] = []
    for dim in side.dims:
        if dim.is_rest:
            dims += [Dim((f"...{number}",), (), dim.column) for number in range(missing)]
        else:
            dims.append(dim)
    return dims


class Sizing:
    """A search for the sizes of one side's parts, from shapes and from sizes by name."""

    def __init__(
        self,
        pattern: Pattern,
        side: PatternSide,
        layout: Layout,
        rank: int | None,
        local_shape: tuple[int, ...] | None,
        shape: tuple[int, ...] | None,
        sizes: Mapping[str, int],
    ) -> None:
        self.pattern, self.layout, self.rank = pattern, layout, rank
        self.local_shape, self.shape = local_shape, shape
        self.sizes = dict(sizes)
        self.where = f"pattern {pattern.text!r} on mesh ({layout.axis_text()})"
        given = shape if shape is not None else local_shape
        if given is None:
            if any(dim.is_rest for dim in side.dims):
                raise ShapeError(
                    'the sizes of the dims that "..." stands for are not known',
                    where=self.where,
                    fix="give the shape of the whole array: shape=(...)",
                )
            given = (0,) * len(side.dims)
        self.spec = spec_of(pattern, side, layout, len(given))
        self.dims = _dims_of_array(pattern, side, len(given))
        if local_shape is not None and len(local_shape) != len(given):
            raise ShapeError(
                f"the shard has {len(local_shape)} dims, the whole array {len(given)}",
                where=self.where,
                found=f"shard {local_shape}, whole {shape}",
            )
        self.coordinate = None if rank is None else layout.get_coordinate(rank)

    def sized_side(self, needs_parts: bool) -> SizedSide:
        """Return the side with all sizes, with ``needs_parts`` also of the parts of "(h k)"."""
        shape: list[int] = []
        names: list[str] = []
        part_sizes: list[int] = []
        counts: list[int] = []
        splits: list[DimSplit] = []
        shard_sizes: dict[int, tuple[int, ...]] = {}
        for place, dim in enumerate(self.dims):
            axes = self.layout.axis_indices(dim.axes) if dim.axes else ()
            axis_sizes = tuple([self.layout.sizes[axis] for axis in axes])
            whole = self._whole_size(place, dim, math.prod(axis_sizes))
            shape.append(whole)
            if dim.is_one:
                counts.append(0)
                continue
            known = [self.sizes[name] for name in dim.names if name in self.sizes]
            dim_names, dim_parts = dim.names, known
            if len(known) < len(dim.names):
                if needs_parts or (axes and whole % math.prod(axis_sizes)):
                    self._fail_unknown(place, dim, whole)
                dim_names, dim_parts = (" ".join(dim.names),), [whole]  # the group is one part
            first = split_dim(dim_parts[0], axes, axis_sizes)
            names += dim_names
            part_sizes += dim_parts
            counts.append(len(dim_parts))
            splits += [first, *(split_dim(part, (), ()) for part in dim_parts[1:])]
            inner = math.prod(dim_parts[1:])
            if axes and inner != 1:
                cells = tuple(
                    [(stop - start) * inner for start, stop in pairwise(first.boundaries)]
                )
                if split_dim(whole, axes, axis_sizes, cells).cell_sizes is not None:
                    shard_sizes[place] = cells
        sharding = NamedSharding(self.layout, self.spec, shard_sizes=shard_sizes)
        at_shape = sharding.placement(tuple(shape))
        self._check_local_shape(at_shape)
        kinds = at_shape.unreduced, at_shape.reduced
        of_parts = Placement(self.layout.sizes, tuple(part_sizes), tuple(splits), *kinds)
        return SizedSide(
            sharding, tuple(shape), tuple(names), tuple(part_sizes), tuple(counts), of_parts
        )

    def _whole_size(self, place: int, dim: Dim, shards: int) -> int:
        """Return the whole size of dim number ``place``; store the size of a part that follows."""
        known = math.prod(self.sizes.get(name, 1) for name in dim.names)
        unknown = [name for name in dim.names if name not in self.sizes]
        if dim.is_one:
            unknown = []
        if self.shape is not None:
            whole = self.shape[place]
        elif not unknown:
            return known
        elif self.local_shape is None:
            self._fail_unknown(place, dim, None)
        else:
            whole = self._from_local(self.local_shape[place], dim, shards, unknown, known)
        if len(unknown) == 1:
            if known == 0 or whole % known:
                self._fail_division(place, dim, whole, known)
            self.sizes[unknown[0]] = whole // known
        elif not unknown and whole != known:
            raise ShapeError(
                f"dim {place} has size {whole}, the pattern and the sizes given make it {known}",
                where=self.where,
                expected="a dim of size 1, as it has no name"
                if dim.is_one
                else " x ".join(f"{name}={self.sizes[name]}" for name in dim.names),
                found=f"{whole} in shape {self.shape}",
            )
        return whole

    def _from_local(self, local: int, dim: Dim, shards: int, unknown: list[str], known: int) -> int:
        """Return the whole size of ``dim`` by ``local``, the size of this rank's shard.

        Args:
            unknown: the names of parts of unknown size.
            known: the product of all other parts' sizes.
        """
        first = dim.names[0]
        if shards > 1 and len(unknown) == 1 and first in self.sizes and self.coordinate is not None:
            axes = self.layout.axis_indices(dim.axes)
            sizes = tuple([self.layout.sizes[axis] for axis in axes])
            start, stop = split_dim(self.sizes[first], axes, sizes).interval(self.coordinate)
            inner = known // self.sizes[first] if self.sizes[first] else 0
            here = (stop - start) * inner
            if here and local % here == 0:
                return local // here * known
        return local * shards

    def _check_local_shape(self, at_shape: Placement) -> None:
        local = self.local_shape
        if local is None or self.coordinate is None:
            return
        expected = at_shape.local_shape(self.coordinate)
        if expected == local:
            return
        wrong = next(
            at for at, pair in enumerate(zip(local, expected, strict=True)) if len({*pair}) > 1
        )
        # No size is proposed: this rank's part says nothing about the others'.
        dim, split, cut = self.dims[wrong], at_shape.dims[wrong], ""
        fix = "give this rank its part of the whole"
        if split.num_cells > 1:
            parts = [str(stop - start) for start, stop in pairwise(split.boundaries)]
            cut = f", whose dim {wrong} is cut into {first_texts(parts, ', ')}, larger parts first"
        if local[wrong] == at_shape.shape[wrong]:
            fix += ": md.shard(x, ...)"
        else:
            if self.shape is None and len(dim.names) == 1 and dim.names[0].isidentifier():
                fix = f"give the size of the whole dim, on every rank: {dim.names[0]}=..."
                fix += ", the sum of all parts" if cut else ""
            if cut and len(self.pattern.operands) == 1:
                fix += (
                    "; other parts by a sharding in place of the pattern: md.NamedSharding(mesh, "
                    f"{self.spec!r}, shard_sizes={{{wrong}: sizes}})"
                )
        raise ShapeError(
            f"rank {self.rank} holds no shard of the whole: dim {wrong} has size {local[wrong]}",
            where=f"rank {self.rank} ({self.layout.coordinate_text(self.rank or 0)}); {self.where}",
            expected=f"a shard of shape {expected}, of a whole of shape {at_shape.shape}{cut}",
            found=f"a shard of shape {local}",
            fix=fix,
        )

    def _fail_unknown(self, place: int, dim: Dim, whole: int | None) -> NoReturn:
        missing = [name for name in dim.names if name not in self.sizes]
        raise ShapeError(
            f"the sizes of {', '.join(map(repr, missing))} are not known",
            where=self.where,
            expected=f"sizes for all but one of the dims of {dim}"
            if len(dim.names) > 1 and whole is not None
            else f"the whole size of {dim}",
            found=f"dim {place} of size {whole}" if whole is not None else None,
            fix=f"give {', '.join(f'{name}=...' for name in missing)}",
        )

    def _fail_division(self, place: int, dim: Dim, whole: int, known: int) -> NoReturn:
        raise ShapeError(
            f"dim {place} of size {whole} is not made of whole {dim}",
            where=self.where,
            expected=f"a multiple of {known}",
            found=str(whole),
        )


@dataclass(frozen=True)
class Regrouping:
    """A pattern with "->" on a mesh, for an array of known shape.

    Args:
        order: for each part on the right, its place among the parts on the left.
    """

    # A local array goes from source to target so: view it with each dim as its parts, move that
    # from ``placement`` to ``target_placement``, permute by ``order``, and view that with the parts
    # of each dim of the target as one dim.
    source: SizedSide
    target: SizedSide
    order: tuple[int, ...]

    @cached_property
    def placement(self) -> Placement:
        """The placement of the source array, a dim for each part on the left of the pattern."""
        return self.source.placement

    @cached_property
    def target_placement(self) -> Placement:
        """The placement of the target array, with a dim per part in the source's order."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return self.target.placement.permuted(back)

    @property
    def is_reordered(self) -> bool:
        """Return whether the parts' order or their grouping into dims changes."""
        return [*self.order] != sorted(self.order) or self.source.counts != self.target.counts


def size_side(
    text: str,
    layout: Layout,
    *,
    rank: int | None = None,
    local_shape: tuple[int, ...] | None = None,
    shape: tuple[int, ...] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> SizedSide:
    """Return the placement of an array that a pattern without "->" describes, with all its sizes.

    Args:
        rank: the rank whose shard has ``local_shape``.
        shape: of the whole array; None takes each dim's size from ``sizes``, and a size that is
            not given there as the shard's size times the number of shards.
        sizes: the whole sizes of parts, by name.

    Example:
        >>> mesh = Layout.from_shape((4,), ("tp",))
        >>> heads = size_side("(h k)@tp d", mesh, rank=0, local_shape=(6, 5), sizes={"h": 10})
        >>> heads.shape, heads.sharding.shard_sizes
        ((20, 5), {0: (6, 6, 4, 4)})
    """
    return _size_side(text, layout, rank, local_shape, shape, tuple((sizes or {}).items()))


def regroup(
    text: str,
    layout: Layout,
    *,
    rank: int | None = None,
    local_shape: tuple[int, ...] | None = None,
    shape: tuple[int, ...] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Regrouping:
    """Return the placements of an array on both sides of a pattern's "->".

    Args:
        rank, local_shape, shape, sizes: as in ``size_side``, all of the left side.

    Example:
        >>> mesh = Layout.from_shape((2,), ("tp",))
        >>> moved = regroup("(h k) d@tp -> d h@tp k", mesh, shape=(12, 5), sizes={"k": 4})
        >>> moved.target.shape, moved.order, moved.target_placement.box((1,))
        ((5, 3, 4), (2, 0, 1), ((2, 3), (0, 4), (0, 5)))
    """
    return _regroup(text, layout, rank, local_shape, shape, tuple((sizes or {}).items()))


def parse_side(text: str) -> tuple[Pattern, PatternSide]:
    """Return the parsed pattern and its only side; raise if it has "->" or a comma."""
    pattern = parse(text)
    side = pattern.get_operand()
    if pattern.result is not None:
        raise column_error(
            text,
            text.index("->"),
            expected="one array: how it lies",
            found="two, before and after '->'",
            summary="this pattern has two sides",
        )
    return pattern, side


@lru_cache(maxsize=4096)
def _size_side(
    text: str,
    layout: Layout,
    rank: int | None,
    local_shape: tuple[int, ...] | None,
    shape: tuple[int, ...] | None,
    sizes: tuple[tuple[str, int], ...],
) -> SizedSide:
    pattern, side = parse_side(text)
    known = checked_sizes(pattern, dict(sizes))
    return Sizing(pattern, side, layout, rank, local_shape, shape, known).sized_side(False)


@lru_cache(maxsize=4096)
def _regroup(
    text: str,
    layout: Layout,
    rank: int | None,
    local_shape: tuple[int, ...] | None,
    shape: tuple[int, ...] | None,
    sizes: tuple[tuple[str, int], ...],
) -> Regrouping:
    pattern = parse(text)
    side, result = pattern.get_operand(), pattern.result
    if result is None:
        raise column_error(
            text,
            len(text),
            expected='"->" and how the array shall lie',
            found="the end",
            summary="this pattern has one side",
        )
    _check_equal_dims(pattern, side, result)
    known = checked_sizes(pattern, dict(sizes))
    left = Sizing(pattern, side, layout, rank, local_shape, shape, known).sized_side(True)
    here = dict(zip(left.names, left.part_sizes, strict=True))
    rest = [size for name, size in here.items() if name.startswith("...")]
    there = shape_of_side(result, here, rest)
    right = Sizing(pattern, result, layout, None, None, there, here).sized_side(True)
    order = tuple(left.names.index(name) for name in right.names)
    return Regrouping(left, right, order)


def shape_of_side(
    side: PatternSide, sizes: Mapping[str, int], rest: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of ``side``, whose "..." has the sizes ``rest``."""
    shape: list[int] = []
    for dim in side.dims:
        if dim.is_rest:
            shape += rest
        else:
            shape.append(1 if dim.is_one else math.prod(sizes[name] for name in dim.names))
    return tuple(shape)


def _check_equal_dims(pattern: Pattern, left: PatternSide, right: PatternSide) -> None:
    for side, other, which in ((left, right, "right"), (right, left, "left")):
        for dim in side.dims:
            for name in () if dim.is_one else dim.names:
                if name not in other.names:
                    raise column_error(
                        pattern.text,
                        dim.column,
                        expected=f"the same dims on both sides: {' '.join(other.names) or 'none'}",
                        found=f"{name!r}, which the {which} side does not name",
                        summary="the sides of this pattern name different dims",
                    )


def checked_sizes(pattern: Pattern, sizes: Mapping[str, Any]) -> dict[str, int]:
    """Return ``sizes`` by dim name, as ints; raise for a name not in the pattern, or no size."""
    sides = [*pattern.operands, *([] if pattern.result is None else [pattern.result])]
    names = list(dict.fromkeys(name for side in sides for name in side.names if name != "..."))
    checked = {}
    for name, size in sizes.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            raise PatternError(
                f"a size is given for {name!r}, which the pattern does not name",
                where=f"pattern {pattern.text!r}",
                expected=f"sizes of {', '.join(map(repr, names)) or 'none'}",
                found=f"{name}={size!r}",
                fix=f"did you mean {near[0]!r}?" if near else None,
            )
        where = f"pattern {pattern.text!r}"
        checked[name] = get_whole_number(size, f"the size of dim {name!r}", where=where)
        if checked[name] < 0:
            raise ShapeError(f"dim {name!r} cannot have size {size}", where=where)
    return checked
