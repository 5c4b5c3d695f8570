"""Objects sent from rank to rank: what they pass by, and what they never pass for."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.collectives.object_protocol import unpack
from tests.pool import Pool


@pytest.mark.parametrize("numbers", [[], [-1], [2, 5], [1 << 62]])
def test_bytes_that_are_no_objects_name_their_sender(numbers: list[int]) -> None:
    data = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
    target: Any = SimpleNamespace(name="the world", world=SimpleNamespace(rank=0))
    with pytest.raises(md.BackendError) as caught:
        unpack(data, 3, "broadcast_object_list", target)
    text = str(caught.value)
    assert "broadcast_object_list: the message of rank 3 is not a list of objects" in text
    assert "where:    rank 0, the world" in text
    assert f"found:    {8 * len(numbers)} bytes: " in text
    assert "fix:      install the same version of meshdist for both ranks" in text


def beside_a_receive_of_any_tag() -> list[Any]:
    """A receive that waits already must not take what belongs to the objects."""
    rank = md.get_rank()
    x = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        early = md.irecv(x, 1)
        md.send_object_list(["for", 1], 1, use_batch=True)
        early.wait()
        return [x.item()]
    objects: list[Any] = [None, None]
    md.recv_object_list(objects, 0, use_batch=True)
    md.send(torch.tensor([77]), 0)
    return objects


def test_objects_pass_by_a_receive_that_waits(on_ranks) -> None:
    assert on_ranks(beside_a_receive_of_any_tag, 2) == [[77], ["for", 1]]


def met_by_another_kind(sends_objects: bool) -> tuple[str, str]:
    """The error of each side, and of its next collective, where one sends objects and one does
    not."""
    group, rank = md.new_group(), md.get_rank()
    numbers = torch.tensor([1, 2, 3])  # as many as go before a list of objects
    calls = [
        lambda: md.send_object_list([1], 1, group) if sends_objects else md.send(numbers, 1, group),
        lambda: md.recv(numbers, 0, group) if sends_objects else md.recv_object_list([0], 0, group),
    ]
    told = []
    for call in (calls[rank], lambda: md.all_reduce(numbers, group=group)):
        try:
            call()
            told.append("")
        except md.MismatchError as error:
            told.append(str(error))
    assert numbers.tolist() == [1, 2, 3]
    return told[0], told[1]


@pytest.mark.parametrize("sends_objects", [True, False])
def test_objects_met_by_another_kind_of_message_are_told_on_both(on_ranks, sends_objects) -> None:
    sent, taken = ("send_object_list", "recv") if sends_objects else ("send", "recv_object_list")
    outcomes = on_ranks(met_by_another_kind, 2, sends_objects)
    for rank, (first, again) in enumerate(outcomes):
        for text in (first, again):
            if not text:  # simulated sends are done at once
                assert rank == 0 and not sends_objects and text is first
                continue
            assert text.startswith("message mismatch: a send does not match its receive\n")
            assert (
                "expected: the same dtype and number of elements on both sides, and objects "
                in text
            )
            assert f"found:    rank 0: {sent}" in text and f"rank 1: {taken}" in text


def no_objects() -> str:
    if md.get_rank() == 0:
        md.send(torch.tensor([1, 2, 3], dtype=torch.uint64), 1)  # as what goes before a list
        return ""
    with pytest.raises(md.BackendError) as caught:
        md.recv_object_list([None])
    return str(caught.value)


def test_no_list_of_objects_from_any_rank_is_told_by_the_receiver(pool: Pool) -> None:
    # On one host members compare messages before; between hosts the receiver sees what has come.
    assert pool.run(no_objects, 2, hosts="AB")[1] == (
        "recv_object_list received a message that is not a list of objects from rank 0\n"
        "  where:    rank 1, the world\n  fix:      call send_object_list on rank 0"
    )


def test_objects_never_pass_for_numbers_over_shared_memory(pool: Pool) -> None:
    def program() -> list[int]:
        group = md.new_group()
        numbers = torch.tensor([1, 2, 3])
        calls = [
            lambda: md.send_object_list([1], 1, group),
            lambda: md.recv(numbers, 0, group),
        ]
        with pytest.raises(md.MismatchError):
            calls[md.get_rank()]()
        return numbers.tolist()

    assert pool.run(program, 2, backend="shm") == [[1, 2, 3]] * 2


def test_a_receiver_that_does_not_come_is_told_with_the_collective(pool: Pool) -> None:
    def program() -> str:
        group = md.new_group(timeout=timedelta(seconds=1))
        if md.get_rank():
            md.barrier()
            return ""
        with pytest.raises(md.CollectiveTimeoutError) as caught:
            md.send_object_list([1], 1, group)
        md.barrier()  # of the world, which is whole
        return str(caught.value)

    text = pool.run(program, 2)[0]
    assert text.startswith("send_object_list on group of ranks 0-1 timed out after 1 s")
    assert "rank 0, send_object_list((3,) uint64, to rank 1) on group of ranks 0-1 at " in text
    assert "expected: rank 1 in recv_object_list, with this rank as its peer\n" in text
