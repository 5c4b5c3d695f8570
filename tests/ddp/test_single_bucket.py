"""Large gradients are averaged where they lie, unless somebody else reads the memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.ddp.buckets import Averaging, Bucket, BucketState, Pending
from meshdist.ddp.unbucketed_gradients import InPlace
from tests.pool import Pool

SIDE = 1500  # 9 MB a parameter: sent without a bucket where ranks share no memory
Forward = Callable[["Large", torch.Tensor], torch.Tensor]


class Done:
    def wait(self) -> None:
        """Nothing was sent."""


def sent_of(parameter: nn.Parameter) -> torch.Tensor:
    """What is sent of its gradient; which gets that back."""
    sent = []

    def average(tensor: torch.Tensor) -> Pending:
        sent.append(tensor)
        return Done()

    averaging = Averaging(None, 0.5, average)
    bucket = Bucket.of_one(0, parameter, InPlace(), averaging, is_deferred=False)
    bucket_state = BucketState(bucket)
    bucket_state.take()
    bucket.copy_mode.start(bucket_state).wait()
    bucket.copy_mode.give(bucket_state, None, is_complete=True, share=1.0)
    assert parameter.grad is sent[0]
    return sent[0]


def test_a_gradient_with_memory_of_its_own_is_not_copied() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    parameter.grad = grad = torch.full((3, 2), 4.0)
    assert sent_of(parameter) is grad
    assert grad.tolist() == [[2.0, 2.0]] * 3, "scaled once"


def test_memory_that_another_tensor_has_is_left_alone() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    others = torch.full((6,), 4.0)
    parameter.grad = others.view(3, 2)
    assert sent_of(parameter).tolist() == [[2.0, 2.0]] * 3
    assert others.tolist() == [4.0] * 6


def test_zeros_without_memory_are_sent_as_numbers() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    parameter.grad = torch._efficientzerotensor((3, 2))
    sent = sent_of(parameter)
    assert sent.data_ptr() != 0 and sent.tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("lacks", [False, True])
def test_all_ranks_send_one_layout_whatever_their_gradients_have(lacks: bool) -> None:
    parameter = nn.Parameter(torch.ones(4, 3).t()[:, ::2])  # of 3 by 2, with gaps
    if not lacks:
        parameter.grad = torch.arange(2.0).expand(3, 2)
    sent = sent_of(parameter)
    assert sent.stride() == (2, 1)
    assert sent.tolist() == ([[0.0, 0.0]] * 3 if lacks else [[0.0, 0.5]] * 3)


class Large(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(SIDE, SIDE)) for _ in range(2))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


def both_parameters(model: Large, x: torch.Tensor) -> torch.Tensor:
    return (model.a.view(-1) + model.b.view(-1)) * x  # their gradients share memory


def also_read_later(model: Large, x: torch.Tensor) -> torch.Tensor:
    earlier = (model.b * x).sin()  # its gradient shares memory with that of a
    return earlier.view(-1) + model.a.view(-1)


def train(forward: Forward) -> list[list[float]]:
    model = md.DDP(Large(forward))
    seen = []
    for _ in range(3):
        model.zero_grad()
        out = model(torch.tensor(1.0))
        (out * torch.full_like(out, 1.0 + md.get_rank())).sum().backward()
        seen.append([p.grad[0, 0].item() for p in model.parameters()])
    return seen


@pytest.mark.parametrize(
    ("forward", "right"),
    [
        (both_parameters, [1.5, 1.5]),
        (also_read_later, [1.5, 1.5 * torch.tensor(1.0).cos().item()]),
    ],
)
def test_gradients_that_share_memory_are_averaged_once(
    pool: Pool, forward: Forward, right: list[float]
) -> None:
    for seen in pool.run(train, 2, forward, backend="gloo"):
        for step in seen:
            assert step == pytest.approx(right)
