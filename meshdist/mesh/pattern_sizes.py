"""Find the spec of a pattern's side, and the sizes of its parts on arrays of a shape.

A group is one dim of the array that consists of several **parts**; a plain dim is a single part. A
pattern with two sides cuts, reorders and regroups parts. Only a group's first part is cut, so
shards split into parts without a copy.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NoReturn

from ..arguments import get_integer
from ..error_text import first_texts, with_article
from ..errors import KindError, PatternError, ShapeError
from .layout import Layout
from .layout_arguments import no_axis
from .partition_spec import Entry, PartitionSpec
from .pattern import Dim, Pattern, PatternSide, column_error, parse
from .placement import DimSplit, Placement, shape_of, split_dim


@dataclass(frozen=True)
class Parts:
    """The parts of an array's dims: "(h d)" in a pattern is a dim of the parts h and d.

    Args:
        names: in order; the dims of "..." are "...0", "...1".
        counts: the number of parts per dim of the array: 0 for "1", 1 for a single name.
        placement: of the array with a dim per part.
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]
    placement: Placement

    @property
    def sizes(self) -> tuple[int, ...]:
        """The global size of each part."""
        return self.placement.shape

    @property
    def by_name(self) -> dict[str, int]:
        """The global size of each part, by name."""
        return dict(zip(self.names, self.sizes, strict=True))

    @cached_property
    def dims(self) -> tuple[DimSplit, ...]:
        """The array's dims, each cut as its first part."""
        rest = iter(self.placement.dims)
        return tuple([_joined([next(rest) for _ in range(count)]) for count in self.counts])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([dim.size for dim in self.dims])


def _joined(parts: Sequence[DimSplit]) -> DimSplit:
    """Return the dim of these parts; the first may be cut."""
    if not parts:
        return split_dim(1, (), ())
    first, inner = parts[0], math.prod([part.size for part in parts[1:]])
    blocks = None
    if first.axes and inner != 1:
        blocks = tuple([(stop - start) * inner for start, stop in pairwise(first.boundaries)])
    return split_dim(first.size * inner, first.axes, first.axis_sizes, blocks)


def spec_of(
    pattern: Pattern,
    side: PatternSide,
    layout: Layout | None,
    ndim: int,
    known_axes: Collection[str] = (),
) -> PartitionSpec:
    """Return the PartitionSpec of a pattern's side for an array of ``ndim`` dims.

    Args:
        layout: None skips the check of axis names.
        known_axes: without a layout, the axis names that no uncut dim may have.
    """
    entries: list[Entry] = []
    cutting = {axis for dim in side.dims for axis in dim.axes}
    axes = set(known_axes if layout is None else layout.names or ()) - cutting
    # With "->", a dim has the same name on both sides, so the name cannot be a misplaced axis.
    for dim in side.dims if pattern.result is None else ():
        name = next((name for name in dim.names if name in axes), None)
        if name is not None and not dim.axes:
            raise column_error(
                pattern.text,
                dim.column,
                expected="dim names that are not names of mesh axes",
                found=f"{name!r}, an axis of the mesh, as the name of a dim that no axis cuts",
                fix=f'if axis {name!r} cuts the dim, write "f@{name}"; if ranks along the axis '
                f"hold different values, call md.annotate(x, varying={name!r}); otherwise rename "
                "the dim",
                summary="this pattern gives an uncut dim the name of an axis",
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
    if layout is None or axis in (layout.names or ()):
        return
    if layout.names is None:
        layout.axis_index(axis)  # Raises.
    found = re.compile(rf"[@,:]\s*\(?\s*({re.escape(axis)})\b").search(pattern.text, start)
    column = start if found is None else found.start(1)
    where = f"mesh ({layout.axis_text()}); column {column + 1} of {pattern.text!r}"
    raise no_axis(axis, layout.names or (), where)


def _fix_of_dims(side: PatternSide, ndim: int) -> str | None:
    """Return how to fix a side whose number of dims is not ``ndim``; None if it has ``...``."""
    if any(dim.is_rest for dim in side.dims):
        return None
    name = " ".join(side.names)
    if len(side.dims) == 1 and len(name) == ndim and name.isalpha():
        return f"separate dims by spaces, unlike in torch.einsum: {' '.join(name)}"
    return 'name each dim, or write "..." for dims that are not cut'


def _dims_of_array(pattern: Pattern, side: PatternSide, ndim: int) -> list[Dim]:
    """Return the side's dims, "..." replaced by as many as fit ``ndim``; or raise."""
    rest = [index for index, dim in enumerate(side.dims) if dim.is_rest]
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


_Cut = tuple[tuple[int, ...], tuple[int, ...]]
"""The axes that cut a dim, and their sizes."""


class Sizing:
    """Find the sizes of the parts of a pattern's side, from shapes and sizes by name."""

    def __init__(
        self,
        pattern: Pattern,
        side: PatternSide,
        layout: Layout,
        sizes: Mapping[str, int],
        *,
        shape: tuple[int, ...] | None = None,
        local_shape: tuple[int, ...] | None = None,
        rank: int | None = None,
        as_keywords: bool = True,
    ) -> None:
        self._given, self._as_keywords = sizes, as_keywords
        self.pattern, self.side, self.layout, self.rank = pattern, side, layout, rank
        self.local_shape, self.shape = local_shape, shape
        self.sizes = dict(sizes)
        self.where = f"pattern {pattern.text!r} on mesh ({layout.axis_text()})"
        given = shape if shape is not None else local_shape
        if given is None:
            if any(dim.is_rest for dim in side.dims):
                raise ShapeError(
                    'the sizes of the dims that "..." stands for are unknown',
                    where=self.where,
                    fix="pass the global shape: shape=(...)",
                )
            given = (0,) * len(side.dims)
        self.spec = spec_of(pattern, side, layout, len(given))
        self.dims = _dims_of_array(pattern, side, len(given))
        if local_shape is not None and len(local_shape) != len(given):
            raise ShapeError(
                f"the shard has {len(local_shape)} dims, the global array {len(given)}",
                where=self.where,
                found=f"shard shape {local_shape}, global shape {shape}",
            )
        self.coordinate = None if rank is None else layout.get_coordinate(rank)

    def parts(self, *, needs_parts: bool = True) -> Parts:
        """Return the parts; without ``needs_parts``, a dim of unknown part sizes is one part."""
        layout = self.layout
        names: list[str] = []
        counts: list[int] = []
        splits: list[DimSplit] = []
        for index, dim in enumerate(self.dims):
            axes = layout.axis_indices(dim.axes) if dim.axes else ()
            axis_sizes = tuple([layout.sizes[axis] for axis in axes])
            cut = axes, axis_sizes
            whole = self._whole_size(index, dim, cut)
            inside = () if dim.is_one else dim.names
            known = [self.sizes[name] for name in inside if name in self.sizes]
            if len(known) < len(inside):
                if needs_parts or whole % math.prod(axis_sizes):
                    self._fail_unknown(index, dim, whole)
                inside, known = (" ".join(inside),), [whole]
            names += inside
            counts.append(len(inside))
            splits += [split_dim(size, *cut) for size in known[:1]]
            splits += [split_dim(size, (), ()) for size in known[1:]]
        kinds = (self.side.unreduced, self.side.reduced)
        placement = Placement(
            layout.sizes,
            tuple([split.size for split in splits]),
            tuple(splits),
            *[tuple(sorted(map(layout.axis_index, axes))) for axes in kinds],
        )
        parts = Parts(tuple(names), tuple(counts), placement)
        self._check_local_shape(parts.dims)
        return parts

    def _whole_size(self, index: int, dim: Dim, cut: _Cut) -> int:
        """Return a dim's global size; store its only unknown part size, which follows; or raise.

        Args:
            index: the dim's index in the array.
            dim: the dim in the pattern; "(h d)" has the parts h and d.
            cut: the axes that cut the dim, and their sizes.
        """
        known = math.prod(self.sizes.get(name, 1) for name in dim.names)
        unknown = [name for name in dim.names if name not in self.sizes]
        if dim.is_one:
            unknown = []
        if self.shape is not None:
            whole = self.shape[index]
        elif not unknown:
            return known
        elif self.local_shape is None:
            self._fail_unknown(index, dim, None)
        else:
            whole = self._from_local(self.local_shape[index], dim, cut, unknown, known)
        if len(unknown) == 1:
            if known == 0 or whole % known:
                raise ShapeError(
                    f"dim {index} of size {whole} cannot be split into {dim}",
                    where=self.where,
                    expected=f"a multiple of {known}",
                    found=str(whole),
                )
            self.sizes[unknown[0]] = whole // known
        elif not unknown and whole != known:
            raise ShapeError(
                f"dim {index} has size {whole}, but the pattern and the given sizes make it "
                f"{known}",
                where=self.where,
                expected="a dim of size 1, as it has no name"
                if dim.is_one
                else " x ".join(f"{name}={self.sizes[name]}" for name in dim.names),
                found=f"{whole} in shape {self.shape}",
            )
        return whole

    def _from_local(
        self, local: int, dim: Dim, cut: _Cut, unknown: Sequence[str], known: int
    ) -> int:
        """Return the global size of ``dim`` from its size in this rank's shard.

        Args:
            unknown: the parts of unknown size.
            known: the product of the known parts' sizes.
        """
        first, num_shards = self.sizes.get(dim.names[0]), math.prod(cut[1])
        if num_shards > 1 and len(unknown) == 1 and first and self.coordinate is not None:
            start, stop = split_dim(first, *cut).interval(self.coordinate)
            here = (stop - start) * known // first
            if here and local % here == 0:
                return local // here * known
        return local * num_shards

    def _check_local_shape(self, dims: Sequence[DimSplit]) -> None:
        local, coordinate = self.local_shape, self.coordinate
        if local is None or coordinate is None:
            return
        expected = shape_of(tuple([dim.interval(coordinate) for dim in dims]))
        if expected == local:
            return
        wrong = next(
            at for at, pair in enumerate(zip(local, expected, strict=True)) if len({*pair}) > 1
        )
        whole = tuple([dim.size for dim in dims])
        # The fix proposes no size, because this rank cannot know the other ranks' sizes.
        dim, split, cut = self.dims[wrong], dims[wrong], ""
        fix = "pass this rank's shard of the global array"
        if split.num_blocks > 1:
            parts = [str(stop - start) for start, stop in pairwise(split.boundaries)]
            cut = f", whose dim {wrong} is cut into {first_texts(parts, ', ')}, larger parts first"
        if local[wrong] == whole[wrong]:
            fix += ": md.shard(x, ...)"
        else:
            if self.shape is None and len(dim.names) == 1 and dim.names[0].isidentifier():
                fix = f"pass the global size of the dim on every rank: {self._argument(dim.names)}"
                fix += ", the sum of all parts" if cut else ""
            if cut and len(self.pattern.operands) == 1:
                fix += (
                    "; for other parts, pass a sharding instead of the pattern: "
                    "md.NamedSharding(mesh, "
                    f"{self.spec!r}, shard_sizes={{{wrong}: sizes}})"
                )
        raise ShapeError(
            f"rank {self.rank} holds no shard of the global array: dim {wrong} has size "
            f"{local[wrong]}",
            where=f"rank {self.rank} ({self.layout.coordinate_text(self.rank or 0)}); {self.where}",
            expected=f"a shard of shape {expected} of a global array of shape {whole}{cut}",
            found=f"a shard of shape {local}",
            fix=fix,
        )

    def _fail_unknown(self, index: int, dim: Dim, whole: int | None) -> NoReturn:
        missing = [name for name in dim.names if name not in self.sizes]
        raise ShapeError(
            f"the sizes of {', '.join(map(repr, missing))} are unknown",
            where=self.where,
            expected=f"sizes for all but one of the dims of {dim}"
            if len(dim.names) > 1 and whole is not None
            else f"the global size of {dim}",
            found=f"dim {index} of size {whole}" if whole is not None else None,
            fix=f"pass {self._argument(missing)}",
        )

    def _argument(self, names: Sequence[str]) -> str:
        """Return, as code, the caller's arguments that pass the sizes of ``names``."""
        if self._as_keywords:
            return ", ".join(f"{name}=..." for name in names)
        sizes = {**self._given, **dict.fromkeys(names, "...")}
        return f"sizes={{{', '.join(f'{name!r}: {size}' for name, size in sizes.items())}}}"


def parse_side(text: str) -> tuple[Pattern, PatternSide]:
    """Return the pattern and its only side; raise if it has "->" or a comma."""
    pattern = parse(text)
    side = pattern.get_operand()
    if pattern.result is not None:
        raise column_error(
            text,
            text.index("->"),
            expected="one side: the sharding of one array",
            found="two, before and after '->'",
            summary="this pattern has two sides",
        )
    return pattern, side


def parse_sides(text: str) -> tuple[Pattern, PatternSide, PatternSide]:
    """Return the pattern and its sides; raise unless they are two with equal dims."""
    pattern = parse(text)
    left, right = pattern.get_operand(), pattern.result
    if right is None:
        raise column_error(
            text,
            len(text),
            expected='"->" and the sharding of the result',
            found="the end",
            summary="this pattern has one side",
        )
    for side, other, which in ((left, right, "right"), (right, left, "left")):
        for dim in side.dims:
            for name in () if dim.is_one else dim.names:
                if name not in other.names:
                    raise column_error(
                        text,
                        dim.column,
                        expected=f"the same dims on both sides: {' '.join(other.names) or 'none'}",
                        found=f"{name!r}, which the {which} side does not name",
                        summary="the sides of this pattern name different dims",
                    )

    return pattern, left, right


def shape_of_side(side: PatternSide, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return a side's shape from all parts' sizes, also of "...0", "...1"."""
    rest = [size for name, size in sizes.items() if name.startswith("...")]
    shape: list[int] = []
    for dim in side.dims:
        names = () if dim.is_one else dim.names
        shape += rest if dim.is_rest else [math.prod([sizes[name] for name in names])]
    return tuple(shape)


def checked_sizes(pattern: Pattern, sizes: Mapping[str, Any]) -> dict[str, int]:
    """Return ``sizes`` as ints; raise for an unknown name or an invalid size."""
    sides = [*pattern.operands, *([] if pattern.result is None else [pattern.result])]
    names = list(dict.fromkeys(name for side in sides for name in side.names if name != "..."))
    checked = {}
    if not isinstance(sizes, Mapping):
        raise KindError(
            "sizes must be a dict of sizes by dim name",
            where=f"pattern {pattern.text!r}",
            found=f"{sizes!r}, {with_article(type(sizes).__name__)}",
            fix="pass for example sizes={'d': 8}",
        )
    for name, size in sizes.items():
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            raise PatternError(
                f"a size is given for {name!r}, which the pattern does not name",
                where=f"pattern {pattern.text!r}",
                expected=f"sizes of {', '.join(map(repr, names)) or 'none'}",
                found=f"{name}={size!r}",
                fix=f"did you mean {near[0]!r}?" if near else None,
            )
        where = f"pattern {pattern.text!r}"
        checked[name] = get_integer(size, f"the size of dim {name!r}", where=where)
        if checked[name] < 0:
            raise ShapeError(f"dim {name!r} cannot have size {size}", where=where)
    return checked
