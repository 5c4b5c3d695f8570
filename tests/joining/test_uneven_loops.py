"""Loops with unequally many steps and no model; what they answer is in tests/groups."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.errors import ArgumentError, KindError
from tests.pool import Pool


@pytest.mark.parametrize("uses_context", [False, True])
def test_all_ranks_leave_the_loop_together(uses_context: bool) -> None:
    def program() -> tuple[list[int], float]:
        def step(x: int) -> int:
            total = torch.tensor(x + 1)
            md.all_reduce(total)
            return int(total)

        data = range(1 + md.get_rank())
        if uses_context:
            with md.uneven(data) as mine:
                sums = [step(x) for x in mine]
        else:
            sums = [step(x) for x in md.uneven(data)]
        after = torch.ones(1)
        md.all_reduce(after)
        return sums, after.item()

    assert md.simulate(program, 3) == [([3], 3.0), ([3, 4], 3.0), ([3, 4, 3], 3.0)]


@pytest.mark.parametrize("uses_context", [False, True])
def test_an_object_serves_one_loop_after_the_other(uses_context: bool) -> None:
    def program() -> list[float]:
        loader = md.uneven(range(1 + md.get_rank()))
        sums = []
        for _ in range(3):
            with loader if uses_context else nullcontext():
                for _ in loader:
                    x = torch.ones(1)
                    md.all_reduce(x)
                    sums.append(x.item())
        return sums

    assert md.simulate(program, 2) == [[2.0] * 3, [2.0, 1.0] * 3]


def test_data_by_index_will_do() -> None:
    class Letters:
        def __getitem__(self, place: int) -> str:
            return "ab"[place]

    assert md.simulate(lambda: list(md.uneven(Letters())), 2) == [["a", "b"]] * 2  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [None, 5])
def test_what_cannot_be_looped_over_is_refused(data: Any) -> None:
    def program() -> str:
        if md.get_rank():
            return ""
        with pytest.raises(KindError) as caught:
            md.uneven(data)
        return str(caught.value)

    text = md.simulate(program, 2)[0]
    assert f"uneven() was given an object of type {type(data).__name__}" in text
    assert "expected: an iterable, for example a loader" in text
    assert "a rank that has no data passes an empty list: uneven([])" in text


@pytest.mark.parametrize("around", ["join", "uneven"])
def test_inside_a_join_context_it_is_refused(around: str) -> None:
    def program() -> str:
        model = md.DDP(nn.Linear(1, 1))
        context: Any = model.join() if around == "join" else md.uneven([1])
        with context, pytest.raises(ArgumentError) as caught:
            list(md.uneven([1, 2]))
        return str(caught.value)

    for rank, text in enumerate(md.simulate(program, 2)):
        assert text == (
            "uneven() was called inside a join context\n"
            f"  where:    rank {rank}, the world\n"
            "  expected: one join context at a time\n"
            "  fix:      loop over the data themselves: the context around it answers the "
            "collectives"
        )


def test_gradients_that_are_summed_in_the_loop_miss_ranks_and_behind_it_none() -> None:
    def program(way: str) -> float:
        mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        weight = torch.ones(1, requires_grad=True)
        weight.grad = torch.zeros(1)
        total = torch.zeros(1)
        for x in md.uneven(torch.arange(1.0, 5.0).split(1)[md.get_rank() :: 3], mesh["dp"]):
            if way == "lax":
                with mesh:
                    used = md.lax.pvary(weight, "dp")
                    md.lax.psum((used * x).sum(), "dp").backward()
                continue
            (weight * x).sum().backward()
            if way == "in the loop":
                md.all_reduce(weight.grad, group=mesh["dp"])
                total += weight.grad
                weight.grad.zero_()
        if way == "behind":
            md.all_reduce(weight.grad, group=mesh["dp"])
        return (total if way == "in the loop" else weight.grad).item()

    assert md.simulate(program, 3, ("behind",)) == [10.0] * 3
    for way in ("in the loop", "lax"):
        assert md.simulate(program, 3, (way,)) == [10.0, 6.0, 6.0]  # 1 + 2 + 3, and 4 on rank 0


@pytest.mark.parametrize("hosts", ["AAA", "ABA", "ABB"])
def test_a_rank_outside_of_the_loop_may_be_ahead_in_a_wider_group(pool: Pool, hosts: str) -> None:
    """Rank 2 waits in a call on the world, which no rank that has joined takes for the loop's."""

    def program() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        rank, x = md.get_rank(), torch.ones(2)
        md.all_reduce(x)
        if rank < 2:
            for _ in md.uneven(range(3 * rank), mesh["dp"]):
                time.sleep(0.1)
                md.all_reduce(torch.ones(1), group=mesh["dp"])
        md.all_reduce(x)
        return x.tolist()

    assert pool.run(program, 3, hosts=hosts) == [[9.0, 9.0]] * 3
