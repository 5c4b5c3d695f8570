"""Training on shards of unequal lengths: ranks that run out of data keep answering the others.

    meshdist run -n 4 examples/uneven_inputs.py
    torchrun --nproc-per-node 2 examples/uneven_inputs.py --epochs 2
    meshdist run -n 3 examples/uneven_inputs.py --check

Rank r has 4 + 3 r batches of an epoch. Inside ``model.join()`` all ranks leave the loop together:
one whose shard has ended gives zeros to the gradients, the metric and whatever else the others
reduce. Then ``md.uneven`` does the same for a loop without a model. With ``--check`` the program
trains one model on one rank in the same way, and exits with 1 if it differs.
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
    for epoch in range(num_epochs):
        # Gradients are means over the ranks that have a batch, also when some have none left.
        with model.join(divide_by_initial_world_size=False):
            for step, x in enumerate(shard(md.get_rank(), epoch)):
                model.zero_grad()
                loss = F.mse_loss(model(x), target(x))
                loss.backward()
                descend(model)
                biggest = loss.detach().clone()
                md.all_reduce(biggest, md.ReduceOp.MAX)  # a verb that the model knows nothing of
                if md.get_rank() == md.get_world_size() - 1 and step % 4 == 0:
                    print(f"epoch {epoch} step {step:2}: largest loss {biggest.item():.4f}")
    return model.module, evaluate(model.module)


def evaluate(model: torch.nn.Module) -> float:
    """The mean loss over the batches of all ranks, which again are unequally many."""
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x in md.uneven(shard(md.get_rank(), 99)):
            sums = torch.stack([F.mse_loss(model(x), target(x)), torch.tensor(1.0)]).double()
            md.all_reduce(sums)
            total += sums
    md.all_reduce(total, md.ReduceOp.MAX)  # of the rank that saw all: losses are not negative
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
    off = 0.0
    if options.check:
        alone = train_alone(md.get_world_size(), options.epochs)
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        off = max((one - other).abs().max().item() for one, other in pairs)
    if md.get_rank() == 0:
        print(f"mean loss over all shards: {loss:.6f}")
        if options.check:
            print(f"difference from one model on one rank: {off:.1e}")
    md.destroy_process_group()
    sys.exit(not off <= LIMIT)  # NaN, too


if __name__ == "__main__":
    main()
