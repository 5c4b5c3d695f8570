"""Backwards of every kind in any order leave the gradients that a few lines of arithmetic give.

Each weight's gradient of one backward is the rank's input. A synchronised backward leaves the mean
of what ranks have by then; every other one adds to what is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshdist as md

NUM_WEIGHTS = 3
Grads = list[list[float | None]]
"""By rank, and by weight."""


class Between(torch.autograd.Function):
    """Raises in the backward where it is told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, net: Net) -> torch.Tensor:
        ctx.net = net
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.net.fails:
            raise ZeroDivisionError
        return grad, None


class Net(nn.Module):
    """The last weight may be left out; the first may be computed again in the backward."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.ones(size, dtype=torch.float64) for _ in range(NUM_WEIGHTS)
        )
        self.fails = False

    def forward(self, x: torch.Tensor, is_cut: bool, is_checkpointed: bool) -> torch.Tensor:
        def first(x: torch.Tensor) -> torch.Tensor:
            return (x * self.weights[0]).sum()

        begun = checkpoint(first, x, use_reentrant=True) if is_checkpointed else first(x)
        total = Between.apply(begun, self) + Between.apply((x * self.weights[1]).sum(), self)
        return total if is_cut else total + (x * self.weights[2]).sum()


kinds = st.sampled_from(["step", "step", "again", "no_sync", "beside", "raise", "zero", "two"])
ranks = st.sets(st.integers(0, 4))
events = st.lists(st.tuples(kinds, ranks, st.integers(1, 9), st.booleans()), max_size=9)


def x_of(rank: int, number: int) -> float:
    return float(number + 10 * rank)


def expected(num_ranks: int, happened: list[tuple[str, set[int], int, bool]]) -> list[Grads]:
    """The contents of ``.grad`` behind each event."""
    grads: Grads = [[None] * NUM_WEIGHTS for _ in range(num_ranks)]
    last: tuple[set[int], int] | None = None
    seen = []

    def add(cut: set[int], number: int) -> None:
        for rank, mine in enumerate(grads):
            for place in range(NUM_WEIGHTS - (rank in cut)):
                mine[place] = (mine[place] or 0.0) + x_of(rank, number)

    def average() -> None:
        for place in range(NUM_WEIGHTS):
            found = [mine[place] for mine in grads]
            if any(one is not None for one in found):
                mean = sum(one or 0.0 for one in found) / num_ranks
                for mine in grads:
                    mine[place] = mean

    for kind, some, number, _ in happened:
        if kind == "again" and last is not None:
            add(*last)
            average()
        elif kind in ("step", "two"):
            add(some, number)
            if kind == "two":
                add(some, number)
            average()
            last = (some, number)
        elif kind in ("no_sync", "beside"):
            add(some, number)
        elif kind == "zero" or (kind == "raise" and any(rank in some for rank in range(num_ranks))):
            grads = [[None] * NUM_WEIGHTS for _ in range(num_ranks)]
        elif kind == "raise":
            add(set(), number)
            average()
        if kind == "raise":
            last = None
        seen.append([list(mine) for mine in grads])
    return seen


def run(size: int, happened: list[tuple[str, set[int], int, bool]], options: Any) -> list[Any]:
    rank = md.get_rank()
    net = Net(size)
    model = md.DDP(net, find_unused_parameters=True, verify_every=0, **options)
    kept: torch.Tensor | None = None
    seen = []
    for kind, some, number, is_checkpointed in happened:
        x = torch.tensor(x_of(rank, number), dtype=torch.float64, requires_grad=True)
        cut = rank in some

        def loss(
            forward: Callable[..., torch.Tensor],
            is_cut: bool = cut,
            x: torch.Tensor = x,
            is_again: bool = is_checkpointed,
        ) -> torch.Tensor:
            return forward(x, is_cut, is_again)

        if kind == "again" and kept is not None:
            kept.backward(retain_graph=True)
        elif kind == "step":
            kept = loss(model, is_again=False)
            kept.backward(retain_graph=True)
        elif kind == "two":
            kept = loss(model, is_again=False)
            (kept + loss(model, is_again=False)).backward(retain_graph=True)
        elif kind == "no_sync":
            with model.no_sync():
                loss(model).backward()
        elif kind == "beside":
            loss(net).backward()
        elif kind == "zero":
            model.zero_grad()
        elif kind == "raise":
            found = loss(model, is_cut=False, is_again=False)
            net.fails = cut
            with contextlib.suppress(ZeroDivisionError, md.errors.GradientError):
                found.backward()
            net.fails = False
            with contextlib.suppress(md.errors.GradientError):
                model.check_gradients()
            kept = None
        seen.append([None if p.grad is None else p.grad[0].item() for p in net.weights])
    return seen


def check(num_ranks: int, size: int, happened: Any, cap: float, as_views: bool) -> None:
    options = {"bucket_cap_mb": cap, "gradient_as_bucket_view": as_views}
    found = md.simulate(run, num_ranks, (size, happened, options))
    for rank, mine in enumerate(found):
        for number, grads in enumerate(mine):
            wanted = expected(num_ranks, happened)[number][rank]
            assert grads == pytest.approx(wanted), (rank, number, happened[number])


arguments = (
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from([1, 9_000]),
    events,
    st.sampled_from([1e-6, 25.0]),
    st.booleans(),
)


@given(*arguments)
def test_any_backwards_in_any_order(
    num_ranks: int, size: int, happened: Any, cap: float, as_views: bool
) -> None:
    check(num_ranks, size, happened, cap, as_views)


@pytest.mark.soak
@given(*arguments)
@settings(deadline=None, max_examples=2000)
def test_two_thousand_backwards(
    num_ranks: int, size: int, happened: Any, cap: float, as_views: bool
) -> None:
    check(num_ranks, size, happened, cap, as_views)
