"""The training step of examples/train_lm.py; of meshdist it uses public names alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_lm

import meshdist as md

DP = TP = 2
AXES = ("dp", "tp")

Step = Callable[[], torch.Tensor]


def make_mesh() -> md.DeviceMesh:
    """Make the demo's mesh."""
    return md.init_device_mesh("cpu", (DP, TP), mesh_dim_names=AXES)


def arguments_of(words: Sequence[str] = ()) -> argparse.Namespace:
    """Read options of train_lm.py; the text is the documentation that CPython carries."""
    return train_lm.parse(words)


def share_of_batch(args: argparse.Namespace, rank: int) -> torch.Tensor:
    """A rank's share of the first batch."""
    text = train_lm.read_text(None)[: args.batch * (args.context + 1)]
    return text.view(args.batch, -1).long().tensor_split(DP)[rank // TP]


def our_model(args: argparse.Namespace, mesh: md.DeviceMesh) -> nn.Module:
    """The demo's model, wrapped by DistributedDataParallel."""
    torch.manual_seed(args.seed)
    model = train_lm.GPT(args.layers, args.width, args.heads)
    md.parallelize(model, mesh["tp"], train_lm.PLAN)
    return md.DistributedDataParallel(model, device_mesh=mesh["dp"])


def step_of(model: nn.Module, batch: torch.Tensor, lr: float) -> Step:
    """Return what trains ``model`` by one step on ``batch``, and returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))

    def step() -> torch.Tensor:
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
