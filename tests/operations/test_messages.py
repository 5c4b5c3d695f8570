"""Point to point on both backends: plain, from any source, by tag, to oneself, in batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshdist as md
from tests.operations.cases import BACKENDS
from tests.pool import Pool


def everyone_to_everyone() -> list[float]:
    """Blocking messages between all pairs, in rank order."""
    rank, size = md.get_rank(), md.get_world_size()
    found = []
    for source in range(size):
        for target in range(size):
            if source == target or rank not in (source, target):
                continue
            if rank == source:
                md.send(torch.full((3,), 10.0 * source + target), target)
            else:
                x = torch.zeros(3)
                assert md.recv(x, source) == source
                found.append(x[0].item())
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_send_and_recv_between_all_pairs(backend: str, pool: Pool) -> None:
    found = BACKENDS[backend](pool, everyone_to_everyone, 4)
    for rank, numbers in enumerate(found):
        assert numbers == [10.0 * source + rank for source in range(4) if source != rank]


def from_any_source(dtype: torch.dtype, num_messages: int) -> list[tuple[int, Any]]:
    rank, size = md.get_rank(), md.get_world_size()
    if rank:
        for number in range(num_messages):
            md.send(torch.tensor([rank * 100 + number]).to(dtype), 0)
        return []
    found = []
    for _ in range(num_messages * (size - 1)):
        x = torch.zeros(1, dtype=dtype)
        found.append((md.recv(x), x.item()))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_recv_from_any_source_keeps_each_sender_s_order(
    backend: str, dtype: torch.dtype, pool: Pool
) -> None:
    found = BACKENDS[backend](pool, from_any_source, 4, dtype, 5)[0]
    for sender in (1, 2, 3):
        assert [x for source, x in found if source == sender] == [
            sender * 100 + number for number in range(5)
        ]


def with_tags() -> list[Any]:
    """Messages sent by tags 0 to 4 and received in the opposite order; any source by tag too."""
    rank = md.get_rank()
    if rank == 0:
        works = [md.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in range(5)]
        works.append(md.isend(torch.tensor([50.0]), 1, tag=50))
        for work in works:
            work.wait()
        return []
    found = []
    for tag in reversed(range(5)):
        x = torch.zeros(1)
        md.recv(x, 0, tag=tag)
        found.append(x.item())
    x = torch.zeros(1)
    return [found, md.recv(x, tag=50), x.item()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tags_match_sends_to_receives(backend: str, pool: Pool) -> None:
    assert BACKENDS[backend](pool, with_tags, 2)[1] == [[4.0, 3.0, 2.0, 1.0, 0.0], 0, 50.0]


def all_pairs_at_once(dtype: torch.dtype) -> list[Any]:
    """isend and irecv to and from all, oneself included."""
    rank, size = md.get_rank(), md.get_world_size()
    sent = [torch.tensor([rank * 10 + peer]).to(dtype) for peer in range(size)]
    received = [torch.zeros(1, dtype=dtype) for _ in range(size)]
    works = [md.irecv(received[peer], peer) for peer in range(size)]
    works += [md.isend(sent[peer], peer) for peer in range(size)]
    for work in works:
        assert work.wait() is True
        assert work.is_completed()
    assert [work.source_rank() for work in works[:size]] == list(range(size))
    return [x.item() for x in received]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_isend_and_irecv_between_all_pairs_and_oneself(
    backend: str, dtype: torch.dtype, pool: Pool
) -> None:
    found = BACKENDS[backend](pool, all_pairs_at_once, 3, dtype)
    for rank, numbers in enumerate(found):
        wanted = torch.tensor([peer * 10 + rank for peer in range(3)]).to(dtype)
        assert numbers == wanted.tolist()


def ring(order: str) -> float:
    rank, size = md.get_rank(), md.get_world_size()
    x = torch.zeros(1)
    operations = [
        md.P2POp(md.isend, torch.tensor([float(rank)]), (rank + 1) % size),
        md.P2POp(md.irecv, x, (rank - 1) % size),
    ]
    if order == "receives first":
        operations.reverse()
    works = md.batch_isend_irecv(operations)
    assert works
    for work in works:
        assert work.wait() is True
    return x.item()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("order", ["sends first", "receives first"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_of_a_ring(backend: str, order: str, size: int, pool: Pool) -> None:
    assert BACKENDS[backend](pool, ring, size, order) == [
        float((r - 1) % size) for r in range(size)
    ]


def batches() -> list[Any]:
    """Rank 0 takes no part; several messages in one direction, by order and by tag."""
    rank = md.get_rank()
    if rank == 0:
        md.barrier()
        return []
    peer = 3 - rank
    sent = [torch.tensor([10.0 * rank + number]) for number in range(4)]
    received = [torch.zeros(1) for _ in range(4)]
    operations = [md.P2POp(md.isend, sent[number], peer) for number in (0, 1)]
    operations += [md.P2POp(md.irecv, received[number], peer) for number in (0, 1)]
    operations += [md.P2POp(md.isend, sent[number], peer, tag=number) for number in (2, 3)]
    operations += [md.P2POp(md.irecv, received[number], peer, tag=number) for number in (3, 2)]
    for work in md.batch_isend_irecv(operations):
        work.wait()
    md.barrier()
    return [x.item() for x in received]


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_without_rank_zero_in_order_and_by_tag(backend: str, pool: Pool) -> None:
    found = BACKENDS[backend](pool, batches, 3)
    assert found == [[], [20.0, 21.0, 22.0, 23.0], [10.0, 11.0, 12.0, 13.0]]


def batch_in_a_group() -> list[Any]:
    rank = md.get_rank()
    if rank == 1:
        return []
    group = md.new_group([2, 0], sort_ranks=False)
    index = group.rank()
    x, y = torch.zeros(1), torch.zeros(1)
    mine = torch.tensor([float(rank)])
    other = 2 - rank
    operations = [
        md.P2POp(md.isend, mine, other, group),
        md.P2POp(md.isend, mine + 10, group=group, group_peer=1 - index),
        md.P2POp(md.irecv, x, group=group, group_peer=1 - index),
        md.P2POp(md.irecv, y, other, group),
    ]
    for work in md.batch_isend_irecv(operations):
        work.wait()
    return [x.item(), y.item()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_in_a_group_by_global_rank_and_by_place(backend: str, pool: Pool) -> None:
    assert BACKENDS[backend](pool, batch_in_a_group, 3) == [[2.0, 12.0], [], [0.0, 10.0]]
