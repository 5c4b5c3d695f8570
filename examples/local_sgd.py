"""Local SGD: gradients averaged inside each host at every step, weights between hosts now and then.

    meshdist run -n 4 examples/local_sgd.py --hosts 2 --check
    torchrun --nproc-per-node 4 examples/local_sgd.py --hosts 4 --period 8
    mpiexec -n 4 python examples/local_sgd.py --hosts 2 --batch-norm --check

The ranks form a mesh of axes `host` and `dp`. Along `dp`, where messages are quick, DDP averages
gradients in every backward; along `host` weights are averaged every `--period` steps, so that less
is sent there. The images are those of train_digits.py. `--check` repeats the run on every rank
alone, with one model for each host in one loop, and fails unless all weights agree.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import meshdist as md
import meshdist.distributed as dist

LIMIT = 1e-4  # largest difference between weights that --check allows, in float32
Batch = tuple[torch.Tensor, torch.Tensor]


def read_digits() -> Batch:
    """Return images and labels, in an order that is equal on every rank."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    return images[order], torch.tensor(digits.target)[order]


def batches(num_steps: int, size: int) -> Iterator[Batch]:
    """Yield the batch of each step, for all ranks together."""
    images, labels = read_digits()
    for step in range(num_steps):
        chosen = torch.arange(step * size, (step + 1) * size) % len(labels)
        yield images[chosen], labels[chosen]


def make_network(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(args.seed)  # equal first weights on every rank
    norm = nn.BatchNorm1d(32) if args.batch_norm else nn.Identity()
    return nn.Sequential(nn.Linear(64, 32), norm, nn.ReLU(), nn.Linear(32, 10))


def make_optimizer(network: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=args.lr, momentum=0.9)


def train(mesh: md.DeviceMesh, args: argparse.Namespace) -> tuple[nn.Module, list[float]]:
    """Return this rank's network, and the mean loss over all ranks at each step."""
    host, dp = mesh["host"], mesh["dp"]
    network = make_network(args)
    if args.batch_norm:
        network = dist.SyncBatchNorm.convert_sync_batchnorm(network, dp)
    model = md.DDP(network, device_mesh=dp)
    averager = dist.PeriodicModelAverager(args.period, process_group=host)
    optimizer = dist.PostLocalSGDOptimizer(make_optimizer(network, args), averager)
    losses = []
    for images, labels in batches(args.steps, args.batch):
        mine = slice(md.get_rank(), None, md.get_world_size())
        loss = F.cross_entropy(model(images[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()  # averages gradients over dp
        optimizer.step()  # averages weights over host, every few steps
        mean = loss.detach().clone()
        md.all_reduce(mean, op=md.ReduceOp.AVG, group=mesh)
        losses.append(mean.item())
    return network, losses


def repeat_alone(num_hosts: int, num_ranks: int, args: argparse.Namespace) -> list[nn.Module]:
    """Return each host's network after the same run in one loop, without a message."""
    networks = [make_network(args) for _ in range(num_hosts)]
    optimizers = [make_optimizer(network, args) for network in networks]
    per_host = num_ranks // num_hosts
    for step, (images, labels) in enumerate(batches(args.steps, args.batch)):
        rank_of = torch.arange(len(labels)) % num_ranks
        for place, (network, optimizer) in enumerate(zip(networks, optimizers, strict=True)):
            ours = rank_of // per_host == place
            optimizer.zero_grad()
            F.cross_entropy(network(images[ours]), labels[ours]).backward()
            optimizer.step()
        if step % args.period == 0:
            for same in zip(*(network.parameters() for network in networks), strict=True):
                mean = torch.stack([weight.detach() for weight in same]).mean(0)
                for weight in same:
                    weight.data.copy_(mean)
    return networks


def difference(network: nn.Module, mesh: md.DeviceMesh, args: argparse.Namespace) -> float:
    """Return the largest difference, over all ranks, from the weights of the run alone."""
    alone = repeat_alone(mesh.size(0), mesh.size(), args)[mesh["host"].get_local_rank()]
    pairs = zip(network.state_dict().values(), alone.state_dict().values(), strict=True)
    worst = torch.stack([(mine - other).abs().max().float() for mine, other in pairs]).max()
    md.all_reduce(worst, op=md.ReduceOp.MAX, group=mesh)
    return worst.item()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--hosts", type=int, default=1, help="how many groups of ranks there are")
    parser.add_argument("--period", type=int, default=4, help="steps between averages of weights")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=96, help="images a step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-norm", action="store_true", help="normalize over each host")
    parser.add_argument("--check", action="store_true", help="compare; exit 1 on a difference")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    md.init_process_group()
    num_ranks = md.get_world_size()
    if args.hosts < 1 or num_ranks % args.hosts or args.batch % num_ranks:
        sys.exit(f"--hosts must divide the {num_ranks} ranks, and they must divide --batch")
    mesh = md.init_device_mesh("cpu", (args.hosts, -1), mesh_dim_names=("host", "dp"))
    network, losses = train(mesh, args)
    is_first, is_fine = md.get_rank() == 0, True
    if is_first:
        print(f"{args.steps} steps: loss {losses[0]:.3f} to {losses[-1]:.3f}")
        averages = len(range(0, args.steps, args.period))
        print(f"between {args.hosts} hosts: {averages} averages in place of {args.steps}")
    if args.check:
        found = difference(network, mesh, args)
        is_fine = found <= LIMIT and losses[-1] < losses[0]
        if is_first:
            outcome = "agree" if is_fine else "DO NOT AGREE"
            print(f"check: weights of {num_ranks} ranks {outcome}, largest difference {found:.1e}")
    md.destroy_process_group()
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
