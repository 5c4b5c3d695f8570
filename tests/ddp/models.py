"""Models whose gradients may be lacking, or whose backward may raise."""

from __future__ import annotations

import torch
from torch import nn


class Two(nn.Module):
    """Two heads, to leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(1, 1, bias=False)
        self.right = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor, use: str = "both") -> torch.Tensor:
        total = torch.zeros(())
        if use in ("left", "both"):
            total = total + self.left(x).sum()
        if use in ("right", "both"):
            total = total + self.right(x).sum()
        return total


class Fragile(nn.Module):
    """Its backward raises between two layers where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.second = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.first.weight)
        nn.init.ones_(self.second.weight)

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        x = self.first(x)
        if fails:
            x.register_hook(self.fail)
        return self.second(x)

    def fail(self, _: torch.Tensor) -> None:
        raise ArithmeticError("no more memory, say")
