"""Members are counted by blocks, and ask the store equally often however many they are."""

from __future__ import annotations

import pytest

from benchmarks.start_at_scale import columns, memory, run
from meshdist.groups.head_counts import blocks_of


def test_members_of_a_host_share_a_number_and_those_missing_are_read_from_it() -> None:
    blocks = blocks_of((1, 2, 5, 6, 7), (0, 0, 0, 0, 1, 1, 1, 1))
    assert [(block.name, block.ranks) for block in blocks] == [("0.0", (1, 2)), ("1.0", (5, 6, 7))]
    numbers = {"x/1.0": blocks[1].bit(5) + blocks[1].bit(7), "y/1.0": 0, "x/0.0": blocks[0].whole}
    assert blocks[1].find_absent(lambda key: numbers[key], ["x", "y"]) == [6]
    assert blocks[0].find_absent(lambda key: numbers[key], ["x"]) == []


def test_no_block_has_more_members_than_a_number_has_bits() -> None:
    blocks = blocks_of(tuple(range(130)), (3,) * 130)
    assert [len(block.ranks) for block in blocks] == [60, 60, 10]
    assert [block.name for block in blocks] == ["3.0", "3.1", "3.2"]
    assert all(0 < block.whole < 1 << 62 for block in blocks)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_a_world_and_a_mesh_cost_each_rank_few_requests_whatever_the_size(size: int) -> None:
    world, mesh, again = run(size, is_private=(False, False), serve=memory)
    assert columns(world)["requests a rank"] <= 13.5
    assert columns(world)["most"] <= 20
    for phase in (mesh, again):  # the second one shares all communicators
        assert columns(phase)["requests a rank"] <= 12
        assert columns(phase)["most"] <= 20
    for phase in (world, mesh, again):
        assert columns(phase)["bytes a rank"] <= 2048


@pytest.mark.parametrize("size", [4, 8, 16])
def test_a_late_rank_costs_the_others_few_requests_whatever_the_size(size: int) -> None:
    _, mesh = run(size, late_s=2.5, serve=memory)
    assert columns(mesh)["requests a rank"] <= 16
    assert columns(mesh)["most"] <= 40
    assert columns(mesh)["bytes a rank"] <= 2048


def test_a_mesh_of_five_axes_costs_no_more_than_one_of_three() -> None:
    _, mesh, again = run(16, num_axes=5, is_private=(False, False), serve=memory)
    assert columns(mesh)["requests a rank"] <= 12
    assert columns(again)["requests a rank"] <= 13
    assert columns(mesh)["bytes a rank"] <= 2048
