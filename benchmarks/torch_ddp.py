"""One training step of torch's own DistributedDataParallel over Gloo and over shared memory.

    python benchmarks/torch_ddp.py [REPORT.json] [--rounds 9] [--models mlp,transformer] [--ranks 2]

Both sides run in the same processes with one thread each, on one world of torch's with a group for
each backend, their rounds interleaved. A sample is the slowest rank's time per step, a row holds
medians over rounds. A step is zero_grad, forward, backward and SGD; "local" has no DDP.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist.torch_backends  # noqa: F401 (offers "shm" to torch)
from benchmarks._models import MODELS, step_of
from benchmarks._report import (
    interleaved,
    ms_per_step,
    parser_of,
    some_of,
    spread,
    start_ranks,
    write_report,
)

BACKENDS = ("gloo", "shm")


def measure(rank: int, folder: str, options: argparse.Namespace) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", f"file://{folder}/world", world_size=options.ranks, rank=rank)
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    rows = []
    for name in options.models:
        training = MODELS[name]
        models: dict[str, nn.Module] = {"local": training.make()}
        for backend, group in groups.items():
            models[backend] = DistributedDataParallel(
                training.make(), process_group=group, gradient_as_bucket_view=True
            )
        x = training.make_input()
        samplers = {
            side: partial(ms_per_step, step_of(model, x), training.num_steps, dist)
            for side, model in models.items()
        }
        samples = interleaved(samplers, options.rounds)
        medians = {side: statistics.median(taken) for side, taken in samples.items()}
        rows += [
            {
                "model": name,
                "backend": side,
                **spread(taken, "ms"),
                "over local ms": medians[side] - medians["local"],
                "gloo / this": medians["gloo"] / medians[side],
            }
            for side, taken in samples.items()
        ]
        del models
    if rank == 0:
        notes = f"{options.ranks} ranks, one thread each, {options.rounds} interleaved rounds"
        write_report("torch_ddp", rows, notes, options.report)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Read the command line and start the ranks."""
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", type=some_of(MODELS), default=["mlp", "transformer"])
    options = parser.parse_args()
    start_ranks(measure, options.ranks, options)


if __name__ == "__main__":
    main()
