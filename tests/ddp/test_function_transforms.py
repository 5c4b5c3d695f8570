"""torch.func transforms a wrapped model with buffers in its inputs, and training goes on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, vmap

import meshdist as md
from meshdist.errors import GradientError
from tests.operations.cases import BACKENDS as WORLDS
from tests.pool import Pool

BACKENDS = [
    "simulated",
    "shm",
    "gloo",
    pytest.param("mpi", marks=pytest.mark.mpi),
    pytest.param("two hosts", marks=pytest.mark.soak),
]


class Scaled(nn.Module):
    """A layer whose output is multiplied by a buffer, in which ranks differ before a forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(2, 3)
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh() * self.scale


def transformed(*, is_forward: bool) -> list[str]:
    """Return what differs from the model without a wrapper, or between the ranks behind it."""
    model, alone = md.DDP(Scaled()), Scaled()
    rows = torch.arange(6.0).view(3, 2)
    runs = {
        "jacrev": lambda net: jacrev(net)(rows[0]),
        "grad": lambda net: grad(lambda x: net(x).sum())(rows[0]),
        "vmap": lambda net: vmap(net)(rows),
        "vmap of jacrev": lambda net: vmap(jacrev(net))(rows),
        "jacfwd": lambda net: jacfwd(net)(rows[0]) if is_forward else torch.zeros(1),
    }
    wrong = []
    for name, run in runs.items():
        model.module.scale.fill_(2.0 + md.get_rank())
        if not torch.allclose(run(model), run(alone)):
            wrong.append(name)
    for step in range(3):
        model.zero_grad()
        model(rows * (md.get_rank() + step)).sum().backward()
        model.check_gradients()
    mean = model.module.inner.weight.grad.clone()
    md.all_reduce(mean)
    mean /= md.get_world_size()
    return wrong + ["training"] * (not torch.allclose(mean, model.module.inner.weight.grad))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_models_with_buffers_are_transformed(backend: str, size: int, pool: Pool) -> None:
    def program() -> list[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates what its forward mode compiles by
            return transformed(is_forward=backend != "simulated")

    assert WORLDS[backend](pool, program, size) == [[]] * size


def wrapped_buffers(make: Any) -> Any:
    model = make(Scaled())
    state = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x = torch.ones(1, 2)
    return grad(lambda given: functional_call(model, {**state, **given}, (x,)).sum())(buffers)


def test_transforms_of_buffers_raise() -> None:
    def program() -> str:
        with pytest.raises(GradientError) as caught:
            wrapped_buffers(md.DDP)
        return str(caught.value)

    assert md.simulate(program, 2) == [
        "torch.func cannot transform a DistributedDataParallel that broadcasts buffers\n"
        f"  where:    rank {rank}, the world\n"
        "  expected: a transform of inputs or parameters only, since each forward overwrites "
        "the buffers\n"
        "  fix:      wrap the model with forward_sync_buffers=False, or transform "
        "model.module instead of model"
        for rank in range(2)
    ]


def test_the_fixes_of_that_error() -> None:
    def program() -> list[float]:
        found = [
            wrapped_buffers(lambda net: md.DDP(net, forward_sync_buffers=False)),
            wrapped_buffers(lambda net: md.DDP(net).module),
        ]
        return [next(iter(grads.values())).item() for grads in found]

    for first, second in md.simulate(program, 2):
        assert first == second != 0
