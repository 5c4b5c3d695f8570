"""torch's distributed checkpoint over shared memory: saved sharded, loaded on another layout.

    torchrun --nproc-per-node 2 examples/torch_programs/checkpoint.py
    torchrun --nproc-per-node 2 examples/torch_programs/checkpoint.py --backend gloo

Each rank writes what it holds; the loading model is sharded along the other dimension. Prints how
many of the parameters came back as they were.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import meshdist.torch_backends  # noqa: F401 (offers "shm" to torch)


def save_and_load() -> list[float]:
    """Return what was saved, as it was loaded: the sum of each parameter."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    whole = {"weight": torch.randn(8, 6), "bias": torch.randn(5)}
    saved = {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in whole.items()}
    with tempfile.TemporaryDirectory() as folder:  # that of rank 0 is everybody's
        names = [folder]
        dist.broadcast_object_list(names)
        dcp.save(saved, checkpoint_id=names[0])
        loaded = {
            "weight": distribute_tensor(torch.zeros(8, 6), mesh, [Shard(1)]),
            "bias": distribute_tensor(torch.zeros(5), mesh, [Shard(0)]),
        }
        dcp.load(loaded, checkpoint_id=names[0])
        dist.barrier()
    found = {name: x.full_tensor() for name, x in loaded.items()}
    assert all(found[name].equal(x) for name, x in whole.items())
    return [x.sum().item() for x in found.values()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="shm")
    dist.init_process_group(parser.parse_args().backend)
    sums = save_and_load()
    if dist.get_rank() == 0:
        print("sums:", *sums)
    dist.destroy_process_group()
