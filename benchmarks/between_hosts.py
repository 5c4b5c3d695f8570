"""The cost of comparing calls between hosts: the same calls with it and without it, beside c10d's.

    python benchmarks/between_hosts.py [REPORT.json] [--rounds 31]

Processes of one machine that take themselves for two hosts: one a host over Gloo, two a host over
Gloo with shared memory inside (hierarchical). Two groups of ours make the same calls in turn; one
of them does not compare. A sample is the slowest rank's time of a call in a row of them, with what
the signal threads do meanwhile. What a call adds by itself is timed alone, too: it is far below
what samples differ by.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import AllreduceOptions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist as md
from benchmarks._report import (
    interleaved,
    ms_per_step,
    parser_of,
    spread,
    start_ranks,
    write_report,
)
from meshdist.bootstrap.world import get_world
from meshdist.groups.host_comparison import HostComparison

HOSTS = {"gloo": "AB", "hierarchical": "AABB"}
CALLS = {8: 600, 1 << 20: 40}
"""How many calls a sample takes, by bytes: of the small ones enough for two looks."""
ALONE = 100_000
ENOUGH = "at most 2 %"


def alone_us() -> float:
    """What one call adds by itself, on the thread that makes it."""
    comparison = HostComparison(get_world(), "alone", (0, 1), False, lambda: None)
    start = time.perf_counter()
    for number in range(ALONE):
        comparison.enter(number, 12345)
    return (time.perf_counter() - start) / ALONE * 1e6


def measure(rank: int, folder: str, wire: str, options: argparse.Namespace) -> None:
    """Measure on this rank; the first one writes the rows into the folder of ``options``."""
    os.environ["MESHDIST_HOST_ID"] = HOSTS[wire][rank]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    size = len(HOSTS[wire])
    md.init_process_group(wire, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    groups = {side: md.new_group() for side in ("compared", "not compared")}
    channels = {side: group.open_channel("cpu") for side, group in groups.items()}
    opened = [channel.opened for channel in channels.values()]
    assert opened[0] is not opened[1] and None not in [one.comparison for one in opened]
    channels["not compared"]._comparison = None
    rows = []
    for num_bytes, num_calls in CALLS.items():
        x = torch.zeros(num_bytes // 4)
        sides: dict[str, Callable[[], Any]] = {
            side: partial(md.all_reduce, x, group=group) for side, group in groups.items()
        }
        if wire == "gloo":
            bare, terms = channels["compared"].communicator.torch_group, AllreduceOptions()
            sides["c10d"] = lambda bare=bare, x=x, terms=terms: bare.allreduce([x], terms).wait()
        samples = interleaved(
            {side: partial(ms_per_step, call, num_calls) for side, call in sides.items()},
            options.rounds,
        )
        us = {side: [1e3 * sample for sample in found] for side, found in samples.items()}
        base = statistics.median(us.get("c10d", us["not compared"]))
        pairs = zip(us["compared"], us["not compared"], strict=True)
        more = statistics.median(one - other for one, other in pairs)
        adds = min(alone_us() for _ in range(5)) if rank == 0 else 0.0
        rows += [
            {
                "wire": wire,
                "bytes": num_bytes,
                "side": side,
                **spread(found, "us"),
                **(
                    {"more, %": 100 * more / base, "alone us": adds, "alone, %": 100 * adds / base}
                    if side == "compared"
                    else {}
                ),
            }
            for side, found in us.items()
        ]
    if rank == 0:
        torch.save(rows, f"{options.found}/{wire}")
    md.destroy_process_group()


def main() -> None:
    options = parser_of(__doc__, rounds=31).parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as options.found:
        for wire, hosts in HOSTS.items():
            start_ranks(measure, len(hosts), wire, options)
            rows += torch.load(f"{options.found}/{wire}")
    targets = [
        {
            "target": f"comparing {row['bytes']} bytes over {row['wire']}, {column}",
            "wanted": ENOUGH,
            "found": f"{row[column]:.2g} %",
        }
        for row in rows
        for column in ("more, %", "alone, %")
        if column in row
    ]
    write_report(
        "between_hosts",
        rows,
        "Medians over interleaved rounds; more: the median of differences within a round, above "
        "c10d's call where it is measured, else above ours that is not compared; alone: the best "
        "of what a call does by itself for the comparison.",
        options.report,
        targets=targets,
    )


if __name__ == "__main__":
    main()
