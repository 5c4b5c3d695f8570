"""Every collective and message on more than 2^31 bytes, on each backend of processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshdist as md
from tests.mpi_job import job_of
from tests.pool import Pool

PART = (1 << 30) + 4
WHOLE = 2 * PART


def ends(x: torch.Tensor) -> list[int]:
    """The first and last element of each half."""
    return [int(x[place]) for place in (0, len(x) // 2 - 1, len(x) // 2, -1)]


def every_call() -> dict[str, Any]:
    """Return for each collective the ends of what it wrote on this of two ranks."""
    rank, found = md.get_rank(), {}
    whole, part = torch.empty(WHOLE, dtype=torch.uint8), torch.empty(PART, dtype=torch.uint8)
    halves = list(whole.view(2, -1).unbind())

    def note(operation: str, x: torch.Tensor) -> None:
        found[operation] = ends(x)

    md.broadcast(whole.fill_(rank + 3), 1)
    note("broadcast", whole)
    md.all_reduce(whole.fill_(rank + 3), md.ReduceOp.MAX)
    note("all_reduce", whole)
    md.reduce(whole.fill_(rank + 3), 1, md.ReduceOp.MAX)
    note("reduce", whole)
    md.all_gather_into_tensor(whole, part.fill_(rank + 3))
    note("all_gather_into_tensor", whole)
    whole.zero_()
    md.all_gather(halves, part)
    note("all_gather", whole)
    whole.zero_()
    md.gather(part, halves if rank == 0 else None, 0)
    note("gather", whole)
    for row, half in enumerate(halves):
        half.fill_(10 * rank + row)
    md.scatter(part, halves if rank == 0 else None, 0)
    note("scatter", part)
    md.reduce_scatter_tensor(part, whole, md.ReduceOp.MAX)
    note("reduce_scatter_tensor", part)
    md.reduce_scatter(part, halves, md.ReduceOp.MAX)
    note("reduce_scatter", part)
    taken = torch.empty_like(whole)
    md.all_to_all_single(taken, whole)
    note("all_to_all_single", taken)
    md.all_to_all(list(taken.zero_().view(2, -1).unbind()), halves)
    note("all_to_all", taken)
    uneven = [WHOLE - 5, 5] if rank == 0 else [5, WHOLE - 5]
    md.all_to_all_single(taken.zero_(), whole, uneven, uneven)
    note("uneven all_to_all_single", taken)
    if rank == 0:
        md.send(whole, 1)
    else:
        md.recv(taken.zero_(), 0)
        note("recv", taken)
    return found


def expected(rank: int) -> dict[str, list[int]]:
    gathered, exchanged = [3, 3, 4, 4], [rank, rank, 10 + rank, 10 + rank]
    rows = {
        "broadcast": [4] * 4,
        "all_reduce": [4] * 4,
        "reduce": [3 + rank] * 4,
        "all_gather_into_tensor": gathered,
        "all_gather": gathered,
        "gather": gathered if rank == 0 else [0] * 4,
        "scatter": [rank] * 4,
        "reduce_scatter_tensor": [10 + rank] * 4,
        "reduce_scatter": [10 + rank] * 4,
        "all_to_all_single": exchanged,
        "all_to_all": exchanged,
        "uneven all_to_all_single": [0, 0, 1, 10] if rank == 0 else [1, 10, 11, 11],
    }
    return rows if rank == 0 else {**rows, "recv": [0, 0, 1, 1]}


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", ["shm", "gloo", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_more_than_2_31_bytes(pool: Pool, backend: str) -> None:
    if backend == "mpi":
        found = job_of(pool, 2).run_in_world(every_call, timeout_s=1700.0)
    else:
        found = pool.run(every_call, 2, timeout_s=1700.0, backend=backend)
    assert found == [expected(0), expected(1)]
