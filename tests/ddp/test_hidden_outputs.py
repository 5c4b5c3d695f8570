"""A loss that the forward hides from the wrapper is averaged; one of other graphs stays local."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshdist as md
from tests.operations.cases import BACKENDS as WORLDS
from tests.pool import Pool

BACKENDS = [
    "simulated",
    "shm",
    "gloo",
    pytest.param("mpi", marks=pytest.mark.mpi),
    pytest.param("two hosts", marks=pytest.mark.soak),
]
KINDS = [
    "attribute",
    "attribute of a child",
    "object",
    "closure",
    "given dict",
    "given list",
    "derived and dropped",
    "checkpoint",
    "reentrant checkpoint",
    "penalty on the way",
]


class Box:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Net(nn.Module):
    """Returns a tensor whose graph reaches no parameter, next to a loss that it hides."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.first, self.second = kind, nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, given: Any) -> Any:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).tanh())

        y = (
            checkpoint(inner, x, use_reentrant="reent" in self.kind)
            if "check" in self.kind
            else inner(x)
        )
        loss = y.square().sum()
        beside = x * 1
        if self.kind == "attribute of a child":
            self.first.loss = loss
        elif self.kind == "object":
            return beside, Box(loss)
        elif self.kind == "closure":
            return beside, lambda: loss
        elif self.kind == "given dict":
            given["loss"] = loss
        elif self.kind == "given list":
            given.append(loss)
        else:
            self.loss = loss
        return beside, None


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    net: Any = model.module if isinstance(model, md.DDP) else model
    given: Any = {} if net.kind == "given dict" else []
    _, found = model(x, given)
    if net.kind == "attribute of a child":
        return net.first.loss
    if net.kind == "object":
        return found.loss
    if net.kind == "closure":
        return found()
    if net.kind == "given dict":
        return given["loss"]
    if net.kind == "given list":
        return given[0]
    loss, net.loss = net.loss, None
    if net.kind == "penalty on the way":
        return loss * 2 + sum(p.square().sum() for p in net.parameters())
    return loss * 3


def train(kinds: list[str], options: dict[str, Any]) -> list[str]:
    """Return the kinds whose gradients are not the average over all ranks."""
    wrong = []
    for kind in kinds:
        model, alone = md.DDP(Net(kind), **options), Net(kind)
        for step in range(4):
            model.zero_grad()
            alone.zero_grad()
            ranks = range(md.get_world_size())
            rows = [torch.full((1, 2), 1.0 + rank + step).requires_grad_() for rank in ranks]
            loss = loss_of(model, rows[md.get_rank()])
            loss.backward(retain_graph=step == 3)
            model.check_gradients()
            if step == 3:
                loss.backward()  # the second one is averaged, too
            for _ in range(1 + (step == 3)):
                for row in rows:
                    (loss_of(alone, row) / len(rows)).backward()
            pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
            if not all(torch.allclose(p.grad, q.grad) for p, q in pairs):
                wrong.append(f"{kind}, step {step}")
    return wrong


@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str
)
@pytest.mark.parametrize("size", [1, 3, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 5))])
def test_hidden_losses_are_averaged(size: int, options: dict[str, Any]) -> None:
    kinds = [kind for kind in KINDS if not (options and "check" in kind)]
    assert md.simulate(train, size, args=(kinds, options)) == [[]] * size


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_hidden_losses_are_averaged_on_every_backend(backend: str, size: int, pool: Pool) -> None:
    assert WORLDS[backend](pool, train, size, KINDS, {}) == [[]] * size


def local() -> list[float]:
    """Return gradients of backwards that pass no synchronised forward."""
    model, rank = md.DDP(Net("attribute")), md.get_rank()
    weight, found = model.module.second.bias, []
    for _ in range(3):
        model.zero_grad()
        loss_of(model, torch.ones(1, 2).requires_grad_()).backward()
    model.zero_grad()
    with model.no_sync():
        loss = loss_of(model, torch.full((1, 2), 1.0 + rank).requires_grad_())
    (loss * 0 + weight.sum() * rank).backward()
    found.append(weight.grad.item())
    model.zero_grad()
    (weight.sum() * (10 + rank)).backward()
    found.append(weight.grad.item())
    model.zero_grad()
    loss_of(model, torch.ones(1, 2).requires_grad_()).backward()
    total = weight.grad.clone()
    md.all_reduce(total)
    return [*found, round((total / md.get_world_size() - weight.grad).item(), 5)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.filterwarnings("ignore:.*its gradients stay local")
def test_other_losses_stay_local(size: int) -> None:
    found = md.simulate(local, size)
    assert found == [[rank, 10.0 + rank, 0.0] for rank in range(size)]
