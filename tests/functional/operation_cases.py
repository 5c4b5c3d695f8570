"""Functional collectives as cases: a call, its kinds, and an oracle in NumPy over the members of a
group.

``check`` runs cases on simulated ranks. Values are compared with the oracle; gradients by the
adjoint identity, in which a value's kind says how its product with its gradient is added up; and
second derivatives with the oracle again. Values are integers, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import meshdist as md
from meshdist.annotations.axis_types import CASTS, GATHERED, GRADIENT_KINDS, KINDS, OPERATION_KINDS
from meshdist.functional import data_movement, reductions
from tests.mpi_job import job_of
from tests.pool import Pool

Arrays = Sequence[np.ndarray]

NAMES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Case:
    """One call of a collective on a value of one kind.

    Args:
        collective: its name.
        source, result: the kinds of what it is given and gives.
        oracle: by the members' places, what each holds afterwards.
        make: its arguments beside x and the group, in a group of this size.
    """

    operation: str
    source: str
    result: str
    oracle: Callable[..., Arrays]
    make: Callable[[int], Mapping[str, Any]]

    def __str__(self) -> str:
        words = " ".join(f"{name}={value}" for name, value in self.make(2).items())
        return f"{self.operation} {self.source}-{self.result} {words}".rstrip()

    def call(self, x: torch.Tensor, group: Any) -> torch.Tensor:
        """The collective on one member."""
        room = reductions if hasattr(reductions, self.operation) else data_movement
        size = group.size()
        return getattr(room, self.operation)(x, group, **self.make(size))

    def wanted(self, xs: Arrays) -> Arrays:
        """What the members hold afterwards."""
        return self.oracle(xs, **self.make(len(xs)))


# -- oracles --------------------------------------------------------------------------------------


def summed(xs: Arrays) -> Arrays:
    return [sum(xs[1:], xs[0])] * len(xs)


def averaged(xs: Arrays) -> Arrays:
    return [total / len(xs) for total in summed(xs)]


def kept(xs: Arrays, **_: Any) -> Arrays:
    return xs


def gathered(xs: Arrays, axis: int = 0, tiled: bool = False, to: str = "") -> Arrays:
    return [(np.concatenate if tiled else np.stack)(xs, axis)] * len(xs)


def parts(x: np.ndarray, size: int, axis: int, tiled: bool) -> Arrays:
    if tiled:
        return np.split(x, size, axis)
    assert x.shape[axis] == size
    return [np.take(x, place, axis) for place in range(size)]


def scattered(xs: Arrays, scatter_dimension: int = 0, tiled: bool = False) -> Arrays:
    return parts(summed(xs)[0], len(xs), scatter_dimension, tiled)


def exchanged(xs: Arrays, split_axis: int, concat_axis: int, tiled: bool = False) -> Arrays:
    blocks = [parts(x, len(xs), split_axis, tiled) for x in xs]
    join = np.concatenate if tiled else np.stack
    return [join([mine[j] for mine in blocks], concat_axis) for j in range(len(xs))]


def swapped(xs: Arrays, axis: int) -> Arrays:
    return exchanged(xs, axis, axis)


def permuted(xs: Arrays, perm: Sequence[tuple[int, int]]) -> Arrays:
    source_of = {destination: source for source, destination in perm}
    return [
        xs[source_of[place]] if place in source_of else np.zeros_like(xs[place])
        for place in range(len(xs))
    ]


def shuffled(xs: Arrays, perm: Sequence[int]) -> Arrays:
    return [xs[source] for source in perm]


def spread(xs: Arrays, source: int) -> Arrays:
    return [xs[source]] * len(xs)


# -- cases ----------------------------------------------------------------------------------------

# Dims 0 and 1 can be cut without tiles into any group's blocks; with tiles dim 2 too.


def shape_of(size: int) -> tuple[int, ...]:
    return size, size, 2 * size


PLAIN: dict[str, Callable[..., Arrays]] = {"psum": summed, "pmean": averaged, "pvary": kept}
SCATTERS = [(0, False), (1, False), (-2, False), (0, True), (1, True), (-1, True)]
EXCHANGES = [
    *[(split, concat, False) for split in (0, 1) for concat in (0, 1, 2, -1)],
    *[(split, concat, True) for split in (-1, 1, 0) for concat in (0, 1, 2)],
]


def fixed(**arguments: Any) -> Callable[[int], Mapping[str, Any]]:
    return lambda size: arguments


def cases_of(operation: str) -> list[Case]:
    """All cases of one collective: every legal kind, every form of its arguments."""

    def made(kinds: Mapping[str, str], oracle: Callable[..., Arrays], make: Any) -> list[Case]:
        return [Case(operation, source, result, oracle, make) for source, result in kinds.items()]

    if operation in PLAIN:
        return made(OPERATION_KINDS[operation], PLAIN[operation], fixed())
    if operation == "pcast":
        return [
            Case(operation, source, result, kept, fixed(to=to, source=KINDS[source]))
            for to, kinds in CASTS.items()
            for source, result in kinds.items()
        ]
    if operation == "all_gather":
        return [
            Case(operation, "V", result, gathered, fixed(axis=axis, tiled=tiled, to=to))
            for to, result in GATHERED.items()
            for axis, tiled in [(0, False), (1, False), (-1, False), (0, True), (2, True)]
        ]
    forms: list[tuple[Callable[..., Arrays], Any]] = {
        "psum_scatter": [
            (scattered, fixed(scatter_dimension=dim, tiled=tiled)) for dim, tiled in SCATTERS
        ],
        "all_to_all": [
            (exchanged, fixed(split_axis=split, concat_axis=concat, tiled=tiled))
            for split, concat, tiled in EXCHANGES
        ],
        "pswapaxes": [(swapped, fixed(axis=axis)) for axis in (0, 1, -2)],
        "ppermute": [
            (permuted, lambda size: {"perm": [[0, size - 1]]}),
            (permuted, lambda size: {"perm": ()}),
            (permuted, lambda size: {"perm": [(i, (i + 1) % size) for i in range(size)]}),
        ],
        "pshuffle": [(shuffled, lambda size: {"perm": [(i + 2) % size for i in range(size)]})],
        "pbroadcast": [
            (spread, fixed(source=0)),
            (spread, lambda size: {"source": size - 1}),
        ],
    }[operation]
    return [
        case for oracle, make in forms for case in made(OPERATION_KINDS[operation], oracle, make)
    ]


FUNCTIONAL = [
    case
    for operation in ("psum", "pmean", "pvary", "pcast", "all_gather", "psum_scatter")
    for case in cases_of(operation)
]
REARRANGING = [
    case
    for operation in ("all_to_all", "ppermute", "pshuffle", "pswapaxes", "pbroadcast")
    for case in cases_of(operation)
]

# Ranks by coordinate, and the axes of the group: alone, several, of size 1, permuted, to 3-D.
CUBE = np.arange(8).reshape(2, 2, 2)
PLACES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "one rank": ([0], ("tp",)),
    "a line": ([0, 1, 2], ("tp",)),
    "rows": ([[0, 1], [2, 3]], ("dp",)),
    "both axes, turned round": ([[0, 1], [2, 3]], ("tp", "dp")),
    "permuted": ([[3, 1], [0, 2]], ("dp",)),
    "permuted, both axes": ([[3, 1], [0, 2]], ("dp", "tp")),
    "beside an axis of size one": ([[2, 0, 1]], ("tp",)),
    "an axis of size one": ([[2, 0, 1]], ("dp",)),
    "the middle of three": (CUBE, ("dp",)),
    "the outer of three, permuted": (CUBE.transpose(2, 0, 1)[::-1], ("tp", "pp")),
}


def groups_of(ranks: np.ndarray, axes: Sequence[str]) -> list[list[int]]:
    """The ranks of each group along ``axes``, in the group's order."""
    names = NAMES[3 - ranks.ndim :]
    inside = [names.index(axis) for axis in axes]
    outside = [axis for axis in range(ranks.ndim) if axis not in inside]
    moved = ranks.transpose(*outside, *inside)
    size = int(np.prod([ranks.shape[axis] for axis in inside]))
    return moved.reshape(-1, size).tolist()


# -- one case on one member, and its judge --------------------------------------------------------


def draw(kind: str, size: int, shape: Sequence[int], dtype: Any, seed: int) -> np.ndarray:
    """A value of a kind, one array a member: equal where the kind says so."""
    random = np.random.default_rng(seed)
    num_own = size if kind in "VU" else 1
    real, imaginary = random.integers(-4, 5, (2, num_own, *shape))
    values = real + 1j * imaginary if np.dtype(dtype).kind == "c" else real
    return np.broadcast_to(values.astype(dtype), (size, *shape))


def inner(kind: str, a: Arrays, b: Arrays) -> float:
    """The product of a value and a gradient: over all members, or once where both are invariant."""
    products = [float(np.vdot(mine, theirs).real) for mine, theirs in zip(a, b, strict=True)]
    return products[0] if kind == "I" else sum(products)


@dataclass(frozen=True)
class Drawn:
    """The arrays of one case in one group: of x, of the result's gradient, of the gradient's."""

    xs: np.ndarray
    ys: np.ndarray
    zs: np.ndarray


def drawn(case: Case, size: int, dtype: Any, seed: int) -> Drawn:
    shape = shape_of(size)
    result = case.wanted(np.zeros((size, *shape)))[0].shape
    return Drawn(
        draw(case.source, size, shape, dtype, seed),
        draw(GRADIENT_KINDS[case.result], size, result, dtype, seed + 1),
        draw(case.source, size, shape, dtype, seed + 2),
    )


def run_case(case: Case, x: Any, y: Any, z: Any, group: Any) -> tuple[Any, Any, Any]:
    """The value at x, its gradient for y, and that one's gradient for z, in NumPy."""
    x, y, z = (torch.tensor(one) for one in (x, y, z))
    x.requires_grad_(), y.requires_grad_()
    value = case.call(x, group)
    (gradient,) = torch.autograd.grad(value, x, y, create_graph=True)
    (again,) = torch.autograd.grad(gradient, y, z)
    return value.detach().numpy(), gradient.detach().numpy(), again.numpy()


def faults(case: Case, given: Drawn, found: Sequence[tuple[Any, Any, Any]]) -> list[str]:
    """What is wrong with the members' answers; nothing, where all is right."""
    values, gradients, seconds = zip(*found, strict=True)
    wrong = []
    if not all(map(equal, values, case.wanted(given.xs))):
        wrong.append(f"{case}: values")
    forward, backward = (
        inner(case.result, values, given.ys),
        inner(case.source, given.xs, gradients),
    )
    if not np.isclose(forward, backward, rtol=1e-12, atol=1e-9):
        wrong.append(f"{case}: <Ax, y> = {forward}, <x, A'y> = {backward}")
    if GRADIENT_KINDS[case.source] in "IR" and not all(
        equal(one, gradients[0]) for one in gradients
    ):
        wrong.append(f"{case}: gradients differ")
    # The gradient is linear in y, and its transpose is the collective.
    if not all(map(equal, seconds, case.wanted(given.zs))):
        wrong.append(f"{case}: second derivatives")
    return wrong


def equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and np.allclose(a, b, rtol=1e-14, atol=0)


def on_members(
    ranks: np.ndarray, axes: tuple[str, ...], cases: Sequence[Case], dtype: Any
) -> list[Any]:
    """Run all cases on this rank."""
    ranks = np.asarray(ranks)
    mesh = md.DeviceMesh("cpu", ranks, mesh_dim_names=NAMES[3 - ranks.ndim :])
    group = mesh[axes].open_group()
    place, size = group.rank(), group.size()
    found = []
    for number, case in enumerate(cases):
        given = drawn(case, size, dtype, 10 * number)
        found.append(run_case(case, given.xs[place], given.ys[place], given.zs[place], group))
    return found


def judge(
    ranks: Any, axes: tuple[str, ...], cases: Sequence[Case], dtype: Any, results: list[Any]
) -> list[str]:
    """All faults of all cases, in every group."""
    ranks = np.asarray(ranks)
    wrong = []
    for members in groups_of(ranks, axes):
        for number, case in enumerate(cases):
            given = drawn(case, len(members), dtype, 10 * number)
            wrong += faults(case, given, [results[rank][number] for rank in members])
    return wrong


Run = Callable[..., list[Any]]


def simulated(fn: Any, size: int, *args: Any) -> list[Any]:
    return md.simulate(fn, size, args=args)


def run_over_mpi(pool: Pool, fn: Any, size: int, *args: Any) -> list[Any]:
    return job_of(pool, size).run_in_world(fn, *args)


def check(place: str, cases: Sequence[Case], dtype: Any, run: Run = simulated) -> None:
    """Run cases on ranks, simulated ones by default."""
    ranks, axes = PLACES[place]
    results = run(on_members, np.size(ranks), ranks, axes, cases, dtype)
    assert judge(ranks, axes, cases, dtype, results) == []


def on_a_line(body: Callable[[Any], Any], size: int) -> list[Any]:
    """What ``body(group)`` returns on simulated ranks along one axis."""

    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        return body(mesh["tp"].open_group())

    return md.simulate(program, size)


def check_memory(case: Case, size: int) -> None:
    """Results share no memory with arguments, and no gradient with another one."""

    def body(group: Any) -> bool:
        x = torch.ones(shape_of(size), requires_grad=True)
        value = case.call(x, group)
        before = x.detach().clone()
        value.detach().fill_(7.0)
        assert torch.equal(x, before)
        with torch.no_grad():
            plain = case.call(x, group)
        return plain.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()

    assert on_a_line(body, size) == [True] * size


class _Unused(torch.autograd.Function):
    """Passes a value on, and gives back no gradient at all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


def check_odd_gradients(case: Case) -> None:
    """A gradient that is missing on one rank counts as zeros; its layout does not matter."""
    size = 2
    given = drawn(case, size, np.float64, 5)
    # A value whose gradient is invariant or reduced has no gradient on one rank alone.
    is_own = GRADIENT_KINDS[case.result] in "VU"
    ys = np.array(given.ys)
    if is_own:
        ys[1] = 0

    def body(group: Any) -> Any:
        place = group.rank()
        x = torch.tensor(given.xs[place], requires_grad=True)
        value = case.call(x, group)
        if is_own and place:
            value = _Unused.apply(value)
        y = torch.tensor(ys[place])
        value.backward(y.mT.contiguous().mT if y.dim() > 1 else y[:, None].expand(-1, 2)[:, 0])
        return value.detach().numpy(), x.grad.numpy()

    found = on_a_line(body, size)
    values, gradients = zip(*found, strict=True)
    assert inner(case.result, values, ys) == inner(case.source, given.xs, gradients)
