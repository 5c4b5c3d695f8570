"""One training step of torch's own DistributedDataParallel over Gloo and over shared memory.

    python benchmarks/torch_ddp.py [REPORT.json] [--rounds 9] [--models mlp,transformer] [--ranks 2]

Both sides run in the same processes with one thread each, on one world of torch's with a group for
each backend, their rounds interleaved. A sample is the slowest rank's time per step, a row holds
medians over rounds. A step is zero_grad, forward, backward and SGD; "local" has no DDP.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist.torch_backends  # noqa: F401 (offers "shm" to torch)
from benchmarks._report import spread, write_report
from benchmarks.ddp_step import MODELS, seconds_per_step

BACKENDS = ("gloo", "shm")


def measure(rank: int, folder: str, ranks: int, names: list[str], rounds: int, path: str) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", f"file://{folder}/world", world_size=ranks, rank=rank)
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    rows = []
    for name in names:
        make, make_input, num_steps = MODELS[name]
        models: dict[str, nn.Module] = {"local": make()}
        for backend, group in groups.items():
            models[backend] = DistributedDataParallel(
                make(), process_group=group, gradient_as_bucket_view=True
            )
        x = make_input()
        samples: dict[str, list[float]] = {side: [] for side in models}
        for round_number in range(rounds + 1):
            for side, model in models.items():
                taken = seconds_per_step(model, x, num_steps, dist)
                if round_number > 0:  # the first warms up, and lets buckets be rebuilt
                    samples[side].append(taken * 1e3)
        medians = {side: spread(taken)["median"] for side, taken in samples.items()}
        rows += [
            {
                "model": name,
                "backend": side,
                "ms": medians[side],
                "min ms": min(taken),
                "max ms": max(taken),
                "over local ms": medians[side] - medians["local"],
                "gloo / this": medians["gloo"] / medians[side],
            }
            for side, taken in samples.items()
        ]
        del models
    if rank == 0:
        notes = f"{ranks} ranks, one thread each, {rounds} interleaved rounds"
        sys.argv[1:] = [path] if path else []  # where write_report looks for the path
        write_report("torch_ddp", rows, notes)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Read the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", nargs="?", default="", help="where the JSON report goes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", default="mlp,transformer", help="some of " + ", ".join(MODELS))
    options = parser.parse_args()
    names = options.models.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        arguments: tuple[Any, ...] = (folder, options.ranks, names, options.rounds, options.report)
        torch.multiprocessing.spawn(measure, arguments, options.ranks)


if __name__ == "__main__":
    main()
