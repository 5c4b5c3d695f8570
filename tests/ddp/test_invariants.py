"""A step of the wrapper equals what two oracles say, over models, options and what ranks leave out.

The first oracle reduces each parameter alone, at the end: the mean of the ranks' gradients, where a
rank without one counts as zeros; a parameter that no rank has a gradient of is left as it is. The
second is one device with the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshdist as md
from tests.pool import Pool

Run = Callable[..., list[Any]]
SIZES = [(3, 4), (150, 120), (5,), (2, 3), (130, 130), (1,)]  # two of them are moved at once


class Parts(nn.Module):
    """Uses those of its parameters that it is told to, each so often, in a given order."""

    def __init__(self, num: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.parts = nn.ParameterList(
            torch.randint(-4, 5, SIZES[i % len(SIZES)], generator=generator, dtype=torch.float64)
            for i in range(num)
        )

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return x * self.parts[index].sum()

    def forward(self, x: torch.Tensor, plan: list[tuple[int, str]]) -> torch.Tensor:
        total = x.clone()
        for index, how in plan:
            if how == "plain":
                total = total + self.part(x, index)
            else:
                total = total + checkpoint(
                    self.part, x, index, use_reentrant=how == "reentrant", preserve_rng_state=False
                )
        return total


@dataclass(frozen=True)
class Step:
    """What one rank does in one step: forwards, each with its own plan; which are synchronised."""

    plans: tuple[tuple[tuple[int, str], ...], ...]


@dataclass(frozen=True)
class Case:
    num_ranks: int
    num_parameters: int
    caps: tuple[float, ...]
    as_views: bool
    keeps: str  # what happens to gradients before a step: "none", "zero" or "keep"
    accumulates: tuple[int, ...]  # of each step: how many forwards come first under no_sync
    steps: tuple[tuple[Step, ...], ...]  # [step][rank]


@st.composite
def cases(draw: st.DrawFn, varies: str) -> Case:
    """``varies``: "never", "by rank", or "by step" (and by rank)."""
    num_ranks = draw(st.integers(1, 4))
    num = draw(st.integers(1, 8))
    hows = st.sampled_from(["plain", "plain", "checkpoint"])
    if varies != "by step":  # how often a hook runs in a backward must not change
        hows |= st.just("reentrant")
    subset = st.lists(st.tuples(st.integers(0, num - 1), hows), min_size=1, max_size=num + 2)
    every = st.permutations(range(num)).flatmap(
        lambda order: st.tuples(*(st.tuples(st.just(i), hows) for i in order))
    )
    whole = st.tuples(every, st.lists(st.tuples(st.integers(0, num - 1), hows), max_size=2)).map(
        lambda parts: [*parts[0], *parts[1]]
    )
    num_steps = draw(st.integers(2, 5))
    accumulates = tuple(draw(st.integers(0, 2)) for _ in range(num_steps))
    plans = whole if varies == "never" else subset
    fixed = [draw(plans) for _ in range(num_ranks)]
    steps = []
    for count in accumulates:
        ranks = []
        for rank in range(num_ranks):
            one = fixed[rank]
            if varies == "by step":
                one = draw(plans)
            ranks.append(Step(tuple(tuple(one) for _ in range(count + 1))))
        steps.append(tuple(ranks))
    return Case(
        num_ranks,
        num,
        tuple(draw(st.lists(st.sampled_from([1e-6, 1e-4, 0.05, 25.0]), min_size=1, max_size=3))),
        draw(st.booleans()),
        draw(st.sampled_from(["none", "zero", "keep"])),
        accumulates,
        tuple(steps),
    )


def x_of(rank: int, step: int, forward: int) -> torch.Tensor:
    return torch.full((2,), 1.0 + rank + 2 * step + forward, dtype=torch.float64)


def clear(model: nn.Module, keeps: str) -> None:
    if keeps != "keep":
        model.zero_grad(set_to_none=keeps == "none")


def train(case: Case, options: dict[str, Any]) -> list[list[Any]]:
    rank = md.get_rank()
    model = md.DDP(
        Parts(case.num_parameters),
        bucket_cap_mb_list=list(case.caps),
        gradient_as_bucket_view=case.as_views,
        **options,
    )
    seen = []
    for number, ranks in enumerate(case.steps):
        clear(model, case.keeps)
        *local, last = ranks[rank].plans
        with model.no_sync():
            for place, plan in enumerate(local):
                model(x_of(rank, number, place).requires_grad_(), list(plan)).sum().backward()
        model(x_of(rank, number, len(local)).requires_grad_(), list(last)).sum().backward()
        seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return seen


def oracle(case: Case) -> list[list[Any]]:
    """The same with one model a rank, each parameter averaged alone at the end."""
    models = [Parts(case.num_parameters) for _ in range(case.num_ranks)]
    seen = []
    for number, ranks in enumerate(case.steps):
        for rank, model in enumerate(models):
            clear(model, case.keeps)
            for place, plan in enumerate(ranks[rank].plans):
                model(x_of(rank, number, place).requires_grad_(), list(plan)).sum().backward()
        for replicas in zip(*(model.parameters() for model in models), strict=True):
            found = [p.grad for p in replicas if p.grad is not None]
            if found:
                mean = sum(found) / case.num_ranks
                for p in replicas:
                    p.grad = mean.clone()
        seen.append([None if p.grad is None else p.grad.clone() for p in models[0].parameters()])
    return seen


def simulated(fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    return md.simulate(fn, num_ranks, args)


def check(case: Case, run: Run = simulated, **options: Any) -> None:
    expected = oracle(case)
    for seen in run(train, case.num_ranks, case, options):
        for number, (mine, theirs) in enumerate(zip(seen, expected, strict=True)):
            for index, (grad, right) in enumerate(zip(mine, theirs, strict=True)):
                assert (grad is None) == (right is None), (number, index)
                if grad is not None:
                    torch.testing.assert_close(
                        grad, right, rtol=1e-14, atol=0, msg=f"{number, index}"
                    )


def check_never(case: Case) -> None:
    check(case)


def check_by_step(case: Case) -> None:
    check(case, find_unused_parameters=True)


def check_by_rank(case: Case) -> None:
    check(case, static_graph=True)


LAWS = {"never": check_never, "by step": check_by_step, "by rank": check_by_rank}


@settings(max_examples=15)
@given(cases("never"))
def test_every_step_is_the_mean_over_the_ranks(case: Case) -> None:
    check_never(case)


@given(cases("by step"))
def test_parameters_may_be_left_out_by_any_rank_in_any_step(case: Case) -> None:
    check_by_step(case)


@settings(max_examples=15)
@given(cases("by rank"))
def test_a_static_graph_may_leave_out_what_it_left_out_at_first(case: Case) -> None:
    check_by_rank(case)


@settings(max_examples=6)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize(
    ("varies", "options"),
    [
        ("never", {}),
        ("by step", {"find_unused_parameters": True}),
        ("by rank", {"static_graph": True}),
    ],
)
@given(st.data())
def test_the_laws_hold_on_processes(
    pool: Pool, backend: str, varies: str, options: dict[str, bool], data: st.DataObject
) -> None:
    check(data.draw(cases(varies)), partial(pool.run, backend=backend), **options)


@pytest.mark.soak
@pytest.mark.parametrize("varies", [*LAWS])
def test_the_laws_hold_for_many_models(varies: str) -> None:
    settings(max_examples=1000)(given(cases(varies))(LAWS[varies]))()
