"""torch's DistributedDataParallel over shared memory: two lines differ from a Gloo program.

    torchrun --nproc-per-node 2 examples/torch_programs/data_parallel.py
    torchrun --nproc-per-node 2 examples/torch_programs/data_parallel.py --backend gloo

Every rank draws its own inputs; gradients are averaged in the backward. Both commands print the
same losses.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import meshdist.torch_backends  # noqa: F401 (offers "shm" to torch)


def train(num_steps: int = 5) -> list[float]:
    """Return the mean loss over the ranks, step by step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(num_steps):
        x = torch.randn(32, 16)
        loss = (model(x).squeeze(1) - x.sum(dim=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="shm")
    dist.init_process_group(parser.parse_args().backend)
    losses = train()
    if dist.get_rank() == 0:
        print("losses:", *losses)
    dist.destroy_process_group()
