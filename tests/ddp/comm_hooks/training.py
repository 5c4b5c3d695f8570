"""A model of several buckets, trained by a few steps with a communication hook."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import meshdist as md

STEPS = 5
BUCKET_MB = 0.008

Registration = tuple[Any, Callable[..., Any]]
"""A state and a hook."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 8)
    )


def steps_of(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """Train, each rank on its own batches; return the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 32, generator=generator)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def trained(
    registration: Callable[[md.ProcessGroup], Registration] | None,
) -> list[torch.Tensor]:
    """The weights of this rank after some steps with our wrapper."""
    mesh = md.init_device_mesh("cpu", (md.get_world_size(),), mesh_dim_names=("dp",))
    model = md.DDP(make_model(), device_mesh=mesh["dp"], bucket_cap_mb=BUCKET_MB)
    if registration is not None:
        model.register_comm_hook(*registration(mesh.get_group("dp")))
    return steps_of(model, md.get_rank())


def sleeping(hook: Callable[..., Any], seed: int, longest_s: float) -> Callable[..., Any]:
    """``hook``, before which, and before the end of whose future, this rank sleeps at random."""
    draw = random.Random(seed).random

    def pause() -> None:
        time.sleep(draw() * longest_s)

    def sleepy(state: Any, bucket: md.GradBucket) -> Any:
        def wake(done: torch.futures.Future[Any]) -> Any:
            pause()
            return done.value()

        pause()
        return hook(state, bucket).then(wake)

    return sleepy


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The largest difference of two sets of weights."""
    return max((x - y).abs().max().item() for x, y in zip(one, other, strict=True))
