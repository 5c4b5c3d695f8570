"""torch's FSDP2, ``fully_shard``, over shared memory.

    torchrun --nproc-per-node 2 examples/torch_programs/fully_sharded.py
    torchrun --nproc-per-node 2 examples/torch_programs/fully_sharded.py --backend gloo

Each rank keeps a part of every parameter, gathers them layer by layer, and keeps its part of the
averaged gradients. Both commands print the same losses.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import meshdist.torch_backends  # noqa: F401 (offers "shm" to torch)


def train(num_steps: int = 5) -> list[float]:
    """Return the mean loss over the ranks, step by step."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    blocks = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in "ab"]
    model = nn.Sequential(*blocks, nn.Linear(32, 7), nn.Tanh())
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(num_steps):
        loss = model(torch.randn(4, 10, 32)).square().mean()
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
