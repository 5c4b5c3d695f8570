"""torch's ZeroRedundancyOptimizer on the gradients of meshdist's DDP, over shared memory.

    torchrun --nproc-per-node 2 examples/torch_programs/zero_with_our_ddp.py
    torchrun --nproc-per-node 2 examples/torch_programs/zero_with_our_ddp.py --backend gloo

Each rank keeps the state of the optimizer for a part of the parameters. The losses are those of one
process, which each run compares.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import meshdist as md
import meshdist.torch_backends  # offers "shm" to torch


def make_model() -> nn.Sequential:
    """Return the model, with equal weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))


def losses_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, place: int, num_places: int, num_steps: int
) -> list[float]:
    """Train on this place's part of each batch, and return its losses."""
    draws = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(num_steps):
        x = torch.randn(32, 16, generator=draws).chunk(num_places)[place]
        loss = (model(x).squeeze(1) - x.sum(dim=1)).square().mean()
        loss.backward()
        optimizer.step()
        model.zero_grad()  # ZeRO's zero_grad knows its own parameters alone
        losses.append(loss.item())
    return losses


def train(num_steps: int = 5) -> list[float]:
    """Return the mean loss over the ranks, step by step; raise if one process has others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = md.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))  # adopts torch's world
    model = md.DDP(make_model(), device_mesh=mesh["dp"])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    means = torch.tensor(losses_of(model, optimizer, rank, size, num_steps))
    dist.all_reduce(means, dist.ReduceOp.AVG)
    alone = make_model()
    adam = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    torch.testing.assert_close(means, torch.tensor(losses_of(alone, adam, 0, 1, num_steps)))
    md.distributed.destroy_process_group()  # ours; torch's goes on
    return means.tolist()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="shm")
    dist.init_process_group(parser.parse_args().backend)
    losses = train()
    if dist.get_rank() == 0:
        print("losses:", *losses)
    dist.destroy_process_group()
