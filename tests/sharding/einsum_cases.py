"""Random einsums on meshes, and what one device that holds all has for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch

import meshdist as md

MESHES = [(2,), (3,), (4,), (2, 2), (2, 3), (4, 2), (2, 2, 2), (2, 1, 3), (2, 2, 4)]
AXES = ("dp", "tp", "cp")


@dataclass(frozen=True)
class Array:
    """An operand or the result: its dims in order, as groups of names, with axes and kinds."""

    groups: tuple[tuple[str, ...], ...]
    cuts: dict[str, tuple[str, ...]]
    unreduced: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()

    def text(self, *, with_kinds: bool = True, sized: bool = False) -> str:
        words = []
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
            if axes and with_kinds
        ]
        return " ".join([*words, *([f"{{{'; '.join(kinds)}}}"] if kinds else [])])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(itertools.chain(*self.groups))

    def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return tuple(math.prod(sizes[name] for name in group) for group in self.groups)

    def parts(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return tuple(sizes[name] for name in self.names)


@dataclass(frozen=True)
class Case:
    """One einsum: its arrays, sizes, and the seed of its values."""

    operands: tuple[Array, ...]
    result: Array
    sizes: dict[str, int] = field(hash=False)
    seed: int

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
    sizes = {name: draws.randint(1, 5) for name in names}
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
    return Case(tuple(operands), draw_array(draws, of_result, axes, "UR"), sizes, seed)


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


class Summands:
    """A whole array as a sum over the coordinates along some axes, and a rank's part of it."""

    def __init__(
        self, draws: np.random.Generator, array: Array, case: Case, mesh: Any, axes: Any
    ) -> None:
        self.axes = tuple(axes)
        sizes = [mesh.axis_sizes[axis] for axis in self.axes]
        shape = array.shape(case.sizes)
        every = torch.from_numpy(draws.integers(-3, 4, (*sizes, *shape)).astype(np.float64))
        self.whole = every.sum(tuple(range(len(sizes)))) if sizes else every
        place = tuple(mesh.get_local_rank(axis) for axis in self.axes)
        mine = every[place] if sizes else every
        self.local = shard(mine, array, case, mesh)


def shard(whole: torch.Tensor, array: Array, case: Case, mesh: Any) -> torch.Tensor:
    """Return this rank's part of a whole array, without kinds."""
    sizes = {name: case.sizes[name] for name in array.names}
    return md.shard(whole, array.text(with_kinds=False), mesh, check=False, **sizes).detach()


def check(case: Case, mesh: Any, *, typed: bool, second: bool) -> None:
    """Compare value and gradients with one device, on this rank."""
    draws = np.random.default_rng(case.seed)
    held = [Summands(draws, x, case, mesh, x.unreduced) for x in case.operands]
    wholes = [x.whole.clone().requires_grad_() for x in held]
    # The cotangent of what is unreduced is reduced, and that of what is reduced unreduced.
    cotangent = Summands(draws, case.result, case, mesh, case.result.reduced)
    expected = product(case, wholes)
    locals_ = [x.local.requires_grad_() for x in held]
    for x, array in zip(locals_, case.operands, strict=True):
        md.annotate(x, array.text(), mesh=mesh)
    if typed:
        md.annotate(
            cotangent.local,
            varying=tuple(axis for axes in case.result.cuts.values() for axis in axes)
            + case.result.reduced,
            mesh=mesh,
        )
        with md.typed(mesh):
            result = md.einsum(case.text, *locals_, mesh=mesh, **case.sizes)
            loss = (result * cotangent.local).sum()
            kinds = md.typeof(loss)
            over = kinds.varying + kinds.unreduced
            loss = md.lax.psum(loss, over) if over else loss
            loss.backward()
        gradients = [x.grad for x in locals_]
    else:
        result = md.einsum(case.text, *locals_, mesh=mesh, **case.sizes)
        gradients = list(torch.autograd.grad(result, locals_, cotangent.local, create_graph=second))
    compare("value", result, expected, case.result, case, mesh, case.result.unreduced)
    wanted = list(torch.autograd.grad(expected, wholes, cotangent.whole, create_graph=second))
    for number, (x, found, right) in enumerate(zip(case.operands, gradients, wanted, strict=True)):
        assert found is not None
        compare(f"gradient {number}", found, right, x, case, mesh, x.reduced)
    if second and not typed and len(locals_) > 1:
        again = Summands(draws, case.operands[0], case, mesh, case.operands[0].unreduced)
        found2 = torch.autograd.grad(gradients[0], locals_[1:], again.local, allow_unused=True)
        right2 = torch.autograd.grad(wanted[0], wholes[1:], again.whole, allow_unused=True)
        for x, found, right in zip(case.operands[1:], found2, right2, strict=True):
            assert found is not None and right is not None
            compare("second", found, right, x, case, mesh, x.reduced)


def compare(
    what: str,
    local: torch.Tensor,
    whole: torch.Tensor,
    array: Array,
    case: Case,
    mesh: Any,
    axes: Any,
) -> None:
    """Raise unless the parts, summed over ``axes``, are those of the whole."""
    total = local.detach().clone()
    for axis in axes:
        md.all_reduce(total, group=mesh[axis])
    right = shard(whole.detach(), array, case, mesh)
    assert total.shape == right.shape, (case.text, what, total.shape, right.shape)
    assert torch.equal(total, right), (case.text, case.sizes, what, total, right)
