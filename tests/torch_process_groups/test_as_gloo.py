"""Results, futures, functional ops and dispatch modes on our process groups are as on Gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshdist as md
from tests.mpi_job import job_of
from tests.pool import Pool
from tests.torch_process_groups.worlds import (
    all_gather_single_of_torch,
    functional_ops,
    on_torch,
    reduce_scatter_single_of_torch,
)

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
        try:
            work = call()
        except RuntimeError as error:
            if "does not support alltoall" in str(error):  # Gloo of torch 2.11
                continue
            raise
        value = plain(work.get_future().wait())
        work.wait()
        found[name] = value, plain(work.result())
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_futures_and_results_nest_as_on_gloo(backend: str, size: int, pool: Pool) -> None:
    for mine, expected in zip(
        run(pool, results, size, backend), run(pool, results, size, "gloo"), strict=True
    ):
        assert {name: mine[name] for name in expected} == expected


def functional() -> list[Any]:
    """Return the results of functional operators that torch implements by a group's backend."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    ops, wait = functional_ops(), functional_ops().wait_tensor
    x, out = torch.tensor([1.0 + rank, 2.0]), torch.zeros(2 * size)
    found = [wait(ops.all_gather_into_tensor_out(x, size, group.group_name, out=out)), out]
    if size > 1 and hasattr(ops, "batch_p2p_ops"):
        peers = [(rank - 1) % size, (rank + 1) % size]
        received = torch.zeros(2)
        words, tensors = ["irecv", "isend"], [received, x]
        ends = ops.batch_p2p_ops(words, peers, [0, 0], tensors, group.group_name)
        found += [*map(wait, ends), received]
    return plain(found)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_functional_ops_give_what_they_give_on_gloo(backend: str, size: int, pool: Pool) -> None:
    expected = run(pool, functional, size, "gloo")
    assert run(pool, functional, size, backend) == expected


def functional_on_two_backends() -> list[Any]:
    """Return the same twice: a process with groups of ours runs torch's own kernel on Gloo."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo")
    x, found = torch.tensor([1.0 + rank]), []
    for each in (dist.group.WORLD, group):
        out = torch.zeros(size)
        name = each.group_name
        done = functional_ops().all_gather_into_tensor_out(x, size, name, out=out)
        found.append(functional_ops().wait_tensor(done).tolist())
    return found


def test_functional_ops_on_gloo_next_to_ours(pool: Pool) -> None:
    assert run(pool, functional_on_two_backends, 2, "shm") == [[[1.0, 2.0]] * 2] * 2


def unknown_word() -> str:
    name = dist.group.WORLD.group_name
    with pytest.raises(md.ArgumentError) as caught:
        functional_ops().batch_p2p_ops(["put"], [0], [0], [torch.ones(1)], name)
    return str(caught.value)


@pytest.mark.skipif(not hasattr(functional_ops(), "batch_p2p_ops"), reason="torch before 2.13")
def test_an_unknown_word_of_a_batch() -> None:
    assert md.simulate(on_simulated_rank, 1, args=(unknown_word,)) == [
        "batch_p2p_ops has an unknown operation 'put'\n"
        "  expected: 'isend' or 'irecv' for each tensor\n"
        "  fix:      pass op_list=['isend', 'irecv', ...]"
    ]


class Seen(TorchDispatchMode):
    """Notes the collectives that pass it, and the sizes of their first tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":  # Gloo's sums of blocks show their splits and copies, too
            tensors = [x for x in tree_leaves(args[0]) if isinstance(x, torch.Tensor)]
            self.calls.append((str(func), [x.shape for x in tensors]))
        return func(*args, **(kwargs or {}))


def seen_calls() -> tuple[list[Any], Any]:
    """Return what a mode sees of each collective, and the collectives' values."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    x, summed, given = torch.arange(4.0) + rank, torch.arange(4.0) + rank, torch.ones(4) * rank
    whole, parts = torch.zeros(4 * size), [torch.zeros(4) for _ in range(size)]
    block, blocks = torch.zeros(2), torch.arange(2.0 * size) + rank
    kept, exchanged = torch.zeros(size), torch.arange(float(size)) + 10 * rank
    with Seen() as seen:
        dist.all_reduce(summed)
        dist.all_reduce(given, dist.ReduceOp.MAX, async_op=True).wait()
        all_gather_single_of_torch(whole, x)
        dist.all_gather(parts, x)
        reduce_scatter_single_of_torch(block, blocks)
        dist.all_to_all_single(kept, exchanged)
        dist.broadcast(x, size - 1)
        group.allreduce_coalesced([summed, given]).wait()
        dist.barrier()
    return seen.calls, plain([x, summed, given, whole, parts, block, kept])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_dispatch_modes_see_what_they_see_on_gloo(backend: str, size: int, pool: Pool) -> None:
    expected = run(pool, seen_calls, size, "gloo")
    assert run(pool, seen_calls, size, backend) == expected


class Forbidding(TorchDispatchMode):
    """Raises at a collective."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise RuntimeError(f"no {func} here")
        return func(*args, **(kwargs or {}))


def forbidden() -> str:
    with pytest.raises(RuntimeError) as caught, Forbidding():
        dist.all_reduce(torch.ones(1))
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mode_may_raise_at_a_collective(backend: str, pool: Pool) -> None:
    assert run(pool, forbidden, 2, backend) == ["no c10d.allreduce_.default here"] * 2


def counts() -> list[Any]:
    """Return what CommDebugMode counts in a step of FSDP2, and in a DTensor's redistribution."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
    with CommDebugMode() as step:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    with CommDebugMode() as change:
        x.redistribute(placements=[Replicate()])
    found = [step.get_comm_counts(), change.get_comm_counts()]
    return [sorted((str(op), count) for op, count in each.items()) for each in found]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_comm_debug_mode_counts_as_on_gloo(backend: str, size: int, pool: Pool) -> None:
    expected = run(pool, counts, size, "gloo")
    assert all(map(len, expected[0]))
    assert run(pool, counts, size, backend) == expected
