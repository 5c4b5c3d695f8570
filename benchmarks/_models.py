"""The models that the benchmarks of training steps share, and one step of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn


class Transformer(nn.Module):
    """Eight layers on short sequences; of width 320: 10 million parameters in 99 tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))


class Many(nn.Module):
    """Weights of 1024 numbers: the cost of a parameter, not of a byte."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(1024) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self.weights)) * x


def mlp(width: int) -> nn.Module:
    """Four layers; of width 2500: 25 million parameters in 8 tensors."""
    return nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU()))
    )


@dataclass(frozen=True)
class Training:
    """A model to train.

    Args:
        make: a new model.
        make_input: one batch for it.
        num_steps: how many steps make a sample.
    """

    make: Callable[[], nn.Module]
    make_input: Callable[[], torch.Tensor]
    num_steps: int


def trainings(scale: int = 1) -> dict[str, Training]:
    """Every model; widths and counts are divided by ``scale``."""
    width, count = 2500 // scale, 2000 // scale
    return {
        "mlp": Training(partial(mlp, width), partial(torch.randn, 64, width), 2),
        "transformer": Training(
            partial(Transformer, 320 // scale), partial(torch.randint, 256, (4, 32)), 2
        ),
        "many": Training(partial(Many, count), partial(torch.randn, 1024), 6),
    }


MODELS = trainings()


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return what trains ``model`` by one step on ``x``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step
