"""One training step under meshdist's DDP and under torch's, over Gloo, on two ranks.

    python benchmarks/ddp_step.py [REPORT.json] [--rounds 7] [--models mlp,transformer,many]

Both sides run in one pair of processes with one thread each, their rounds interleaved; a sample is
the slower rank's time per step, a row holds medians over rounds. A step is zero_grad, forward,
backward and SGD. "alone" is the same over a group of one rank: what the reducer itself costs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as torch_dist, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist as md
from benchmarks._report import spread, write_report

NUM_RANKS = 2


class Transformer(nn.Module):
    """Eight layers of width 320 on short sequences: 10 million parameters in 99 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 320)
        layer = nn.TransformerEncoderLayer(320, 8, 1280, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.head = nn.Linear(320, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))


class Many(nn.Module):
    """2000 weights of 1024 numbers: the cost of a parameter, not of a byte."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(1024) for _ in range(2000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self.weights)) * x


def mlp() -> nn.Module:
    """25 million parameters in 8 tensors."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(2500, 2500), nn.ReLU()]
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], int]] = {
    "mlp": (mlp, lambda: torch.randn(64, 2500), 2),
    "transformer": (Transformer, lambda: torch.randint(256, (4, 32)), 2),
    "many": (Many, lambda: torch.randn(1024), 6),
}


def variants(make: Callable[[], nn.Module]) -> dict[str, nn.Module]:
    """Every side of the comparison, each with a model of its own."""
    mesh = md.init_device_mesh("cpu", (NUM_RANKS, 1), mesh_dim_names=("dp", "one"))
    # Every rank of the world makes every group, as torch wants it.
    groups_of_one = [torch_dist.new_group([rank], backend="gloo") for rank in range(NUM_RANKS)]
    one = groups_of_one[md.get_rank()]
    return {
        "local": make(),
        "torch": TorchDDP(make()),
        "torch, views": TorchDDP(make(), gradient_as_bucket_view=True),
        "torch, batched copy": TorchDDP(
            make(), gradient_as_bucket_view=True, batched_grad_copy=True
        ),
        "meshdist": md.DDP(make(), device_mesh=mesh["dp"]),
        "torch alone, views": TorchDDP(make(), process_group=one, gradient_as_bucket_view=True),
        "meshdist alone": md.DDP(make(), device_mesh=mesh["one"]),
    }


def seconds_per_step(model: nn.Module, x: torch.Tensor, num_steps: int, library: Any = md) -> float:
    """The slowest rank's time per step; ``library`` is whose ranks they are, ours or torch's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    library.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    taken = torch.tensor((time.perf_counter() - start) / num_steps, dtype=torch.float64)
    library.all_reduce(taken, library.ReduceOp.MAX)
    return taken.item()


def measure(rank: int, folder: str, names: list[str], rounds: int, report: str | None) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    md.init_process_group("gloo", f"file://{folder}/ours", world_size=NUM_RANKS, rank=rank)
    torch_dist.init_process_group(
        "gloo", f"file://{folder}/theirs", world_size=NUM_RANKS, rank=rank
    )
    rows = []
    for name in names:
        make, make_input, num_steps = MODELS[name]
        models = variants(make)
        x = make_input()
        samples: dict[str, list[float]] = {side: [] for side in models}
        for round_number in range(rounds + 1):
            for side, model in models.items():
                taken = seconds_per_step(model, x, num_steps)
                if round_number > 0:  # the first warms up, and lets buckets be rebuilt
                    samples[side].append(taken * 1e3)
        num_parameters = len(list(models["local"].parameters()))
        medians = {side: spread(taken)["median"] for side, taken in samples.items()}
        for side, taken in samples.items():
            over_local = medians[side] - medians["local"]
            rows.append(
                {
                    "model": name,
                    "side": side,
                    "ms": medians[side],
                    "min ms": min(taken),
                    "max ms": max(taken),
                    "over local ms": over_local,
                    "us per parameter": over_local * 1e3 / num_parameters,
                    "torch / this": medians["torch"] / medians[side],
                }
            )
        del models
    if rank == 0:
        notes = f"{NUM_RANKS} ranks over Gloo, one thread each, {rounds} interleaved rounds"
        sys.argv[1:] = [report] if report else []  # where write_report looks for the path
        write_report("ddp_step", rows, notes)
    torch_dist.barrier()
    torch_dist.destroy_process_group()
    md.destroy_process_group()


def main() -> None:
    """Read the command line and start both ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", nargs="?", help="where the JSON report goes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", default=",".join(MODELS), help="some of " + ", ".join(MODELS))
    options = parser.parse_args()
    names = options.models.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        arguments: tuple[Any, ...] = (folder, names, options.rounds, options.report)
        torch.multiprocessing.spawn(measure, arguments, NUM_RANKS)


if __name__ == "__main__":
    main()
