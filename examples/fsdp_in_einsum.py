"""Fully sharded training (FSDP) as one line per layer: no wrapper, no hook.

    meshdist run -n 4 examples/fsdp_in_einsum.py --check
    torchrun --nproc-per-node 2 examples/fsdp_in_einsum.py --keep

Each rank stores its rows of every matrix, with their gradient and their optimizer's state. A layer
gathers the matrix for its product and drops it, gathers it again in the backward, and scatters the
summed gradient. ``--keep`` keeps what was gathered until the backward. ``--check`` also trains the
whole model on the whole batch on each rank, and exits with 1 if the weights differ.
"""

import argparse
import itertools
import sys

import torch
from torch import nn

import meshdist as md

BATCH, WIDTHS = 24, (8, 32, 32, 4)
LIMIT = 1e-9  # largest difference allowed; the numbers are float64


class Sharded(nn.Module):
    """A stack of linear maps, each of which is cut over dp."""

    def __init__(self, mesh: md.DeviceMesh, *, regather: bool) -> None:
        super().__init__()
        self.mesh, self.regather = mesh, regather
        self.weights = nn.ParameterList(md.shard(w, "d@dp f", mesh) for w in draw())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for w in self.weights:
            line = "b@dp d, d@dp f -> b@dp f"
            x = md.einsum(line, x, w, mesh=self.mesh, regather=self.regather).tanh()
        return x


def draw() -> list[torch.Tensor]:
    """Return the matrices, which every rank draws alike."""
    generator = torch.Generator().manual_seed(0)
    sizes = itertools.pairwise(WIDTHS)
    return [torch.randn(*s, generator=generator, dtype=torch.float64) / s[0] ** 0.5 for s in sizes]


def batches() -> list[torch.Tensor]:
    """Return the batches, equal on all ranks."""
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(BATCH, WIDTHS[0], generator=generator, dtype=torch.float64) for _ in "12345"]


def train(mesh: md.DeviceMesh, *, regather: bool = True) -> tuple[Sharded, float]:
    """Train on the mesh; return this rank's part of the model, and the last loss."""
    model = Sharded(mesh, regather=regather)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = torch.zeros(())
    for whole in batches():
        x = md.shard(whole, "b@dp d", mesh)
        loss = model(x).square().sum() / BATCH  # the whole loss is the sum of the ranks' losses
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, md.lax.psum(loss.detach(), "dp", mesh=mesh).item()


def difference(model: Sharded, mesh: md.DeviceMesh) -> float:
    """Train alone with whole matrices; return the largest difference of weights on any rank."""
    weights = [w.requires_grad_() for w in draw()]
    optimizer = torch.optim.Adam(weights, lr=0.01)
    for x in batches():
        for w in weights:
            x = (x @ w).tanh()
        optimizer.zero_grad()
        (x.square().sum() / BATCH).backward()
        optimizer.step()
    off = torch.zeros((), dtype=torch.float64)
    for mine, whole in zip(model.weights, weights, strict=True):
        wanted = md.shard(whole.detach(), "d@dp f", mesh)
        off = torch.maximum(off, (mine.detach() - wanted).abs().max())
    md.all_reduce(off, md.ReduceOp.MAX)
    return off.item()


def main() -> int:
    """Make the mesh, train, and compare where that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="keep gathered matrices")
    parser.add_argument("--check", action="store_true", help="compare with one rank")
    options = parser.parse_args()
    torch.set_num_threads(1)
    md.init_process_group()
    mesh = md.init_device_mesh("cpu", (md.get_world_size(),), mesh_dim_names=("dp",))
    if BATCH % mesh.size() or any(width % mesh.size() for width in WIDTHS[:-1]):
        raise SystemExit(f"{mesh.size()} ranks cannot share {BATCH} rows and widths {WIDTHS}")
    model, loss = train(mesh, regather=not options.keep)
    off = difference(model, mesh) if options.check else 0.0
    if md.get_rank() == 0:
        print(f"dp={mesh.size()}: loss {loss:.6f} after 5 steps")
        if options.check:
            print(f"difference from one rank: {off:.1e}")
    md.destroy_process_group()
    return int(not off <= LIMIT)  # NaN, too


if __name__ == "__main__":
    sys.exit(main())
