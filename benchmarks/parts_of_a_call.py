"""Where the time of a small all-reduce over shared memory goes, part by part.

    python benchmarks/parts_of_a_call.py [REPORT.json] [--rounds 25] [--bytes 8]

Each part is the difference of two calls that do the same but for that part; a time is the median
over rounds of the fastest of some blocks of calls, in nanoseconds a call, on rank 0 of two. The
calls, each of which does what stands before it, too:

    a method of the core      the fast path is given no tensor, and declines
    the tensor                it is given no reduction, and declines
    note, header, autograd    the call is done, in a group of this rank alone
    the other rank            the call is done by two ranks: publish, wait, reduce
    the collective, of a group      the public collective, with a group
    the world                 the public collective, with none

``knows torch`` says whether the core reads torch's tensors where they lie; without that (the
variable MESHDIST_TORCH_LAYOUT=0) it asks Python, and the tensor and autograd take longer.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import interleaved, parser_of, start_ranks, write_report

CALLS, BLOCKS = 500, 5


def fastest_ns(call: Callable[[], Any]) -> float:
    """Nanoseconds a call, of the fastest block."""
    blocks = []
    for _ in range(BLOCKS):
        begin = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        blocks.append((time.perf_counter_ns() - begin) / CALLS)
    return min(blocks)


def measure(rank: int, folder: str, rounds: int, num_bytes: int, path: str) -> None:
    import torch

    import meshdist as md
    from meshdist.backends.native_core import core

    torch.set_num_threads(1)
    md.init_process_group("shm", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    x, world, op = torch.ones(max(1, num_bytes // 4)), md.group.WORLD, md.ReduceOp.SUM
    alone = [md.new_group([one]) for one in range(2)][rank]
    md.all_reduce(x)
    md.all_reduce(x, op, alone)
    one, both, nothing = alone.fast_path, world.fast_path, object()
    calls: dict[str, Callable[[], Any]] = {
        "an empty call": lambda: None,
        "a method of the core": lambda: one.all_reduce(nothing, op),
        "the tensor": lambda: one.all_reduce(x, nothing),
        "note, header, autograd": lambda: one.all_reduce(x, op),
        "the other rank": lambda: both.all_reduce(x, op),
        "the collective, of a group": lambda: md.all_reduce(x, op, world),
        "the world": lambda: md.all_reduce(x),
    }
    samples = interleaved(
        {name: lambda call=call: fastest_ns(call) for name, call in calls.items()}, rounds
    )
    if rank == 0:
        times = {name: statistics.median(some) for name, some in samples.items()}
        found = {"knows torch": core.knows_torch(), "times": times}
        Path(path).write_text(json.dumps(found))
    md.destroy_process_group()


def main() -> None:
    parser = parser_of(__doc__, rounds=25)
    parser.add_argument("--bytes", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "times.json")
        start_ranks(measure, 2, arguments.rounds, arguments.bytes, path)
        found = json.loads(Path(path).read_text())
    times, rows, before = found["times"], [], 0.0
    for name, taken in times.items():
        row = {"part": name, "bytes": arguments.bytes, "ns": taken - before, "in all ns": taken}
        rows.append(
            {key: round(one) if isinstance(one, float) else one for key, one in row.items()}
        )
        before = taken
    notes = f"{arguments.rounds} rounds; the core knows torch: {found['knows torch']}."
    write_report("parts_of_a_call", rows, notes, arguments.report)


if __name__ == "__main__":
    main()
