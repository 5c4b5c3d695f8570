"""What a small all-reduce over NCCL costs the CPU beside a call of torch's class alone.

    python benchmarks/calls_on_a_stream.py [REPORT.json] [--rounds 15] [--gpu]

Without a GPU, the class is the tests' stand-in for ProcessGroupNCCL, which takes CPU tensors, on
one rank: what it does in Python takes longer than the C++ of torch's, so that the differences
count, not the quotients. With one (`--gpu`) it is torch's own, and "torch" is the collective of
torch.distributed on a world of its own. "Class" is a call of its method on prepared options, with a
wait for the work where the call is started; "in Python" is the collective where the group's fast
path is not taken. A time is the CPU's for the calling thread, in microseconds a call: the median
over rounds of the fastest of some blocks of calls. MAX is of floats, which are compared as whole
numbers: two copies beside the call.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.distributed import AllreduceOptions

import meshdist as md
from benchmarks._report import interleaved, parser_of, write_report
from tests.backends.c10d.nccl_stand_in import standing_in

OPS = ("SUM", "AVG", "MAX")
CALLS, BLOCKS = 200, 5


def measure(
    op: str, x: torch.Tensor, forget: Callable[[], None], rounds: int, *, is_async: bool
) -> dict[str, Any]:
    """The row of an all-reduce of ``x`` by the world; ``forget`` runs before each block."""
    group: Any = md.group.WORLD
    reduction = getattr(md.ReduceOp, op)
    its_op = getattr(torch.distributed.ReduceOp, op)
    device_group = group.open_device_group(x.device.type)
    place = "fast_path_on_device" if x.is_cuda else "fast_path"
    its_class, path = device_group.communicator.torch_group, getattr(group, place)
    options = AllreduceOptions()
    options.asyncOp, options.reduceOp = is_async, its_op

    def fastest_us(call: Callable[[], Any], fast_path: Any) -> float:
        setattr(group, place, fast_path)
        blocks = []
        for _ in range(BLOCKS):
            forget()
            begin = time.thread_time_ns()
            for _ in range(CALLS):
                work = call()
                if work is not None:
                    work.wait()
            blocks.append((time.thread_time_ns() - begin) / CALLS)
        return min(blocks) / 1e3

    def operation() -> Any:
        return md.all_reduce(x, reduction, group, async_op=is_async)

    def of_torch() -> Any:
        return torch.distributed.all_reduce(x, its_op, async_op=is_async)

    ways = {
        "class": lambda: fastest_us(lambda: its_class.allreduce([x], options), path),
        "meshdist": lambda: fastest_us(operation, path),
        "in Python": lambda: fastest_us(operation, None),
    }
    if x.is_cuda:
        ways["torch"] = lambda: fastest_us(of_torch, path)
    samples = interleaved(ways, rounds)
    setattr(group, place, path)
    times = {way: statistics.median(some) for way, some in samples.items()}
    row: dict[str, Any] = {"call": f"{op}, async" if is_async else op}
    row |= {f"{way} us": round(taken, 2) for way, taken in times.items()}
    row["meshdist more than class us"] = round(times["meshdist"] - times["class"], 2)
    row["in Python more than class us"] = round(times["in Python"] - times["class"], 2)
    return row


@contextmanager
def on_the_stand_in(folder: str) -> Iterator[tuple[torch.Tensor, Callable[[], None]]]:
    with standing_in() as device:
        method = f"file://{folder}/store"
        md.init_process_group("cpu:nccl", init_method=method, rank=0, world_size=1)
        x = torch.ones(2)
        md.all_reduce(x)
        its_class = md.group.WORLD.open_device_group("cpu").communicator.torch_group

        def forget() -> None:
            for kept in (device.log, device.kernels, its_class.calls, its_class.kernels):
                kept.clear()  # by the stand-in, of all calls

        yield x, forget
        md.destroy_process_group()
        while its_class._enqueued:  # a thread that holds works would end with the process midway
            time.sleep(0.01)


@contextmanager
def on_a_gpu(folder: str) -> Iterator[tuple[torch.Tensor, Callable[[], None]]]:
    ours, its = f"file://{folder}/ours", f"file://{folder}/its"
    md.init_process_group("nccl", init_method=ours, rank=0, world_size=1)
    torch.distributed.init_process_group("nccl", init_method=its, rank=0, world_size=1)
    x = torch.ones(2, device="cuda")
    md.all_reduce(x)
    torch.distributed.all_reduce(x)
    yield x, torch.cuda.synchronize
    torch.distributed.destroy_process_group()
    md.destroy_process_group()


def main() -> None:
    parser = parser_of(__doc__, rounds=15)
    parser.add_argument("--gpu", action="store_true", help="torch's own class, over NCCL")
    options = parser.parse_args()
    torch.set_num_threads(1)
    place = on_a_gpu if options.gpu else on_the_stand_in
    with tempfile.TemporaryDirectory() as folder, place(folder) as (x, forget):
        rows = [
            measure(op, x, forget, options.rounds, is_async=is_async)
            for op in OPS
            for is_async in (False, True)
        ]
    name = "calls_on_a_stream_gpu" if options.gpu else "calls_on_a_stream"
    write_report(name, rows, (__doc__ or "").split("\n\n")[2], options.report)


if __name__ == "__main__":
    main()
