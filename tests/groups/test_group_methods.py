"""The methods of process groups: each is its collective, in every form that torch's method has."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshdist as md
from tests.pool import Pool

MINUTE = timedelta(minutes=1)
BACKENDS: dict[str, Callable[..., list[Any]]] = {
    "shm": lambda pool, program: pool.run(program, 2, backend="shm"),
    "gloo": lambda pool, program: pool.run(program, 2),
    "simulated": lambda pool, program: md.simulate(program, 2),
}
ON_ALL_BACKENDS = pytest.mark.parametrize("backend", BACKENDS)


def options(kind: str, **fields: Any) -> Any:
    """Torch's options of a collective."""
    made = getattr(torch._C._distributed_c10d, kind)()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def run(backend: str, pool: Pool, program: Callable[[], Any]) -> list[Any]:
    return BACKENDS[backend](pool, program)


@ON_ALL_BACKENDS
def test_a_view_is_reduced_and_nothing_outside_it(backend: str, pool: Pool) -> None:
    def program() -> list[float]:
        whole = torch.zeros(10)
        whole[::2] = 1
        md.group.WORLD.allreduce([whole[::2]]).wait()
        return whole.tolist()

    assert run(backend, pool, program) == [[2.0, 0.0] * 5] * 2


@ON_ALL_BACKENDS
def test_an_expanded_tensor_is_rejected_by_a_method_that_writes(backend: str, pool: Pool) -> None:
    def program() -> str:
        world = md.group.WORLD
        with pytest.raises(md.ArgumentError) as found:
            world.allreduce([torch.ones(1).expand(4)])
        world.barrier().wait()  # the group lives
        return str(found.value)

    for text in run(backend, pool, program):
        assert text.startswith("all_reduce cannot write into tensor")


@ON_ALL_BACKENDS
def test_every_form_of_every_reduction(backend: str, pool: Pool) -> None:
    def program() -> list[Any]:
        world, rank = md.group.WORLD, md.get_rank()
        found = []

        def add(work: Any, *tensors: torch.Tensor) -> None:
            assert isinstance(work, md.Work) and work.wait()
            found.append([x.tolist() for x in tensors])

        def mine() -> torch.Tensor:
            return torch.tensor([1.0, 2.0]) * (rank + 1)

        most = options("AllreduceOptions", reduceOp=dist.ReduceOp.MAX)
        for given in ((), (most,), (md.ReduceOp.MAX,), (dist.ReduceOp.MAX, MINUTE)):
            add(world.allreduce([x := mine()], *given), x)
            add(world.allreduce(x := mine(), *given), x)
            add(world.allreduce([x := mine()[0]], *given), x)
            add(world.allreduce(x := mine()[0], *given), x)
        add(world.allreduce(tensors=[x := mine()], opts=most), x)
        add(world.allreduce(tensor=(x := mine()), op=dist.ReduceOp.MIN, timeout=MINUTE), x)
        x, y = mine(), mine()[:1]
        add(world.allreduce_coalesced([x, y]), x, y)
        to_1 = options("ReduceOptions", rootRank=1, reduceOp=dist.ReduceOp.MAX)
        add(world.reduce([x := mine()], to_1), x)
        add(world.reduce(x := mine(), 1), x)
        add(world.reduce(x := mine(), root=1, op=dist.ReduceOp.MIN), x)
        parts = [mine(), mine() + 1]
        least = options("ReduceScatterOptions", reduceOp=dist.ReduceOp.MIN)
        add(world.reduce_scatter([x := mine()], [parts]), x)
        add(world.reduce_scatter([x := mine()], [parts], least), x)
        add(world.reduce_scatter(x := mine(), parts, dist.ReduceOp.MIN, MINUTE), x)
        add(world._reduce_scatter_base(x := mine()[:1], mine()), x)
        add(world.reduce_scatter_single(x := mine()[:1], mine(), least), x)
        return found

    for rank, found in enumerate(run(backend, pool, program)):
        own, of_max, of_sum = [1.0 + rank, 2.0 + 2 * rank], [2.0, 4.0], [3.0, 6.0]
        both = [of_sum, of_sum, 3.0, 3.0, *[of_max, of_max, 2.0, 2.0] * 3]
        expected: list[Any] = [[x] for x in [*both, of_max, [1.0, 2.0]]]
        expected.append([of_sum, [3.0]])
        expected += [[x if rank == 1 else own] for x in (of_max, of_sum, [1.0, 2.0])]
        expected.append([[3.0 + 2 * rank, 6.0 + 2 * rank]])
        expected += [[[1.0 + rank, 2.0 + rank]]] * 2
        expected += [[[of_sum[rank]]], [[[1.0], [2.0]][rank]]]
        assert found == expected


@ON_ALL_BACKENDS
def test_every_form_of_every_move(backend: str, pool: Pool) -> None:
    def program() -> list[Any]:
        world, rank = md.group.WORLD, md.get_rank()
        found = []

        def add(work: Any, *tensors: torch.Tensor) -> None:
            assert isinstance(work, md.Work) and work.wait()
            found.append([x.tolist() for x in tensors])

        def mine() -> torch.Tensor:
            return torch.tensor([rank * 10, rank * 10 + 1])

        def two() -> list[torch.Tensor]:
            return [torch.empty(2, dtype=torch.int64) for _ in range(2)]

        from_1 = options("BroadcastOptions", rootRank=1)
        add(world.broadcast([x := mine()], from_1), x)
        add(world.broadcast(x := mine(), 1, MINUTE), x)
        add(world.broadcast(tensor=(x := mine()), root=1), x)
        add(world.allgather([into := two()], [mine()]), *into)
        add(world.allgather(into := two(), mine(), MINUTE), *into)
        add(world.allgather([into := two()], [mine()], options("AllgatherOptions")), *into)
        lists = [two(), two()]
        add(world.allgather_coalesced(lists, [mine(), mine() + 100]), *lists[0], *lists[1])
        add(world._allgather_base(x := torch.empty(4, dtype=torch.int64), mine()), x)
        to_1 = options("GatherOptions", rootRank=1)
        into = two() if rank == 1 else []
        add(world.gather([into] if into else [], [mine()], to_1), *into)
        add(world.gather(into := two() if rank == 1 else [], mine(), 1), *into)
        parts = [mine(), mine() + 100] if rank == 1 else []
        of_1 = options("ScatterOptions", rootRank=1)
        add(world.scatter([x := mine()], [parts] if parts else [], of_1), x)
        add(world.scatter(x := mine(), parts, 1), x)
        add(world.alltoall(into := two(), [mine(), mine() + 100]), *into)
        add(world.alltoall_base(x := mine(), mine(), [], []), x)
        add(world.alltoall_base(x := mine(), mine(), [1, 1], [1, 1]), x)
        add(world.barrier())
        add(world.barrier(options("BarrierOptions")))
        add(world.barrier(timeout=MINUTE))
        world.monitored_barrier(MINUTE)
        other, x, y = 1 - rank, mine(), mine()
        works = [world.send([mine()], other, 3), world.recv([x], other, 3)]
        for work in [*works, world.send([mine()], other, 4), world.recv_anysource([y], 4)]:
            add(work)
        add(world.barrier(), x, y)
        return found

    zero, one = [0, 1], [10, 11]
    for rank, found in enumerate(run(backend, pool, program)):
        other = [one, zero][rank]
        expected: list[Any] = [[one]] * 3 + [[zero, one]] * 3
        expected += [[zero, [100, 101], one, [110, 111]], [zero + one]]
        expected += [[zero, one] if rank == 1 else []] * 2
        expected += [[[[10, 11], [110, 111]][rank]]] * 2
        expected.append([[x + 100 * rank for x in each] for each in (zero, one)])
        expected += [[[rank, 10 + rank]]] * 2
        assert found == [*expected, *[[]] * 7, [other, other]]


def test_numpy_arrays_too() -> None:
    def program() -> list[float]:
        x = np.ones(2)
        md.group.WORLD.allreduce(x).wait()
        return x.tolist()

    assert md.simulate(program, 2) == [[2.0, 2.0]] * 2


@ON_ALL_BACKENDS
def test_a_method_meets_the_collective_of_the_same_meaning(backend: str, pool: Pool) -> None:
    def program() -> list[Any]:
        world, rank = md.group.WORLD, md.get_rank()
        x, y = torch.ones(2), torch.full((2,), float(rank))
        into = [torch.empty(2) for _ in range(2)]
        if rank == 0:
            world.allreduce([x]).wait()
            world.broadcast([y], options("BroadcastOptions", rootRank=1)).wait()
            world.allgather([into], [y]).wait()
            world.send([y + 1], 1, 0).wait()
        else:
            md.all_reduce(x)
            md.broadcast(y, 1)
            md.all_gather(into, y)
            md.recv(y, 0)
        return [one.tolist() for one in (x, y, *into)]

    ones, twos = [1.0, 1.0], [2.0, 2.0]
    assert run(backend, pool, program) == [[twos, ones, ones, ones], [twos, twos, ones, ones]]


@ON_ALL_BACKENDS
def test_torchs_own_collectives_take_a_group_of_ours(backend: str, pool: Pool) -> None:
    """As hooks written for torch call them; there is no world of torch's."""

    def program() -> list[Any]:
        group = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)).get_group("dp")
        rank = md.get_rank()
        found: list[Any] = [dist.is_initialized(), dist.get_world_size(group)]

        def mine() -> torch.Tensor:
            return torch.tensor([1.0, 2.0]) * (rank + 1)

        def two() -> list[torch.Tensor]:
            return [torch.empty(2), torch.empty(2)]

        own = {"group": group, "async_op": True}
        for work in (
            dist.all_reduce(mine(), **own),
            dist.all_reduce(mine(), op=dist.ReduceOp.MAX, **own),
            dist.all_gather(two(), mine(), **own),
            dist.broadcast(mine(), group_src=1, **own),
            dist.reduce_scatter(torch.empty(2), [mine(), mine() + 1], **own),
        ):
            future = work.get_future()
            assert isinstance(future, torch.futures.Future)
            found.append(future.then(lambda done: [x.tolist() for x in done.value()]).wait())
        x = mine()
        dist.all_reduce(x, group=group)
        return [*found, x.tolist()]

    one, two, three = [1.0, 2.0], [2.0, 4.0], [3.0, 6.0]
    for rank, found in enumerate(run(backend, pool, program)):
        expected = [[three], [two], [one, two], [two], [[3.0 + 2 * rank, 6.0 + 2 * rank]]]
        assert found == [False, 2, *expected, three]


def test_torchs_options_say_how_long_to_wait_and_whether_to() -> None:
    def program() -> tuple[str, bool]:
        group = md.group.WORLD
        waits = options("AllreduceOptions", asyncOp=False)
        is_done = "finished" in repr(group.allreduce([torch.ones(1)], waits))
        return "", is_done

    assert md.simulate(program, 2) == [("", True)] * 2


def test_a_timeout_of_its_own_bounds_the_waits(pool: Pool) -> None:
    def program() -> str:
        if md.get_rank() == 1:
            time.sleep(1.5)
            return ""
        work = md.group.WORLD.broadcast(torch.ones(1), 1, timedelta(milliseconds=300))
        with pytest.raises(md.CollectiveTimeoutError) as found:
            work.wait()
        return str(found.value)

    assert "0.3" in pool.run(program, 2)[0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda group: group.allreduce([]), "all_reduce: a list of 0 tensors"),
        (lambda group: group.broadcast([torch.ones(1)] * 2), "broadcast: a list of 2 tensors"),
        (
            lambda group: group.allgather([[], []], [torch.ones(1)]),
            "all_gather: 2 lists of tensors",
        ),
        (lambda group: group.allreduce(["x"]), "all_reduce cannot take a str"),
        (lambda group: group.broadcast(torch.ones(1), 7), "7"),
        (lambda group: group.send([torch.ones(1)], 7, 0), "7"),
        (lambda group: group.broadcast(torch.ones(1), 0, 3), "timedelta"),
        (lambda group: group.broadcast(torch.ones(1), 0, -MINUTE), "timeout must be positive"),
    ],
)
def test_what_is_wrong_is_rejected(call: Callable[[Any], Any], text: str) -> None:
    def program() -> str:
        with pytest.raises(md.MeshdistError) as found:
            call(md.group.WORLD)
        return str(found.value)

    for told in md.simulate(program, 2):
        assert text in told


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_lists_raise_with_what_to_pass(backend: str, pool: Pool) -> None:
    def program() -> list[str]:
        group = md.init_device_mesh("cpu", (2,)).get_group()
        root = {"root": group.rank()}  # each rank as the root: nothing is sent
        texts = []
        for call in (
            lambda: group.allgather([], []),
            lambda: group.reduce_scatter([torch.ones(1)], []),
            lambda: group.gather([], [torch.ones(1)], **root),
            lambda: group.scatter([torch.ones(1)], [], **root),
            lambda: group.allreduce([]),
            lambda: group.broadcast([]),
            lambda: group.send([], 1 - group.rank(), 0),
        ):
            with pytest.raises(md.ArgumentError) as caught:
                call()
            texts.append(str(caught.value))
        return texts

    for texts in run(backend, pool, program):
        for text, operation in zip(
            texts, ("all_gather", "reduce_scatter", "gather", "scatter"), strict=False
        ):
            assert text == (
                f"{operation}: 0 lists of tensors, one for each device of this process\n"
                "  expected: one list\n"
                "  fix:      pass [tensors], with one for each rank"
            )
        for text in texts[4:]:
            assert text.endswith("\n  expected: one tensor\n  fix:      pass [tensor]")
