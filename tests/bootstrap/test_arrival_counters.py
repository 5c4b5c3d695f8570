"""Members are counted by blocks, and ask the store equally often however many they are."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from benchmarks.start_at_scale import columns, memory, run
from meshdist.bootstrap.arrival_counters import arrival_counter_of


class Numbers(Counter[str]):
    """Numbers of a store, and how many were read."""

    num_read = 0

    def add(self, key: str, amount: int) -> int:
        self[key] += amount
        return self[key]

    def read(self, key: str) -> int:
        self.num_read += 1
        return self[key]


def test_members_of_a_host_share_a_number_and_those_missing_are_read_from_it() -> None:
    counts = arrival_counter_of((1, 2, 5, 6, 7), (0, 0, 0, 0, 1, 1, 1, 1))
    blocks = [counts.block_of(rank) for rank in (1, 5)]
    assert [(block.name, block.ranks) for block in blocks] == [("0.0", (1, 2)), ("1.0", (5, 6, 7))]
    store = Numbers()
    come = [counts.count(store.add, key, rank) for key, rank in (("x", 5), ("x", 7), ("y", 1))]
    assert come == [(1, False), (2, False), (1, False)]
    assert counts.find_absent(store.read, ["x", "y"]) == [2, 6]
    assert counts.find_absent(store.read, ["x", "y"], among=[1, 5, 6]) == [6]
    assert blocks[1].find_absent(store.read, ["x"]) == [6]
    assert blocks[0].find_absent(store.read, ["x"]) == [1, 2]


def test_no_number_has_more_bits_than_a_store_can_add() -> None:
    counts = arrival_counter_of(tuple(range(130)), (3,) * 130)
    assert [len(part.ranks) for part in counts.parts] == [60, 60, 10]
    assert sorted(counts.names()) == ["1:0", "3.0", "3.1", "3.2"]
    large = arrival_counter_of(tuple(range(16384)), tuple(rank // 4 for rank in range(16384)))
    assert large.names and all(len(part.parts) <= 60 for part in large.parts)


@pytest.mark.parametrize(("size", "per_host"), [(1, 1), (5, 8), (130, 130), (1024, 8), (16384, 8)])
def test_a_look_for_one_late_member_reads_as_much_whatever_the_size(
    size: int, per_host: int
) -> None:
    counts = arrival_counter_of(tuple(range(size)), tuple(rank // per_host for rank in range(size)))
    store, order = Numbers(), list(range(size))
    random.Random(size).shuffle(order)
    last = order.pop()
    assert not any(counts.count(store.add, "x", rank)[1] for rank in order)
    num_writes = len(store)
    assert counts.find_absent(store.read, ["x"]) == [last]
    assert store.num_read <= 4
    assert counts.count(store.add, "x", last)[1]
    assert counts.find_absent(store.read, ["x"]) == []
    assert len(store) <= num_writes + 4
    assert sorted(store) == sorted(f"x/{name}" for name in counts.names())


def test_a_look_while_many_are_missing_reads_few_numbers() -> None:
    size = 4096
    counts = arrival_counter_of(tuple(range(size)), tuple(rank // 8 for rank in range(size)))
    store = Numbers()
    for rank in range(0, size, 2):  # half of each host has come
        counts.count(store.add, "x", rank)
    assert counts.find_absent(store.read, ["x"], most=8) == list(range(1, 16, 2))
    assert store.num_read <= 6
    assert len(counts.find_absent(store.read, ["x"])) == size // 2


@pytest.mark.parametrize("size", [4, 8, 16])
def test_a_world_and_a_mesh_cost_each_rank_few_requests_whatever_the_size(size: int) -> None:
    world, mesh, again = run(size, is_private=(False, False), serve=memory)
    assert columns(world)["requests a rank"] <= 13
    assert columns(world)["most"] <= 20
    for phase in (mesh, again):  # the second one shares all communicators
        assert columns(phase)["requests a rank"] <= 12
        assert columns(phase)["most"] <= 20
    for phase in (world, mesh, again):
        assert columns(phase)["bytes a rank"] <= 2048


@pytest.mark.parametrize("size", [4, 8, 16])
def test_a_late_rank_costs_the_others_few_requests_whatever_the_size(size: int) -> None:
    _, mesh = run(size, late_s=2.5, serve=memory)
    assert columns(mesh)["requests a rank"] <= 14
    assert columns(mesh)["most"] <= 40
    assert columns(mesh)["bytes a rank"] <= 2048


def test_a_mesh_of_five_axes_costs_no_more_than_one_of_three() -> None:
    _, mesh, again = run(16, num_axes=5, is_private=(False, False), serve=memory)
    assert columns(mesh)["requests a rank"] <= 12
    assert columns(again)["requests a rank"] <= 13
    assert columns(mesh)["bytes a rank"] <= 2048
