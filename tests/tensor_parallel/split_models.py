"""Small models, the plans that split them, and what one device makes of the same step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import meshdist as md

WHOLE_PLAN = {
    "embedding": "vocab",
    "layers.*.[qkv]": "column",
    "layers.*.o": "row",
    "layers.*.up": "column",
    "layers.*.down": "row",
    "head": "column_whole",
}
SEQUENCE_PLAN = {
    "embedding": "vocab_sequence",
    "layers.*.norm?": "reduced",
    "layers.*.[qkv]": "column_sequence",
    "layers.*.o": "row_sequence",
    "layers.*.up": "column_sequence",
    "layers.*.down": "row_sequence",
    "norm": "reduced",
    "head": "column_sequence_whole",
}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, and what is particular about it."""

    num_classes: int = 11
    heads: int = 2
    head_dim: int = 2
    hidden: int = 5
    layers: int = 1
    is_tied: bool = False
    has_bias: bool = True


class Block(nn.Module):
    """A layer of a transformer: attention and two products, each behind its norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, bias = sizes.heads * sizes.head_dim, sizes.has_bias
        self.head_dim = sizes.head_dim
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=bias) for _ in range(4))
        self.up = nn.Linear(width, sizes.hidden, bias=bias)
        self.down = nn.Linear(sizes.hidden, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        heads = [layer(y).unflatten(-1, (-1, self.head_dim)) for layer in (self.q, self.k, self.v)]
        q, k, v = (each.transpose(-2, -3) for each in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(-2, -3).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """Indices [..., place] -> logits [..., place, classes]."""

    def __init__(self, sizes: Sizes = Sizes()) -> None:
        super().__init__()
        width = sizes.heads * sizes.head_dim
        self.embedding = nn.Embedding(sizes.num_classes, width)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, sizes.num_classes, bias=sizes.has_bias and not sizes.is_tied)
        if sizes.is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.embedding(index)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def draw_text(sizes: Sizes, batch: int, length: int) -> torch.Tensor:
    """Return indices [batch, length + 1], equal on all ranks."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, sizes.num_classes, (batch, length + 1), generator=generator)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], text: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next index."""
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def make(sizes: Sizes = Sizes()) -> LanguageModel:
    """Return a model in float64, equal on all ranks."""
    md.seed(0)
    return LanguageModel(sizes).double()


def part_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the part of ``whole`` that a rank holds which has ``like`` as its parameter."""
    spec = md.typeof(like).spec
    if spec is None or not any(spec.partitions):
        return whole
    spec = md.P(*spec.partitions)  # a wrapper marks more
    sharding = md.NamedSharding(md.get_current_mesh(), spec)
    return md.shard(whole, sharding, check=False)  # type: ignore[no-any-return]


def difference(split: nn.Module, whole: nn.Module, mesh: md.DeviceMesh) -> float:
    """Return the largest difference of values and gradients from those of one device."""
    found = [0.0]
    with mesh:
        for mine, all_of_it in zip(split.parameters(), whole.parameters(), strict=True):
            assert mine.requires_grad == all_of_it.requires_grad
            found.append(distance(mine.detach(), part_of(all_of_it.detach(), mine)))
            if all_of_it.grad is None:
                assert mine.grad is None
            else:
                assert mine.grad is not None
                found.append(distance(mine.grad, part_of(all_of_it.grad, mine)))
    return max(found)


def distance(mine: torch.Tensor, other: torch.Tensor) -> float:
    assert mine.shape == other.shape
    return (mine - other).detach().abs().max().item() if mine.numel() else 0.0


def copied(module: Any) -> Any:
    """Return a copy, whose parameters have lost their marks."""
    return copy.deepcopy(module)
