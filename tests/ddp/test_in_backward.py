"""Optimizers in the backward equal the same optimizers behind it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.errors import GradientError, KindError
from tests.ddp.models import Two

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns there of what it does itself
    from torch.distributed.optim import _apply_optimizer_in_backward

SGD = {"lr": 0.1, "momentum": 0.9}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 130)
        self.middle = nn.Linear(130, 130)  # large enough to move at once
        self.last = nn.Linear(130, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def mark(model: nn.Module, *, has_hooks: bool = False) -> None:
    _apply_optimizer_in_backward(
        torch.optim.SGD, list(model.parameters()), SGD, register_hook=has_hooks
    )


def inputs(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + md.get_rank())
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def train(how: str, options: dict[str, Any]) -> list[torch.Tensor]:
    net = Net()
    if how.startswith("marks before"):
        mark(net, has_hooks=how.endswith("with hooks"))
    model = md.DDP(net, **options)
    if how == "marks after":
        mark(model)
    if how == "fused":
        model._register_fused_optim(torch.optim.SGD, **SGD)
    optimizer = torch.optim.SGD(model.parameters(), **SGD) if how == "plain" else None
    for step in range(4):
        model.zero_grad()
        model(inputs(step)).mean().backward()
        if optimizer is not None:
            optimizer.step()
        elif how != "fused":
            assert all(p.grad is None for p in model.parameters())
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    "how", ["marks before", "marks before, with hooks", "marks after", "fused"]
)
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1e-3}, {"gradient_as_bucket_view": 0}])
def test_steps_in_the_backward_equal_a_plain_optimizers(how: str, options: dict[str, Any]) -> None:
    mine = md.simulate(train, 2, (how, options))
    theirs = md.simulate(train, 2, ("plain", options))
    for ours, plain in zip([*mine[0], *mine[1]], [*theirs[0], *theirs[1]], strict=True):
        assert torch.equal(ours, plain)


def test_marks_after_the_first_forward_are_refused() -> None:
    def program() -> str:
        net = Net()
        model = md.DDP(net)
        model(inputs(0)).mean().backward()
        mark(net)
        with pytest.raises(GradientError) as error:
            model(inputs(1))
        return str(error.value)

    for text in md.simulate(program, 2):
        assert text.startswith("an optimizer in the backward was noted on parameters after the")
        assert "expected: _apply_optimizer_in_backward called before the wrapper's first" in text


def test_only_the_marked_parameters_step_and_lose_their_gradients() -> None:
    def program() -> list[Any]:
        model = md.DDP(Two())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        _apply_optimizer_in_backward(
            torch.optim.SGD, [model.module.left.weight], {"lr": 0.5}, register_hook=False
        )
        model(torch.full((1, 1), 1.0 + md.get_rank())).backward()
        return [[p.item(), p.grad and p.grad.item()] for p in model.parameters()]

    assert md.simulate(program, 2) == [[[0.25, None], [1.0, 1.5]]] * 2


def test_a_fused_optimizer_steps_the_parameters_that_it_is_given() -> None:
    def program() -> list[Any]:
        model = md.DDP(Two())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        left = model.module.left.weight
        model._register_fused_optim(torch.optim.SGD, 0.5, optim_params=[left])
        model(torch.full((1, 1), 1.0 + md.get_rank())).backward()
        return [[p.item(), p.grad.item()] for p in model.parameters()]

    assert md.simulate(program, 2) == [[[0.25, 1.5], [1.0, 1.5]]] * 2


def test_a_parameter_that_no_rank_used_does_not_step() -> None:
    def program() -> list[float]:
        model = md.DDP(Two(), find_unused_parameters=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        _apply_optimizer_in_backward(
            torch.optim.SGD, list(model.parameters()), {"lr": 0.5}, register_hook=False
        )
        for _ in range(2):
            model(torch.ones(1, 1), use="left").backward()
        return [p.item() for p in model.parameters()]

    assert md.simulate(program, 2) == [[0.0, 1.0]] * 2


def test_several_optimizers_of_one_parameter_step_in_their_order() -> None:
    def program() -> float:
        model = md.DDP(nn.Linear(1, 1, bias=False))
        weight = model.module.weight
        with torch.no_grad():
            weight.fill_(1.0)
        for lr in (1.0, 0.5):
            _apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": lr}, register_hook=False)
        model(torch.ones(1, 1)).sum().backward()
        return weight.item()

    assert md.simulate(program, 2) == [-0.5, -0.5]


def refuse_no_sync_of_marks() -> None:
    model = md.DDP(Net())
    mark(model)
    model(inputs(0)).mean().backward()
    with model.no_sync():
        pass


def refuse_no_sync_of_marks_before_the_first_forward() -> None:
    net = Net()
    mark(net)
    model = md.DDP(net)
    with model.no_sync():
        model(inputs(0))


def refuse_no_sync_of_fused() -> None:
    model = md.DDP(Net())
    model._register_fused_optim(torch.optim.SGD, lr=0.1)
    with model.no_sync():
        pass


def refuse_two_fused() -> None:
    model = md.DDP(Net())
    for _ in range(2):
        model._register_fused_optim(torch.optim.SGD, lr=0.1)


def refuse_what_is_no_class() -> None:
    model = md.DDP(Net())
    model._register_fused_optim(torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("program", "kind", "text"),
    [
        *(
            (
                one,
                GradientError,
                "no_sync() cannot be used with an optimizer in the backward\n"
                "  expected: every backward averaged, since each one steps\n"
                "  fix:      step outside of the backward where gradients add up over several",
            )
            for one in (
                refuse_no_sync_of_marks,
                refuse_no_sync_of_marks_before_the_first_forward,
                refuse_no_sync_of_fused,
            )
        ),
        (
            refuse_two_fused,
            GradientError,
            "an optimizer in the backward was registered behind another one\n"
            "  expected: one optimizer in the backward, or a communication hook\n"
            "  fix:      make another DistributedDataParallel",
        ),
        (
            refuse_what_is_no_class,
            KindError,
            "  expected: a subclass of torch.optim.Optimizer\n"
            "  fix:      pass for example torch.optim.SGD, and its arguments behind it",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    program: Callable[[], None], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as error:
        md.simulate(program, 2)
    assert text in str(error.value)
