"""All-reduce beside busy processes: through shared memory and over torch's Gloo, two ranks.

    python -m benchmarks.busy [REPORT] [--rounds 15] [--busy 0,1,2,4,6] [--sizes 8,1048576,67108864]

Busy processes compute without end, as a data loader's workers do; this script starts them, and
they end with it. For each number of them both sides start anew and keep their processes, asleep
while the other is at work; each round asks each side once. A row has the medians over rounds of the
slowest rank's time per call, and the median over rounds of shared memory's time divided by Gloo's
in the same round: at most 1.05 is wanted beside any number of busy processes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import parser_of, write_report
from meshdist.bench.measurement import Cell, Entrant, measure, running
from meshdist.bench.reports import size_text

OURS, TORCH = "meshdist/shm", "torch/gloo"
MIB = 1 << 20
MOST = 1.05
# Ends also where the process that started it cannot end it.
BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(10_000):
        pass
"""


@contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes that compute until the context ends."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def row(cell: Cell, num_busy: int) -> dict[str, Any]:
    """One line of the report: a size beside so many busy processes."""
    ours, torch = cell.samples[OURS], cell.samples[TORCH]
    ratio = statistics.median(mine / other for mine, other in zip(ours, torch, strict=True))
    return {
        "busy": num_busy,
        "size": size_text(cell.num_bytes),
        "shm us": statistics.median(ours) * 1e6,
        "min us": min(ours) * 1e6,
        "max us": max(ours) * 1e6,
        "gloo us": statistics.median(torch) * 1e6,
        "shm / gloo": ratio,
        "verdict": "met" if ratio <= MOST else "MISSED",
    }


def rows_beside(num_busy: int, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Measure all sizes beside so many busy processes."""
    with (
        running([Entrant(OURS, OURS), Entrant(TORCH, TORCH)], 2) as ranks,
        busy_processes(num_busy),
    ):
        cells = measure(ranks, ["all_reduce"], sizes, rounds, lambda cell: None)
    rows = [row(cell, num_busy) for cell in cells]
    for one in rows:
        print(*(f"{v:.4g}" if isinstance(v, float) else v for v in one.values()), flush=True)
    return rows


def numbers(text: str) -> list[int]:
    """A comma list of integers."""
    return [int(one) for one in text.split(",")]


def main() -> None:
    parser = parser_of(__doc__, rounds=15)
    parser.add_argument("--busy", type=numbers, default=[0, 1, 2, 4, 6], help="how many, a list")
    parser.add_argument("--sizes", type=numbers, default=[8, MIB, 64 * MIB], help="in bytes")
    arguments = parser.parse_args()
    rows = []
    for num_busy in arguments.busy:
        rows += rows_beside(num_busy, arguments.sizes, arguments.rounds)
    write_report("busy", rows, __doc__ or "", arguments.report)


if __name__ == "__main__":
    main()
