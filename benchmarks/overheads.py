"""What meshdist adds: to one call, to an import, to the command line.

    python benchmarks/overheads.py [REPORT.json]

One process; the all_reduce is of one element over one member, so that the wire's own work is as
small as it can be. Both sides are timed in turn.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist as md
from benchmarks._report import spread, write_report

ROUNDS = 15
OWN = {"dp": md.AxisOptions(private=True)}
CALLS = 2000


class Nothing:
    """A communicator that does nothing, so that only the way to it is timed."""

    def all_reduce(self, *_: Any) -> None:
        """Start nothing."""

    def finish(self, *_: Any) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        """Hold nothing."""


def per_call_us(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def call_rows() -> list[dict[str, Any]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    md.init_process_group()
    mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    axis = mesh["dp"]
    idle = md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",), axis_options=OWN)
    mesh_of_nothing = idle["dp"]
    idle.get_group("dp").channel("cpu").communicator = Nothing()
    group = axis.get_group()
    bare = group.communicator("cpu")._group
    options = AllreduceOptions()
    x = torch.ones(1)
    sides: dict[str, Callable[[], Any]] = {
        "bare c10d": lambda: bare.allreduce([x], options).wait(),
        "meshdist, group=mesh": lambda: md.all_reduce(x, group=axis),
        "meshdist, group=ProcessGroup": lambda: md.all_reduce(x, group=group),
        "meshdist, group=None": lambda: md.all_reduce(x),
        "torch.distributed": lambda: dist.all_reduce(x),
    }
    own_python = [
        per_call_us(lambda: md.all_reduce(x, group=mesh_of_nothing)) for _ in range(ROUNDS)
    ]
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(ROUNDS + 1):
        for name, call in sides.items():
            took = per_call_us(call)
            if number:
                samples[name].append(took)
    md.destroy_process_group()
    dist.destroy_process_group()
    least = min(samples["bare c10d"])
    rows = [
        {
            "what": f"all_reduce, {name}",
            "unit": "us",
            "best": min(values),
            "median": spread(values)["median"],
            "best above bare": min(values) - least,
        }
        for name, values in samples.items()
    ]
    alone = {"what": "all_reduce, meshdist's Python alone", "unit": "us"}
    return [*rows, {**alone, "best": min(own_python), "median": spread(own_python)["median"]}]


def process_s(code: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(code, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def process_rows() -> list[dict[str, Any]]:
    commands = {
        "import torch": [sys.executable, "-c", "import torch"],
        "import torch, meshdist, one use": [
            sys.executable,
            "-c",
            "import torch, meshdist; meshdist.init_device_mesh; meshdist.all_reduce",
        ],
        "meshdist run --help": [sys.executable, "-m", "meshdist", "run", "--help"],
    }
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(8):
        for name, command in commands.items():
            took = process_s(command)
            if number:
                samples[name].append(took * 1e3)
    base = samples["import torch"]
    rows = []
    for name, values in samples.items():
        row = {"what": name, "unit": "ms", "best": min(values)}
        row["median"] = spread(values)["median"]
        if name.startswith("import torch,"):
            row["best above bare"] = min(values) - min(base)
        rows.append(row)
    return rows


def main() -> None:
    torch.set_num_threads(1)
    write_report(
        "overheads",
        call_rows() + process_rows(),
        "Over interleaved rounds. Above bare: above the bare c10d call, or above `import torch`. "
        "Where the machine is slow to wake Gloo's thread (a bare call of 35 us instead of 11), any "
        "pause between calls costs more than itself, torch.distributed's too; Python alone is the "
        "same call over a communicator that does nothing.",
    )


if __name__ == "__main__":
    main()
