"""What meshdist adds: to one call, to an import, to the command line.

    python benchmarks/overheads.py [REPORT.json]

One process; the all_reduce is of one element over one member, so that the backend's own work is as
small as it can be. Both sides are timed in turn.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist as md
from benchmarks._report import interleaved, parser_of, write_report
from meshdist.backends.requests import DONE, Request

ROUNDS = 15
OWN = {"dp": md.AxisOptions(private=True)}
CALLS = 2000


class Nothing:
    """A communicator that does nothing, so that only the way to it is timed."""

    on_stream = False

    def start(self, *_: Any) -> Request:
        """Start nothing."""
        return DONE

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
    idle.get_group("dp").open_device_group("cpu").communicator = Nothing()
    group = axis.get_group()
    bare = group.open_device_group("cpu").communicator.torch_group
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
    samples = interleaved(
        {name: partial(per_call_us, call) for name, call in sides.items()}, ROUNDS
    )
    md.destroy_process_group()
    dist.destroy_process_group()
    least = min(samples["bare c10d"])
    rows = [
        {**row_of(f"all_reduce, {name}", "us", values), "best above bare": min(values) - least}
        for name, values in samples.items()
    ]
    return [*rows, row_of("all_reduce, meshdist's Python alone", "us", own_python)]


def row_of(what: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
    return {"what": what, "unit": unit, "best": min(values), "median": statistics.median(values)}


def process_ms(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - start) * 1e3


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
    samples = interleaved(
        {name: partial(process_ms, command) for name, command in commands.items()}, 7
    )
    least = min(samples["import torch"])
    rows = []
    for name, values in samples.items():
        row = row_of(name, "ms", values)
        if name.startswith("import torch,"):
            row["best above bare"] = min(values) - least
        rows.append(row)
    return rows


def main() -> None:
    options = parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    write_report(
        "overheads",
        call_rows() + process_rows(),
        "Over interleaved rounds. Above bare: above the bare c10d call, or above `import torch`. "
        "Where the machine is slow to wake Gloo's thread (a bare call of 35 us instead of 11), any "
        "pause between calls costs more than itself, torch.distributed's too; Python alone is the "
        "same call over a communicator that does nothing.",
        options.report,
    )


if __name__ == "__main__":
    main()
