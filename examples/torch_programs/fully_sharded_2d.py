"""torch's FSDP2 around its tensor parallelism, on a mesh (dp=2, tp=2), over shared memory.

    torchrun --nproc-per-node 4 examples/torch_programs/fully_sharded_2d.py
    torchrun --nproc-per-node 4 examples/torch_programs/fully_sharded_2d.py --backend gloo

Layers are split over tp, and what each rank then has of them is kept in parts over dp. The losses
are those of one process, which each run compares.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import meshdist.torch_backends  # noqa: F401 (offers "shm" to torch)


def make_model() -> nn.Sequential:
    """Return the model, with equal weights at every call."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh())
    return nn.Sequential(block, nn.Linear(16, 1), nn.Softplus())


def losses_of(model: nn.Module, place: int, num_places: int, num_steps: int) -> list[float]:
    """Train on this place's part of each batch, and return its losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draws = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(num_steps):
        x = torch.randn(32, 16, generator=draws).chunk(num_places)[place]
        loss = (model(x).squeeze(1) - x.abs().sum(dim=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(num_steps: int = 5) -> list[float]:
    """Return the mean loss over dp, step by step; raise if one process has others."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = make_model()
    parallelize_module(model, mesh["tp"], {"0.0": ColwiseParallel(), "0.2": RowwiseParallel()})
    fully_shard(model[0], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    mine = losses_of(model, mesh.get_local_rank("dp"), mesh["dp"].size(), num_steps)
    means = torch.tensor(mine)
    dist.all_reduce(means, dist.ReduceOp.AVG)
    torch.testing.assert_close(means, torch.tensor(losses_of(make_model(), 0, 1, num_steps)))
    return means.tolist()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="shm")
    dist.init_process_group(parser.parse_args().backend)
    losses = train()
    if dist.get_rank() == 0:
        print("losses:", *losses)
    dist.destroy_process_group()
