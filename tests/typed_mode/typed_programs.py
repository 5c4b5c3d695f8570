"""Random programs over a mesh, and what one device makes of them.

A value over a mesh is, on one device, an array with one leading dim for each axis: of the axis's
size where the value varies along it, else of size 1. So operations on values that vary along
different axes are plain broadcasts there, and their gradients are autograd's own: no rule about
kinds of values is used to find what is right.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

import meshdist as md
from meshdist import lax

F64 = torch.float64
SIZE = 6  # of both dims of every value: the sizes of all axes divide it
MESHES = [
    [0, 1],
    [2, 0, 1],
    [[0, 1]],
    [[1, 3], [0, 2]],
    [[0, 1], [2, 3]],
    [[4, 2, 0], [1, 3, 5]],
    [[[0, 2]], [[3, 1]]],
]
NAMES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Leaf:
    """A leaf: its kinds by axis, and whether it has a gradient."""

    kinds: dict[str, str]
    requires_grad: bool
    seed: int


@dataclass
class Program:
    """Steps on a pool of values: an operation, the places of its operands, and numbers."""

    ranks: Any
    leaves: list[Leaf]
    steps: list[tuple[str, tuple[int, ...], Any]] = field(default_factory=list)
    kinds: list[dict[str, str]] = field(default_factory=list)

    @property
    def sizes(self) -> dict[str, int]:
        shape = torch.tensor(self.ranks).shape
        return dict(zip(NAMES[-len(shape) :], shape, strict=True))


def make_program(seed: int) -> Program:
    """A program that is right by its types."""
    r = random.Random(seed)
    program = Program(r.choice(MESHES), [])
    axes = list(program.sizes)
    for number in range(5):
        kinds = {axis: "V" for axis in axes if number > 1 and r.random() < 0.5}
        program.leaves.append(Leaf(kinds, number != 4, seed * 10 + number))
    if r.random() < 0.3:
        axis = r.choice(axes)
        program.leaves.append(Leaf({axis: "R"}, True, seed * 10 + 7))
    program.kinds = [dict(leaf.kinds) for leaf in program.leaves]
    for _ in range(r.randrange(6, 14)):
        add_step(program, r, axes)
    return program


def add_step(program: Program, r: random.Random, axes: list[str]) -> None:
    pool = program.kinds
    a, b = (r.randrange(len(pool)) for _ in range(2))
    axis = r.choice(axes)
    kind = pool[a].get(axis, "I")
    joined = {
        one: "V" if "V" in (pool[a].get(one), pool[b].get(one)) else "R"
        for one in {*pool[a], *pool[b]}
    }

    def add(name: str, places: tuple[int, ...], number: Any, kinds: dict[str, str]) -> None:
        program.steps.append((name, places, number))
        pool.append({one: kind for one, kind in kinds.items() if kind != "I"})

    choice = r.random()
    if choice < 0.12:
        add("sin", (a,), None, pool[a])
    elif choice < 0.2:
        add("shapes", (a,), r.randrange(1, SIZE), pool[a])
    elif choice < 0.5:
        name = r.choice(["add", "sub", "mul", "matmul", "where", "stack"])
        add(name, (a, b), None, joined)
    elif choice < 0.58:
        add("lists", (a, b), None, joined)
    elif choice < 0.66 and joined == pool[a]:
        add("in place", (a, b), r.choice(["add_", "mul_", "copy_", "slice"]), joined)
    elif kind == "V":
        operation = r.choice(
            [
                *("psum", "psum", "pmean", "pmax", "gather V", "gather I", "scatter"),
                *("exchange", "rotate", "unreduced", "broadcast"),
            ]
        )
        is_whole = operation in ("psum", "pmean", "pmax", "gather I", "unreduced", "broadcast")
        if is_whole and len(pool[a]) > 1 and operation in ("psum", "pmean") and r.random() < 0.5:
            both = tuple(one for one in axes if pool[a].get(one) == "V")
            add(
                operation,
                (a,),
                both,
                {one: kind for one, kind in pool[a].items() if one not in both},
            )
        else:
            add(operation, (a,), (axis,), {**pool[a], axis: "I" if is_whole else "V"})
    elif kind == "I":
        to = r.choice(["varying", "reduced"])
        add("pcast", (a,), (axis, to), {**pool[a], axis: to[0].upper()})
    else:
        add("pcast", (a,), (axis, "varying"), {**pool[a], axis: "V"})


class Device(Protocol):
    """What runs a program."""

    def leaf(self, leaf: Leaf) -> torch.Tensor: ...
    def join(self, *values: tuple[torch.Tensor, dict[str, str]]) -> list[torch.Tensor]: ...
    def operation(self, name: str, x: torch.Tensor, kinds: dict[str, str], number: Any) -> Any: ...
    def total(self, x: torch.Tensor, kinds: dict[str, str]) -> torch.Tensor: ...


def run(program: Program, device: Device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss, and the leaves that have gradients."""
    leaves = [device.leaf(leaf) for leaf in program.leaves]
    pool = list(leaves)
    for (name, places, number), kinds in zip(
        program.steps, program.kinds[len(leaves) :], strict=True
    ):
        given = [(pool[place], program.kinds[place]) for place in places]
        pool.append(step(device, name, given, number))
        assert pool[-1].shape[-2:] == (SIZE, SIZE), (name, kinds)
    count = len(pool)
    used = [*range(count - 3, count), *(place for place in range(5) if place % 2)]
    return sum(device.total(pool[place], program.kinds[place]) for place in used), leaves


def step(
    device: Device, name: str, given: list[tuple[torch.Tensor, dict[str, str]]], number: Any
) -> torch.Tensor:
    if name not in PLAIN:
        return device.operation(name, *given[0], number)
    return PLAIN[name](*device.join(*given), number)


def in_place(x: torch.Tensor, y: torch.Tensor, how: str) -> torch.Tensor:
    x = x.expand(torch.broadcast_shapes(x.shape, y.shape)) * 1.0
    y = y.expand(x.shape)
    if how == "slice":
        x[..., 1:3] = y[..., :2].tanh()
        return x
    return getattr(x, how)(y.tanh())


def of_lists(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, second = torch._foreach_mul([x, y], 0.5)
    first, second = torch._foreach_add([first, second], [y, y])
    return first.tanh() + second.tanh()


PLAIN: dict[str, Any] = {
    "sin": lambda x, _: x.sin(),
    "shapes": lambda x, n: x.transpose(-1, -2).flip(-1).roll(n, -1).reshape(x.shape).clone(),
    "add": lambda x, y, _: x + 0.5 * y,
    "sub": lambda x, y, _: torch.sub(x, y, alpha=0.25),
    "mul": lambda x, y, _: (x * y).tanh(),
    "matmul": lambda x, y, _: (x @ y / SIZE).tanh(),
    "where": lambda x, y, _: torch.where(x > y, x, y * 0.5),
    "stack": lambda x, y, _: torch.stack([*torch.broadcast_tensors(x, y)]).mean(0),
    "lists": lambda x, y, _: of_lists(x, y),
    "in place": in_place,
}


def values(leaf: Leaf, sizes: dict[str, int]) -> torch.Tensor:
    """A leaf's values on one device."""
    leading = [size if leaf.kinds.get(axis) == "V" else 1 for axis, size in sizes.items()]
    generator = torch.Generator().manual_seed(leaf.seed)
    return torch.randn(*leading, SIZE, SIZE, dtype=F64, generator=generator)


class OneDevice:
    """One device that holds all."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.axes = list(sizes)

    def leaf(self, leaf: Leaf) -> torch.Tensor:
        return values(leaf, self.sizes).requires_grad_(leaf.requires_grad)

    def join(self, *given: tuple[torch.Tensor, dict[str, str]]) -> list[torch.Tensor]:
        return [value for value, _ in given]

    def whole(self, x: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        """``x`` with one entry for each rank along ``axes``."""
        shape = list(x.shape)
        for axis in axes:
            shape[self.axes.index(axis)] = self.sizes[axis]
        return x.expand(shape)

    def operation(self, name: str, x: torch.Tensor, kinds: dict[str, str], number: Any) -> Any:
        if name == "pcast":
            return x * 1.0
        x = self.whole(x, number)
        places = [self.axes.index(axis) for axis in number]
        (place, *_), size = places, self.sizes[number[0]]
        if name in ("psum", "unreduced"):
            return x.sum(places, keepdim=True) * (1.5 if name == "unreduced" else 1)
        if name == "pmean":
            return x.mean(places, keepdim=True)
        if name == "pmax":
            return x.amax(places, keepdim=True)
        if name == "broadcast":
            return x.narrow(place, size - 1, 1)
        if name == "rotate":
            return x.roll(1, place)
        parts = x.movedim(place, 0)  # by rank along the axis
        if name in ("gather V", "gather I"):
            weights = torch.arange(1.0, size + 1, dtype=F64)
            gathered = torch.einsum("k,k...->...", weights, parts)
            return gathered.unsqueeze(place)
        if name == "scatter":
            total = parts.sum(0).unflatten(-2, (size, -1)).movedim(-3, 0)
            return total.repeat(*(1 for _ in range(total.dim() - 2)), size, 1).movedim(0, place)
        assert name == "exchange"
        blocks = parts.unflatten(-2, (size, -1))  # sender, ..., receiver, rows, columns
        return blocks.movedim(-3, 0).movedim(1, -3).flatten(-3, -2).movedim(0, place)

    def total(self, x: torch.Tensor, kinds: dict[str, str]) -> torch.Tensor:
        return self.whole(x, tuple(kinds)).sin().sum()


class Ranks:
    """One rank of many: by types, or with casts that stand where they are needed."""

    def __init__(self, mesh: md.DeviceMesh, *, by_hand: bool) -> None:
        self.mesh = mesh
        self.by_hand = by_hand
        self.leaves: dict[int, torch.Tensor] = {}

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of what one device holds."""
        for place in self.mesh.get_coordinate():
            whole = whole[min(place, len(whole) - 1)]
        return whole

    def leaf(self, leaf: Leaf) -> torch.Tensor:
        """The same tensor each time."""
        if leaf.seed not in self.leaves:
            self.leaves[leaf.seed] = self.make(leaf)
        return self.leaves[leaf.seed]

    def make(self, leaf: Leaf) -> torch.Tensor:
        with md.untyped():  # each rank draws the whole, and takes its part
            whole = values(leaf, self.mesh.axis_sizes)
            x = self.own(whole).clone().requires_grad_(leaf.requires_grad)
        axes = {
            word: tuple(axis for axis, kind in leaf.kinds.items() if kind == word[0].upper())
            for word in ("varying", "reduced")
        }
        return x if self.by_hand else md.annotate(x, **axes, mesh=self.mesh)

    def join(self, *given: tuple[torch.Tensor, dict[str, str]]) -> list[torch.Tensor]:
        if not self.by_hand:
            return [x for x, _ in given]
        joined = {}
        for axis in self.mesh.axis_names:
            here = {kinds.get(axis, "I") for _, kinds in given}
            joined[axis] = next(kind for kind in "VRI" if kind in here)
        found = []
        for x, kinds in given:
            for axis, kind in joined.items():
                if kinds.get(axis, "I") == "I" != kind:
                    x = lax.pcast(x, axis, to="varying" if kind == "V" else "reduced")
            found.append(x)
        return found

    def operation(self, name: str, x: torch.Tensor, kinds: dict[str, str], number: Any) -> Any:
        axis = number[0] if len(number) == 1 or name == "pcast" else number
        if name == "pcast":
            if self.by_hand and kinds.get(axis) == "R":
                return x * 1.0  # from reduced: nothing to do in either direction
            return lax.pcast(x, axis, to=number[1])
        if name in ("psum", "pmean", "pmax"):
            return getattr(lax, name)(x, axis)
        size = self.mesh.size(axis)
        if name == "unreduced":
            partial_sum = lax.pcast(x, axis, to="unreduced")
            return lax.psum(partial_sum + partial_sum * 0.5, axis)
        if name == "broadcast":
            return lax.pbroadcast(x, axis, size - 1)
        if name == "rotate":
            return lax.ppermute(x, axis, [(place, (place + 1) % size) for place in range(size)])
        if name in ("gather V", "gather I"):
            gathered = lax.all_gather(x, axis, to="varying" if name[-1] == "V" else "invarying")
            return torch.einsum("k,k...->...", torch.arange(1.0, size + 1, dtype=F64), gathered)
        if name == "scatter":
            return lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True).repeat(size, 1)
        return lax.all_to_all(x, axis, 0, 0, tiled=True)

    def total(self, x: torch.Tensor, kinds: dict[str, str]) -> torch.Tensor:
        for axis, kind in kinds.items():
            if kind == "R" and not self.by_hand:
                x = lax.pcast(x, axis, to="varying")
        total = x.sin().sum()
        return lax.psum(total, tuple(kinds)) if kinds else total


def largest_error(program: Program, mesh: md.DeviceMesh, *, by_hand: bool) -> float:
    """How far one rank's loss and gradients are from one device's, relative to the largest."""
    one = OneDevice(program.sizes)
    expected, whole_leaves = run(program, one)
    expected.backward()
    device = Ranks(mesh, by_hand=by_hand)
    if by_hand:
        with mesh:
            loss, leaves = run(program, device)
            loss.backward()
    else:
        for _ in range(2):  # the second time leaves are cast in buckets
            with md.typed(mesh):
                loss, leaves = run(program, device)
                for one in leaves:
                    one.grad = None
                assert not str(md.typeof(loss)).endswith("}")
                loss.backward()
    errors = [abs(loss.item() - expected.item()) / max(1.0, abs(expected.item()))]
    for leaf, whole, mine in zip(program.leaves, whole_leaves, leaves, strict=True):
        if not leaf.requires_grad or whole.grad is None:
            assert mine.grad is None or not mine.grad.abs().max()
            continue
        grad = torch.zeros_like(mine) if mine.grad is None else mine.grad.clone()
        for axis, kind in leaf.kinds.items():
            if kind == "R":
                md.all_reduce(grad, group=mesh[axis])
        gap = (grad - device.own(whole.grad)).abs().max()
        errors.append(float(gap / whole.grad.abs().max().clamp(min=1)))
    return max(errors)
