"""Choose the dim of an einsum that each mesh axis divides, and the communication that this needs.

An axis divides one dim that some operand or the result has cut over it. An operand with that dim is
cut there. An operand without it is *reduced* over the axis: equal on all ranks, with a partial sum
as gradient. If the result lacks the dim, the product is *unreduced*. So ranks compute the same
product twice only along an axis that cuts nothing. If dims compete for an axis, the best choice has
the fewest elements received by all ranks forward, then backward, then the result's own layout, then
the first dim in text order, the result's dims first. All ranks choose the same. A dim that several
axes cut takes the result's axis order, else the first operand's.

Worked example: the second layer of a Megatron block, on 2 ranks along tp.

    text       b f@tp        ,  f@tp d        ->  b d
    work       b f@tp           f@tp d            b d {U:tp}     the result lacks f: partial sums
    forward    stays            stays             all-reduce
    backward   stays            stays             stays: the gradient enters reduced

If the weights are cut over the axis of the batch, two dims compete for it:

    text       b@dp d        ,  d@dp f        ->  b@dp f         b = 32, d = 4, f = 4, 2 ranks
    by b       stays            gathered: 16      stays          16 elements in all: chosen
    by d       exchanged: 64    stays             scattered: 128

    >>> layout = Layout.from_shape((2,), ("tp",))
    >>> shapes = ((8, 4), (4, 3))
    >>> laid = lay_out_einsum("b f@tp, f@tp d -> b d", layout, 0, shapes, (), ((), ()))
    >>> laid.choices, laid.work.result.unreduced, laid.num_received
    (('f',), (0,), (48, 0))
    >>> shapes = ((16, 4), (2, 4))
    >>> laid = lay_out_einsum("b@tp d, d@tp f -> b@tp f", layout, 0, shapes, (), ((), ()))
    >>> laid.choices, laid.num_received
    (('b',), (16, 16))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import NoReturn

from ..errors import AxisTypeError, PatternError, ShapeError
from ..mesh.layout import Layout
from ..mesh.pattern import Pattern, PatternSide, column_error, parse
from ..mesh.pattern_sizes import shape_of_side
from ..mesh.placement import DimSplit, Placement, split_dim
from ..mesh.spec import NamedSharding, sharding_of_side
from .routes import num_received_by_all

Choice = str | int | None
"""The dim of the work that an axis divides, or the operand that stays unreduced."""


@dataclass(frozen=True)
class WorkPlacements:
    """Placements of operands and result during the local product."""

    operands: tuple[Placement, ...]
    result: Placement


@dataclass(frozen=True, eq=False)
class EinsumLayout:
    """An einsum on a mesh, for known operand shapes.

    Args:
        operands: their sides of the text, with all sizes.
        sources: their placements, including annotated reduced axes.
        choices: for each axis, the name that it divides.
        num_received: by all ranks in total, forward and backward.
    """

    text: str
    operands: tuple[NamedSharding, ...]
    result: NamedSharding
    sources: tuple[Placement, ...]
    work: WorkPlacements
    choices: tuple[Choice, ...]
    num_received: tuple[int, int]

    @cached_property
    def equation(self) -> str:
        """The ``torch.einsum`` equation of the local product."""
        names = dict.fromkeys(name for side in self.operands for name in side.parts.names)
        # torch.einsum accepts letters of both cases.
        letters = {name: chr(97 + at) if at < 26 else chr(39 + at) for at, name in enumerate(names)}
        *left, right = [
            "".join(letters[name] for name in side.parts.names)
            for side in (*self.operands, self.result)
        ]
        return f"{','.join(left)}->{right}"

    @cached_property
    def is_matmul(self) -> bool:
        """Return whether the einsum is ``torch.matmul`` of operand 0 and matrix operand 1."""
        return self._is_product_with(0)

    @cached_property
    def is_linear(self) -> bool:
        """Return whether the einsum is ``linear`` of operand 0 with weight matrix operand 1."""
        return self._is_product_with(1)

    def _is_product_with(self, index: int) -> bool:
        """Return whether operand 0's last dim is summed with dim ``index`` of matrix operand 1."""
        first, *others = [side.parts.names for side in self.operands]
        if len(others) != 1 or len(others[0]) != 2:
            return False
        (*rows, inner), right = first or ("",), others[0]
        return right[index] == inner and (*rows, right[1 - index]) == self.result.parts.names


@lru_cache(maxsize=4096)
def lay_out_einsum(
    text: str,
    layout: Layout,
    rank: int | None,
    shapes: tuple[tuple[int, ...], ...] | None,
    sizes: tuple[tuple[str, int], ...],
    marks: tuple[tuple[str, ...], ...],
) -> EinsumLayout:
    """Return an einsum's layout; raise if text, shapes and annotations do not fit.

    Args:
        rank: the rank whose shards have the ``shapes``; both None if ``sizes`` is complete.
        marks: the axes over which each operand is annotated reduced, in addition to the text.
    """
    pattern = parse(text)
    result = _checked_result(pattern)
    operands, known = _sized_operands(pattern, layout, rank, shapes, sizes)
    shape = shape_of_side(result, known)
    sized = sharding_of_side(pattern, result, layout, known, shape=shape)
    sources = []  # also reduced over the axes with which an operand is annotated
    for side, axes in zip(operands, marks, strict=True):
        lies = side.parts.placement
        reduced = {*lies.reduced, *map(layout.axis_index, axes)}
        sources.append(replace(lies, reduced=tuple(sorted(reduced))))
    return LayoutChooser(text, layout, operands, tuple(sources), sized).best()


# -- sizes --------------------------------------------------------------------------------------


def _checked_result(pattern: Pattern) -> PatternSide:
    """Return the result's side; raise if it is missing, or has a dim that no operand has."""
    if pattern.result is None:
        raise column_error(
            pattern.text,
            len(pattern.text),
            expected='"->" and the sharding of the result',
            found="the end",
            summary="this einsum has no result",
        )
    named = dict.fromkeys(name for side in pattern.operands for name in side.names)
    for dim in pattern.result.dims:
        for name in () if dim.is_one else dim.names:
            if name not in named:
                is_joined = len(name) > 1 and {*name} <= {*"".join(named)}  # "bsf" of bsd,df->bsf
                raise column_error(
                    pattern.text,
                    dim.column,
                    expected=f"dims of the operands: {' '.join(named) or 'none'}",
                    found=f"{name!r}, which no operand has",
                    summary="the result of this einsum has a dim that no operand has",
                    fix=f"separate dims by spaces, unlike in torch.einsum: {' '.join(name)}"
                    if is_joined
                    else None,
                )
    return pattern.result


def _sized_operands(
    pattern: Pattern,
    layout: Layout,
    rank: int | None,
    shapes: tuple[tuple[int, ...], ...] | None,
    sizes: tuple[tuple[str, int], ...],
) -> tuple[tuple[NamedSharding, ...], dict[str, int]]:
    """Return the operands with sizes, and each part's size by name; raise if they differ."""
    known, given = dict(sizes), dict(sizes)
    sized: list[NamedSharding] = []
    num_rest: int | None = None
    for number, side in enumerate(pattern.operands):
        shape = None if shapes is None else shapes[number]
        try:
            found = sharding_of_side(pattern, side, layout, known, local_shape=shape, rank=rank)
        except ShapeError:
            if shapes is not None:
                _compare_sizes(pattern, layout, rank, shapes, given, sized)
            raise
        if any(dim.is_rest for dim in side.dims):
            count = sum(name.startswith("...") for name in found.parts.names)
            if num_rest not in (None, count):
                raise ShapeError(
                    f'"..." stands for {num_rest} dims of one operand and for {count} of another',
                    where=f"operand {number} of einsum {pattern.text!r}",
                    expected="as many dims in each operand",
                    found=f"shapes {shapes}",
                    fix="name the dims that only one operand has",
                )
            num_rest = count
        known.update(found.parts.by_name)
        sized.append(found)
    return tuple(sized), known


def _compare_sizes(
    pattern: Pattern,
    layout: Layout,
    rank: int | None,
    shapes: tuple[tuple[int, ...], ...],
    given: Mapping[str, int],
    before: Sequence[NamedSharding],
) -> None:
    """Raise if the operand after ``before`` has a dim in another size than earlier operands."""
    number = len(before)
    operand, shape = pattern.operands[number], shapes[number]
    try:
        found = sharding_of_side(pattern, operand, layout, given, local_shape=shape, rank=rank)
    except ShapeError:
        return
    here = found.parts.by_name
    for other, side in enumerate(before):
        for name, size in side.parts.by_name.items():
            if here.get(name, size) != size:
                pair = ((other, size), (number, here[name]))
                raise ShapeError(
                    f"einsum: dim {name!r} has two sizes, {size} and {here[name]}",
                    where=f"einsum {pattern.text!r} on mesh ({layout.axis_text()})",
                    expected=f"one size of {name!r} in all operands",
                    found=f"{name}={size} in operand {other}, a shard of shape {shapes[other]}; "
                    f"{name}={here[name]} in operand {number}, a shard of shape {shapes[number]}",
                    fix=_fix_of_sizes(pattern, layout, name, pair),
                )


def _fix_of_sizes(
    pattern: Pattern, layout: Layout, name: str, pair: Sequence[tuple[int, int]]
) -> str | None:
    """Return a fix for a dim of two sizes, given as (operand, size) pairs, or None."""
    is_cut = False
    for (number, size), (_, other) in (pair, pair[::-1]):
        side = pattern.operands[number]
        axes = next((dim.axes for dim in side.dims if name in dim.names), ())
        is_cut |= bool(axes)
        if axes and size == other * math.prod(layout.axis_sizes[axis] for axis in axes):
            return f"shard operand {number} if it is global: md.shard(x, {str(side)!r}, mesh)"
    return f"if its shards are uneven, pass the global size: {name}=..." if is_cut else None


# -- the choice ---------------------------------------------------------------------------------


class LayoutChooser:
    """Possible divisions of an einsum's work by mesh axes, with costs."""

    def __init__(
        self,
        text: str,
        layout: Layout,
        operands: tuple[NamedSharding, ...],
        sources: tuple[Placement, ...],
        result: NamedSharding,
    ) -> None:
        self.text, self.layout = text, layout
        self.operands, self.sources, self.result = operands, sources, result
        self.sizes = {name: size for side in operands for name, size in side.parts.by_name.items()}
        self.sides = [(result.parts.names, result.parts.placement)]
        self.sides += [(side.parts.names, at) for side, at in zip(operands, sources, strict=True)]

    def best(self) -> EinsumLayout:
        """Return the layout of the cheapest division; of equal costs the first."""
        every = list(product(*map(self.choices_along, range(self.layout.ndim))))
        works = list(map(self.work, every))
        forward = [self.num_received(work) for work in works]
        fewest = min(forward)
        target = self.result.parts.placement.dims
        prices = {
            number: (self.num_received(work, is_backward=True), work.result.dims != target)
            for number, work in enumerate(works)
            if forward[number] == fewest
        }
        best = min(prices, key=prices.__getitem__)
        return EinsumLayout(
            self.text,
            self.operands,
            self.result,
            self.sources,
            works[best],
            every[best],
            (fewest, prices[best][0]),
        )

    def num_received(self, work: WorkPlacements, *, is_backward: bool = False) -> int:
        """Return the total elements received, forward or in the backward."""
        moves = [*zip(self.sources, work.operands, strict=True)]
        moves.append((work.result, self.result.parts.placement))
        if is_backward:
            moves = [(there.transposed(), here.transposed()) for here, there in moves]
        return sum(num_received_by_all(*ends) for ends in moves)

    def choices_along(self, axis: int) -> list[Choice]:
        """Return what ``axis`` can divide, best first: partial sum, dims, None (nothing)."""
        cut = [
            name
            for names, side in self.sides
            for name, dim in zip(names, side.dims, strict=True)
            if axis in dim.axes
        ]
        is_operand_cut = any(axis in side.cut_axes for side in self.sources)
        partial_sums = [at for at, side in enumerate(self.sources) if axis in side.unreduced]
        if len(partial_sums) > 1 and not cut:
            self.fail_two_unreduced(axis, partial_sums)
        choices: list[Choice] = []
        if len(partial_sums) == 1 and not is_operand_cut:
            choices += partial_sums
        choices += dict.fromkeys(cut)
        if not cut:
            self.check_marks(axis)
            choices.append(None)
        return choices

    def work(self, choices: tuple[Choice, ...]) -> WorkPlacements:
        """Return the placements if each axis divides its choice."""
        every = range(self.layout.ndim)
        target = self.result.parts.placement
        operands = []
        for number, (source, side) in enumerate(zip(self.sources, self.operands, strict=True)):
            dims = self.dims(side.parts.names, choices)
            cut = {axis for dim in dims for axis in dim.axes}
            operands.append(
                Placement(
                    self.layout.sizes,
                    source.shape,
                    dims,
                    tuple(axis for axis in every if choices[axis] == number),
                    tuple(
                        axis
                        for axis in every
                        if axis not in cut
                        and choices[axis] != number
                        and (choices[axis] is not None or axis in target.reduced)
                    ),
                )
            )
        dims = self.dims(self.result.parts.names, choices)
        cut = {axis for dim in dims for axis in dim.axes}
        unreduced = tuple(axis for axis in every if axis not in cut and choices[axis] is not None)
        reduced = tuple(axis for axis in every if choices[axis] is None and axis in target.reduced)
        result = Placement(self.layout.sizes, target.shape, dims, unreduced, reduced)
        return WorkPlacements(tuple(operands), result)

    def dims(self, names: Sequence[str], choices: tuple[Choice, ...]) -> tuple[DimSplit, ...]:
        """Return the local product's dims ``names``, each cut by the axes that chose it."""
        dims = []
        for name in names:
            axes = self.axes_of(name, choices)
            sizes = tuple([self.layout.sizes[axis] for axis in axes])
            dims.append(split_dim(self.sizes[name], axes, sizes))
        return tuple(dims)

    def axes_of(self, name: str, choices: tuple[Choice, ...]) -> tuple[int, ...]:
        """Return the axes that chose ``name``, in the order of a side that all of them cut."""
        mine = [axis for axis, choice in enumerate(choices) if choice == name]
        for names, side in self.sides if len(mine) > 1 else ():
            if name in names:
                cutting = side.dims[names.index(name)].axes
                if {*mine} <= {*cutting}:
                    return tuple(axis for axis in cutting if axis in mine)
        return tuple(mine)

    def fail_two_unreduced(self, axis: int, partial_sums: Sequence[int]) -> NoReturn:
        name = _axis_name(self.layout, axis)
        both = " and ".join(map(str, partial_sums[:2]))
        raise PatternError(
            f"einsum: operands {both} are both unreduced over axis {name!r}",
            where=f"einsum {self.text!r} on mesh ({self.layout.axis_text()})",
            expected="at most one unreduced operand, since a product of two partial sums is not a "
            "partial sum of the product",
            found=f"{len(partial_sums)} operands with {{U:{name}}}",
            fix=f"reduce one first: md.reshard(x, '... {{U:{name}}} -> ...', mesh)",
        )

    def check_marks(self, axis: int) -> None:
        """Raise if an operand is annotated reduced over ``axis``, which the einsum leaves out."""
        # Its gradient would be equal on all ranks, so only one rank would keep it, and DDP's mean
        # would be too small. On 2 ranks with g and 0, DDP would average to g / 2.
        if axis in self.result.parts.placement.reduced or self.layout.sizes[axis] == 1:
            return
        for number, (side, source) in enumerate(zip(self.operands, self.sources, strict=True)):
            if axis in source.reduced and axis not in side.parts.placement.reduced:
                name = _axis_name(self.layout, axis)
                raise AxisTypeError(
                    f"einsum: operand {number} is annotated as reduced over axis {name!r}, which "
                    "the pattern leaves out",
                    where=f"einsum {self.text!r} on mesh ({self.layout.axis_text()})",
                    expected=f"a dim that {name!r} cuts, or a result that is reduced over it",
                    found=f"operand {number} with {{R:{name}}} by its annotation, as a parameter "
                    "under DDP",
                    fix=f"if the batch differs along it, write b@{name}; if all values are equal "
                    f"along it, end the result with {{R:{name}}}; or pass a mesh with only the "
                    "axes of the pattern: mesh=mesh['tp']",
                )


def _axis_name(layout: Layout, axis: int) -> str:
    return layout.names[axis] if layout.names else str(axis)
