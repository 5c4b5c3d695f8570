"""Every collective of torch.distributed on shm gives what Gloo gives, and what Gloo rejects."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshdist.checking.calls import get_message
from tests.inner import ENDS_RECORDS_ANYWHERE
from tests.pool import Pool
from tests.torch_process_groups.worlds import (
    KEEPS_ORDER,
    all_gather_single_of_torch,
    on_torch,
    reduce_scatter_single_of_torch,
)

OperationSpec = Callable[[bool, torch.dtype], Any]


def mine(count: int, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    """Small integers of this rank's own, so that sums are exact."""
    return (torch.arange(count) % 3 + dist.get_rank() + shift).to(dtype)


def plain(x: Any) -> Any:
    return x.tolist() if isinstance(x, torch.Tensor) else [plain(one) for one in x]


def done(work: Any) -> None:
    if work is not None:
        work.wait()


def all_reduce(later: bool, dtype: torch.dtype) -> Any:
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        x = mine(5, dtype)
        done(dist.all_reduce(x, op, async_op=later))
        found.append(x)
    return found


def reduce(later: bool, dtype: torch.dtype) -> Any:
    x = mine(4, dtype)
    done(dist.reduce(x, 1, async_op=later))
    return x if dist.get_rank() == 1 else []


def broadcast(later: bool, dtype: torch.dtype) -> Any:
    x = mine(4, dtype)
    done(dist.broadcast(x, 2, async_op=later))
    return x


def all_gather(later: bool, dtype: torch.dtype) -> Any:
    outputs = [torch.zeros(3, 2, dtype=dtype) for _ in range(dist.get_world_size())]
    done(dist.all_gather(outputs, mine(6, dtype).view(3, 2), async_op=later))
    return outputs


def all_gather_coalesced(later: bool, dtype: torch.dtype) -> Any:
    inputs = [mine(2, dtype), mine(3, dtype)]
    outputs = [[torch.zeros_like(x) for x in inputs] for _ in range(dist.get_world_size())]
    work = dist.group.WORLD.allgather_coalesced(outputs, inputs)
    done(work)
    return outputs


def all_gather_single(later: bool, dtype: torch.dtype) -> Any:
    output = torch.zeros(dist.get_world_size() * 2, 2, dtype=dtype)
    done(all_gather_single_of_torch(output, mine(4, dtype).view(2, 2), async_op=later))
    return output


def gather(later: bool, dtype: torch.dtype) -> Any:
    size = dist.get_world_size()
    outputs = [torch.zeros(3, dtype=dtype) for _ in range(size)] if dist.get_rank() == 0 else None
    done(dist.gather(mine(3, dtype), outputs, 0, async_op=later))
    return outputs or []


def scatter(later: bool, dtype: torch.dtype) -> Any:
    size = dist.get_world_size()
    inputs = [mine(3, dtype, shift) for shift in range(size)] if dist.get_rank() == 1 else None
    output = torch.zeros(3, dtype=dtype)
    done(dist.scatter(output, inputs, 1, async_op=later))
    return output


def reduce_scatter(later: bool, dtype: torch.dtype) -> Any:
    output = torch.zeros(2, dtype=dtype)
    inputs = [mine(2, dtype, shift) for shift in range(dist.get_world_size())]
    done(dist.reduce_scatter(output, inputs, async_op=later))
    return output


def reduce_scatter_single(later: bool, dtype: torch.dtype) -> Any:
    output = torch.zeros(2, dtype=dtype)
    whole = mine(2 * dist.get_world_size(), dtype)
    done(reduce_scatter_single_of_torch(output, whole, async_op=later))
    return output


def all_to_all_single(later: bool, dtype: torch.dtype) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    even = torch.zeros(2 * size, dtype=dtype)
    done(dist.all_to_all_single(even, mine(2 * size, dtype), async_op=later))
    sends = [j + 1 for j in range(size)]
    uneven = torch.zeros((rank + 1) * size, 2, dtype=dtype)
    whole = mine(2 * sum(sends), dtype).view(-1, 2)
    done(dist.all_to_all_single(uneven, whole, [rank + 1] * size, sends, async_op=later))
    return [even, uneven]


def coalesced(later: bool, dtype: torch.dtype) -> Any:
    group: Any = dist.group.WORLD
    size = dist.get_world_size()
    sums = [mine(2, dtype), mine(3, dtype)]
    done(group.allreduce_coalesced(sums))
    outputs = [torch.zeros(2 * size, dtype=dtype), torch.zeros(size, dtype=dtype)]
    is_new = hasattr(dist.ProcessGroup, "all_gather_single_coalesced")  # since torch 2.13
    gather = group.all_gather_single_coalesced if is_new else group.allgather_into_tensor_coalesced
    done(gather(outputs, [mine(2, dtype), mine(1, dtype)]))
    blocks = [torch.zeros(1, dtype=dtype), torch.zeros(2, dtype=dtype)]
    reduce = (
        group.reduce_scatter_single_coalesced if is_new else group.reduce_scatter_tensor_coalesced
    )
    done(reduce(blocks, [mine(size, dtype), mine(2 * size, dtype)]))
    return [sums, outputs, blocks]


def messages(later: bool, dtype: torch.dtype) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    found = [torch.zeros(4, dtype=dtype), torch.zeros(2, dtype=dtype)]
    works = [
        dist.irecv(found[0], before, tag=7),
        dist.irecv(found[1], before, tag=5),
        dist.isend(mine(2, dtype, 1), after, tag=5),
        dist.isend(mine(4, dtype), after, tag=7),
    ]
    for work in works:
        done(work)
    batch = torch.zeros(3, dtype=dtype)
    ops = [
        dist.P2POp(dist.isend, mine(3, dtype), after),
        dist.P2POp(dist.irecv, batch, before),
    ]
    for work in dist.batch_isend_irecv(ops):
        done(work)
    senders = []
    if rank == 0:
        anyone = torch.zeros(1, dtype=dtype)
        for _ in range(size - 1):
            senders.append(dist.recv(anyone))
            assert anyone.item() == senders[-1]
    else:
        dist.send(torch.full((1,), rank, dtype=dtype), 0)
    dist.barrier(async_op=False)
    return [found, batch, torch.tensor(sorted(senders))]


OPERATIONS: list[OperationSpec] = [
    all_reduce,
    reduce,
    broadcast,
    all_gather,
    all_gather_coalesced,
    all_gather_single,
    gather,
    scatter,
    reduce_scatter,
    reduce_scatter_single,
    all_to_all_single,
    coalesced,
    messages,
]
DTYPES = [torch.float32, torch.int64, torch.bfloat16, torch.uint8]


def every_operation() -> dict[str, Any]:
    return {
        f"{operation.__name__} {dtype} {'later' if later else 'now'}": plain(
            operation(later, dtype)
        )
        for operation in OPERATIONS
        for dtype in DTYPES
        for later in (False, True)
    }


@pytest.mark.parametrize("size", [3, 4])
def test_every_collective_gives_what_gloo_gives(size: int, pool: Pool) -> None:
    ours, theirs = (on_torch(pool, every_operation, size, name) for name in ("shm", "gloo"))
    for rank in range(size):
        assert ours[rank].keys() == theirs[rank].keys()
        for call, result in theirs[rank].items():
            assert ours[rank][call] == result, call


def test_what_gloo_rejects(pool: Pool) -> None:
    def program() -> Any:
        rank, size = dist.get_rank(), dist.get_world_size()
        uneven = [torch.zeros(j + 1) for j in range(size)]
        dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
        taken = [torch.zeros(j + rank + 1, dtype=torch.int16) for j in range(size)]
        given = [torch.full((j + rank + 1,), 10 * rank + j, dtype=torch.int16) for j in range(size)]
        dist.all_to_all(taken, given)
        counts = torch.full((3,), rank + 1, dtype=torch.uint16)
        dist.all_reduce(counts)
        halves = torch.full((2,), 60000.0, dtype=torch.float16)
        dist.all_reduce(halves, dist.ReduceOp.AVG)
        return plain([uneven, taken]), counts.tolist(), halves.tolist()

    for rank, (lists, counts, halves) in enumerate(on_torch(pool, program, 3)):
        assert lists[0] == [[0.0], [1.0] * 2, [2.0] * 3]
        assert lists[1] == [[10 * j + rank] * (j + rank + 1) for j in range(3)]
        assert counts == [6] * 3
        assert halves == [60000.0] * 2


def test_tensors_that_are_not_contiguous(pool: Pool) -> None:
    def program() -> Any:
        rank, size = dist.get_rank(), dist.get_world_size()
        column = torch.arange(6.0).view(3, 2)
        dist.all_reduce(column[:, 0])
        later = torch.arange(6.0).view(3, 2)
        dist.all_reduce(later.t()[1], async_op=True).wait()
        outputs = [torch.zeros(2, 3).t() for _ in range(size)]
        dist.all_gather(outputs, (torch.arange(6.0).view(2, 3) * rank).t())
        conjugate = torch.tensor([1 + 2j]).conj()
        dist.group.WORLD.allreduce(conjugate).wait()  # the front end rejects it
        with torch.inference_mode():
            inferred = torch.arange(6.0).view(3, 2)
        dist.all_reduce(inferred[:, 0])
        assert inferred.tolist() == column.tolist()
        return plain([column, later, *outputs]), conjugate.item()

    whole = torch.arange(6.0).view(2, 3).t()
    expected = [[0.0, 1.0], [4.0, 3.0], [8.0, 5.0]], [[0.0, 2.0], [2.0, 6.0], [4.0, 10.0]]
    for lists, conjugate in on_torch(pool, program, 2):
        assert lists == [*expected, (0 * whole).tolist(), whole.tolist()]
        assert conjugate == 2 - 4j


def test_premul_sum_multiplies_by_each_ranks_own_factor(pool: Pool) -> None:
    def program() -> Any:
        factor = float(dist.get_rank() + 1)
        op = dist._make_nccl_premul_sum(factor)
        summed = torch.ones(2)
        dist.all_reduce(summed, op)
        kept = torch.ones(2)
        dist.reduce(kept, 0, op)
        block, whole = torch.zeros(1), torch.ones(2)
        reduce_scatter_single_of_torch(block, whole, op)
        return plain([summed, kept, block, whole])

    first, second = on_torch(pool, program, 2)
    assert first == [[3.0, 3.0], [3.0, 3.0], [3.0], [1.0, 1.0]]
    assert second == [[3.0, 3.0], [1.0, 1.0], [3.0], [1.0, 1.0]]


def test_the_short_forms_that_programs_call_on_a_group(pool: Pool) -> None:
    def program() -> Any:
        group: Any = dist.group.WORLD
        rank = dist.get_rank()
        summed, largest, first = torch.ones(1), torch.full((1,), float(rank)), torch.ones(1) * rank
        group.allreduce(summed).wait()
        group.allreduce([largest], dist.ReduceOp.MAX).wait()
        group.broadcast(first, 1).wait()
        group.barrier().wait()
        at_root = torch.ones(1)
        group.reduce(at_root, 0, dist.ReduceOp.SUM).wait()
        return plain([summed, largest, first]), at_root.item() if rank == 0 else None

    assert on_torch(pool, program, 2) == [
        ([[2.0], [1.0], [1.0]], 2.0),
        ([[2.0], [1.0], [1.0]], None),
    ]


def test_works_and_their_futures(pool: Pool) -> None:
    def program() -> Any:
        x = torch.ones(3)
        work = dist.all_reduce(x, async_op=True)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        assert doubled.wait().tolist() == [4.0] * 3
        assert work.wait() and work.is_completed() and work.is_success()
        assert work.exception() is None
        assert work.result()[0] is x
        assert work.get_future() is work.get_future()
        both = torch.futures.collect_all(
            [dist.all_reduce(torch.ones(1), async_op=True).get_future() for _ in range(2)]
        )
        return [one.value()[0].item() for one in both.wait()]

    assert on_torch(pool, program, 2) == [[2.0, 2.0]] * 2


def test_a_callback_may_wait_for_another_future(pool: Pool) -> None:
    def program() -> list[float]:
        time.sleep(0.1 * dist.get_rank())  # so rank 0 asks for futures that are not done
        first, second = (dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2))
        asked_before = second.get_future()

        def more(future: Any) -> Any:
            third = dist.all_reduce(future.value()[0] * 2, async_op=True).get_future()
            return [asked_before.wait()[0].item(), third.wait()[0].item()]

        return first.get_future().then(more).wait()

    assert on_torch(pool, program, 2) == [[2.0, 8.0]] * 2


def test_torchs_compressing_hook_gives_what_it_gives_on_gloo(pool: Pool) -> None:
    def program() -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
            PowerSGDState,
            powerSGD_hook,
        )

        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
        model = torch.nn.parallel.DistributedDataParallel(net)
        state = PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, powerSGD_hook)
        for step in range(4):
            model.zero_grad()
            x = torch.arange(32.0).view(2, 16) * (dist.get_rank() + 1 + step)
            model(x).square().mean().backward()
        # Gloo's group must not end in its own thread, which may still be in the hook's callback.
        vars(dist)["kept_by_a_test"] = dist.group.WORLD
        return [x.grad.clone() for x in model.parameters()]

    ours, theirs = (on_torch(pool, program, 2, name) for name in ("shm", "gloo"))
    for mine, their in zip(ours, theirs, strict=True):
        for gradient, expected in zip(mine, their, strict=True):
            torch.testing.assert_close(gradient, expected)


def test_coalescing_gives_one_work(pool: Pool) -> None:
    def program() -> Any:
        x, y = torch.ones(2), torch.ones(3)
        with dist._coalescing_manager(async_ops=True) as several:
            dist.all_reduce(x)
            dist.all_reduce(y)
        several.wait()
        z = torch.ones(1)
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as several:
            dist.group.WORLD.allreduce([z]).wait()
        several.wait()
        return plain([x, y, z])

    assert on_torch(pool, program, 2) == [[[2.0] * 2, [2.0] * 3, [2.0]]] * 2


@pytest.mark.skipif(not KEEPS_ORDER, reason="torch 2.11 has no sort_ranks: it sorts always")
def test_groups_and_ranks_outside_them(pool: Pool) -> None:
    def program() -> Any:
        rank = dist.get_rank()
        group = dist.new_group([2, 0], sort_ranks=False)
        x = torch.full((1,), float(rank))
        if rank == 1:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            return dist.get_rank(group), dist.get_world_size(group), None
        dist.broadcast(x, 2, group=group)
        assert dist.get_process_group_ranks(group) == [2, 0]
        return dist.get_rank(group), dist.get_world_size(group), x.item()

    assert on_torch(pool, program, 3) == [(1, 2, 2.0), (-1, -1, None), (0, 2, 2.0)]


def test_what_torch_says_about_the_group(pool: Pool) -> None:
    def program() -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        group: Any = dist.group.WORLD
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        return (
            dist.get_backend(),
            dist.get_backend_config(),
            group.name(),
            group.group_desc,
            [device.type for device in group._device_types],
            mesh["dp"].get_group().group_desc,
            dist.get_backend(mesh["tp"].get_group()),
            group.options.backend,
        )

    expected = ("shm", "cpu:shm", "shm", "default_pg", ["cpu"], "default_pg", "shm", "shm")
    assert on_torch(pool, program, 2) == [expected] * 2


def test_threads_may_share_a_group(pool: Pool) -> None:
    def program() -> float:
        import threading

        x = torch.zeros(1)
        if dist.get_rank() == 0:
            receiver = threading.Thread(target=dist.recv, args=(x, 1))
            receiver.start()
            dist.barrier()
            receiver.join()
        else:
            dist.barrier()
            dist.send(torch.ones(1), 0)
        return x.item()

    assert on_torch(pool, program, 2) == [1.0, 0.0]


def test_messages_and_sums_of_two_threads_are_noted_as_themselves(pool: Pool) -> None:
    def program() -> Any:
        import threading

        rank, num_rounds = dist.get_rank(), 60
        op = dist._make_nccl_premul_sum(0.5)  # such calls are compared by their notes
        found = []

        def pass_round() -> None:
            for i in range(num_rounds):
                x = torch.full((i % 7 + 1,), float(i))
                if rank == 0:
                    dist.send(x, 1)
                    dist.recv(x, 1)
                else:
                    dist.recv(x, 0)
                    dist.send(x + 1, 0)
                found.append(x[0].item())

        thread = threading.Thread(target=pass_round)
        sys.setswitchinterval(1e-6)  # threads change between any two steps
        thread.start()
        for i in range(num_rounds):
            x = torch.full((i % 5 + 1,), float(i))
            work = dist.all_reduce(x, op, async_op=bool(i % 2))
            if work is not None:
                work.wait()
            assert x.tolist() == [i] * (i % 5 + 1)
        thread.join()
        sys.setswitchinterval(0.005)
        return found

    first, second = on_torch(pool, program, 2)
    assert first == [i + 1 for i in range(60)]
    assert second == list(range(60))


def test_all_device_types_of_a_backend_are_opened_with_the_group(pool: Pool) -> None:
    def program() -> Any:
        from meshdist.torch_process_groups.backend_group import BackendGroup
        from tests.inner import Opening, ShmBackend

        class StandIn(ShmBackend):
            """Notes for which device types it is opened."""

            device_types = frozenset({"cpu", "cuda"})

            def open(self, opening: Opening) -> Any:
                opened.append(opening.device_type)
                return super().open(opening)

        opened: list[str] = []
        rank, ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
        store = dist.distributed_c10d._get_default_store()
        for has_cuda in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.cuda, "is_available", partial(bool, has_cuda))
                keys = dist.PrefixStore(f"stand-in {has_cuda}", store)
                opening = Opening(keys, lambda: store, ranks, rank, "cpu", timedelta(seconds=20))
                BackendGroup(StandIn(), opening).shutdown()
        return opened

    assert on_torch(pool, program, 2) == [["cpu", "cpu", "cuda"]] * 2


def test_the_world_can_be_built_again(pool: Pool) -> None:
    def program() -> list[float]:
        store = dist.distributed_c10d._get_default_store()
        rank, size = dist.get_rank(), dist.get_world_size()
        found = []
        for _ in range(3):
            dist.destroy_process_group()
            dist.init_process_group("shm", store=store, rank=rank, world_size=size)
            x = torch.ones(1)
            dist.all_reduce(x)
            found.append(x.item())
        return found

    assert on_torch(pool, program, 2) == [[2.0] * 3] * 2


def test_sums_of_sparse_tensors(pool: Pool) -> None:
    def program() -> Any:
        rank = dist.get_rank()
        torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns of whoever does not say
        whole = torch.zeros(4, 2)
        whole[rank] = 1.0
        whole[3] = rank + 1.0
        x = whole.to_sparse(1)
        dist.all_reduce(x)
        embedding = torch.nn.Embedding(5, 2, sparse=True)
        model = torch.nn.parallel.DistributedDataParallel(embedding)
        model(torch.tensor([rank, 4])).sum().backward()
        return x.to_dense().tolist(), embedding.weight.grad.to_dense()[:, 0].tolist()

    for name in ("shm", "gloo"):
        for summed, gradient in on_torch(pool, program, 2, name):
            assert summed == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [3.0, 3.0]]
            assert gradient == [0.5, 0.5, 0.0, 0.0, 1.0]


def test_collectives_show_in_torchs_profiler_as_those_of_its_own_backends(pool: Pool) -> None:
    def program() -> Any:
        with torch.autograd.profiler.profile(record_shapes=True) as profile:
            dist.all_reduce(torch.ones(3, 2))
            dist.broadcast(torch.ones(4), 0, async_op=True).wait()
            if dist.get_rank() == 0:
                dist.send(torch.ones(5), 1)
            else:
                dist.recv(torch.ones(5))
        return [
            (event.name, event.is_async, event.input_shapes)
            for event in profile.function_events
            if event.name.startswith("shm:")
        ]

    late = ENDS_RECORDS_ANYWHERE
    both = [("shm:all_reduce", late, [[3, 2]]), ("shm:broadcast", late, [[4]])]
    first, second = on_torch(pool, program, 2)
    assert first == [*both, ("shm:send", late, [[5]])]
    assert second == [*both, ("shm:recvAnySource", late, [[5]])]


def test_a_call_is_compared_as_itself_though_another_thread_notes_one(pool: Pool) -> None:
    def program() -> list[float]:
        group = dist.group.WORLD._get_backend(torch.device("cpu"))
        (device_group,) = group.inner.device_groups
        executor, start = device_group.communicator, device_group.communicator.start

        def start_late(prepared: Any) -> Any:
            if dist.get_rank() == 0:  # as a message of another thread would be
                message = get_message("isend", torch.ones(3), 1, 7)
                device_group.recorder.note(device_group.group, message)
            return start(prepared)

        x = torch.ones(2)
        with mock.patch.object(executor, "start", start_late):
            dist.all_reduce(x, dist._make_nccl_premul_sum(2.0))
        return x.tolist()

    assert on_torch(pool, program, 2) == [[4.0, 4.0]] * 2
