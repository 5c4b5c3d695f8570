"""torch.func's transforms of every collective, against loops of plain calls."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import meshdist as md
from meshdist.annotations.axis_types import GRADIENT_KINDS
from meshdist.functional.data_movement import ragged_all_to_all
from meshdist.functional.reductions import pmax, pmin, psum, pvary
from tests.functional.operation_cases import FUNCTIONAL, REARRANGING, Case, draw, drawn, shape_of
from tests.mpi_job import job_of
from tests.pool import Pool

# Of each collective and pair of kinds the form whose dims are the least alike.
CASES = list(
    {(case.operation, case.source, case.result): case for case in FUNCTIONAL + REARRANGING}.values()
)
FORWARD = {"jvp", "jacfwd", "hessian"}


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def contracted(jacobian: torch.Tensor, direction: torch.Tensor, *, last: bool) -> torch.Tensor:
    """A Jacobian times a vector, along its last dims or its first ones."""
    return (
        torch.tensordot(
            jacobian, direction, ([*range(-direction.dim(), 0)], [*range(direction.dim())])
        )
        if last
        else torch.tensordot(direction, jacobian, direction.dim())
    )


def by_autograd(f: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(f(leaf), leaf, y)[0]


def wrong_transforms(
    f: Callable[[torch.Tensor], torch.Tensor],
    loss: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    is_forward: bool,
) -> list[str]:
    """The transforms that differ from plain calls, for a linear f and a loss of degree two at most.

    Jacobians take a unit on every rank at once, so they are compared along a direction that is
    equal on all ranks.
    """
    one = torch.ones((), dtype=x.dtype)
    batch = torch.stack([x, 2 * x, x + 1])
    along = torch.arange(x.numel(), dtype=x.dtype).view(x.shape) % 5 - 2
    back = torch.arange(y.numel(), dtype=y.dtype).view(y.shape) % 7 - 3

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return by_autograd(loss, x, one)

    def curvature() -> torch.Tensor:  # exact, since the gradient is linear in x
        return (gradient(x + along) - gradient(x - along)) / 2

    checks: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "grad": (lambda: grad(loss)(x), lambda: gradient(x)),
        "vjp": (lambda: vjp(f, x)[1](y)[0], lambda: by_autograd(f, x, y)),
        "jvp": (lambda: jvp(f, (x,), (batch[2],))[1], lambda: f(batch[2])),
        "jacrev": (
            lambda: contracted(jacrev(f)(x), back, last=False),
            lambda: by_autograd(f, x, back),
        ),
        "jacfwd": (lambda: contracted(jacfwd(f)(x), along, last=True), lambda: f(along)),
        "hessian": (lambda: contracted(hessian(loss)(x), along, last=True), curvature),
        "hessian by two backwards": (
            lambda: contracted(jacrev(grad(loss))(x), along, last=False),
            curvature,
        ),
        "vmap": (lambda: vmap(f)(batch), lambda: torch.stack([f(one) for one in batch])),
        "vmap of another dim": (
            lambda: vmap(f, in_dims=1, out_dims=-1)(batch.movedim(0, 1)),
            lambda: torch.stack([f(one) for one in batch], -1),
        ),
        "vmap of grad": (
            lambda: vmap(grad(loss))(batch),
            lambda: torch.stack([gradient(one) for one in batch]),
        ),
        "vmap of vmap": (
            lambda: vmap(vmap(f))(batch[None]),
            lambda: torch.stack([f(one) for one in batch])[None],
        ),
    }
    return [
        name
        for name, (found, wanted) in checks.items()
        if (is_forward or name not in FORWARD) and not is_same(found(), wanted())
    ]


def wrong_of_operations(is_forward: bool) -> list[str]:
    """The faults of all cases, on this rank of a world."""
    group = md.init_device_mesh("cpu", (md.get_world_size(),), mesh_dim_names=("tp",))["tp"]
    group = group.open_group()
    place, size = group.rank(), group.size()
    found = []
    for number, case in enumerate(CASES):
        given = drawn(case, size, np.float64, number)
        x, y = torch.tensor(given.xs[place]), torch.tensor(given.ys[place])
        shape = tuple(y.shape)
        w = torch.tensor(draw(GRADIENT_KINDS[case.result], size, shape, np.float64, 7)[place])

        def f(x: torch.Tensor, case: Case = case) -> torch.Tensor:
            return case.call(x, group)

        def loss(x: torch.Tensor, case: Case = case, w: torch.Tensor = w) -> torch.Tensor:
            result = case.call(x, group)
            return (result * w).sum() if case.result == "U" else (result**2 * w).sum()

        found += [
            f"{case}: {name}" for name in wrong_transforms(f, loss, x, y, is_forward=is_forward)
        ]
    return found


def wrong_of_others(is_forward: bool) -> list[str]:
    """The same of what is no linear collective on one tensor: extremes, and the ragged exchange."""
    group = md.init_device_mesh("cpu", (md.get_world_size(),), mesh_dim_names=("tp",))["tp"]
    group = group.open_group()
    place, size = group.rank(), group.size()
    shape = shape_of(size)
    x = torch.tensor(draw("V", size, shape, np.float64, 1)[place]) + torch.arange(shape[-1]) / 100
    y = torch.tensor(draw("I", size, shape, np.float64, 2)[place])
    found = []
    for operation in (pmax, pmin):
        # Linear around x, where no rank gains or loses the extreme.
        at = x.clone()

        def f(t: torch.Tensor, operation: Any = operation, at: torch.Tensor = at) -> torch.Tensor:
            return operation(at + 1e-3 * t, group) - operation(at, group)

        def loss(t: torch.Tensor, f: Any = f) -> torch.Tensor:
            return (f(t) ** 2 * y).sum()

        found += [
            f"{operation.__name__}: {name}"
            for name in wrong_transforms(f, loss, x / 8, y, is_forward=is_forward)
        ]
    sizes = [(place + j) % 2 for j in range(size)]
    offsets = [place for _ in range(size)]

    def ragged(x: torch.Tensor) -> torch.Tensor:
        return ragged_all_to_all(x, 0 * x, [0] * size, sizes, offsets, sizes, group)

    w = torch.tensor(draw("V", size, shape, np.float64, 3)[place])
    found += [
        f"ragged_all_to_all: {name}"
        for name in wrong_transforms(
            ragged, lambda x: (ragged(x) ** 2 * w).sum(), x, y, is_forward=is_forward
        )
    ]
    return found


def wrong_of_all() -> list[str]:
    """All transforms of all collectives; a process alone has forward mode for itself."""
    with warnings.catch_warnings():
        # torch's first use of forward mode compiles its rules with what torch itself deprecates.
        warnings.filterwarnings("ignore", "`torch.jit.script`")  # torch's own call
        return wrong_of_operations(True) + wrong_of_others(True)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_every_transform_on_processes(backend: str, pool: Pool) -> None:
    assert pool.run(wrong_of_all, 2, backend=backend) == [[], []]


@pytest.mark.soak
@pytest.mark.mpi
def test_every_transform_over_mpi(pool: Pool) -> None:
    assert job_of(pool, 2).run_in_world(wrong_of_all) == [[], []]


def test_transforms_of_the_backward_on_simulated_ranks() -> None:
    def program() -> list[str]:
        return wrong_of_operations(False) + wrong_of_others(False)

    assert md.simulate(program, 3) == [[], [], []]


def test_forward_derivatives_of_linear_collectives_are_the_collectives_themselves() -> None:
    def program() -> list[str]:
        group = md.init_device_mesh("cpu", (md.get_world_size(),), mesh_dim_names=("tp",))["tp"]
        group = group.open_group()
        wrong = []
        for number, case in enumerate(CASES):
            given = drawn(case, group.size(), np.float64, number)
            x = torch.tensor(given.xs[group.rank()])
            found = forward_ad.unpack_dual(case.call(forward_ad.make_dual(x, 3 * x + 1), group))
            wanted = case.call(x, group), case.call(3 * x + 1, group)
            if not all(map(is_same, found, wanted)):
                wrong.append(str(case))
        return wrong

    with warnings.catch_warnings(), forward_ad.dual_level():  # the level is the process's
        warnings.filterwarnings("ignore", "`torch.jit.script`")  # torch's own call
        assert md.simulate(program, 3) == [[]] * 3


def rejected_on_duals() -> dict[str, str]:
    """What each collective says of a dual tensor, after which all ranks make a plain call."""
    rank, size = md.get_rank(), md.get_world_size()
    y, total = torch.ones(3), torch.ones(3)
    x = forward_ad.make_dual(torch.ones(3), torch.full((3,), 2.0))
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: md.all_reduce(x),
        "all_reduce in flight": lambda: md.all_reduce(x, async_op=True),
        "broadcast": lambda: md.broadcast(x, 0),
        "reduce": lambda: md.reduce(x, 0),
        "all_gather": lambda: md.all_gather([y.clone() for _ in range(size)], x),
        "all_reduce_coalesced": lambda: md.all_reduce_coalesced([y, x]),
        "send": lambda: md.send(x, (rank + 1) % size),
        "irecv": lambda: md.irecv(x, (rank + 1) % size),
    }
    told = {}
    for name, call in calls.items():
        with pytest.raises(md.GradientError) as caught:
            call()
        told[name] = str(caught.value)
        assert (y == 1).all() and forward_ad.unpack_dual(x).primal.tolist() == [1.0] * 3
    md.all_reduce(total)
    md.all_reduce(x.detach())  # the way that the error names
    assert total.tolist() == x.tolist() == [float(size)] * 3
    return told


def on_duals() -> dict[str, str]:
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.filterwarnings("ignore", "`torch.jit.script`")
        md.all_reduce(torch.ones(1))
        return rejected_on_duals()


def inside_jvp() -> tuple[str, list[float]]:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        md.all_reduce(y)
        return y

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script`")
        with pytest.raises(md.GradientError) as caught:
            jvp(program, (torch.ones(3),), (torch.ones(3),))
    x = torch.ones(3)
    md.all_reduce(x)
    return str(caught.value), x.tolist()


@pytest.mark.parametrize("backend", ["simulated", "shm", "gloo"])
def test_collectives_in_place_reject_a_dual_tensor(backend: str, pool: Pool) -> None:
    if backend == "simulated":
        with warnings.catch_warnings(), forward_ad.dual_level():
            warnings.filterwarnings("ignore", "`torch.jit.script`")
            told = md.simulate(rejected_on_duals, 2)
    else:
        told = pool.run(on_duals, 2, backend=backend)
        for text, after in pool.run(inside_jvp, 2, backend=backend):
            assert text.startswith("all_reduce has no forward derivative") and after == [2.0] * 3
    for texts in told:
        for name, text in texts.items():
            assert text.startswith(f"{name.split()[0]} has no forward derivative, and ")
            assert text.splitlines()[0].endswith(" is a dual tensor")
            assert (
                "expected: a tensor without a tangent, or a collective that differentiates" in text
            )
            assert (
                "fix:      call a function of meshdist.lax instead, for example psum(x, axis, "
                "mesh=mesh)" in text
            )


def test_a_transform_of_another_thread_is_none_of_ours() -> None:
    def program() -> float:
        with md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)) as mesh:
            group = mesh["tp"].open_group()
            inside, done = threading.Event(), threading.Event()

            def f(x: torch.Tensor) -> torch.Tensor:
                inside.set()
                assert done.wait(30)
                return (x * x).sum()

            thread = threading.Thread(target=lambda: grad(f)(torch.ones(2)))
            thread.start()
            assert inside.wait(30)
            x = torch.ones(2, requires_grad=True)
            psum(pvary(x, group), group).sum().backward()
            done.set()
            thread.join(30)
            return x.grad.sum().item()

    assert md.simulate(program, 1) == [2.0]
