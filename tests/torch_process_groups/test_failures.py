"""What a torch program sees when something goes wrong: an error that explains, and never a hang."""

from __future__ import annotations

import atexit
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshdist as md
from tests.load import is_within
from tests.pool import Failure, Pool, WorkerLost
from tests.torch_process_groups.worlds import (
    all_gather_single_of_torch,
    on_torch,
    outcomes_on_torch,
)


def caught(kind: type[BaseException], call: Any) -> str:
    with pytest.raises(kind) as found:
        call()
    assert isinstance(found.value, dist.DistBackendError)
    return str(found.value)


def raise_no_data(*_: object) -> None:
    raise KeyError("no data")


def without_memory() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_calls_that_differ_are_told_on_every_rank(pool: Pool) -> None:
    def program() -> tuple[str, float]:
        rank = dist.get_rank()
        text = caught(md.MismatchError, lambda: dist.all_reduce(torch.ones(3 + rank // 2)))
        x = torch.ones(1)
        dist.all_reduce(x)  # the members stay in step
        return text, x.item()

    for rank, (text, after) in enumerate(on_torch(pool, program, 3)):
        count = 4 if rank == 2 else 3
        line = program.__code__.co_firstlineno + 2
        where = f" at {__file__}:{line} in <lambda>"
        assert text == (
            "collective mismatch: ranks made different calls as call 1\n"
            "  where:    group '0' (ranks 0-2); no data was moved\n"
            f"            raised on rank {rank}, call 1 on group '0' (ranks 0-2): "
            f"all_reduce(({count},) float32, SUM){where}\n"
            "  expected: the same collective, dtype, number of elements, op and root on every "
            "rank\n"
            f"  found:    ranks 0-1: all_reduce((3,) float32, SUM){where}\n"
            f"            rank 2: all_reduce((4,) float32, SUM){where}\n"
            "  fix:      call the same collectives in the same order, with matching tensors, "
            "on every rank"
        )
        assert after == 3.0


def test_what_a_handler_raises_in_a_collective_is_told_to_the_others(pool: Pool) -> None:
    def program() -> str:
        if dist.get_rank() == 1:
            time.sleep(1.0)
            return caught(md.AbortedError, lambda: dist.all_reduce(torch.ones(2)))
        signal.signal(signal.SIGALRM, raise_no_data)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyError, match="no data"):
            dist.all_reduce(torch.ones(2))
        time.sleep(1.5)
        return ""

    told = on_torch(pool, program, 2)[1]
    assert "rank 0: gave up in call 1 on group '0' (ranks 0-1): all_reduce((2,) float32" in told
    assert ": KeyError: 'no data'" in told


def test_a_negative_tag_is_rejected_before_anything_is_sent(pool: Pool) -> None:
    def program() -> list[str]:
        x, told = torch.ones(2), []
        for call in (
            lambda: dist.send(x, 1 - dist.get_rank(), tag=-1),
            lambda: dist.recv(x, tag=-1),
        ):
            with pytest.raises(md.ArgumentError) as found:
                call()
            told.append(str(found.value).splitlines()[0])
        return told

    assert on_torch(pool, program, 2) == [["send: tag is -1", "recv: tag is -1"]] * 2


def test_collectives_and_roots_that_differ_too(pool: Pool) -> None:
    def program() -> tuple[str, str]:
        rank = dist.get_rank()
        x = torch.ones(2)
        operations = [lambda: dist.all_reduce(x), lambda: dist.broadcast(x, 0)]
        return (
            caught(md.MismatchError, operations[rank]),
            caught(md.MismatchError, lambda: dist.broadcast(x, rank)),
        )

    for operations, roots in on_torch(pool, program, 2):
        assert "rank 0: all_reduce((2,) float32, SUM)" in operations
        assert "rank 1: broadcast((2,) float32, root rank 0)" in operations
        assert "rank 1: broadcast((2,) float32, root rank 1)" in roots


def test_a_message_that_does_not_fit(pool: Pool) -> None:
    def program() -> str:
        if dist.get_rank() == 0:
            dist.isend(torch.ones(3), 1, tag=4)
            dist.barrier()
            return ""
        text = caught(md.MismatchError, lambda: dist.recv(torch.ones(2), 0, tag=4))
        dist.barrier()
        return text

    _, text = on_torch(pool, program, 2)
    assert text.startswith("message mismatch: a send does not match its receive\n")
    assert "raised on rank 1, recv((2,) float32, from rank 0, tag 4) on group '0'" in text


def test_a_killed_member_is_an_error_on_the_others(pool: Pool) -> None:
    def program() -> tuple[str, float]:
        rank = dist.get_rank()
        dist.barrier()
        if rank == 1:
            os._exit(3)
        start = time.monotonic()
        text = caught(md.BackendError, lambda: dist.all_reduce(torch.ones(100_000)))
        return text, time.monotonic() - start

    first, killed, last = outcomes_on_torch(pool, program, 3)
    assert isinstance(killed, Failure) and isinstance(killed.exception, WorkerLost)
    for text, seconds in (first, last):
        assert "all_reduce on group '0' (ranks 0-2) failed on backend 'shm'" in text
        assert "found:    rank 1 has ended" in text
        assert is_within(seconds, 5.0)


def test_a_killed_member_is_an_error_for_ddp(pool: Pool) -> None:
    def program() -> str:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        if dist.get_rank() == 1:
            os._exit(3)
        loss = model(torch.ones(2, 4)).sum()
        with pytest.raises(RuntimeError) as found:
            loss.backward()
        return str(found.value)

    text, killed = outcomes_on_torch(pool, program, 2)
    assert isinstance(killed, Failure)
    assert "rank 1 has ended" in text


def test_who_does_not_come_is_waited_for_no_longer_than_the_timeout(pool: Pool) -> None:
    def program() -> tuple[str, str]:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            store.wait(["told"], timedelta(seconds=30))
            return "", ""
        start = time.monotonic()
        text = caught(md.CollectiveTimeoutError, lambda: dist.all_reduce(torch.ones(2)))
        took = time.monotonic() - start
        assert took >= 4.0
        assert is_within(took, 15.0)
        after = caught(md.AbortedError, dist.barrier)
        store.set("told", "")
        return text, after

    text, after = on_torch(pool, program, 2, seconds=4.0)[0]
    assert text.startswith("all_reduce on group '0' (ranks 0-1) timed out after 4 s\n")
    assert "expected: the same call on ranks 0-1" in text
    assert after == (
        "group '0' (ranks 0-1) cannot be used after a failure\n"
        "  where:    rank 0\n"
        "  found:    all_reduce failed before: its timeout has passed\n"
        "  fix:      create a new group with the remaining ranks"
    )


def test_who_comes_late_does_not_meet_a_later_call(pool: Pool) -> None:
    def program() -> str:
        x = torch.full((1,), float(dist.get_rank()))
        if dist.get_rank() == 1:
            time.sleep(0.5)
            return caught(md.BackendError, lambda: dist.all_reduce(x))
        work = dist.all_reduce(torch.ones(1), async_op=True)
        caught(md.CollectiveTimeoutError, lambda: work.wait(timedelta(milliseconds=100)))
        return caught(md.AbortedError, lambda: dist.all_reduce(x))

    early, late = on_torch(pool, program, 2)
    assert "all_reduce failed before: its timeout has passed" in early
    assert late.startswith("all_reduce on group '0' (ranks 0-1)")


def test_the_timeout_of_a_wait(pool: Pool) -> None:
    def program() -> str:
        if dist.get_rank() == 1:
            time.sleep(1.0)
            return ""
        work = dist.all_reduce(torch.ones(2), async_op=True)
        text = caught(md.CollectiveTimeoutError, lambda: work.wait(timedelta(milliseconds=100)))
        assert work.is_completed() and not work.is_success()
        assert isinstance(work.exception(), md.CollectiveTimeoutError)
        with pytest.raises(RuntimeError, match=r"timed out after 0\.1 s"):
            work.get_future().wait()
        return text

    assert "timed out after 0.1 s" in on_torch(pool, program, 2)[0]


def test_abort_frees_whoever_waits(pool: Pool) -> None:
    def program() -> str:
        group: Any = dist.group.WORLD
        if dist.get_rank() == 1:
            time.sleep(0.3)
            group.abort()
            group.monitored_barrier()  # it goes by the store
            return ""
        text = caught(md.AbortedError, lambda: dist.all_reduce(torch.ones(2)))
        group.monitored_barrier()
        return text

    text = on_torch(pool, program, 2)[0]
    assert text.startswith("all_reduce on group '0' (ranks 0-1) was aborted\n")


def test_a_destroyed_group_is_told(pool: Pool) -> None:
    def program() -> str:
        group: Any = dist.new_group([0, 1])
        dist.destroy_process_group(group)
        x = torch.ones(1)
        for op in (dist.ReduceOp.SUM, dist._make_nccl_premul_sum(2.0)):
            with pytest.raises(md.GroupClosedError) as found:
                group.allreduce(x, op=op)
        assert x.item() == 1.0  # the factor was not applied
        return str(found.value)

    assert on_torch(pool, program, 2)[0].startswith("group '1' (ranks 0-1) was closed\n")


def test_a_forked_child_has_no_part_in_the_group(pool: Pool) -> None:
    def program() -> str:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                dist.group.WORLD.barrier()
                text = "nothing was raised"
            except md.WorldError as error:
                text = str(error)
            os.write(write, text.encode())
            os._exit(0)
        os.waitpid(child, 0)
        return os.read(read, 4096).decode()

    text = on_torch(pool, program, 1)[0]
    assert text.startswith("a forked child cannot communicate in its parent's world\n")


def test_a_forked_child_says_nothing_for_its_parent(pool: Pool) -> None:
    def program() -> float:
        child = os.fork()
        if child == 0:
            group: Any = dist.group.WORLD
            group.abort()
            group.shutdown()
            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(child, 0)
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    assert on_torch(pool, program, 2) == [2.0] * 2


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (
            lambda: all_gather_single_of_torch(torch.ones(3), torch.ones(2)),
            md.ShapeError,
            "all_gather_into_tensor: output_tensor does not hold one input_tensor per rank",
        ),
        (
            lambda: dist.all_gather([torch.ones(2)], torch.ones(2)),
            md.ArgumentError,
            "all_gather: tensor_list has 1 entry\n",
        ),
        (
            lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
            md.ShapeError,
            "all_to_all_single cannot split output into 2 equal parts",
        ),
        (
            lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 2], [2, 2]),
            md.ShapeError,
            "all_to_all_single: output_split_sizes do not split output into one part per rank",
        ),
        (
            lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG),
            md.DtypeError,
            "all_reduce cannot reduce bool with AVG",
        ),
        (
            lambda: dist.group.WORLD.send([torch.ones(1)], 5, 0),
            md.ArgumentError,
            "group_dst=5 is outside the group\n  where:    rank 1, group '0' (ranks 0-1)",
        ),
        (
            lambda: dist.all_reduce(torch.ones(2, device="meta")),
            md.BackendError,
            "group '0' (ranks 0-1) does not support meta tensors",
        ),
        (
            lambda: dist.group.WORLD.allreduce([torch.ones(1), torch.ones(1)]),
            md.ArgumentError,
            "all_reduce: a list of 2 tensors, one for each device of this process",
        ),
        (
            lambda: dist.all_reduce(torch.ones(1).expand(3)),
            md.ArgumentError,
            "all_reduce cannot write into tensor because its elements share memory",
        ),
        (
            lambda: dist.all_gather([torch.ones(1).expand(3)] * 2, torch.ones(3)),
            md.ArgumentError,
            "all_gather cannot write into tensor_list[0] because its elements share memory",
        ),
        (
            lambda: dist.broadcast(without_memory(), 0),
            md.ArgumentError,
            "broadcast cannot use tensor because it has no memory",
        ),
        (
            lambda: dist.group.WORLD.allreduce_coalesced([]),
            md.ArgumentError,
            "all_reduce_coalesced: tensors has 0 entries",
        ),
        (
            lambda: dist.group.WORLD.all_gather_single_coalesced([], []),
            md.ArgumentError,
            "all_gather_into_tensor: inputs has 0 entries",
        ),
        (
            lambda: dist.group.WORLD.reduce_scatter_single_coalesced([], []),
            md.ArgumentError,
            "reduce_scatter_tensor: inputs has 0 entries",
        ),
        (
            lambda: dist.group.WORLD.allgather_coalesced([], []),
            md.ArgumentError,
            "all_gather_coalesced: input_tensor_list has 0 entries",
        ),
        (
            lambda: dist.group.WORLD.alltoall([], []),
            md.ArgumentError,
            "all_to_all: input_tensor_list has 0 entries",
        ),
        (
            lambda: dist.group.WORLD.recv([], 0, 0),
            md.ArgumentError,
            "recv: a list of 0 tensors",
        ),
        (
            lambda: dist.group.WORLD.reduce_scatter([torch.ones(2)], [[torch.ones(1)] * 2]),
            md.ShapeError,
            "reduce_scatter: my input_list and output have different numbers of elements",
        ),
    ],
)
def test_wrong_arguments_are_rejected_before_anything_is_sent(
    call: Any, kind: type[Exception], text: str, pool: Pool
) -> None:
    def program() -> str:
        with pytest.raises(kind) as found:
            call()
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == 2.0
        return str(found.value)

    assert on_torch(pool, program, 2)[1].startswith(text)


def test_a_monitored_barrier_names_who_does_not_come(pool: Pool) -> None:
    def program() -> list[str]:
        group: Any = dist.group.WORLD
        limit = timedelta(milliseconds=500)
        group.monitored_barrier(limit)
        with pytest.raises(
            md.CollectiveTimeoutError, match="timed out in monitoredBarrier: it may"
        ):
            group.monitored_barrier(timedelta(0))
        found = []
        for names_all in (False, True):
            if dist.get_rank() in (1, 2):
                time.sleep(0.7)
                continue
            with pytest.raises(md.CollectiveTimeoutError) as late:
                group.monitored_barrier(limit, wait_all_ranks=names_all)
            found.append(str(late.value).splitlines()[0])
        dist.barrier()
        return found

    first, *_, last = on_torch(pool, program, 4)
    assert (
        first
        == last
        == [
            "Rank 1 failed to pass monitoredBarrier in 500 ms",
            "Ranks 1, 2 failed to pass monitoredBarrier in 500 ms",
        ]
    )


def test_a_monitored_barrier_ends_in_one_way_for_all(pool: Pool) -> None:
    def program() -> str:
        group: Any = dist.group.WORLD
        if dist.get_rank() == 0:
            time.sleep(2.0)
        with pytest.raises(md.CollectiveTimeoutError) as found:
            group.monitored_barrier(timedelta(milliseconds=500))
        group.monitored_barrier()
        return str(found.value).splitlines()[0]

    expected = "Rank 0 failed to pass monitoredBarrier in 500 ms"
    assert on_torch(pool, program, 3) == [expected] * 3


def test_a_member_that_does_not_come_to_a_new_group(pool: Pool) -> None:
    def program() -> str:
        if dist.get_rank() == 1:
            time.sleep(1.5)
            return ""
        limit = timedelta(seconds=1)
        return caught(md.CollectiveTimeoutError, lambda: dist.new_group([0, 1], timeout=limit))

    text = on_torch(pool, program, 2)[0]
    assert text.startswith("group '1' (ranks 0-1) could not be opened on backend 'shm'\n")
