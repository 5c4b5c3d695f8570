"""Data and layers split over a (dp, tp) mesh: plain modules, no wrapper, no hook.

    meshdist run -n 4 examples/no_wrapper.py --check
    torchrun --nproc-per-node 6 examples/no_wrapper.py --tp 3

The program says which tensors differ between ranks, a share of the batch and blocks of weights, and
sums where a split layer ends. ``md.typed`` adds what each backward needs besides. ``--check`` also
trains the whole model on the whole batch on one rank, and exits with 1 if the weights differ.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import nn

import meshdist as md

BATCH, HIDDEN = 24, 60
LIMIT = 1e-9  # largest difference allowed; the numbers are float64


class Block(nn.Module):
    """Norm and MLP; over tp each rank has some of the hidden units."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + md.lax.psum(self.down(F.gelu(self.up(self.norm(x)))), "tp")


def part(whole: torch.Tensor, dim: int, axis: md.DeviceMesh) -> torch.Tensor:
    """This rank's part of what every rank drew alike."""
    return whole.detach().chunk(axis.size(), dim)[axis.get_local_rank()].clone()


def split(layer: nn.Linear, dim: int, tp: md.DeviceMesh) -> None:
    """Leave this rank its part of the outputs (dim 0) or the inputs (dim 1)."""
    for name, whole in layer.named_parameters():
        mine = nn.Parameter(part(whole, dim, tp))
        setattr(layer, name, md.annotate(mine, varying="tp"))


def train(mesh: md.DeviceMesh, *, is_typed: bool = True) -> tuple[nn.Module, float]:
    """Train on the mesh; return this rank's model, and the last loss."""
    torch.manual_seed(0)  # every rank draws alike, and then takes its part
    model = nn.Sequential(nn.Linear(2, 16), Block(16), Block(16), nn.Linear(16, 1)).double()
    for block in model[1:3]:
        split(block.up, 0, mesh["tp"])
        split(block.down, 1, mesh["tp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        points = torch.rand(BATCH, 2, dtype=torch.float64)
        x = md.annotate(part(points, 0, mesh["dp"]), varying="dp")
        with md.typed(mesh) if is_typed else mesh:
            loss = F.mse_loss(model(x), x.prod(1, keepdim=True).sin())
            loss = md.lax.pmean(loss, "dp")
            optimizer.zero_grad()
            loss.backward()  # complete: over dp for all weights, over tp for those that are whole
            optimizer.step()
    return model, loss.item()


def difference(model: nn.Module, mesh: md.DeviceMesh) -> float:
    """Train alone, whole, without types; return the largest difference of weights on any rank."""
    alone = md.DeviceMesh("cpu", [[md.get_rank()]], mesh_dim_names=("dp", "tp"))
    whole, _ = train(alone, is_typed=False)
    off = torch.zeros((), dtype=torch.float64)
    for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
        split_dims = [dim for dim, size in enumerate(mine.shape) if size != its.shape[dim]]
        mine_of_its = part(its, split_dims[0], mesh["tp"]) if split_dims else its.detach()
        off = torch.maximum(off, (mine.detach() - mine_of_its).abs().max())
    md.all_reduce(off, md.ReduceOp.MAX)
    return off.item()


def main() -> int:
    """Make the mesh, train, and compare where that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="parts of each layer")
    parser.add_argument("--check", action="store_true", help="compare with one rank")
    options = parser.parse_args()
    torch.set_num_threads(1)
    md.init_process_group()
    shape = md.get_world_size() // options.tp, options.tp
    if BATCH % shape[0] or HIDDEN % shape[1] or md.get_world_size() % options.tp:
        raise SystemExit(
            f"{md.get_world_size()} ranks cannot share {BATCH} points and {HIDDEN} units"
        )
    mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model, loss = train(mesh)
    off = difference(model, mesh) if options.check else 0.0
    if md.get_rank() == 0:
        print(f"dp={shape[0]}, tp={shape[1]}: loss {loss:.6f} after 10 steps")
        if options.check:
            print(f"difference from one rank: {off:.1e}")
    md.destroy_process_group()
    return int(not off <= LIMIT)  # NaN, too


if __name__ == "__main__":
    sys.exit(main())
