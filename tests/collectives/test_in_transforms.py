"""Transforms of torch.func cannot follow collectives in place: the error names what they can."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, vjp, vmap

import meshdist as md
import meshdist.distributed as dist
from meshdist.errors import GradientError, KindError
from tests.operations.cases import BACKENDS as WORLDS
from tests.pool import Pool
from tests.torch_process_groups.worlds import on_torch

BACKENDS = [
    "simulated",
    "shm",
    "gloo",
    pytest.param("mpi", marks=pytest.mark.mpi),
    pytest.param("two hosts", marks=pytest.mark.soak),
]

OperationSpec = Callable[[torch.Tensor], Any]


def operations() -> dict[str, OperationSpec]:
    size, rank = md.get_world_size(), md.get_rank()
    return {
        "all_reduce": md.all_reduce,
        "broadcast": lambda x: dist.broadcast(x, 0),
        "reduce": lambda x: dist.reduce(x, 0),
        "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(torch.empty(4 * size), x),
        "all_gather": lambda x: dist.all_gather([torch.empty(4) for _ in range(size)], x),
        "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(
            torch.empty(4), x.repeat(size)
        ),
        "all_to_all_single": lambda x: dist.all_to_all_single(
            torch.empty(size), x.repeat(size)[:size]
        ),
        "gather": lambda x: dist.gather(x, [x] * size if rank == 0 else None),
        "scatter": lambda x: dist.scatter(x, [x] * size if rank == 0 else None),
        "isend": lambda x: dist.isend(x, (rank + 1) % size),
        "irecv": lambda x: dist.irecv(x, (rank + 1) % size),
        "all_reduce_coalesced": lambda x: dist.all_reduce_coalesced([x]),
    }


def in_place(operation: OperationSpec) -> OperationSpec:
    def call(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        operation(x)
        return x

    return call


def transformed(f: OperationSpec, *, is_forward: bool) -> dict[str, Callable[[torch.Tensor], Any]]:
    found = {
        "grad": grad(lambda x: f(x).sum()),
        "jacrev": jacrev(f),
        "vjp": lambda x: vjp(f, x),
        "vmap": lambda x: vmap(f)(x.expand(2, 4)),
        "vmap of grad": lambda x: vmap(grad(lambda x: f(x).sum()))(x.expand(2, 4)),
    }
    return {**found, "jacfwd": jacfwd(f)} if is_forward else found


def rejected(*, is_forward: bool) -> list[str]:
    """Return the calls that raise anything but the error that is expected."""
    wrong = []
    for operation, call in operations().items():
        for name, run in transformed(in_place(call), is_forward=is_forward).items():
            try:
                run(torch.arange(4.0))
                wrong.append(f"{name} of {operation} raises nothing")
            except (KindError, GradientError) as error:
                wanted = f"torch.func cannot transform {operation}, which works in place"
                if isinstance(error, GradientError) and name == "jacfwd":
                    wanted = f"{operation} has no forward derivative"
                if not str(error).startswith(wanted) or "meshdist.lax" not in str(error):
                    wrong.append(f"{name} of {operation}: {error}")
    total = torch.ones(1)
    md.all_reduce(total)  # the group can still be used
    return wrong + ["the group"] * (total.item() != md.get_world_size())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_collectives_in_place_name_the_alternative(backend: str, size: int, pool: Pool) -> None:
    def program() -> list[str]:
        return rejected(is_forward=False)

    assert WORLDS[backend](pool, program, size) == [[]] * size


def objects() -> list[str]:
    """Return the transforms inside of which objects and new memory are wrong."""
    size, rank, wrong = md.get_world_size(), md.get_rank(), []

    def f(x: torch.Tensor) -> torch.Tensor:
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, {"rank": rank})
        given = [rank]
        dist.broadcast_object_list(given, size - 1)
        md.barrier()
        assert dist.shared_empty(3).shape == (3,)
        assert (gathered, given) == ([{"rank": other} for other in range(size)], [size - 1])
        return x * 2

    for name, run in transformed(f, is_forward=False).items():
        try:
            run(torch.ones(4))
        except (md.MeshdistError, AssertionError) as error:
            wrong.append(f"{name}: {error}")
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_objects_travel_inside_transforms(backend: str, size: int, pool: Pool) -> None:
    assert WORLDS[backend](pool, objects, size) == [[]] * size


def test_in_forward_mode(pool: Pool) -> None:
    def program() -> list[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates what its forward mode compiles by
            return rejected(is_forward=True)

    assert WORLDS["shm"](pool, program, 2) == [[]] * 2


def test_the_text() -> None:
    def program() -> str:
        with pytest.raises(KindError) as caught:
            grad(lambda x: in_place(md.all_reduce)(x).sum())(torch.ones(2))
        return str(caught.value)

    assert (
        md.simulate(program, 2)
        == [
            "torch.func cannot transform all_reduce, which works in place\n"
            "  where:    argument tensor of all_reduce, shape (2,), float32\n"
            "  expected: a tensor that no transform of torch.func has wrapped\n"
            "  fix:      call a function of meshdist.lax that returns its result, for example "
            "psum(x, axis, mesh=mesh) instead of all_reduce"
        ]
        * 2
    )


def test_the_alternative() -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return grad(lambda x: md.lax.psum(x, "tp", mesh=mesh).sum())(torch.ones(2)).tolist()

    assert md.simulate(program, 2) == [[1.0, 1.0]] * 2


def test_torchs_own_calls_on_our_groups(pool: Pool) -> None:
    def program() -> str:
        def f(x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            torch.distributed.all_reduce(x)
            return x.sum()

        with pytest.raises(KindError) as caught:
            grad(f)(torch.ones(2))
        return str(caught.value).splitlines()[0]

    assert (
        on_torch(pool, program, 2)
        == ["torch.func cannot transform all_reduce, which works in place"] * 2
    )
