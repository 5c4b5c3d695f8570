"""One training step under meshdist's DDP and under torch's, over Gloo, on two ranks.

    python benchmarks/ddp_step.py [REPORT.json] [--rounds 7] [--models mlp,transformer,many]

Both sides run in one pair of processes with one thread each, their rounds interleaved; a sample is
the slower rank's time per step, a row holds medians over rounds. A step is zero_grad, forward,
backward and SGD. "alone" is the same over a group of one rank: what the reducer itself costs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as torch_dist, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist as md
from benchmarks._report import (
    interleaved,
    ms_per_step,
    parser_of,
    some_of,
    spread,
    start_ranks,
    write_report,
)

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


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return what trains ``model`` by one step on ``x``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def sample_sides(
    models: dict[str, nn.Module], x: torch.Tensor, num_steps: int, rounds: int, library: Any = md
) -> dict[str, list[float]]:
    """Milliseconds per step of each model; the first round lets buckets be rebuilt."""
    steps = {side: step_of(model, x) for side, model in models.items()}
    samplers = {
        side: partial(ms_per_step, step, num_steps, library) for side, step in steps.items()
    }
    return interleaved(samplers, rounds)


def measure(rank: int, folder: str, options: argparse.Namespace) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    md.init_process_group("gloo", f"file://{folder}/ours", world_size=NUM_RANKS, rank=rank)
    torch_dist.init_process_group(
        "gloo", f"file://{folder}/theirs", world_size=NUM_RANKS, rank=rank
    )
    rows = []
    for name in options.models:
        make, make_input, num_steps = MODELS[name]
        models = variants(make)
        num_parameters = len(list(models["local"].parameters()))
        samples = sample_sides(models, make_input(), num_steps, options.rounds)
        medians = {side: statistics.median(taken) for side, taken in samples.items()}
        for side, taken in samples.items():
            over_local = medians[side] - medians["local"]
            rows.append(
                {
                    "model": name,
                    "side": side,
                    **spread(taken, "ms"),
                    "over local ms": over_local,
                    "us per parameter": over_local * 1e3 / num_parameters,
                    "torch / this": medians["torch"] / medians[side],
                }
            )
        del models
    if rank == 0:
        notes = f"{NUM_RANKS} ranks over Gloo, one thread each, {options.rounds} interleaved rounds"
        write_report("ddp_step", rows, notes, options.report)
    torch_dist.barrier()
    torch_dist.destroy_process_group()
    md.destroy_process_group()


def main() -> None:
    """Read the command line and start both ranks."""
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--models", type=some_of(MODELS), default=[*MODELS])
    start_ranks(measure, NUM_RANKS, parser.parse_args())


if __name__ == "__main__":
    main()
