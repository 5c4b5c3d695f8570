"""Calls of one of torch's groups, compared in the shared words of one host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from meshdist.checking.calls import Call, GroupFacts
from meshdist.torch_process_groups.inner_group import TorchGroupPeers
from tests.inner import Endings, FingerprintTables, RanksMismatch, Recorder, World

RANKS = (4, 6)
ONE_HOST = (-1, -1, -1, -1, 0, -1, 0)
TWO_HOSTS = (-1, -1, -1, -1, 0, -1, 1)


class Member:
    """One member, which notes its calls and writes them where the others see them."""

    def __init__(self, rank: int, store: HashStore, hosts: tuple[int, ...] = ONE_HOST) -> None:
        world = World(RANKS[rank], len(hosts), store, {}, hosts=hosts)
        self.group = GroupFacts("a group", RANKS, rank)
        self.recorder = Recorder()
        self.tables = FingerprintTables(world)
        Endings(world).announce(words=self.tables.make_words())
        self.table = self.tables.make("a group", RANKS, compares_messages=False)
        facts = self.group, store, self.recorder, self.table
        self.others = TorchGroupPeers(*facts, lambda: None)

    def enter(self, operation: str = "all_reduce", count: int = 2, sizes: Any = ()) -> list[int]:
        data = torch.Size([count]), torch.float32
        call = Call(operation, data, is_uneven=bool(sizes))
        self.recorder.note(self.group, call, sizes)
        assert self.table is not None
        return self.table.enter(self.recorder.sequence, call.fingerprint, *sizes)

    def compare(self, **how: bool) -> int | None:
        """The number of a call in whose place another member has started another one."""
        try:
            self.others.compare_again(**how)
        except RanksMismatch as failure:
            self.told = str(failure)
            return failure.number
        return None


@pytest.fixture
def pair() -> Iterator[list[Member]]:
    store = HashStore()
    made = [Member(rank, store) for rank in range(2)]
    if made[0].table is None:
        pytest.skip("this system has no shared words")
    yield made
    for one in made:
        one.tables.close()


def test_equal_calls_pass(pair: list[Member]) -> None:
    for _ in range(3):
        assert [one.enter() for one in pair] == [[], []]
    assert [one.compare() for one in pair] == [None, None]


def test_the_later_of_two_different_calls_differs_at_once(pair: list[Member]) -> None:
    assert pair[0].enter() == []
    assert pair[1].enter(count=3) == [0]


def test_the_earlier_one_sees_it_while_it_waits_and_at_its_next_call(pair: list[Member]) -> None:
    pair[0].enter()
    assert pair[0].compare() is None
    pair[1].enter("broadcast")
    assert pair[0].compare() == pair[0].compare() == 1
    assert pair[0].told == "this member's call differs from that of rank 6"
    pair[0].enter()
    assert pair[0].compare(is_thorough=False) == 1


def test_a_call_that_a_member_skips_over_stops_the_short_look_alone(pair: list[Member]) -> None:
    pair[0].enter()
    pair[1].recorder.note(pair[1].group, Call("barrier", None))  # its word is not there yet
    pair[1].enter("broadcast")
    pair[0].enter()
    assert pair[0].compare(is_thorough=False) is None
    assert pair[0].compare() == 2


def test_uneven_calls_are_compared_pair_by_pair(pair: list[Member]) -> None:
    pair[0].enter("all_to_all", sizes=([1, 2], [1, 5]))
    assert pair[1].enter("all_to_all", count=9, sizes=([5, 4], [2, 4])) == []
    pair[0].enter("all_to_all", sizes=([1, 2], [1, 5]))
    assert pair[1].enter("all_to_all", sizes=([6, 4], [2, 4])) == [0]
    assert pair[0].compare() == 2


def test_after_its_end_nothing_is_compared(pair: list[Member]) -> None:
    pair[0].enter()
    for _ in range(2):  # a channel for each device type closes it
        pair[1].table.close()
    pair[1].enter(count=3)
    assert pair[1].compare() is None


def test_members_of_different_hosts_compare_nothing() -> None:
    store = HashStore()
    for rank in range(2):
        one = Member(rank, store, TWO_HOSTS)
        assert one.table is None and one.compare() is None
        one.tables.close()
