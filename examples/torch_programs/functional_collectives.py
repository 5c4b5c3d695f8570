"""torch's functional collectives, which torch.compile can trace, over shared memory.

    torchrun --nproc-per-node 2 examples/torch_programs/functional_collectives.py
    torchrun --nproc-per-node 2 examples/torch_programs/functional_collectives.py --backend gloo

They return new tensors, which are waited for when they are first used. Both commands print the
same numbers.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh

import meshdist.torch_backends  # noqa: F401 (offers "shm" to torch)

if hasattr(funcol, "all_gather_single"):
    all_gather, reduce_scatter = funcol.all_gather_single, funcol.reduce_scatter_single
else:  # their names before torch 2.13
    all_gather, reduce_scatter = funcol.all_gather_tensor, funcol.reduce_scatter_tensor


def collect() -> list[list[float]]:
    """Return on every rank: a sum, a maximum, all parts, one part of a sum, and an exchange."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    mine = torch.arange(size * 1.0) + 10 * rank
    results = [
        funcol.all_reduce(mine, "sum", mesh),
        funcol.all_reduce(mine, "max", mesh),
        all_gather(mine, 0, mesh),
        reduce_scatter(mine, "sum", 0, mesh),
        funcol.all_to_all_single(mine, [1] * size, [1] * size, mesh),
        funcol.broadcast(mine, 1, mesh),
        *funcol.all_reduce_coalesced([mine, 2 * mine], "sum", mesh),
    ]
    return [funcol.wait_tensor(result).tolist() for result in results]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="shm")
    dist.init_process_group(parser.parse_args().backend)
    results = collect()
    if dist.get_rank() == 0:
        print("results:", *results)
    dist.destroy_process_group()
