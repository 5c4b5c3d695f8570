"""torch's programs over MPI, on ranks that one mpiexec has started."""

from __future__ import annotations

import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshdist as md
from tests.load import is_within
from tests.mpi_job import job_of
from tests.pool import Pool
from tests.torch_process_groups.worlds import KEEPS_ORDER, all_gather_single_of_torch, on_torch

pytestmark = pytest.mark.mpi

DIFFERENT = "MismatchError: collective mismatch: ranks made different calls as call 1"


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


@pytest.mark.soak
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
            assert is_within(time.monotonic() - start, 5.0)
            timer.join()
            text = str(found.value)
        dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
        return text

    text = on_mpi(pool, program)[0]
    assert text.startswith("all_reduce on group 'mpi 0,1 ")
    assert "(ranks 0-1) was aborted\n" in text


def errors_of(calls: Any) -> list[Any]:
    """The kind and text of what each call of this rank raises, on a group of its own; "" for none.

    ``calls`` takes the group and the rank, and returns what to call, one after the other.
    """
    group: Any = dist.new_group([0, 1], backend="mpi")
    found = []
    for call in calls(group, dist.get_rank()):
        try:
            call()
            found.append("")
        except dist.DistBackendError as error:
            found.append(f"{type(error).__name__}: {error}")
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))  # it goes by the store
    return found


def test_calls_that_differ_are_told_on_every_rank(pool: Pool) -> None:
    def calls(group: Any, rank: int) -> list[Any]:
        x = torch.ones(4 + 2 * rank)
        return [
            lambda: dist.barrier(group),
            lambda: dist.all_reduce(x, group=group),
            lambda: dist.barrier(group),
        ]

    for rank, (before, text, after) in enumerate(on_mpi(pool, lambda: errors_of(calls))):
        assert before == ""
        name = re.search(r"group '(.*?)'", text)
        assert name is not None
        line = calls.__code__.co_firstlineno + 4
        where = f" at {__file__}:{line} in <lambda>"
        assert text == (
            "MismatchError: collective mismatch: ranks made different calls as call 2\n"
            f"  where:    group '{name[1]}' (ranks 0-1); this member's tensors may have been "
            "written\n"
            f"            raised on rank {rank}, call 2 on group '{name[1]}' (ranks 0-1): "
            f"all_reduce(({4 + 2 * rank},) float32, SUM){where}\n"
            "  expected: the same collective, dtype, number of elements, op and root on every "
            "rank\n"
            f"  found:    rank 0: all_reduce((4,) float32, SUM){where}\n"
            f"            rank 1: all_reduce((6,) float32, SUM){where}\n"
            "  fix:      call the same collectives in the same order, with matching tensors, "
            "on every rank; this group can no longer be used: create a new one with new_group(), "
            "or re-initialize"
        )
        assert after.startswith(f"AbortedError: group '{name[1]}' (ranks 0-1) cannot be used ")
        assert "collective mismatch: ranks made different calls as call 2" in after


WAYS: dict[str, Any] = {
    "dtypes": lambda x, rank, group: dist.all_reduce(
        x.to([x.dtype, torch.int32][rank]), group=group
    ),
    "ops": lambda x, rank, group: dist.all_reduce(
        x, [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank], group
    ),
    "roots": lambda x, rank, group: dist.broadcast(x, rank, group),
    "operations": lambda x, rank, group: [dist.all_reduce, all_gather_single_of_torch][rank](
        *[(x,), (torch.ones(8), x)][rank], group=group
    ),
    "lists": lambda x, rank, group: dist.all_gather(
        [torch.ones(4 if rank else 5), torch.ones(4)], torch.ones(5 - rank), group
    ),
    "exchanges": lambda x, rank, group: dist.all_to_all_single(
        torch.ones(5 - rank), x, [2, 3 - rank], [2, 2], group
    ),
}


@pytest.mark.parametrize("way", [*WAYS])
def test_every_way_to_differ_is_told(way: str, pool: Pool) -> None:
    def calls(group: Any, rank: int) -> list[Any]:
        return [lambda: WAYS[way](torch.ones(4), rank, group)]

    told = on_mpi(pool, lambda: errors_of(calls))
    for (text,) in told:
        assert text.startswith(DIFFERENT)
    found = [text.split("found:")[1] for (text,) in told]
    assert found[0] == found[1]


def test_a_call_that_nobody_waits_for_is_told_at_the_next(pool: Pool) -> None:
    def calls(group: Any, rank: int) -> list[Any]:
        def start() -> None:
            dist.all_reduce(torch.ones(4 + rank), group=group, async_op=True)

        if rank == 0:
            return [start, lambda: time.sleep(0.5), lambda: dist.barrier(group)]
        return [lambda: time.sleep(0.2), start]

    first, second = on_mpi(pool, lambda: errors_of(calls))
    text = first[2]
    assert text.startswith(f"{DIFFERENT}\n")
    assert "rank 0: all_reduce((4,) float32, SUM) at " in text
    assert second[1].startswith(DIFFERENT)


def test_lists_of_uneven_tensors_that_fit_pass(pool: Pool) -> None:
    def program() -> Any:
        rank = dist.get_rank()
        for _ in range(300):  # more than the sizes of that many calls are kept
            into = [torch.zeros(1), torch.zeros(2)]
            dist.all_gather(into, torch.full((rank + 1,), rank + 1.0))
        out = torch.zeros(rank + 1)
        dist.reduce_scatter(out, [torch.ones(1), torch.ones(2)])
        sizes = [[1, 2], [3, 4]]  # from row to column
        given = sizes[rank]
        takes = [row[rank] for row in sizes]
        taken = torch.zeros(sum(takes))
        dist.all_to_all_single(taken, torch.full((sum(given),), float(rank)), takes, given)
        return [x.tolist() for x in (*into, out, taken)]

    for rank, found in enumerate(on_mpi(pool, program)):
        taken = [[0.0] + [1.0] * 3, [0.0] * 2 + [1.0] * 4][rank]
        assert found == [[1.0], [2.0, 2.0], [2.0] * (rank + 1), taken]


@pytest.mark.parametrize("count", [3, 5])
def test_a_message_that_does_not_fit(count: int, pool: Pool) -> None:
    def program() -> str:
        text = ""
        if dist.get_rank() == 0:
            dist.send(torch.ones(count), 1, tag=4)
        else:
            with pytest.raises(md.MismatchError) as found:
                dist.recv(torch.ones(4), 0, tag=4)
            text = str(found.value)
        dist.barrier()
        return text

    text = on_mpi(pool, program)[1]
    assert text.startswith("message mismatch: a send does not match its receive\n")
    assert "raised on rank 1, recv((4,) float32, from rank 0, tag 4) on group " in text


def test_groups_of_shared_memory_in_a_world_over_mpi(pool: Pool) -> None:
    def program() -> list[Any]:
        found: list[Any] = []
        # torch 2.11 has no sort_ranks: it sorts always.
        for ranks in ([0, 1], [1, 0] if KEEPS_ORDER else [0, 1], [0, 1]):
            order = {} if ranks == sorted(ranks) else {"sort_ranks": False}
            group = dist.new_group(ranks, backend="shm", **order)
            x = torch.full((1,), float(dist.get_rank()))
            dist.broadcast(x, 1, group)
            found += [dist.get_backend(group), x.item()]
        alone = dist.new_group([0], backend="shm")
        found.append(dist.get_rank(alone))
        return found

    for rank, found in enumerate(on_mpi(pool, program)):
        assert found == ["shm", 1.0] * 3 + [-rank]


def test_groups_over_mpi_in_a_world_over_gloo(pool: Pool, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/world"

    def program(rank: int) -> Any:
        import meshdist.torch_backends  # noqa: F401 (offers mpi to torch)

        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
        try:
            found = []
            for backend in ("mpi", "shm", "gloo"):
                x = torch.ones(1)
                dist.all_reduce(x, group=dist.new_group([0, 1], backend=backend))
                found.append(x.item())
            return found
        finally:
            dist.destroy_process_group()

    assert job_of(pool, 2).call(program, 2) == [[2.0] * 3] * 2
