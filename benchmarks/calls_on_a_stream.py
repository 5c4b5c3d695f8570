"""What a small all-reduce over NCCL costs the CPU beside a call of torch's class alone.

    python benchmarks/calls_on_a_stream.py [REPORT.json] [--rounds 15]

The class is the tests' stand-in for ProcessGroupNCCL, which takes CPU tensors, on one rank: what it
does in Python takes longer than the C++ of torch's, so that the differences count, not the
quotients. "Class" is a call of its method on prepared options, with a wait for the work where the
call is started; "in Python" is the verb where the group's fast path is not taken. A time is the
CPU's for the calling thread, in microseconds a call: the median over rounds of the fastest of some
blocks of calls. MAX is of floats, which are compared as whole numbers: two copies beside the call.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.distributed import AllreduceOptions

import meshdist as md
from benchmarks._report import interleaved, parser_of, write_report
from tests.wires.c10d.nccl_stand_in import Device, standing_in

OPS = ("SUM", "AVG", "MAX")
CALLS, BLOCKS = 200, 5


def measure(op: str, device: Device, rounds: int, *, is_async: bool) -> dict[str, Any]:
    """The row of an all-reduce of two floats, on the world's group."""
    group: Any = md.group.WORLD
    x, reduction = torch.ones(2), getattr(md.ReduceOp, op)
    channel = group.open_channel("cpu")
    its_class, path = channel.communicator._group, channel.fast_path
    options = AllreduceOptions()
    options.asyncOp, options.reduceOp = is_async, getattr(torch.distributed.ReduceOp, op)

    def fastest_us(call: Callable[[], Any], fast_path: Any) -> float:
        group.fast_path, blocks = fast_path, []
        for _ in range(BLOCKS):
            for kept in (device.log, device.kernels, its_class.calls, its_class.kernels):
                kept.clear()  # by the stand-in, of all calls
            begin = time.thread_time_ns()
            for _ in range(CALLS):
                work = call()
                if work is not None:
                    work.wait()
            blocks.append((time.thread_time_ns() - begin) / CALLS)
        return min(blocks) / 1e3

    def verb() -> Any:
        return md.all_reduce(x, reduction, group, async_op=is_async)

    ways = {
        "class": lambda: fastest_us(lambda: its_class.allreduce([x], options), path),
        "meshdist": lambda: fastest_us(verb, path),
        "in Python": lambda: fastest_us(verb, None),
    }
    samples = interleaved(ways, rounds)
    times = {way: statistics.median(some) for way, some in samples.items()}
    row: dict[str, Any] = {"call": f"{op}, async" if is_async else op}
    row |= {f"{way} us": round(taken, 2) for way, taken in times.items()}
    row["meshdist more than class us"] = round(times["meshdist"] - times["class"], 2)
    row["in Python more than class us"] = round(times["in Python"] - times["class"], 2)
    return row


def main() -> None:
    options = parser_of(__doc__, rounds=15).parse_args()
    with tempfile.TemporaryDirectory() as folder, standing_in() as device:
        torch.set_num_threads(1)
        method = f"file://{folder}/store"
        md.init_process_group("cpu:nccl", init_method=method, rank=0, world_size=1)
        md.all_reduce(torch.ones(2))
        rows = [
            measure(op, device, options.rounds, is_async=is_async)
            for op in OPS
            for is_async in (False, True)
        ]
        md.destroy_process_group()
    write_report("calls_on_a_stream", rows, (__doc__ or "").split("\n\n")[2], options.report)


if __name__ == "__main__":
    main()
