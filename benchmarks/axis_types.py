"""What types that follow values cost: a call, a training step, and a psum that autograd records.

    python benchmarks/axis_types.py [REPORT.json] [--rounds 21] [--parts calls,step,ranks,psum]
        [--quick]

calls: an operation on 4 x 4 numbers, as it is, under a mode of torch that does nothing, and inside
``md.typed``: of two values that vary, and of one that varies with a parameter whose cast is kept.
step: a step of a transformer of width 256 on 512 tokens, one rank: as it is, and inside.
ranks: a step of one of width 128 on 256 tokens a rank, two ranks, over shared memory and over Gloo:
by our DDP, and inside, where the gradients are found to be the same.
psum: ``lax.psum`` of a tensor that requires a gradient and torch's functional all_reduce, both over
Gloo, two ranks; forward alone, and with a backward of the same derivative.

A step is zero_grad, forward and backward. One thread a rank; every round asks all sides, each time
another first. Calls and the step of one rank are told in CPU time of the thread; with two ranks,
the CPU time is that of all threads, the mean of both ranks, and the wall time the slower rank's. A
target is compared with the median over rounds of the quotients, or differences, of each round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed as torch_dist, nn
from torch.distributed import _functional_collectives as functional
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist as md
from benchmarks._report import interleaved, parser_of, some_of, start_ranks, write_report
from benchmarks._step_times import Sample, quotient, sample_of, thread_us, verdict

NUM_RANKS = 2
QUICK_SCALE = 8
PARTS = ("calls", "step", "ranks", "psum")
VOCABULARY = 256

# What each quotient must not exceed; the differences in microseconds.
OVER_EMPTY_MODE = 1.4
OVER_EMPTY_MODE_WITH_CAST = 3.0
ADDED_US = 10.0
STEP_OVER_PLAIN = 1.15
STEP_OVER_DDP = 1.1
PSUM_OVER_TORCH = 1.05

Call = Callable[[], Any]
Rows = list[dict[str, Any]]


def times(taken: Sequence[float]) -> dict[str, float]:
    """Columns of a side."""
    return {"median": statistics.median(taken), "min": min(taken)}


# -- calls ----------------------------------------------------------------------------------------


class EmptyMode(TorchFunctionMode):
    """Sees every function of torch, and does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


def calls() -> dict[str, tuple[float, Call]]:
    """Operations by name, each with its target over the empty mode."""
    x, y = (md.annotate(torch.rand(4, 4), varying="dp") for _ in range(2))
    weight = nn.Parameter(torch.rand(4, 4))
    return {
        "x * y": (OVER_EMPTY_MODE, lambda: x * y),
        "softmax(x)": (OVER_EMPTY_MODE, lambda: F.softmax(x, -1)),
        "x + weight, cast kept": (OVER_EMPTY_MODE_WITH_CAST, lambda: x + weight),
        "linear(x, weight), cast kept": (OVER_EMPTY_MODE_WITH_CAST, lambda: F.linear(x, weight)),
    }


def measure_calls(mesh: md.DeviceMesh, rounds: int, count: int) -> tuple[Rows, Rows]:
    """What the mode adds to single calls."""
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain": nullcontext,
        "empty mode": EmptyMode,
        "typed": partial(md.typed, mesh),
    }
    rows, targets = [], []
    for name, (most, call) in calls().items():
        sides = {side: partial(thread_us, call, count, one) for side, one in contexts.items()}
        taken = interleaved(sides, rounds)
        rows += [
            {"what": name, "side": side, "unit": "us, CPU", **times(one)}
            for side, one in taken.items()
        ]
        ratio = quotient(taken["typed"], taken["empty mode"])
        pairs = zip(taken["typed"], taken["plain"], strict=True)
        added = statistics.median(typed - plain for typed, plain in pairs)
        targets += [
            target(f"{name}: typed / empty mode", most, ratio),
            target(f"{name}: typed - plain, us", ADDED_US, added),
        ]
    return rows, targets


def target(what: str, most: float, cpu: float, wall: float | None = None) -> dict[str, Any]:
    """A row of what was aimed at."""
    found = [cpu] if wall is None else [cpu, wall]
    row: dict[str, Any] = {"what": what, "CPU": cpu}
    if wall is not None:
        row["wall"] = wall
    return {**row, "verdict": verdict(most, found)}


# -- steps ----------------------------------------------------------------------------------------


def encoder(width: int) -> nn.Module:
    """Four layers of a transformer; the same on every rank."""
    torch.manual_seed(0)
    layer = partial(nn.TransformerEncoderLayer, width, 4, 4 * width, 0.0, batch_first=True)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, width), *(layer() for _ in range(4)), nn.Linear(width, VOCABULARY)
    )


def tokens(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's texts, of 64 tokens each, and what follows."""
    generator = torch.Generator().manual_seed(md.get_rank())
    x, y = torch.randint(VOCABULARY, (2, rows, 64), generator=generator)
    return md.annotate(x, varying="dp"), md.annotate(y, varying="dp")


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def plain_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Call:
    """A step without types; of a wrapper, it averages the gradients."""

    def step() -> None:
        model.zero_grad()
        loss_of(model, x, y).backward()

    return step


def typed_step(model: nn.Module, mesh: md.DeviceMesh, x: torch.Tensor, y: torch.Tensor) -> Call:
    """A step inside ``md.typed``."""

    def step() -> None:
        model.zero_grad()
        with md.typed(mesh):
            md.lax.pmean(loss_of(model, x, y), "dp").backward()

    return step


def thread_ms(step: Call) -> float:
    """CPU time of a step; the backward is on the same thread."""
    start = time.thread_time()
    step()
    return (time.thread_time() - start) * 1e3


def measure_step(mesh: md.DeviceMesh, rounds: int, width: int) -> tuple[Rows, Rows]:
    """What types add to a step of one rank."""
    x, y = tokens(8)
    sides = {
        "plain": partial(thread_ms, plain_step(encoder(width), x, y)),
        "typed": partial(thread_ms, typed_step(encoder(width), mesh, x, y)),
    }
    taken = interleaved(sides, rounds, warm_up=3)
    name = f"step, width {width}, 512 tokens, one rank"
    rows = [
        {"what": name, "side": side, "unit": "ms, CPU", **times(one)} for side, one in taken.items()
    ]
    ratio = quotient(taken["typed"], taken["plain"])
    return rows, [target(f"{name}: typed / plain", STEP_OVER_PLAIN, ratio)]


# -- two ranks ------------------------------------------------------------------------------------


def both_clocks(what: str, unit: str, taken: Mapping[str, Sequence[Sample]]) -> Rows:
    """Rows of sides that were measured on two ranks."""
    return [
        {"what": what, "side": side, "unit": f"{unit}, {label}", **times(values)}
        for side, samples in taken.items()
        for clock, label in (("cpu", "CPU"), ("wall", "wall"))
        for values in [[getattr(one, clock) for one in samples]]
    ]


def quotients(taken: Mapping[str, Sequence[Sample]]) -> tuple[float, float]:
    """The first side over the second, in CPU and in wall time."""
    one, other = taken.values()
    cpu = quotient([a.cpu for a in one], [b.cpu for b in other])
    return cpu, quotient([a.wall for a in one], [b.wall for b in other])


def measure_ranks(
    meshes: Mapping[str, md.DeviceMesh], rounds: int, width: int
) -> tuple[Rows, Rows]:
    """Types beside our DDP, over each backend."""
    x, y = tokens(4)
    rows, targets = [], []
    for backend, mesh in meshes.items():
        model, wrapped = encoder(width), md.DDP(encoder(width), device_mesh=mesh)
        steps = {"typed": typed_step(model, mesh, x, y), "DDP": plain_step(wrapped, x, y)}
        for _ in range(2):
            for step in steps.values():
                step()
        for mine, its in zip(model.parameters(), wrapped.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad)
        sides = {side: partial(sample_of, step, 2) for side, step in steps.items()}
        taken = interleaved(sides, rounds)
        name = f"step, width {width}, 2 ranks over {backend}"
        rows += both_clocks(name, "ms", taken)
        targets.append(target(f"{name}: typed / DDP", STEP_OVER_DDP, *quotients(taken)))
    return rows, targets


def measure_psum(mesh: md.DeviceMesh, rounds: int, large: int) -> tuple[Rows, Rows]:
    """Our psum beside torch's functional all_reduce: bytes small and large, both ways."""
    group = torch_dist.group.WORLD
    rows, targets = [], []
    for num_bytes, size, num_calls in ((16, "16 B", 100), (large, f"{large >> 20} MiB", 1)):
        x = torch.ones(num_bytes // 4, requires_grad=True)
        gradient = torch.ones_like(x)

        def ours(x: torch.Tensor = x) -> torch.Tensor:
            return md.lax.psum(x, "dp", mesh=mesh)

        def torchs(x: torch.Tensor = x) -> torch.Tensor:
            return functional.wait_tensor(functional.all_reduce(x, "sum", group))

        def ours_both(x: torch.Tensor = x, gradient: torch.Tensor = gradient) -> None:
            sum_ = md.lax.pvary(md.lax.psum(x, "dp", mesh=mesh), "dp", mesh=mesh)
            torch.autograd.grad(sum_, x, gradient)

        def torchs_both(x: torch.Tensor = x, gradient: torch.Tensor = gradient) -> None:
            sum_ = functional.wait_tensor(functional.all_reduce(x, "sum", group))
            torch.autograd.grad(sum_, x, gradient)

        pairs: dict[str, tuple[Call, Call]] = {
            f"psum of {size}": (ours, torchs),
            f"psum of {size}, and backward": (ours_both, torchs_both),
        }
        for name, (our_call, torchs_call) in pairs.items():
            sides = {
                "meshdist": partial(sample_of, our_call, num_calls),
                "torch": partial(sample_of, torchs_call, num_calls),
            }
            taken = interleaved(sides, rounds)
            rows += both_clocks(name, "ms", taken)
            targets.append(target(f"{name}: meshdist / torch", PSUM_OVER_TORCH, *quotients(taken)))
    return rows, targets


# -- the run --------------------------------------------------------------------------------------


def measure_alone(options: argparse.Namespace) -> tuple[Rows, Rows]:
    """The parts of one rank, in this process."""
    torch.set_num_threads(1)
    md.init_process_group(store=md.HashStore(), rank=0, world_size=1)
    mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    rows: Rows = []
    targets: Rows = []
    scale = QUICK_SCALE if options.quick else 1
    if "calls" in options.parts:
        found = measure_calls(mesh, options.rounds, 4000 // scale)
        rows, targets = rows + found[0], targets + found[1]
    if "step" in options.parts:
        found = measure_step(mesh, options.rounds, 256 // scale)
        rows, targets = rows + found[0], targets + found[1]
    md.destroy_process_group()
    return rows, targets


def measure(rank: int, folder: str, options: argparse.Namespace, rows: Rows, targets: Rows) -> None:
    """One rank's part of what takes two; the report has ``rows`` and ``targets`` as well."""
    torch.set_num_threads(1)
    md.init_process_group("shm", f"file://{folder}/ours", world_size=NUM_RANKS, rank=rank)
    torch_dist.init_process_group(
        "gloo", f"file://{folder}/theirs", world_size=NUM_RANKS, rank=rank
    )
    meshes = {
        backend: md.init_device_mesh(
            "cpu",
            (NUM_RANKS,),
            mesh_dim_names=("dp",),
            axis_options={"dp": md.AxisOptions(backend=backend)},
        )
        for backend in ("shm", "gloo")
    }
    scale = QUICK_SCALE if options.quick else 1
    if "ranks" in options.parts:
        found = measure_ranks(meshes, options.rounds, 128 // scale)
        rows, targets = rows + found[0], targets + found[1]
    if "psum" in options.parts:
        found = measure_psum(meshes["gloo"], options.rounds, (64 << 20) // scale)
        rows, targets = rows + found[0], targets + found[1]
    if rank == 0:
        notes = f"one thread a rank, {options.rounds} interleaved rounds"
        notes += f", sizes {QUICK_SCALE} times smaller" if options.quick else ""
        notes += f"; load average before {options.load}, at the end {os.getloadavg()[0]:.1f}"
        write_report("axis_types", rows, notes, options.report, targets=targets)
    torch_dist.barrier()
    torch_dist.destroy_process_group()
    md.destroy_process_group()


def main() -> None:
    """Measure one rank here, then two in processes of their own."""
    parser = parser_of(__doc__, rounds=21)
    parser.add_argument("--parts", type=some_of(PARTS), default=[*PARTS])
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 2
    options.load = f"{os.getloadavg()[0]:.1f}"
    start_ranks(measure, NUM_RANKS, options, *measure_alone(options))


if __name__ == "__main__":
    main()
