"""Train on shards of unequal lengths: ranks that run out of data repeat a batch with weight 0.

    meshdist run -n 4 examples/uneven_inputs.py
    torchrun --nproc-per-node 2 examples/uneven_inputs.py --epochs 2
    meshdist run -n 3 examples/uneven_inputs.py --check

Rank r has 4 + 3 r batches of an epoch. ``md.uneven`` runs the loop equally often on every rank, so
collectives such as that of the metric work inside. ``model.join()`` trains a second model: there a
rank that runs out of data shadows the collectives of the model. With ``--check`` the program trains
a model on one rank in the same way, and exits with 1 if any of them differ.
"""

import argparse
import sys

import torch
from torch.nn import functional as F

import meshdist as md

LIMIT = 1e-9  # largest difference allowed; the numbers are float64


def shard(rank: int, epoch: int) -> list[torch.Tensor]:
    """The batches of one rank: points on a plane, of which the model learns a line."""
    generator = torch.Generator().manual_seed(1000 * epoch + rank)
    return [
        torch.randn(8, 2, generator=generator, dtype=torch.float64) for _ in range(4 + 3 * rank)
    ]


def target(x: torch.Tensor) -> torch.Tensor:
    """What the model is to learn."""
    return x @ torch.tensor([[2.0], [-1.0]], dtype=torch.float64) + 0.5


def descend(model: torch.nn.Module) -> None:
    """One step of gradient descent."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def train(num_epochs: int) -> tuple[torch.nn.Module, float]:
    """Train on every rank's own shard; return the model and the mean loss over all batches."""
    torch.manual_seed(0)
    model = md.DDP(torch.nn.Linear(2, 1, dtype=torch.float64))
    rank, size = md.get_rank(), md.get_world_size()
    for epoch in range(num_epochs):
        batches = md.uneven(shard(rank, epoch))
        for step, (x, weight) in enumerate(batches):
            model.zero_grad()
            loss = F.mse_loss(model(x), target(x)) * weight
            (loss * size / batches.num_active).backward()  # the mean over the ranks with data
            descend(model)
            biggest = loss.detach().clone()
            md.all_reduce(biggest, md.ReduceOp.MAX)
            if rank == size - 1 and step % 4 == 0:
                print(f"epoch {epoch} step {step:2}: largest loss {biggest.item():.4f}")
    return model.module, evaluate(model.module)


def train_in_context(num_epochs: int) -> torch.nn.Module:
    """Train as ``train`` does, in a join context; return the model."""
    torch.manual_seed(0)
    model = md.DDP(torch.nn.Linear(2, 1, dtype=torch.float64))
    for epoch in range(num_epochs):
        with model.join(divide_by_initial_world_size=False):
            for x in shard(md.get_rank(), epoch):
                model.zero_grad()
                F.mse_loss(model(x), target(x)).backward()
                descend(model)
    return model.module


def evaluate(model: torch.nn.Module) -> float:
    """Return the mean loss over the batches of all ranks, which again are unequally many."""
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, weight in md.uneven(shard(md.get_rank(), 99)):
            sums = torch.stack([F.mse_loss(model(x), target(x)), torch.tensor(1.0)]).double()
            md.all_reduce(sums.mul_(weight))
            total += sums
    return (total[0] / total[1]).item()


def train_alone(num_ranks: int, num_epochs: int) -> torch.nn.Module:
    """The same training on one rank: each step on the batches of all ranks that have one."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1, dtype=torch.float64)
    for epoch in range(num_epochs):
        shards = [shard(rank, epoch) for rank in range(num_ranks)]
        for step in range(max(map(len, shards))):
            batches = [one[step] for one in shards if step < len(one)]
            model.zero_grad()
            losses = [F.mse_loss(model(x), target(x)) for x in batches]
            torch.stack(losses).mean().backward()
            descend(model)
    return model


def main() -> None:
    """Train, show the result, and compare it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    md.init_process_group()
    model, loss = train(options.epochs)
    in_context = train_in_context(options.epochs)
    off = 0.0
    if options.check:
        alone = train_alone(md.get_world_size(), options.epochs)
        for trained in (model, in_context):
            pairs = zip(trained.parameters(), alone.parameters(), strict=True)
            off = max(off, *((one - other).abs().max().item() for one, other in pairs))
    if md.get_rank() == 0:
        print(f"mean loss over all shards: {loss:.6f}")
        if options.check:
            print(f"difference from one model on one rank: {off:.1e}")
    md.destroy_process_group()
    sys.exit(not off <= LIMIT)  # NaN, too


if __name__ == "__main__":
    main()
