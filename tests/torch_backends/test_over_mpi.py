"""torch's programs over MPI, on ranks that one mpiexec has started."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshdist as md
from tests.mpi_job import job_of
from tests.pool import Pool
from tests.torch_backends.worlds import on_torch

pytestmark = pytest.mark.mpi


def on_mpi(pool: Pool, program: Any) -> list[Any]:
    """What ``program()`` returns on each of two ranks of a world of torch's own."""
    job = job_of(pool, 2)
    return job.call(in_world, 2, program)


def in_world(rank: int, program: Any) -> Any:
    import meshdist.torch_backends  # noqa: F401 (offers mpi to torch)

    dist.init_process_group("mpi")
    try:
        return program()
    finally:
        dist.destroy_process_group()


def test_ddp_gives_what_it_gives_on_gloo(pool: Pool) -> None:
    def program() -> Any:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        model = torch.nn.parallel.DistributedDataParallel(net)
        model(torch.arange(16.0).view(2, 8) * (dist.get_rank() + 1)).sum().backward()
        return [x.grad.tolist() for x in model.parameters()]

    assert on_mpi(pool, program) == on_torch(pool, program, 2, "gloo")


def test_threads_sum_on_groups_of_their_own(pool: Pool) -> None:
    def program() -> list[float]:
        groups = [dist.new_group([0, 1], backend="mpi") for _ in range(2)]
        sums = [torch.full((1,), float(place)) for place in range(2)]

        def work(place: int) -> None:
            for _ in range(50):
                dist.all_reduce(sums[place], dist.ReduceOp.MAX, group=groups[place])
                dist.all_reduce(sums[place], group=groups[place])
                sums[place] /= 2

        threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [x.item() for x in sums]

    assert on_mpi(pool, program) == [[0.0, 1.0]] * 2


def test_abort_frees_whoever_waits_in_this_process(pool: Pool) -> None:
    def program() -> str:
        group: Any = dist.new_group([0, 1], backend="mpi")
        text = ""
        if dist.get_rank() == 0:
            timer = threading.Timer(0.3, group.abort)
            timer.start()
            start = time.monotonic()
            with pytest.raises(md.AbortedError) as found:
                dist.all_reduce(torch.ones(1), group=group)
            assert time.monotonic() - start < 5.0
            timer.join()
            text = str(found.value)
        dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
        return text

    text = on_mpi(pool, program)[0]
    assert text.startswith("all_reduce on group 'mpi 0,1 ")
    assert "(ranks 0-1) was aborted\n" in text
