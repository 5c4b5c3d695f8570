"""A mixture of experts on a mesh (dp, ep): tokens travel to the experts that they choose, and back.

    meshdist run -n 4 examples/mixture_of_experts.py --check
    torchrun --nproc-per-node 6 examples/mixture_of_experts.py --ep 3 --experts 7
    meshdist run -n 4 examples/mixture_of_experts.py --ep 4 --capacity 1.5 --check

Each rank has different data. The experts are sharded over ep, so a rank's experts see the tokens of
all ranks along ep; the ranks along dp hold replicas of them. ``md.DDP(..., experts_over="ep")``
averages all gradients. The router takes the best k experts (arXiv:1701.06538), with a loss that
balances them (arXiv:2101.03961, section 2.2), in addition to an expert that all tokens share.
``--check`` also trains on one process, in float64, and exits with 1 if losses or weights differ.
"""

import argparse
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import meshdist as md

BATCH, WIDTH, HIDDEN, STEPS = 240, 16, 32, 20
DATA = ("dp", "ep")  # the axes that the batch is cut over
LIMIT = 1e-9  # largest difference allowed; the numbers of --check are float64


def has_grouped_mm(dtype: torch.dtype) -> bool:
    """Whether PyTorch has one product for all experts: from 2.10 on, and not in float64."""
    return hasattr(F, "grouped_mm") and dtype in (torch.float32, torch.bfloat16, torch.float16)


class Experts(nn.Module):
    """The experts of this rank, of those that every rank draws alike."""

    def __init__(self, num_experts: int, ep: md.DeviceMesh) -> None:
        super().__init__()
        mine = torch.arange(num_experts).tensor_split(ep.size())[ep.get_local_rank()]
        self.up = nn.Parameter(torch.randn(num_experts, WIDTH, HIDDEN)[mine] / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, HIDDEN, WIDTH)[mine] / HIDDEN**0.5)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What they make of their rows, which lie expert after expert."""
        if not len(counts):  # more ranks than experts: it takes part in the others' backward
            return rows + self.up.sum() + self.down.sum()
        if has_grouped_mm(rows.dtype):
            ends = counts.cumsum(0).to(torch.int32)
            hidden = F.gelu(F.grouped_mm(rows, self.up, offs=ends))
            return F.grouped_mm(hidden, self.down, offs=ends)
        parts = zip(rows.tensor_split(counts.cumsum(0)[:-1]), self.up, self.down, strict=True)
        return torch.cat([F.gelu(x @ up) @ down for x, up, down in parts])


class Mixture(nn.Module):
    """A router, the experts that it chooses among, and one that all tokens share."""

    def __init__(self, options: argparse.Namespace, ep: md.DeviceMesh) -> None:
        super().__init__()
        self.num_experts, self.num_chosen = options.experts, options.chosen
        self.capacity = options.capacity
        self.router = nn.Linear(WIDTH, self.num_experts, bias=False)
        self.shared = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.experts = Experts(self.num_experts, ep)

    def forward(self, x: torch.Tensor, num_parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens changed, and the loss that balances the experts, 1 where all are equal."""
        probabilities = self.router(x).softmax(-1)
        weights, chosen = probabilities.topk(self.num_chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        share = F.one_hot(chosen, self.num_experts).to(x.dtype).mean((0, 1))
        share = md.lax.pmean(share, DATA)  # of all tokens; it has no gradient
        balance = self.num_experts * (share * probabilities.mean(0)).sum()
        if self.capacity:
            most = int(self.capacity * x.shape[0] / num_parts * self.num_chosen / self.num_experts)
            chosen = torch.cat([self.limited(part, most) for part in chosen.chunk(num_parts)])
        rows, route = md.experts.dispatch(x, chosen, "ep", self.num_experts)
        y = md.experts.combine(self.experts(rows, route.counts), route, weights)
        return x + self.shared(x) + y, balance

    def limited(self, chosen: torch.Tensor, most: int) -> torch.Tensor:
        """Drop, as -1, what an expert gets of one rank beyond ``most``, the last tokens first."""
        flat = chosen.flatten().unsqueeze(1)
        numbers = F.one_hot(flat.squeeze(1), self.num_experts).cumsum(0).gather(1, flat)
        return chosen.masked_fill(numbers.view_as(chosen) > most, -1)


def train(mesh: md.DeviceMesh, options: argparse.Namespace, num_parts: int = 1) -> Any:
    """Train on the mesh; return the model and the losses of the whole.

    ``num_parts``: so many ranks' tokens are here, as on one process.
    """
    torch.manual_seed(0)  # every rank draws alike, and then takes its experts and tokens
    model = Mixture(options, mesh["ep"]).to(options.dtype)
    md.annotate(model, {"experts.*": "e@ep ..."}, mesh=mesh)
    ddp = md.DDP(model, device_mesh=mesh[DATA], experts_over="ep")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, dtype=options.dtype)
        wanted = x.flip(1).sin() * x[:, :1].sign()
        with mesh:
            place = md.lax.axis_index(DATA)
            x, wanted = (whole.chunk(mesh.size())[place] for whole in (x, wanted))
            y, balance = ddp(x, num_parts)
            loss = F.mse_loss(y, wanted) + 0.01 * balance
            losses.append(md.lax.pmean(loss.detach(), DATA).item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, losses


def difference(model: Mixture, losses: list[float], options: argparse.Namespace) -> float:
    """Train on one process; return the largest difference of losses and weights on any rank."""
    alone = md.DeviceMesh("cpu", [[md.get_rank()]], mesh_dim_names=DATA)
    whole, its_losses = train(alone, options, md.get_world_size())
    off = [abs(a - b) for a, b in zip(losses, its_losses, strict=True)]
    place = md.get_rank() % options.ep
    for (name, mine), its in zip(model.named_parameters(), whole.parameters(), strict=True):
        if "experts." in name:
            its = its.tensor_split(options.ep)[place]
        off.append((mine - its).detach().abs().max().item() if mine.numel() else 0.0)
    worst = torch.tensor(off, dtype=torch.float64).max()  # NaN, too
    md.all_reduce(worst, md.ReduceOp.MAX)
    return worst.item()


def main() -> int:
    """Make the mesh, train, and compare where that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ep", type=int, help="ranks that share the experts; 2, or 1 of 1")
    parser.add_argument("--experts", type=int, default=6)
    parser.add_argument("--chosen", type=int, default=2, help="experts of each token")
    parser.add_argument("--capacity", type=float, help="most rows of an expert / an even share")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    options = parser.parse_args()
    options.dtype = torch.float64 if options.check else torch.float32
    torch.set_num_threads(1)
    md.init_process_group()
    size = md.get_world_size()
    options.ep = options.ep or min(2, size)
    if size % options.ep or BATCH % size:
        raise SystemExit(f"{size} ranks do not divide by --ep {options.ep}, or {BATCH} by them")
    if not 1 <= options.chosen <= options.experts:
        raise SystemExit(f"a token cannot choose {options.chosen} of {options.experts} experts")
    mesh = md.init_device_mesh("cpu", (size // options.ep, options.ep), mesh_dim_names=DATA)
    model, losses = train(mesh, options)
    off = difference(model, losses, options) if options.check else 0.0
    if md.get_rank() == 0:
        how = "grouped_mm" if has_grouped_mm(options.dtype) else "a product for each"
        print(f"dp={size // options.ep}, ep={options.ep}, {options.experts} experts by {how}:")
        print(f"loss {losses[0]:.6f} to {losses[-1]:.6f}")
        if options.check:
            print(f"difference from one process: {off:.1e}")
    md.destroy_process_group()
    return int(not off <= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
