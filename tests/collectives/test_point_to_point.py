"""Messages between two ranks, on simulated ranks and over Gloo; torch's tutorial as a program."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import meshdist as md
from tests.pool import Failure, Pool

ROOT = Path(__file__).resolve().parents[2]


def pairs_while_one_is_busy() -> float:
    rank = md.get_rank()
    x = torch.full((4,), float(rank))
    if rank == 0:
        md.send(x, dst=1)
    elif rank == 1:
        md.recv(x, src=0)
    # Rank 2 has called nothing so far: two members talk while the third is busy elsewhere.
    md.all_reduce(x)
    return x[0].item()


def test_two_members_talk_while_the_third_is_busy(on_ranks) -> None:
    assert on_ranks(pairs_while_one_is_busy, 3) == [2.0] * 3


def messages() -> list:
    rank, size = md.get_rank(), md.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    sent = [torch.full((2,), 10.0 * rank + tag) for tag in range(3)]
    got = [torch.zeros(2) for _ in range(3)]
    works = [md.isend(sent[tag], right, tag=tag) for tag in (2, 0, 1)]
    works += [md.irecv(got[tag], left, tag=tag) for tag in (1, 2, 0)]
    for work in works:
        work.wait()
    sources = [work.source_rank() for work in works[3:]]
    return [g[0].item() for g in got], sources


@pytest.mark.parametrize("size", [1, 2, 3])
def test_immediate_point_to_point_by_tag_also_to_oneself(on_ranks, size: int) -> None:
    for rank, (got, sources) in enumerate(on_ranks(messages, size)):
        left = (rank - 1) % size
        assert got == [10.0 * left + tag for tag in range(3)]
        assert sources == [left] * 3


def in_order() -> list[float]:
    if md.get_rank() == 0:
        for number in range(20):
            md.send(torch.tensor([float(number)]), dst=1, tag=3)
        return []
    received = []
    for _ in range(20):
        x = torch.empty(1)
        md.recv(x, src=0, tag=3)
        received.append(x.item())
    return received


def test_messages_with_one_tag_arrive_in_the_order_sent(on_ranks) -> None:
    assert on_ranks(in_order, 2)[1] == [float(number) for number in range(20)]


def from_anyone() -> list:
    if md.get_rank():
        md.send(torch.tensor([md.get_rank()]), dst=0)
        return []
    found = []
    for _ in range(md.get_world_size() - 1):
        x = torch.empty(1, dtype=torch.int64)
        found.append((md.recv(x), x.item()))
    return sorted(found)


def test_receive_from_any_sender_returns_its_global_rank(on_ranks) -> None:
    assert on_ranks(from_anyone, 3)[0] == [(1, 1), (2, 2)]


def ranks_in_a_group() -> list:
    if md.get_rank() not in (1, 3):
        return []
    group = md.new_group([3, 1], sort_ranks=False)
    x = torch.tensor([float(md.get_rank())])
    if md.get_rank() == 1:
        md.send(x, dst=3, group=group)  # by global rank, or
        md.send(x, group=group, group_dst=0)  # by place in the group
        md.isend(x, group=group, group_dst=0).wait()
        return []
    found = []
    for source in ({}, {"src": 1}, {"group_src": 1}):
        x = torch.zeros(1)
        found.append((md.recv(x, group=group, **source), x.item()))
    return found


def test_peers_are_global_ranks_or_group_ranks_and_recv_returns_the_global_one(on_ranks) -> None:
    assert on_ranks(ranks_in_a_group, 4) == [[], [], [], [(1, 1.0)] * 3]


def results() -> list:
    x = torch.full((2,), md.get_rank() + 1.0)
    if md.get_rank() == 0:
        sent, work = md.send(x, dst=1), md.isend(x, dst=1)
        work.wait()
        return [sent, isinstance(work, md.Work)]
    source, work = md.recv(x, src=0), md.irecv(x, src=0)
    work.wait()
    return [source, isinstance(work, md.Work)]


def test_send_returns_none_recv_the_sender_and_the_others_a_work(on_ranks) -> None:
    assert on_ranks(results, 2) == [[None, True], [0, True]]


def arrays() -> list:
    if md.get_rank() == 0:
        md.send(np.arange(6.0).reshape(2, 3).T, dst=1)
        md.send(torch.arange(4).view(2, 2).t(), dst=1)
        return []
    columns, rows = np.zeros((3, 2), order="F"), torch.zeros(4, 2, dtype=torch.int64)
    md.recv(columns, src=0)
    md.recv(rows[::2], src=0)
    return [columns.tolist(), rows.tolist()]


def test_arrays_of_any_layout_are_sent_and_written_where_they_lie(on_ranks) -> None:
    columns = [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert on_ranks(arrays, 2)[1] == [columns, [[0, 2], [0, 0], [1, 3], [0, 0]]]


# -- torch's tutorial "Writing distributed applications" ------------------------------------------

TUTORIAL = """
import os
import sys
import torch
import meshdist as dist
import torch.multiprocessing as mp

def blocking(rank, size):
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        # Send the tensor to process 1
        dist.send(tensor=tensor, dst=1)
    else:
        # Receive tensor from process 0
        dist.recv(tensor=tensor, src=0)
    print('Rank ', rank, ' has data ', tensor[0])

def immediate(rank, size):
    tensor = torch.zeros(1)
    req = None
    if rank == 0:
        tensor += 1
        # Send the tensor to process 1
        req = dist.isend(tensor=tensor, dst=1)
        print('Rank 0 started sending')
    else:
        # Receive tensor from process 0
        req = dist.irecv(tensor=tensor, src=0)
        print('Rank 1 started receiving')
    req.wait()
    print('Rank ', rank, ' has data ', tensor[0])

def collective(rank, size):
    group = dist.new_group([0, 1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    print('Rank ', rank, ' has data ', tensor[0])

def run(rank, size):
    for part in (blocking, immediate, collective):
        part(rank, size)
"""


def test_the_tutorials_parts_in_their_order_on_simulated_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: dict = {"__name__": "tutorial"}
    exec(compile(TUTORIAL, "tutorial", "exec"), names)
    md.simulate(lambda: names["run"](md.get_rank(), md.get_world_size()), 2)
    told = capsys.readouterr().out.splitlines()
    for rank, operation in enumerate(("sending", "receiving")):
        mine = [line for line in told if line.startswith((f"Rank  {rank}", f"Rank {rank}"))]
        assert mine == [
            f"Rank  {rank}  has data  tensor(1.)",
            f"Rank {rank} started {operation}",
            f"Rank  {rank}  has data  tensor(1.)",
            f"Rank  {rank}  has data  tensor(2.)",
        ]


def polled() -> bool:
    rank = md.get_rank()
    x = torch.full((4,), float(rank))
    work = md.isend(x, 1) if rank == 0 else md.irecv(x, 0)
    deadline = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    is_done = work.is_completed()
    work.wait()
    return is_done and x.tolist() == [0.0] * 4


def test_polling_a_message_sees_it_come_and_go(on_ranks) -> None:
    assert on_ranks(polled, 2) == [True, True]


def to_oneself() -> list[float]:
    x = torch.ones(2)
    md.isend(x, md.get_rank()).wait()
    x.fill_(7.0)  # it may be written again
    got = torch.zeros(2)
    md.irecv(got, md.get_rank()).wait()
    return got.tolist()


def test_a_send_to_oneself_may_be_waited_for_before_the_receive(on_ranks) -> None:
    assert on_ranks(to_oneself, 2) == [[1.0, 1.0]] * 2


def bad_tags() -> list[str]:
    found = []
    for tag in (-1, (1 << 30) - 2, "a", None, 1.5, True):
        with pytest.raises((md.ArgumentError, md.KindError)) as caught:
            md.isend(torch.ones(1), 0, tag=tag)
        found.append(str(caught.value))
    md.barrier()  # nothing was sent, nothing is broken
    return found


def test_a_wrong_tag_is_rejected_before_anything_is_sent(on_ranks) -> None:
    largest = (1 << 30) - 3
    for found in on_ranks(bad_tags, 2):
        assert found[0].endswith(f": tag is -1\n  expected: an integer from 0 to {largest}")
        assert found[2].endswith(": tag must be an integer\n  found:    'a', a str")


def large_tags() -> list[float]:
    rank = md.get_rank()
    tags = (0, 1 << 14, (1 << 30) - 3, (1 << 14) - 1)
    got = [torch.full((2,), float(place)) for place in range(len(tags))]
    works = [
        md.isend(x, 1, tag=tag) if rank == 0 else md.irecv(x.zero_(), 0, tag=tag)
        for x, tag in reversed(list(zip(got, tags, strict=True)))
    ]
    for work in works:
        work.wait()
    return [x[0].item() for x in got]


def test_tags_of_every_size_tell_messages_apart(on_ranks) -> None:
    assert on_ranks(large_tags, 2) == [[0.0, 1.0, 2.0, 3.0]] * 2


@pytest.mark.parametrize(
    "given", [torch.zeros(2), torch.zeros(8), torch.zeros(4, dtype=torch.int32)]
)
def test_a_message_that_does_not_fit_over_gloo_is_one_error_on_both_sides(
    pool: Pool, given: torch.Tensor
) -> None:
    def program(given: torch.Tensor) -> None:
        md.barrier()
        group = md.new_group(timeout=timedelta(seconds=20))
        if md.get_rank() == 0:
            md.send(torch.ones(4), 1, group)
        else:
            md.recv(given, 0, group)

    dtype = str(given.dtype).removeprefix("torch.")
    for outcome in pool.outcomes(program, 2, given):
        assert isinstance(outcome, Failure)
        assert isinstance(outcome.exception, md.MismatchError)
        text = str(outcome.exception)
        assert text.startswith("message mismatch: a send does not match its receive\n")
        assert "rank 0: send((4,) float32, to rank 1) at " in text
        assert f"rank 1: recv({tuple(given.shape)} {dtype}, from rank 0) at " in text


@pytest.mark.parametrize("given", [torch.zeros(2), torch.zeros(4, dtype=torch.int32)])
@pytest.mark.parametrize("is_sent_first", [True, False])
def test_a_message_to_oneself_that_does_not_fit_names_both_sides(
    pool: Pool, given: torch.Tensor, is_sent_first: bool
) -> None:
    def program(given: torch.Tensor) -> str:
        me = md.get_rank()
        calls = [lambda: md.isend(torch.ones(4), me, tag=3), lambda: md.irecv(given, me, tag=3)]
        first, second = calls if is_sent_first else calls[::-1]
        first()
        with pytest.raises(md.MismatchError) as caught:
            second()
        md.barrier()  # nothing is broken
        return str(caught.value)

    dtype = str(given.dtype).removeprefix("torch.")
    assert pool.run(program, 1, given) == [
        "a message of a rank to itself does not fit the tensor that receives it\n"
        "  where:    tag 3; nothing was copied\n"
        "  expected: equal dtype and number of elements on both sides\n"
        f"  found:    sent: (4,) float32\n            received: {tuple(given.shape)} {dtype}\n"
        "  fix:      receive into a tensor like the one that is sent"
    ]


def futures() -> list[str]:
    me = md.get_rank()
    works = [md.isend(torch.ones(2), me), md.irecv(torch.zeros(2), me)]
    found = []
    for work in works:
        with pytest.raises(md.BackendError) as caught:
            work.get_future()
        found.append(str(caught.value))
        work.wait()
    return found


def test_a_transfer_has_no_future(on_ranks) -> None:
    text = (
        "a send or a receive has no future\n"
        "  expected: the Work of a collective\n"
        "  fix:      call wait() or is_completed() on the Work"
    )
    assert on_ranks(futures, 2) == [[text] * 2] * 2


def test_a_wrong_tag_opens_nothing() -> None:
    def program() -> bool:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("x",), open_groups=False)
        if md.get_rank() == 0:  # alone: nobody else would come to an opening
            with pytest.raises(md.KindError, match="isend: tag must be an integer"):
                md.isend(torch.ones(1), 1, group=mesh, tag="a")  # type: ignore[arg-type]
        return mesh.get_group().is_open

    assert md.simulate(program, 2) == [False, False]


def from_anyone_and_too_large(is_async: bool) -> str:
    def call() -> None:
        if md.get_rank() == 2:
            md.send(torch.ones(5), 1, tag=9)
        elif md.get_rank() == 1:
            md.recv(torch.ones(2), 0, tag=9)
            if is_async:
                md.irecv(torch.ones(3), tag=9).wait()
            else:
                md.recv(torch.ones(3), tag=9)
        else:
            md.send(torch.ones(2), 1, tag=9)
        md.barrier()

    with pytest.raises(md.MismatchError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("is_async", [True, False])
def test_what_anyone_sent_and_does_not_fit_is_told_with_both_calls(
    pool: Pool, is_async: bool
) -> None:
    operation = "irecv" if is_async else "recv"
    for text in pool.run(from_anyone_and_too_large, 3, is_async, backend="shm"):
        assert f"rank 1: {operation}((3,) float32, from " in text
        assert "rank 2: send((5,) float32, to rank 1, tag 9)" in text


def all_wait_for_each_other() -> str:
    """What this rank is told; "" where another one gave up first, and was heard to, over Gloo."""
    group = md.new_group(timeout=timedelta(seconds=2))
    right = (md.get_rank() + 1) % md.get_world_size()
    md.barrier(group)  # so that on a busy machine, too, all have called before one gives up
    with pytest.raises(md.BackendError) as caught:
        md.recv(torch.ones(3), right, group=group)
    time.sleep(1.0)  # its last call, for whoever gives up later on a busy machine
    return str(caught.value) if isinstance(caught.value, md.CollectiveTimeoutError) else ""


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_deadlock_of_messages_is_told_with_all_calls(pool: Pool, backend: str) -> None:
    told = pool.run(all_wait_for_each_other, 3, backend=backend)
    assert all(told) if backend == "shm" else any(told)
    for rank in [rank for rank in range(3) if told[rank]]:
        text = told[rank]
        for other in {0, 1, 2} - {rank}:
            call = f"recv((3,) float32, from rank {(other + 1) % 3})"
            assert f"rank {other}: last {call}" in text
