"""Calls of one of torch's groups, compared in the shared words of one host."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from meshdist.checking.calls import Call, GroupFacts, Note
from meshdist.checking.header_table import CHECK_EVERY
from meshdist.torch_process_groups.members import Comparison
from meshdist.wires.failures import MembersDisagree, WireAborted, WireTimeout
from meshdist.wires.registry import Opening

RANKS = (4, 6)
LIMIT = timedelta(seconds=5)
SHORT = timedelta(milliseconds=50)


def opening(rank: int, store: HashStore, **more: object) -> Opening:
    return Opening(store, lambda: store, RANKS, rank, "cpu", LIMIT, **more)  # type: ignore[arg-type]


def call(sequence: int, verb: str = "all_reduce", count: int = 2, sizes: Any = ()) -> Note:
    called = Call(verb, (torch.Size([count]), torch.float32), is_uneven=bool(sizes))
    return Note(sequence, GroupFacts("a group", RANKS, 0), called, sizes)


@pytest.fixture
def is_broken() -> list[bool]:
    return [False]


@pytest.fixture
def pair(is_broken: list[bool]) -> Iterator[list[Comparison]]:
    store = HashStore()
    made = [Comparison(opening(rank, store), lambda: is_broken[0]) for rank in range(2)]
    if made[0]._table is None:
        pytest.skip("this system has no shared words")
    yield made
    for one in made:
        one.close()


def test_equal_calls_pass(pair: list[Comparison]) -> None:
    for number in range(1, 4):
        for one in pair:
            one.enter(call(number), LIMIT)
    for one in pair:
        one.compare_again()


def test_the_later_of_two_different_calls_is_refused_at_once(pair: list[Comparison]) -> None:
    pair[0].enter(call(1), LIMIT)
    with pytest.raises(MembersDisagree, match="differs from that of rank 4") as caught:
        pair[1].enter(call(1, count=3), LIMIT)
    assert caught.value.number == 1


def test_the_earlier_one_sees_it_while_it_waits_and_at_its_next_call(
    pair: list[Comparison],
) -> None:
    pair[0].enter(call(1), LIMIT)
    pair[0].compare_again()
    with pytest.raises(MembersDisagree):
        pair[1].enter(call(1, "broadcast"), LIMIT)
    for _ in range(2):
        with pytest.raises(MembersDisagree, match="differs from that of rank 6") as caught:
            pair[0].compare_again()
        assert caught.value.number == 1
    with pytest.raises(MembersDisagree) as caught:
        pair[0].enter(call(2), LIMIT)
    assert caught.value.number == 1


def test_uneven_calls_are_compared_pair_by_pair(pair: list[Comparison]) -> None:
    pair[0].enter(call(1, "all_to_all", sizes=([1, 2], [1, 5])), LIMIT)
    pair[1].enter(call(1, "all_to_all", count=9, sizes=([5, 4], [2, 4])), LIMIT)
    pair[0].enter(call(2, "all_to_all", sizes=([1, 2], [1, 5])), LIMIT)
    with pytest.raises(MembersDisagree):
        pair[1].enter(call(2, "all_to_all", sizes=([6, 4], [2, 4])), LIMIT)


def test_a_member_that_is_far_ahead_waits(pair: list[Comparison], is_broken: list[bool]) -> None:
    for one in pair:
        one.enter(call(1), LIMIT)
    pair[0].enter(call(2), LIMIT)
    late = call(4 * CHECK_EVERY)
    with pytest.raises(WireTimeout, match="rank 6 is too many calls behind"):
        pair[0].enter(late, SHORT)
    is_broken[0] = True
    with pytest.raises(WireAborted):
        pair[0].enter(late, LIMIT)


def test_after_its_end_nothing_is_compared(pair: list[Comparison]) -> None:
    pair[0].enter(call(1), LIMIT)
    pair[1].close()
    pair[1].enter(call(1, count=3), LIMIT)
    pair[1].compare_again()
    pair[1].close()


def test_members_of_different_hosts_compare_nothing() -> None:
    store = HashStore()
    for rank in range(2):
        one = Comparison(opening(rank, store, hosts=(0, 1)), lambda: False)
        one.enter(call(1, count=2 + rank), LIMIT)
        one.close()
    assert store.num_keys() == 0
