"""Batches of sends and receives, on simulated ranks and over Gloo."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as torch_distributed

import meshdist as md
from tests.pool import Failure, Pool


def ring(is_receive_first: bool) -> list[float]:
    rank, size = md.get_rank(), md.get_world_size()
    x = torch.zeros(2)
    operations = [
        md.P2POp(md.isend, torch.arange(2.0) + 2 * rank, (rank + 1) % size),
        md.P2POp(md.irecv, x, (rank - 1) % size),
    ]
    if is_receive_first:
        operations.reverse()
    works = md.batch_isend_irecv(operations)
    assert len(works) == 2
    assert all(work.wait() is True for work in works)
    assert works[not is_receive_first].source_rank() == (rank - 1) % size
    return x.tolist()


@pytest.mark.parametrize("is_receive_first", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_ring_in_either_order_also_to_oneself(on_ranks, size: int, is_receive_first) -> None:
    expected = [[2.0 * left, 2.0 * left + 1] for left in [(r - 1) % size for r in range(size)]]
    assert on_ranks(ring, size, is_receive_first) == expected


def everyone_with_everyone() -> list[list[float]]:
    """Three messages of different sizes to each member, one after the other, all in one list."""
    rank, size = md.get_rank(), md.get_world_size()
    got = {(peer, n): torch.zeros(n + 1) for peer in range(size) for n in range(3)}
    operations = []
    for peer in range(size):
        for n in range(3):
            sent = torch.full((n + 1,), 100.0 * rank + 10 * peer + n)
            operations.append(md.P2POp(md.isend, sent, peer))
            operations.append(md.P2POp(md.irecv, got[peer, n], peer))
    # Each rank has an order of its own between peers; within a pair and direction all agree.
    operations = sorted(operations, key=lambda one: (one.peer * (rank + 1)) % (size + 1))
    for work in reversed(md.batch_isend_irecv(operations)):
        work.wait()
    return [x.tolist() for x in got.values()]


def test_all_with_all_at_once_in_the_order_of_each_pair(on_ranks) -> None:
    for rank, got in enumerate(on_ranks(everyone_with_everyone, 3)):
        assert got == [
            [100.0 * peer + 10 * rank + n] * (n + 1) for peer in range(3) for n in range(3)
        ]


def large_to_each_other() -> float:
    """More than any buffer between two processes holds, both sending first."""
    rank = md.get_rank()
    x = torch.zeros(1 << 20)
    operations = [
        md.P2POp(md.isend, torch.full((1 << 20,), rank + 1.0), 1 - rank),
        md.P2POp(md.irecv, x, 1 - rank),
    ]
    for work in md.batch_isend_irecv(operations):
        work.wait()
    assert (x == x[0]).all()
    return x[0].item()


def test_large_messages_to_each_other(on_ranks) -> None:
    assert on_ranks(large_to_each_other, 2) == [2.0, 1.0]


def on_an_axis() -> list[Any]:
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    axis = mesh["dp"]
    here, there = axis.get_local_rank(), 1 - axis.get_local_rank()
    out = np.full((2, 2), md.get_rank())
    got = np.zeros((2, 4), dtype=out.dtype)[:, ::2]
    operation = md.P2POp(md.irecv, got, group=axis, group_peer=there)
    assert (operation.group_peer, operation.peer) == (there, there * 2 + md.get_rank() % 2)
    assert operation.group is axis.get_group() and operation.tag == 5 - 5
    send = md.P2POp(md.isend, out, operation.peer, axis)
    assert send.group_peer == there and send.op is md.isend and send.tensor is out
    for work in md.batch_isend_irecv([send, operation]):
        work.wait()
    return [here, got.tolist(), repr(send), repr(operation)]


def test_on_a_mesh_axis_with_arrays_of_numpy(on_ranks) -> None:
    for rank, (here, got, sent, received) in enumerate(on_ranks(on_an_axis, 4)):
        other = (rank + 2) % 4
        assert got == [[other] * 2] * 2
        rest = "group=axis 'dp' of DeviceMesh(dp=2, tp=2), tag=0)"
        ends = f"group_src={here}, group_dst={1 - here}"
        assert sent == f"P2POp(isend, (2, 2) int64, {ends}, {rest}"
        ends = f"group_src={1 - here}, group_dst={here}"
        assert received == f"P2POp(irecv, (2, 2) int64, {ends}, {rest}"


def rejected() -> list[str]:
    x = torch.ones(2)
    pair = md.new_group([0, 1])
    send = md.P2POp(md.isend, x, 0)
    calls = [
        lambda: md.P2POp(torch_distributed.isend, x, 0),
        lambda: md.P2POp(md.send, x, 0),
        lambda: md.P2POp(md.isend, x),
        lambda: md.P2POp(md.isend, x, 0, group_peer=0),
        lambda: md.batch_isend_irecv([]),
        lambda: md.batch_isend_irecv(send),  # type: ignore[arg-type]
        lambda: md.batch_isend_irecv([send, x]),  # type: ignore[list-item]
        lambda: md.batch_isend_irecv([send, md.P2POp(md.irecv, x, 0, pair)]),
        lambda: md.batch_isend_irecv([send, md.P2POp(md.isend, x, 0, tag=-1)]),
    ]
    found = []
    for call in calls:
        with pytest.raises(md.ArgumentError) as caught:
            call()
        found.append(str(caught.value))
    with pytest.raises(ValueError, match=r"found: +ndarray"):
        md.batch_isend_irecv(np.zeros((2, 2)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="P2POp cannot take a list as tensor"):
        md.P2POp(md.isend, [1.0], 0)
    md.barrier()  # nothing was sent, nothing is broken
    return found


def test_what_is_no_batch_is_rejected(on_ranks) -> None:
    for found in on_ranks(rejected, 2):
        assert found == [
            "P2POp accepts only isend or irecv\n"
            "  expected: meshdist.distributed.isend or meshdist.distributed.irecv\n"
            "  found:    torch.distributed.distributed_c10d.isend\n"
            "  fix:      pass dist.isend or dist.irecv as op",
            "P2POp accepts only isend or irecv\n"
            "  expected: meshdist.distributed.isend or meshdist.distributed.irecv\n"
            "  found:    meshdist.collectives.point_to_point.send\n"
            "  fix:      pass dist.isend or dist.irecv as op",
            "P2POp needs peer or group_peer\n  fix:      pass a global rank, peer=0, or a rank in "
            "the group, group_peer=0",
            "P2POp got both peer and group_peer\n  found:    peer=0, group_peer=0\n"
            "  fix:      pass either peer (a global rank) or group_peer (a rank in the group)",
            "batch_isend_irecv needs a list of at least one P2POp\n  found:    an empty list\n"
            "  fix:      pass for example [P2POp(isend, x, 1)], or skip the call if there is no "
            "message",
            "batch_isend_irecv needs a list of at least one P2POp\n  found:    P2POp\n"
            "  fix:      pass for example [P2POp(isend, x, 1)], or skip the call if there is no "
            "message",
            "batch_isend_irecv accepts only a list of P2POp\n  found:    Tensor at index 1\n"
            "  fix:      create each with P2POp(isend, tensor, peer) or P2POp(irecv, tensor, peer)",
            "batch_isend_irecv cannot use operations of different groups\n"
            "  found:    the world and group of ranks 0-1\n"
            "  fix:      call batch_isend_irecv once for each group",
            f"isend: tag is -1\n  expected: an integer from 0 to {(1 << 30) - 3}",
        ]


def test_two_backends_in_one_batch_are_rejected() -> None:
    def program() -> str:
        group = md.ProcessGroup(
            get_world(),
            (0, 1),
            name="both",
            backends={"cpu": "simulated", "meta": "nccl"},
        )
        x = torch.ones(2)
        operations = [
            md.P2POp(md.isend, x, 0, group),
            md.P2POp(md.isend, x.to("meta"), 0, group),
        ]
        with pytest.raises(md.ArgumentError) as caught:
            md.batch_isend_irecv(operations)
        return str(caught.value)

    from tests.inner import get_world

    assert (
        md.simulate(program, 2)
        == [
            "batch_isend_irecv cannot send tensors over different backends\n"
            "  where:    both\n  found:    cpu over simulated, meta over nccl\n"
            "  fix:      call batch_isend_irecv once for each device type"
        ]
        * 2
    )


def test_a_misfit_in_a_batch_is_one_error_on_both_sides(pool: Pool) -> None:
    def program() -> None:
        rank = md.get_rank()
        x, y = torch.ones(2), torch.ones(3)
        kinds = (md.isend, md.isend) if rank == 0 else (md.irecv, md.irecv)
        order = (x, y) if rank == 0 else (y, x)
        operations = [md.P2POp(kind, t, 1 - rank) for kind, t in zip(kinds, order, strict=True)]
        for work in md.batch_isend_irecv(operations):
            work.wait()

    for outcome in pool.outcomes(program, 2):
        assert isinstance(outcome, Failure)
        assert isinstance(outcome.exception, md.MismatchError)
        text = str(outcome.exception)
        assert "rank 0: isend((2,) float32, to rank 1) at " in text
        assert "rank 1: irecv((3,) float32, from rank 0) at " in text
