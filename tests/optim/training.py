"""A model that meshes of (pod, dp, tp) train in float64, and its training by one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import meshdist as md

AXES = ("pod", "dp", "tp")
SHAPES = [(1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 2, 2), (2, 1, 2), (2, 2, 3)]
STEPS = 6
Make = Callable[[nn.Module, Any], torch.optim.Optimizer]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 17), nn.Linear(17, 8)
        self.whole = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.whole(self.down(torch.tanh(self.up(x))))
        return y


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 8, generator=generator, dtype=torch.float64)
    return x, torch.randn(24, 5, generator=generator, dtype=torch.float64)


def new_model() -> Mlp:
    torch.manual_seed(0)
    return Mlp().double()


def alone(make: Make) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The oracle: the losses and parameters of one process."""
    model, (x, target), losses = new_model(), data(), []
    optimizer = make(model, None)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def together(shape: Sequence[int], make: Make, is_typed: bool = False) -> float:
    """The largest difference from ``alone`` (with the same ``make``), of losses and parameters."""
    wanted, whole = alone(make)
    mesh = md.init_device_mesh("cpu", tuple(shape), mesh_dim_names=AXES)
    model, (x, target) = new_model(), data()
    md.parallelize(model, mesh["tp"], {"up": "column", "down": "row"})
    ddp = md.DDP(model, device_mesh=mesh["pod", "dp"])
    optimizer = make(model, mesh)
    x, target = (md.shard(each, "b@(pod,dp) d", mesh) for each in (x, target))
    differences = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if is_typed:
            with md.typed(mesh):
                loss = F.mse_loss(ddp(x), target)
                loss.backward()
                optimizer.step()
        else:
            loss = F.mse_loss(ddp(x), target)
            loss.backward()
            optimizer.step()
        mean = loss.detach().clone()
        md.all_reduce(mean, op=md.ReduceOp.AVG, group=mesh["pod", "dp"])
        differences.append(abs(mean.item() - wanted[step]))
    for name, p in model.named_parameters():
        found = md.unshard(p.detach(), like=p, mesh=mesh) if md.typeof(p).cut_dims else p.detach()
        differences.append(float((found - whole[name]).abs().max()))
    return max(differences)
