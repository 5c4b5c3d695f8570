"""Local SGD: averages over all for some steps, then over some, or over none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.ddp.comm_hooks.registered_hooks import RegisteredHook
from tests.pool import Pool


def steps(state: Any, count: int = 4) -> list[float]:
    """What each of some steps makes of this rank's number."""
    world, found = md.group.WORLD, []
    registered = RegisteredHook(state, md.comm_hooks.post_localSGD_hook, world)
    for _ in range(count):
        x = torch.tensor([1.0 * md.get_rank()])
        registered.start(md.GradBucket(x, [x], [x], 0, True, world)).wait()
        found.append(x.item())
    return found


@pytest.mark.parametrize("is_mesh", [False, True])
def test_a_subgroup_of_the_programs(is_mesh: bool) -> None:
    def program() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "local"))
        subgroup = mesh["local"] if is_mesh else mesh.get_group("local")
        return steps(md.comm_hooks.PostLocalSGDState(None, subgroup, 2))

    assert md.simulate(program, 4) == [[1.5, 1.5, 0.5, 0.5]] * 2 + [[1.5, 1.5, 2.5, 2.5]] * 2


def test_no_averages_after_some_steps() -> None:
    def program() -> list[float]:
        return steps(md.comm_hooks.PostLocalSGDState(None, None, 3, False))

    assert md.simulate(program, 2) == [[0.5, 0.5, 0.5, 0.0], [0.5, 0.5, 0.5, 1.0]]


def test_without_a_subgroup_it_is_the_group_where_all_are_on_one_host() -> None:
    def program() -> bool:
        state = md.comm_hooks.PostLocalSGDState(None, None, 1)
        assert steps(state) == [1.0] * 4
        return state.subgroup is md.group.WORLD

    assert md.simulate(program, 3) == [True] * 3


def test_without_a_subgroup_it_is_the_ranks_of_each_host(pool: Pool) -> None:
    def program() -> tuple[list[float], tuple[int, ...]]:
        state = md.comm_hooks.PostLocalSGDState(None, None, 1)
        return steps(state, 3), state.subgroup.ranks

    assert pool.run(program, 3, hosts="aab") == [
        ([1.0, 0.5, 0.5], (0, 1)),
        ([1.0, 0.5, 0.5], (0, 1)),
        ([1.0, 2.0, 2.0], (2,)),
    ]
