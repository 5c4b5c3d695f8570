"""Results, futures, functional ops and dispatch modes on our process groups are as on Gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshdist as md
from tests.mpi_job import job_of
from tests.pool import Pool
from tests.torch_process_groups.worlds import all_gather_single_of_torch, on_torch

Program = Callable[[], Any]

pytestmark = pytest.mark.filterwarnings("ignore")  # torch deprecates names that all versions have

BACKENDS = ["shm", "simulated", pytest.param("mpi", marks=pytest.mark.mpi)]
SIZES = [1, 2, 3, 5]


def run(pool: Pool, program: Program, size: int, backend: str) -> list[Any]:
    """Return what ``program`` returns on each rank of a world of torch on ``backend``."""
    if backend == "simulated":
        return md.simulate(on_simulated_rank, size, args=(program,))
    if backend == "mpi":
        return job_of(pool, size).call(over_mpi, size, program)
    return on_torch(pool, program, size, backend)


def on_simulated_rank(program: Program) -> Any:
    dist.init_process_group("simulated", init_method="simulated://")
    return program()


def over_mpi(rank: int, program: Program) -> Any:
    import meshdist.torch_backends  # noqa: F401 (offers mpi to torch)

    dist.init_process_group("mpi")
    try:
        return program()
    finally:
        dist.destroy_process_group()


def plain(x: Any) -> Any:
    return x.tolist() if isinstance(x, torch.Tensor) else [plain(one) for one in x]


def results() -> dict[str, Any]:
    """Return the future's value and the result of calls, as lists of numbers."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    x = torch.tensor([[1.0 + rank], [2.0]])

    def places() -> list[torch.Tensor]:
        return [torch.zeros(2, 1) for _ in range(size)]

    calls = {
        "all_reduce": lambda: dist.all_reduce(x.clone(), async_op=True),
        "broadcast": lambda: dist.broadcast(x.clone(), 0, async_op=True),
        "all_gather": lambda: dist.all_gather(places(), x, async_op=True),
        "allgather": lambda: group.allgather([places()], [x]),
        "all_gather_into_tensor": lambda: all_gather_single_of_torch(
            torch.zeros(2 * size, 1), x, async_op=True
        ),
        "gather": lambda: dist.gather(x, places() if rank == 0 else None, 0, async_op=True),
        "all_to_all": lambda: dist.all_to_all(places(), [x] * size, async_op=True),
        "allreduce_coalesced": lambda: group.allreduce_coalesced([x.clone(), x.clone()]),
    }
    found = {}
    for name, call in calls.items():
        work = call()
        value = plain(work.get_future().wait())
        work.wait()
        found[name] = value, plain(work.result())
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_futures_and_results_nest_as_on_gloo(backend: str, size: int, pool: Pool) -> None:
    expected = run(pool, results, size, "gloo")
    assert run(pool, results, size, backend) == expected
