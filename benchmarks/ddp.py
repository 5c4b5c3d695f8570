"""One training step under meshdist's DDP and under torch's, on two ranks.

    python benchmarks/ddp.py [REPORT.json] [--rounds 21] [--models mlp,transformer,many]
        [--sides local,torch,meshdist/shm] [--quick]
    python benchmarks/ddp.py --profile meshdist/shm many    # where a step's CPU time goes

All sides run in one pair of processes with one thread each. A step is zero_grad, forward, backward
and SGD. A sample is some steps: the wall time is the slower rank's, the CPU time, of all threads,
the mean of both ranks. Every round asks all sides, each time another first.

"local" has no DDP, and what a step takes above it in the same round is its exposed time. Torch's
sides go over Gloo; "noop" has a communication hook that sends nothing, so it shows torch's reducer
alone, as "alone", a group of one rank, shows ours. A target is compared with the median over rounds
of the quotients of each round, in CPU and in wall time; where the divisor's exposed time is not
above zero, a round counts as infinite.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as torch_dist, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist as md
from benchmarks._ddp_profile import show_profile
from benchmarks._models import MODELS, Training, step_of, trainings
from benchmarks._report import interleaved, parser_of, some_of, start_ranks, write_report
from benchmarks._step_times import Sample, sample_of, verdict

NUM_RANKS = 2
QUICK_SCALE = 10
MIB = 1 << 20

Wrap = Callable[[nn.Module], nn.Module]


def without_messages(model: nn.Module) -> nn.Module:
    """Torch's reducer alone."""
    wrapped = TorchDDP(model)
    wrapped.register_comm_hook(None, noop_hook)
    return wrapped


def compressed(model: nn.Module, axis: md.DeviceMesh) -> nn.Module:
    """Ours, with gradients sent in bfloat16."""
    wrapped = md.DDP(model, device_mesh=axis)
    wrapped.register_comm_hook(None, md.comm_hooks.bf16_compress_hook)
    return wrapped


TORCHS_OVER_GLOO = ("torch", "torch/views", "torch/batched")
SIDES = (
    "local",
    *TORCHS_OVER_GLOO,
    "torch/noop",
    "meshdist/gloo",
    "meshdist/shm",
    "meshdist/alone",
    "meshdist/gloo/bf16",
)


def make_sides() -> dict[str, Wrap]:
    """What makes a side of a module, for every side of ``SIDES``; collective."""
    names = ("dp", "one")
    over = {
        backend: md.init_device_mesh(
            "cpu",
            (NUM_RANKS, 1),
            mesh_dim_names=names,
            axis_options={name: md.AxisOptions(backend=backend) for name in names},
        )
        for backend in ("gloo", "shm")
    }
    gloo, shm, one = over["gloo"]["dp"], over["shm"]["dp"], over["shm"]["one"]
    makers: tuple[Wrap, ...] = (
        lambda model: model,
        TorchDDP,
        partial(TorchDDP, gradient_as_bucket_view=True),
        partial(TorchDDP, gradient_as_bucket_view=True, batched_grad_copy=True),
        without_messages,
        partial(md.DDP, device_mesh=gloo),
        partial(md.DDP, device_mesh=shm),
        partial(md.DDP, device_mesh=one),
        partial(compressed, axis=gloo),
    )
    return dict(zip(SIDES, makers, strict=True))


def live_bytes(model: nn.Module) -> int:
    """The bytes of all tensors of this process, and of the gradients of ``model``."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]  # torch makes them in C++
    storages = [one.untyped_storage() for one in tensors if one.is_cpu]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def gradient_bytes(wrap: Wrap, training: Training, x: torch.Tensor) -> float:
    """What gradients and buckets take between steps, over what the parameters take.

    The buckets are tensors that Python knows of, so this is for ours alone.
    """
    module = training.make()
    before = live_bytes(module)
    step = step_of(wrap(module), x)
    for _ in range(3):
        step()
    return (live_bytes(module) - before) / sum(p.nbytes for p in module.parameters())


# -- comparisons ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A quotient of two sides; ``most`` is what it must not exceed, if that was set.

    Args:
        what: the time that is compared, "step" or "exposed".
        side, other: the sides; "torch, best" is the best of torch's over Gloo in this run.
        most: the target; None where there is none.
        models: for which the target was set.
    """

    what: str
    side: str
    other: str
    most: float | None = None
    models: tuple[str, ...] = tuple(MODELS)


BEST = "torch, best"
COMPARISONS = (
    Comparison("step", "meshdist/gloo", BEST, 1.0),
    Comparison("exposed", "meshdist/gloo", BEST),
    Comparison("exposed", "meshdist/shm", "torch", 0.3),
    Comparison("exposed", "meshdist/shm", BEST),
    Comparison("exposed", "meshdist/alone", "torch/noop", 0.5, ("many",)),
    Comparison("step", "meshdist/gloo/bf16", "meshdist/gloo", 1.0, ("mlp", "transformer")),
)
MOST_MEMORY = 1.05


def quotient(value: float, divisor: float) -> float:
    """One over the other; infinite where the divisor says nothing.

    Example:
        >>> quotient(1.0, 4.0), quotient(1.0, -0.1)
        (0.25, inf)
    """
    return value / divisor if divisor > 0 else math.inf


def quotient_of(
    comparison: Comparison, samples: Mapping[str, Sequence[Sample]], clock: str
) -> tuple[float, str] | None:
    """The median over rounds, and the other side; None where a side was not measured."""
    times = {side: [getattr(one, clock) for one in taken] for side, taken in samples.items()}
    other = comparison.other
    if other == BEST:
        known = [side for side in TORCHS_OVER_GLOO if side in times]
        other = min(known, key=lambda side: statistics.median(times[side]), default=BEST)
    if not {comparison.side, other} <= times.keys():
        return None
    below = [0.0] * len(times[other])
    if comparison.what == "exposed":
        if "local" not in times:
            return None
        below = times["local"]
    rounds = zip(times[comparison.side], times[other], below, strict=True)
    found = [quotient(mine - base, theirs - base) for mine, theirs, base in rounds]
    return statistics.median(found), other


def shown(value: float) -> float | str:
    """A quotient as JSON can hold it."""
    return value if math.isfinite(value) else "inf"


def comparison_rows(model: str, samples: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """One row for each comparison of sides that were measured."""
    rows = []
    for one in COMPARISONS:
        cpu, wall = (quotient_of(one, samples, clock) for clock in ("cpu", "wall"))
        if cpu is None or wall is None:
            continue
        others = dict.fromkeys((cpu[1], wall[1]))
        most = one.most if model in one.models else None
        rows.append(
            {
                "model": model,
                "what": f"{one.what}: {one.side} / {one.other}",
                "CPU": shown(cpu[0]),
                "wall": shown(wall[0]),
                "verdict": verdict(most, (cpu[0], wall[0])),
                "best": " and ".join(others) if one.other == BEST else "",
            }
        )
    return rows


def side_rows(model: str, samples: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """One row for each side: medians over rounds."""
    rows = []
    for side, taken in samples.items():
        row: dict[str, Any] = {"model": model, "side": side}
        for clock, name in (("cpu", "CPU"), ("wall", "wall")):
            times = [getattr(one, clock) for one in taken]
            row[f"{name} ms"] = statistics.median(times)
            row[f"min {name}"] = min(times)
            if "local" in samples:
                local = [getattr(one, clock) for one in samples["local"]]
                above = [mine - base for mine, base in zip(times, local, strict=True)]
                row[f"exposed {name}"] = statistics.median(above)
        rows.append(row)
    return rows


# -- the run --------------------------------------------------------------------------------------


def measure_model(
    name: str, training: Training, sides: Mapping[str, Wrap], rounds: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of one model: its sides, and its targets."""
    x = training.make_input()
    memory = {
        side: gradient_bytes(wrap, training, x)
        for side, wrap in sides.items()
        if side in ("meshdist/gloo", "meshdist/shm")
    }
    samplers = {
        side: partial(sample_of, step_of(wrap(training.make()), x), training.num_steps)
        for side, wrap in sides.items()
    }
    samples = interleaved(samplers, rounds, warm_up=2)  # buckets are laid out anew in the first
    targets = comparison_rows(name, samples)
    for side, taken in memory.items():
        about = {"model": name, "what": f"memory: gradients of {side} / parameters"}
        targets.append({**about, "bytes": taken, "verdict": verdict(MOST_MEMORY, [taken])})
    return side_rows(name, samples), targets


def measure(rank: int, folder: str, options: argparse.Namespace) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    md.init_process_group("shm", f"file://{folder}/ours", world_size=NUM_RANKS, rank=rank)
    torch_dist.init_process_group(
        "gloo", f"file://{folder}/theirs", world_size=NUM_RANKS, rank=rank
    )
    models = trainings(QUICK_SCALE) if options.quick else MODELS
    sides = make_sides()
    if options.profile:
        side, name = options.profile
        training = models[name]
        step = step_of(sides[side](training.make()), training.make_input())
        show_profile(step, 5 * training.num_steps, is_shown=rank == 0)
    else:
        chosen = {side: sides[side] for side in options.sides}
        rows, targets = [], []
        loads = []
        for name in options.models:
            loads.append(f"{os.getloadavg()[0]:.1f}")
            found = measure_model(name, models[name], chosen, options.rounds)
            rows += found[0]
            targets += found[1]
        if rank == 0:
            notes = f"{NUM_RANKS} ranks, one thread each, {options.rounds} interleaved rounds"
            notes += f", models {QUICK_SCALE} times smaller" if options.quick else ""
            loads.append(f"{os.getloadavg()[0]:.1f}")
            notes += f"; load average before each model and at the end {', '.join(loads)}"
            write_report("ddp", rows, notes, options.report, targets=targets)
    torch_dist.barrier()
    torch_dist.destroy_process_group()
    md.destroy_process_group()


def main() -> None:
    """Read the command line and start both ranks."""
    parser = parser_of(__doc__, rounds=21)
    parser.add_argument("--models", type=some_of(MODELS), default=[*MODELS])
    parser.add_argument("--sides", type=some_of(SIDES), default=[*SIDES])
    parser.add_argument("--quick", action="store_true", help="small models, two rounds")
    parser.add_argument(
        "--profile", nargs=2, metavar=("SIDE", "MODEL"), help="show where a step's CPU time goes"
    )
    options = parser.parse_args()
    if options.profile:
        for text, known in zip(options.profile, (SIDES, MODELS), strict=True):
            if text not in known:
                parser.error(f"--profile: {text!r} is none of {', '.join(known)}")
    if options.quick:
        options.rounds = 2
    start_ranks(measure, NUM_RANKS, options)


if __name__ == "__main__":
    main()
