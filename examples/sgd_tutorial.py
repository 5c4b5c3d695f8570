"""Distributed synchronous SGD by hand: each rank has its part of the data, gradients are averaged.

    meshdist run -n 4 examples/sgd_tutorial.py --check
    torchrun --nproc-per-node 2 examples/sgd_tutorial.py --epochs 3
    mpiexec -n 4 python examples/sgd_tutorial.py

A small convolutional network learns scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; the
only communication is one all_reduce for each parameter in each step. `--check` fails unless the
loss has fallen and all ranks hold equal weights, bit by bit. Write `meshdist.DDP` instead of
`average_gradients` in programs of your own: it does the same in fewer, larger messages, while the
backward still runs.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import meshdist.distributed as dist

SEED = 1234
BATCH = 128  # images a step, over all ranks


class DataPartitioner:
    """Cuts data, shuffled in the same way on every rank, into parts of given fractions."""

    def __init__(self, data: Sequence[Any], sizes: Sequence[float], seed: int = SEED) -> None:
        self.data = data
        order = list(range(len(data)))
        random.Random(seed).shuffle(order)
        self.parts: list[list[int]] = []
        for fraction in sizes:
            count = int(fraction * len(data))
            self.parts.append(order[:count])
            order = order[count:]

    def use(self, part: int) -> Subset:
        """Return one part of the data."""
        return Subset(self.data, self.parts[part])


def read_digits() -> TensorDataset:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    return TensorDataset((images - images.mean()) / images.std(), torch.tensor(digits.target))


def partition_dataset() -> DataLoader:
    """Return the batches of this rank's part of the digits."""
    size = dist.get_world_size()
    bsz = max(BATCH // size, 1)
    partition = DataPartitioner(read_digits(), [1 / size] * size).use(dist.get_rank())
    return DataLoader(partition, batch_size=bsz, shuffle=True)


class Net(nn.Module):
    """Two convolutions and a linear layer: 9,930 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.out = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.log_softmax(self.out(x.flatten(1)), dim=1)


def average_gradients(model: nn.Module) -> None:
    """Replace every gradient by its mean over all ranks."""
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= size


def train(
    model: nn.Module, train_set: DataLoader, epochs: int, device: torch.device
) -> Iterator[float]:
    """After each epoch, yield the mean loss over this rank's batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for _ in range(epochs):
        epoch_loss = 0.0
        for data, target in train_set:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data.to(device)), target.to(device))
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        yield epoch_loss / len(train_set)


def are_weights_equal(model: nn.Module) -> bool:
    """Return on every rank whether all ranks hold the same bits."""
    mine = torch.cat([param.detach().flatten() for param in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, src=0)
    agree = torch.tensor(int(torch.equal(mine, first)), device=mine.device)
    dist.all_reduce(agree, op=dist.ReduceOp.MIN)
    return bool(agree)


def is_learned(losses: list[float], model: nn.Module, device: torch.device) -> bool:
    """Say on rank 0, and return on every rank, whether the run is what it should be."""
    means = torch.tensor([losses[0], losses[-1]], device=device)
    dist.all_reduce(means, op=dist.ReduceOp.AVG)
    first, last = means.tolist()
    is_equal = are_weights_equal(model)
    if dist.get_rank() == 0:
        fell = "fell" if last < first else "DID NOT FALL"
        equal = "equal" if is_equal else "NOT EQUAL"
        ranks = dist.get_world_size()
        print(f"check: loss {fell}, {first:.4f} to {last:.4f}; weights {equal} on {ranks} ranks")
    return last < first and is_equal


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--check", action="store_true", help="fail unless it has learned")
    args = parser.parse_args(argv)
    if args.epochs < (2 if args.check else 1):
        parser.error("--epochs is at least 1, and at least 2 for --check to compare")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, and torch sees none")

    dist.init_process_group()
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank() % torch.cuda.device_count())
    torch.manual_seed(SEED)  # equal first weights on every rank
    train_set = partition_dataset()
    model = Net().to(device)
    losses = []
    for epoch, loss in enumerate(train(model, train_set, args.epochs, device)):
        losses.append(loss)
        # One write a line, so that lines of several ranks do not mix.
        print(f"rank {dist.get_rank()}, epoch {epoch}: mean loss {loss:.4f}\n", end="")
    is_fine = not args.check or is_learned(losses, model, device)
    dist.destroy_process_group()
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
