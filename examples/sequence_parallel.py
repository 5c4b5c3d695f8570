"""Train a block whose layers and sequence are split over tp, with DDP over dp: no sums by hand.

    meshdist run -n 4 examples/sequence_parallel.py --check
    torchrun --nproc-per-node 8 examples/sequence_parallel.py --tp 4 --check
    python examples/sequence_parallel.py --simulate 4 --check      # in one process

Between the products a rank holds some places of each sequence; norms and biases are whole, and
their gradients are summed over tp with one message a step. ``--check`` trains the whole block on
one rank as well, compares the norms of all gradients and the weights behind the last step, and
exits with 1 if they differ.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import nn

import meshdist as md

BATCH, LENGTH, WIDTH, HEADS, STEPS = 8, 12, 16, 8, 5
LIMIT = 1e-9  # largest difference allowed; the numbers are float64
PLAN = {
    "norm1": "reduced",
    "[qkv]": "column_sequence",
    "out": "row_sequence",
    "norm2": "reduced",
    "up": "column_sequence",
    "down": "row_sequence",
}


class Block(nn.Module):
    """Attention and two layers: what a program without any axis has."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        heads = [f(y).unflatten(-1, (-1, self.head_dim)) for f in (self.q, self.k, self.v)]
        q, k, v = (each.transpose(1, 2) for each in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def train(mesh: md.DeviceMesh) -> tuple[nn.Module, list[float]]:
    """Return the block behind some steps, and the norm of all gradients at each."""
    md.seed(0)
    block = Block().double()
    md.parallelize(block, mesh["tp"], PLAN)
    ddp = md.DDP(block, device_mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2, eps=1e-4)
    draws = torch.Generator().manual_seed(1)
    norms = []
    for _ in range(STEPS):
        whole = torch.randn(BATCH, LENGTH, WIDTH, generator=draws, dtype=torch.float64)
        x = md.shard(whole, "b@dp s@tp d", mesh)
        optimizer.zero_grad()
        per_replica = whole.numel() / mesh["dp"].size()
        ddp(x).pow(2).sum().div(
            per_replica
        ).backward()  # a partial sum over tp, whose mean is over dp
        norms.append(md.clip_grad_norm_(block.parameters(), 1.0, mesh=mesh).item())
        optimizer.step()
    return block, norms


def difference(mesh: md.DeviceMesh, block: nn.Module, norms: list[float]) -> float:
    """Return the largest difference from one rank, over norms and weights, on all ranks."""
    alone = md.DeviceMesh("cpu", [[md.get_rank()]], mesh_dim_names=("dp", "tp"))
    whole, wanted = train(alone)
    off = [abs(a - b) for a, b in zip(norms, wanted, strict=True)]
    for mine, all_of_it in zip(block.parameters(), whole.parameters(), strict=True):
        spec = md.typeof(mine).spec
        part = all_of_it.detach()
        if spec is not None:
            part = md.shard(part, md.NamedSharding(mesh, md.P(*spec.partitions)))
        off.append((mine.detach() - part).abs().max().item())
    found = torch.tensor(max(off), dtype=torch.float64)
    md.all_reduce(found, md.ReduceOp.MAX)
    return found.item()


def run(options: argparse.Namespace) -> int:
    """Make the mesh, train, and compare where that is asked for."""
    if md.get_world_size() % options.tp:
        raise SystemExit(f"--tp={options.tp} does not divide {md.get_world_size()} ranks")
    shape = md.get_world_size() // options.tp, options.tp
    mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    block, norms = train(mesh)
    off = difference(mesh, block, norms) if options.check else 0.0
    if md.get_rank() == 0:
        print(f"dp={shape[0]}, tp={shape[1]}: norms {' '.join(f'{norm:.4f}' for norm in norms)}")
        if options.check:
            print(f"difference from one rank: {off:.1e}")
    return int(not off <= LIMIT)  # NaN, too


def main() -> int:
    """Read the command line, and run on the ranks that there are, or on simulated ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="parts of each layer and sequence")
    parser.add_argument("--simulate", type=int, metavar="N", help="run N ranks in this process")
    parser.add_argument("--check", action="store_true", help="compare with one rank")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.simulate:
        return max(md.simulate(run, options.simulate, args=(options,)))
    md.init_process_group()
    outcome = run(options)
    md.destroy_process_group()
    return outcome


if __name__ == "__main__":
    sys.exit(main())
