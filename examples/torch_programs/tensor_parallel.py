"""torch's DTensor with tensor-parallel layers over shared memory.

    torchrun --nproc-per-node 2 examples/torch_programs/tensor_parallel.py
    torchrun --nproc-per-node 2 examples/torch_programs/tensor_parallel.py --backend gloo

The first layer is split by columns and the second by rows, so that one reduction per layer pair
and direction is enough. Both commands print the same losses.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import meshdist.torch_backends  # noqa: F401 (offers "shm" to torch)


def train(num_steps: int = 5) -> list[float]:
    """Return the loss, which all ranks share, step by step; then the sum of a gathered tensor."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(num_steps):
        x = torch.randn(32, 16)  # equal on all ranks
        loss = (model(x).squeeze(1) - x.sum(dim=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    squares = distribute_tensor(torch.arange(9.0), mesh, [Shard(0)]) ** 2
    return [*losses, squares.full_tensor().sum().item()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="shm")
    dist.init_process_group(parser.parse_args().backend)
    losses = train()
    if dist.get_rank() == 0:
        print("losses:", *losses)
    dist.destroy_process_group()
