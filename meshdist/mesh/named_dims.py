"""Patterns on a mesh, for arrays of known shape: how an array lies, and how one becomes another.

What a pattern moves are parts (see ``dim_sizes``): they are cut, put in another order and grouped
anew. Of a group only the first part is cut, so a shard comes apart into parts without a copy.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from ..errors import KindError, PatternError, ShapeError
from .dim_sizes import SizedSide, Sizing
from .layout import Layout
from .pattern import Pattern, Side, column_error, parse
from .splits import Placement

__all__ = ["SizedSide", "Regrouping", "parse_side", "regroup", "size_side"]


@dataclass(frozen=True)
class Regrouping:
    """A pattern with "->" on a mesh, for an array of known shape.

    A local array goes from source to target so: view it with each dim as its parts, move that from
    ``placement`` to ``target_placement``, permute by ``order``, and view that with the parts of
    each dim of the target as one dim.

    Args:
        source: the left side.
        target: the right side.
        order: for each part on the right, its place among the parts on the left.
    """

    source: SizedSide
    target: SizedSide
    order: tuple[int, ...]

    @cached_property
    def placement(self) -> Placement:
        """How the parts lie in the source."""
        return self.source.placement

    @cached_property
    def target_placement(self) -> Placement:
        """How the parts lie in the target, but in the order of the source."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return self.target.placement.permuted(back)

    @property
    def is_reordered(self) -> bool:
        """Whether parts change places, or dims are grouped anew."""
        return (
            self.order != tuple(range(len(self.order))) or self.source.counts != self.target.counts
        )


def size_side(
    text: str,
    layout: Layout,
    *,
    rank: int | None = None,
    local_shape: tuple[int, ...] | None = None,
    shape: tuple[int, ...] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> SizedSide:
    """Return how an array lies that a pattern of one side describes; kept by all arguments.

    Args:
        text: the pattern.
        layout: the mesh.
        rank: whose shard has ``local_shape``.
        local_shape: the shape of that shard; None where there is none, as in planning.
        shape: of the whole array; None takes each dim's size from ``sizes``, and those that are
            not given there as the shard's size times the number of shards.
        sizes: the whole sizes of parts, by name.

    Raises:
        PatternError: no pattern, more than one operand, or a "->".
        AxisError: an axis that the mesh does not have.
        ShapeError: another number of dims, sizes that contradict each other or are missing, or a
            shard whose shape is not that of its rank.
        NotInGroupError: the mesh does not hold ``rank``.

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
    """Return how an array lies on both sides of a pattern's "->"; kept by all arguments.

    Args and Raises: as for ``size_side``; shapes are those of the left side. PatternError as well
    where there is no "->", or its sides name different dims.

    Example:
        >>> mesh = Layout.from_shape((2,), ("tp",))
        >>> moved = regroup("(h k) d@tp -> d h@tp k", mesh, shape=(12, 5), sizes={"k": 4})
        >>> moved.target.shape, moved.order, moved.target_placement.box((1,))
        ((5, 3, 4), (2, 0, 1), ((2, 3), (0, 4), (0, 5)))
    """
    return _regroup(text, layout, rank, local_shape, shape, tuple((sizes or {}).items()))


def parse_side(text: str) -> tuple[Pattern, Side]:
    """Return the pattern of a text that says how one array lies, and its only side."""
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
    known = _checked_sizes(pattern, dict(sizes))
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
    known = _checked_sizes(pattern, dict(sizes))
    left = Sizing(pattern, side, layout, rank, local_shape, shape, known).sized_side(True)
    here = dict(zip(left.names, left.part_sizes, strict=True))
    rest = [size for name, size in here.items() if name.startswith("...")]
    there = _shape_of(result, here, rest)
    right = Sizing(pattern, result, layout, None, None, there, here).sized_side(True)
    order = tuple(left.names.index(name) for name in right.names)
    return Regrouping(left, right, order)


def _shape_of(side: Side, sizes: Mapping[str, int], rest: Sequence[int]) -> tuple[int, ...]:
    shape: list[int] = []
    for dim in side.dims:
        if dim.is_rest:
            shape += rest
        else:
            shape.append(1 if dim.is_one else math.prod(sizes[name] for name in dim.names))
    return tuple(shape)


def _check_equal_dims(pattern: Pattern, left: Side, right: Side) -> None:
    for side, other, which in ((left, right, "right"), (right, left, "left")):
        for dim in side.dims:
            for name in () if dim.is_one else dim.names:
                if name not in other.names:
                    raise column_error(
                        pattern.text,
                        dim.column,
                        expected=f"the same dims on both sides: {_listed(other)}",
                        found=f"{name!r}, which the {which} side does not name",
                        summary="the sides of this pattern name different dims",
                    )


def _listed(side: Side) -> str:
    return " ".join(side.names) or "none"


def _checked_sizes(pattern: Pattern, sizes: Mapping[str, Any]) -> dict[str, int]:
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
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise KindError(
                f"the size of dim {name!r} is a whole number",
                where=f"pattern {pattern.text!r}",
                found=f"{name}={size!r}",
            )
        checked[name] = operator.index(size)
        if checked[name] < 0:
            raise ShapeError(
                f"dim {name!r} cannot have size {size}", where=f"pattern {pattern.text!r}"
            )
    return checked
