"""Random einsums on meshes, and what one device that holds all has for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import torch

import meshdist as md

AXES = ("dp", "tp", "cp")


@dataclass(frozen=True)
class Array:
    """An operand or the result: its dims in order, as groups of names, with axes and kinds.

    Args:
        rest: names of the whole dims that a leading "..." stands for; None without one.
    """

    groups: tuple[tuple[str, ...], ...]
    cuts: dict[str, tuple[str, ...]]
    unreduced: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    rest: tuple[str, ...] | None = None

    def text(self) -> str:
        words = [] if self.rest is None else ["..."]
        for group in self.groups:
            axes = self.cuts.get(group[0], ())
            name = group[0] if len(group) == 1 else f"({' '.join(group)})"
            listed = ",".join(axes)
            words.append(
                f"{name}@({listed})" if len(axes) > 1 else f"{name}@{listed}" if axes else name
            )
        kinds = [
            f"{kind}:{','.join(axes)}"
            for kind, axes in (("U", self.unreduced), ("R", self.reduced))
            if axes
        ]
        return " ".join([*words, *([f"{{{'; '.join(kinds)}}}"] if kinds else [])])

    @property
    def names(self) -> tuple[str, ...]:
        return (*(self.rest or ()), *itertools.chain(*self.groups))

    def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        groups = [*((name,) for name in self.rest or ()), *self.groups]
        return tuple(math.prod(sizes[name] for name in group) for group in groups)

    def parts(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return tuple(sizes[name] for name in self.names)


@dataclass(frozen=True)
class Case:
    """One einsum: its arrays, the size of each dim, and the seed of its values."""

    operands: tuple[Array, ...]
    result: Array
    sizes: dict[str, int] = field(hash=False)
    seed: int

    @property
    def has_rest(self) -> bool:
        return any(x.rest is not None for x in self.operands)

    def named_sizes(self, *arrays: Array) -> dict[str, int]:
        """The sizes that a call is given by name: of the dims that the text names."""
        named = {name for x in arrays for group in x.groups for name in group}
        return {name: size for name, size in self.sizes.items() if name in named}

    @property
    def text(self) -> str:
        return f"{', '.join(x.text() for x in self.operands)} -> {self.result.text()}"


def draw_array(draws: Random, names: Sequence[str], axes: Sequence[str], of_kind: str) -> Array:
    """Return an array of these dims in some order, cut over some of the axes."""
    order = draws.sample(names, len(names))
    cuts: dict[str, tuple[str, ...]] = {}
    by_kind: dict[str, tuple[str, ...]] = {"U": (), "R": ()}
    for axis in draws.sample(axes, len(axes)):
        where = draws.choice([*order, *order, "", "", *of_kind])
        if where in by_kind:
            by_kind[where] += (axis,)
        elif where:
            cuts[where] = (*cuts.get(where, ()), axis)
    groups: list[tuple[str, ...]] = []
    for name in order:
        if groups and name not in cuts and draws.random() < 0.2:
            groups[-1] += (name,)
        else:
            groups.append((name,))
    return Array(tuple(groups), cuts, by_kind["U"], by_kind["R"])


def draw_case(seed: int, axes: Sequence[str]) -> Case:
    """Return the einsum of a seed, on a mesh with these axes."""
    draws = Random(seed)
    names = ("a", "b", "c", "d")[: draws.randint(1, 4)]
    sizes = {name: draws.choice((0, 1, 1, 2, 3, 4, 5)) for name in names}
    operands: list[Array] = []
    for _ in range(draws.randint(1, 3)):
        mine = draws.sample(names, draws.randint(0, min(3, len(names))))
        made = draw_array(draws, mine, axes, "UR")
        before = {axis for x in operands for axis in x.unreduced}
        kept = tuple(axis for axis in made.unreduced if axis not in before)
        operands.append(Array(made.groups, made.cuts, kept, made.reduced))
    there = sorted({name for x in operands for name in x.names})
    sizes = {name: sizes[name] for name in there}
    of_result = draws.sample(there, draws.randint(0, len(there)))
    result = draw_array(draws, of_result, axes, "UR")
    if draws.random() < 0.25:
        rest = ("y", "z")[: draws.randint(0, 2)]
        sizes |= {name: draws.randint(1, 3) for name in rest}
        with_it = draws.sample(range(len(operands)), draws.randint(1, len(operands)))
        operands = [replace(x, rest=rest) if i in with_it else x for i, x in enumerate(operands)]
        result = replace(result, rest=rest) if draws.random() < 0.75 else result
    return Case(tuple(operands), result, sizes, seed)


# -- one device -----------------------------------------------------------------------------------


def product(case: Case, wholes: list[torch.Tensor]) -> torch.Tensor:
    """Return the einsum of whole arrays."""
    letters = {name: chr(97 + at) for at, name in enumerate(case.sizes)}
    parts = [
        x.reshape(array.parts(case.sizes)) for x, array in zip(wholes, case.operands, strict=True)
    ]
    left = ",".join("".join(letters[n] for n in x.names) for x in case.operands)
    out = "".join(letters[n] for n in case.result.names)
    return torch.einsum(f"{left}->{out}", *parts).reshape(case.result.shape(case.sizes))


class PartialSums:
    """A whole array as a sum over the coordinates along some axes, and a rank's part of it."""

    def __init__(
        self,
        draws: np.random.Generator,
        array: Array,
        case: Case,
        mesh: Any,
        axes: Any,
        *,
        exact: bool,
    ) -> None:
        self.axes = tuple(axes)
        sizes = [mesh.axis_sizes[axis] for axis in self.axes]
        shape = (*sizes, *array.shape(case.sizes))
        values = draws.integers(-3, 4, shape) if exact else draws.normal(size=shape)
        every = torch.from_numpy(np.asarray(values, dtype=np.float64))
        self.whole = every.sum(tuple(range(len(sizes)))) if sizes else every
        place = tuple(mesh.get_local_rank(axis) for axis in self.axes)
        self.local = shard(every[place] if sizes else every, array, case, mesh)


def shard(whole: torch.Tensor, array: Array, case: Case, mesh: Any) -> torch.Tensor:
    """Return this rank's part of a whole array, by the rule of balanced parts."""
    part, places = whole.reshape(array.parts(case.sizes)), mesh.get_coordinate()
    for dim, name in enumerate(array.names):
        start, size = 0, case.sizes[name]
        for axis in array.cuts.get(name, ()):
            number = mesh.axis_names.index(axis)
            smaller, num_larger = divmod(size, mesh.shape[number])
            place = places[number]
            start += place * smaller + min(place, num_larger)
            size = smaller + (place < num_larger)
        part = part.narrow(dim, start, size)
    local = dict(zip(array.names, part.shape, strict=True))
    return part.reshape(array.shape(local)).clone(memory_format=torch.contiguous_format)


def summed_loss(x: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
    """Return, inside a context, the sum of products over all ranks that have parts of it."""
    loss = (x * cotangent).sum()
    kinds = md.typeof(loss)
    over = kinds.varying + kinds.unreduced
    return md.lax.psum(loss, over) if over else loss


def check(case: Case, mesh: Any, *, typed: bool, second: bool, exact: bool = True) -> None:
    """Compare value and gradients with one device, on this rank.

    Args:
        second: whether the gradient of a gradient is compared, too.
        exact: values are integers, and compared to the bit; else to 1e-12.
    """
    draws = np.random.default_rng(case.seed)
    second = second and len(case.operands) > 1

    def drawn(array: Array, axes: Any) -> PartialSums:
        return PartialSums(draws, array, case, mesh, axes, exact=exact)

    held = [drawn(x, x.unreduced) for x in case.operands]
    # The cotangent of what is unreduced is reduced, and that of what is reduced unreduced.
    cotangent = drawn(case.result, case.result.reduced)
    again = drawn(case.operands[0], case.operands[0].unreduced)
    wholes = [x.whole.clone().requires_grad_() for x in held]
    expected = product(case, wholes)
    wanted = torch.autograd.grad(expected, wholes, cotangent.whole, create_graph=second)
    locals_ = [x.local.requires_grad_() for x in held]
    for x, array in zip(locals_, case.operands, strict=True):
        md.annotate(x, array.text(), mesh=mesh)
    found2: Sequence[torch.Tensor] = ()
    sizes = case.named_sizes(*case.operands)
    if typed:
        for given, array in ((cotangent, case.result), (again, case.operands[0])):
            cut = sum(array.cuts.values(), ())
            md.annotate(given.local, varying=(*cut, *given.axes), mesh=mesh)
        with md.typed(mesh):
            result = md.einsum(case.text, *locals_, mesh=mesh, **sizes)
            loss = summed_loss(result, cotangent.local)
            gradients = torch.autograd.grad(loss, locals_, create_graph=second)
            if second:
                loss = summed_loss(gradients[0], again.local)
                found2 = torch.autograd.grad(loss, locals_[1:])
    else:
        # Two lines with the same activations; one of them gathers again in the backward.
        used = [1 * x for x in locals_]
        lines = [
            md.einsum(case.text, *used, mesh=mesh, regather=regather, **sizes)
            for regather in (False, True)
        ]
        result = (lines[0] + lines[1]) / 2
        gradients = torch.autograd.grad(result, locals_, cotangent.local, create_graph=second)
        if second:
            found2 = torch.autograd.grad(gradients[0], locals_[1:], again.local)
    compared = [("gradient", gradients, wanted, case.operands)]
    if second:
        wanted2 = torch.autograd.grad(wanted[0], wholes[1:], again.whole)
        compared.append(("second", found2, wanted2, case.operands[1:]))
    pairs = [("value", result, expected, case.result, case.result.unreduced)]
    for what, found, right, arrays in compared:
        for number, (mine, whole, x) in enumerate(zip(found, right, arrays, strict=True)):
            pairs.append((f"{what} {number}", mine, whole, x, x.reduced))
    for what, mine, whole, x, axes in pairs:
        compare(what, mine, whole, x, case, mesh, axes, exact=exact)
    # <A x, y> = <x, A' y> of what ranks hold, for each operand that A is linear in.
    products = [(result, cotangent.local, case.result)]
    products += [*zip(locals_, gradients, case.operands, strict=True)]
    forward, *backwards = inner(products, mesh)
    for backward in backwards:
        assert math.isclose(forward, backward, rel_tol=0 if exact else 1e-10, abs_tol=1e-10), (
            case.text,
            case.sizes,
            forward,
            backward,
        )


def check_in_turn(cases: Sequence[Case], mesh: Any) -> None:
    """Check cases with types and without, with second gradients, and with rounded values."""
    for number, case in enumerate(cases):
        check(case, mesh, typed=number % 3 == 2, second=number % 2 == 0, exact=number % 5 > 1)


def inner(
    products: Sequence[tuple[torch.Tensor, torch.Tensor, Array]], mesh: Any
) -> Sequence[float]:
    """Return inner products of arrays and their cotangents, from the parts that ranks hold."""
    totals = torch.stack([(x.detach() * y.detach()).sum() for x, y, _ in products])
    md.all_reduce(totals, group=mesh)
    found = []
    for total, (_, _, array) in zip(totals.tolist(), products, strict=True):
        of_parts = {*sum(array.cuts.values(), ()), *array.unreduced, *array.reduced}
        copies = math.prod(size for axis, size in mesh.axis_sizes.items() if axis not in of_parts)
        found.append(total / copies)
    return found


def compare(
    what: str,
    local: torch.Tensor,
    whole: torch.Tensor,
    array: Array,
    case: Case,
    mesh: Any,
    axes: Any,
    *,
    exact: bool,
) -> None:
    """Raise unless the parts, summed over ``axes``, are those of the whole."""
    total = local.detach().clone()
    for axis in axes:
        md.all_reduce(total, group=mesh[axis])
    right = shard(whole.detach(), array, case, mesh)
    assert total.shape == right.shape, (case.text, what, total.shape, right.shape)
    # Sums of products of rounded numbers are rounded in the measure of the largest of them.
    most = 0.0 if exact else 1e-12 * max(1.0, whole.abs().max().item() if whole.numel() else 0.0)
    is_right = torch.allclose(total, right, rtol=0, atol=most)
    assert is_right, (case.text, case.sizes, what, total, right)
