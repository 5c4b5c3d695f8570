"""Classify handwritten digits with data parallelism over every rank that was started.

    meshdist run -n 4 examples/train_digits.py
    torchrun --nproc-per-node 2 examples/train_digits.py
    mpiexec -n 4 python examples/train_digits.py --epochs 10

Every rank holds the whole network and reads its share of the 1,797 images of 8 x 8 pixels that
scikit-learn carries; gradients are averaged over the ranks. Exits with 1 unless more than 95 % of
the images that were kept for the test are recognised.
"""

import argparse
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshdist as md
import meshdist.distributed as dist

TARGET = 0.95
TEST_IMAGES = 360


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the images to learn from and those to test with; equal on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = (
        TensorDataset(images[some], labels[some]) for some in order.tensor_split([TEST_IMAGES])
    )
    return train, test


def make_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


@torch.no_grad()
def accuracy(network: nn.Module, test: TensorDataset, dp: md.DeviceMesh) -> float:
    """Return the share of test images recognised; every rank looks at its part of them."""
    images, labels = (part[dp.get_local_rank() :: dp.size()] for part in test.tensors)
    device = next(network.parameters()).device
    right = (network(images.to(device)).argmax(1) == labels.to(device)).sum()
    md.all_reduce(right, group=dp)
    return right.item() / len(test)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="images a step, over all ranks")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args(argv)

    mesh = md.init_device_mesh(args.device, (-1,), mesh_dim_names=("dp",))
    dp, is_first = mesh["dp"], md.get_rank() == 0
    train, test = read_digits()
    sampler = dist.DistributedSampler(train, dp, seed=args.seed)
    loader = DataLoader(train, max(args.batch // dp.size(), 1), sampler=sampler)

    torch.manual_seed(args.seed)
    network = md.DDP(make_network().to(args.device), device_mesh=dp)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch
        total = torch.zeros((), device=args.device)
        for images, labels in loader:
            loss = F.cross_entropy(network(images.to(args.device)), labels.to(args.device))
            optimizer.zero_grad()
            loss.backward()  # averages gradients over dp
            optimizer.step()
            total += loss.detach() / len(loader)
        md.all_reduce(total, op=md.ReduceOp.AVG, group=dp)
        if is_first:
            print(f"epoch {epoch + 1:>2}/{args.epochs}  loss {total.item():.3f}")

    reached = accuracy(network.module, test, dp)
    if is_first:
        print(f"test accuracy {reached:.1%} ({len(test)} images; ranks: {dp.size()})")
    md.destroy_process_group()
    return 0 if reached > TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
