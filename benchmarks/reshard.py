"""Resharding beside DTensor: time and bytes of transitions, a lone pair, planning, a call's Python.

    python benchmarks/reshard.py [REPORT.json] [--rounds 11] [--quick]
        [--parts transitions,pair,planning,calls] [--meshes 2x2,2x4] [--transition NAME] [--mib 64]

transitions: nine of a square float32 matrix on meshes of 4 and 8 ranks. DTensor over Gloo, with its
default planner and with the one of least cost, both without and with the flattened mesh that it can
merge collectives on; ours over Gloo and through shared memory. Results are compared before anything
is timed. Bytes are those received: ours as the plan says, DTensor's counted as its collectives pass
by, each in its cheapest form; the bound is the fewest that the transition needs.
pair: two of four ranks exchange 16 MiB and the others nothing: as messages, by all_to_all with
sizes, and by the transposition of a mesh's axes.
planning: microseconds of one rank's plan with all that is kept forgotten, at 4 to 4,096 ranks.
calls: a call's Python where communication is free, its plan kept; DTensor's on torch's fake process
group.

One thread a rank. Every round asks all sides, each time another first; a target is compared with
the median over rounds of the quotients of each round. Times are the slowest rank's, into memory
that the call allocates.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed as torch_dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist as md
from benchmarks import _dtensor as dtensor, _transitions as transitions
from benchmarks._planning import measure_planning
from benchmarks._report import interleaved, parser_of, some_of, start_ranks, write_report
from benchmarks._step_times import Sample, quotient, sample_of, thread_us, verdict
from benchmarks._transitions import AXES, TRANSITIONS, pattern_of, sides_of
from meshdist.sharding import executor

MIB = 1 << 20
PARTS = ("transitions", "pair", "planning", "calls")
MESHES = {"2x2": (2, 2), "2x4": (2, 4)}
QUICK_SCALE = 64

# What is aimed at, as quotients that must not be exceeded.
OF_DTENSOR = {"[S0,S1]->[S1,S0]": 0.2, "[S0,S0]->[S1,S1]": 0.2}
OF_DTENSOR_AT_TWICE_THE_BOUND = 0.667
NOT_SLOWER = 1.05
OF_MESSAGES = 1.2
OF_DTENSORS_CALL = 1 / 4

Call = Callable[[], Any]
Rows = list[dict[str, Any]]

BEST = "DTensor, best"


def columns(taken: Sequence[Sample]) -> dict[str, float]:
    """A side's times, as columns."""
    wall = [one.wall for one in taken]
    return {
        "ms": statistics.median(wall),
        "min ms": min(wall),
        "CPU ms": statistics.median(one.cpu for one in taken),
    }


def wall_times(samples: Mapping[str, Sequence[Sample]]) -> dict[str, list[float]]:
    return {side: [one.wall for one in taken] for side, taken in samples.items()}


def compared(
    what: str, one: Sequence[float], other: Sequence[float], most: float | None
) -> dict[str, Any]:
    """A row of what was aimed at. "Not slower" is within 5 %, or what the rounds differ by."""
    found = quotient(one, other)
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    if most == NOT_SLOWER:
        most = round(max(most, 1 + high - low), 3)
    return {
        "what": what,
        "quotient": found,
        "quartiles": f"{low:.2f}-{high:.2f}",
        "verdict": verdict(most, [found]),
    }


# -- transitions ----------------------------------------------------------------------------------


def our_meshes(sizes: tuple[int, ...]) -> dict[str, md.DeviceMesh]:
    """A mesh over each backend; collective."""
    return {
        ours: md.init_device_mesh(
            "cpu",
            sizes,
            mesh_dim_names=AXES,
            axis_options={axis: md.AxisOptions(backend=ours) for axis in AXES},
        )
        for ours in ("gloo", "shm")
    }


def received_by_dtensor(call: Call) -> tuple[float, str]:
    """The bytes that this rank receives, and its collectives."""
    with dtensor.ReceivedBytes() as counted:
        call()
    return counted.num_bytes, ", ".join(counted.operations)


def over_ranks(value: float) -> tuple[float, float]:
    """The mean and the largest of a number over all ranks."""
    mean, largest = torch.tensor([value] * 2, dtype=torch.float64)
    md.all_reduce(mean, md.ReduceOp.AVG)
    md.all_reduce(largest, md.ReduceOp.MAX)
    return mean.item(), largest.item()


def measure_transition(
    transition: str,
    ours: Mapping[str, md.DeviceMesh],
    dtensors: Mapping[str, TorchMesh],
    edge: int,
    rounds: int,
) -> tuple[Rows, Rows]:
    """All sides of one transition on one mesh."""
    sizes = ours["shm"].shape
    coordinate = ours["shm"].get_coordinate()
    assert coordinate is not None
    before, after = sides_of(transition)
    whole = torch.arange(edge * edge, dtype=torch.int32).remainder_(1021).float().view(edge, edge)
    x = transitions.partial_sum_of(whole, before, sizes, coordinate)
    count = transitions.num_partial_sums(before, sizes)
    expected = transitions.shard_of(whole, after, sizes, coordinate) * count
    all_bytes, num_ranks = whole.nbytes, math.prod(sizes)
    fewest = transitions.bound(transition, sizes) / num_ranks
    del whole

    calls = {
        side: dtensor.redistribution(side, mesh, transition, x) for side, mesh in dtensors.items()
    }
    received = {side: received_by_dtensor(call) for side, call in calls.items()}
    pattern = pattern_of(transition)
    for name, mesh in ours.items():
        plan = md.plan(pattern, mesh=mesh, shape=(edge, edge))
        operations = ", ".join(step.name for step in plan.steps)
        received[f"meshdist/{name}"] = plan.bytes_received(x.itemsize), operations
        calls[f"meshdist/{name}"] = partial(md.reshard, x, pattern, mesh)
    for side, call in calls.items():
        if not torch.equal(call(), expected):
            raise AssertionError(f"{transition} by {side} is wrong on rank {md.get_rank()}")

    samples = interleaved(
        {side: partial(sample_of, call, 1) for side, call in calls.items()}, rounds
    )
    name = f"{transition} {'x'.join(map(str, sizes))}"
    rows = []
    shares = {}
    for side, (num_bytes, operations) in received.items():
        mean, worst = over_ranks(num_bytes / all_bytes)
        shares[side] = mean
        rows.append(
            {
                "what": name,
                "side": side,
                **columns(samples[side]),
                "received": mean,
                "worst": worst,
                "bound": fewest,
                "/ bound": mean / fewest,
                "operations": operations,
            }
        )
    return rows, transition_targets(name, transition, wall_times(samples), shares, fewest)


def transition_targets(
    name: str,
    transition: str,
    times: Mapping[str, Sequence[float]],
    received: Mapping[str, float],
    fewest: float,
) -> Rows:
    """Ours over Gloo beside DTensor's fastest, and ours through shared memory beside both."""
    best = min(dtensor.SIDES, key=lambda side: statistics.median(times[side]))
    least = min(received[side] for side in dtensor.SIDES)
    most = OF_DTENSOR.get(transition, NOT_SLOWER)
    if most == NOT_SLOWER and least >= 1.999 * fewest:
        most = OF_DTENSOR_AT_TWICE_THE_BOUND
    gloo, shm = times["meshdist/gloo"], times["meshdist/shm"]
    against = compared(f"{name}: gloo / {BEST}", gloo, times[best], most)
    beside = compared(f"{name}: shm / {BEST}", shm, times[best], None)
    return [
        {**against, "best": best},
        {**beside, "best": best},
        compared(f"{name}: shm / gloo", shm, gloo, NOT_SLOWER),
    ]


def measure_transitions(
    rank: int, folder: str, options: argparse.Namespace, found: Path, name: str
) -> None:
    """One rank's part of all transitions on one mesh."""
    sizes = MESHES[name]
    start_both(rank, math.prod(sizes), folder, "gloo")
    ours, dtensors = our_meshes(sizes), dtensor.make_meshes(sizes)
    edge = math.isqrt(int(options.mib * MIB) // 4)
    rows: Rows = []
    targets: Rows = []
    gc.freeze()
    for transition in options.transitions:
        more = measure_transition(transition, ours, dtensors, edge, options.rounds)
        rows, targets = rows + more[0], targets + more[1]
    finish(rank, found, rows, targets)


# -- a lone pair ----------------------------------------------------------------------------------


def pair_calls(mesh: md.DeviceMesh, count: int) -> dict[str, Call]:
    """Ranks 1 and 2 of four exchange ``count`` numbers, into memory that is there or new memory."""
    group, rank = mesh[AXES].open_group(), md.get_rank()
    other = {1: 2, 2: 1}.get(rank)
    x, out = torch.full((count,), float(rank)), torch.empty(count)
    sizes = [count if place == other else 0 for place in range(4)]
    given, taken = (x, out) if other else (x[:0], out[:0])

    def messages(out: torch.Tensor = out) -> torch.Tensor:
        if other is not None:
            both = [md.P2POp(md.isend, x, other, group), md.P2POp(md.irecv, out, other, group)]
            for work in md.batch_isend_irecv(both):
                work.wait()
        return out

    def single() -> torch.Tensor:
        md.all_to_all_single(taken, given, sizes, sizes, group=group)
        return out

    def listed() -> torch.Tensor:
        empty = x[:0]
        outs = [out if size else out[:0] for size in sizes]
        md.all_to_all(outs, [x if size else empty for size in sizes], group=group)
        return out

    def messages_to_new_memory() -> torch.Tensor:
        return messages(torch.empty_like(x)) if other else x.clone()

    return {
        "messages": messages,
        "all_to_all_single": single,
        "all_to_all": listed,
        "messages to new memory": messages_to_new_memory,
        "reshard": partial(md.reshard, x, "n@(dp,tp) -> n@(tp,dp)", mesh),
    }


PAIR_TARGETS = (
    ("all_to_all_single", "messages"),
    ("all_to_all", "messages"),
    ("reshard", "messages to new memory"),
)


def measure_pair(rank: int, folder: str, options: argparse.Namespace, found: Path) -> None:
    """One rank's part of the lone pair."""
    torch.set_num_threads(1)
    md.init_process_group("shm", f"file://{folder}/ours", world_size=4, rank=rank)
    rows: Rows = []
    targets: Rows = []
    size = 16 * MIB // (QUICK_SCALE if options.quick else 1)
    gc.freeze()
    for ours, mesh in our_meshes((2, 2)).items():
        calls = pair_calls(mesh, size // 4)
        for name, call in calls.items():
            if rank in (1, 2) and not (call() == 3 - rank).all():
                raise AssertionError(f"{name} over {ours} is wrong on rank {rank}")
            if rank in (0, 3):
                call()
        sides = {side: partial(sample_of, call, 1) for side, call in calls.items()}
        samples = interleaved(sides, 2 * options.rounds)
        what = f"a lone pair of four over {ours}, {size / MIB:g} MiB"
        rows += [{"what": what, "side": side, **columns(taken)} for side, taken in samples.items()]
        times = wall_times(samples)
        if ours == "shm":
            targets += [
                compared(f"{what}: {one} / {other}", times[one], times[other], OF_MESSAGES)
                for one, other in PAIR_TARGETS
            ]
    finish(rank, found, rows, targets)


# -- calls ----------------------------------------------------------------------------------------

OPERATIONS = ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor")


def measure_calls(rank: int, folder: str, options: argparse.Namespace, found: Path) -> None:
    """Ours and DTensor's Python, on rank 0; the others wait after they have opened their groups."""
    start_both(rank, 4, folder, "fake")
    mesh = our_meshes((2, 2))["gloo"]
    torchs = dtensor.make_meshes((2, 2))["DTensor"]
    rows: Rows = []
    targets: Rows = []
    free = dict.fromkeys(OPERATIONS, lambda *arguments: None)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    count = 2000 // (20 if options.quick else 1)
    for transition in options.transitions:
        pattern, before = pattern_of(transition), sides_of(transition)[0]
        x = transitions.partial_sum_of(torch.zeros(8, 8), before, mesh.shape, coordinate)
        ours = partial(md.reshard, x, pattern, mesh)
        ours()
        if rank == 0:
            sides = {
                "meshdist": partial(thread_us, ours, count),
                "DTensor": partial(
                    thread_us, dtensor.redistribution("DTensor", torchs, transition, x), count // 10
                ),
            }
            with mock.patch.multiple(executor, **free):
                taken = interleaved(sides, options.rounds)
            what = f"a call's Python, {transition}"
            rows += [
                {"what": what, "side": side, "us": statistics.median(one), "min us": min(one)}
                for side, one in taken.items()
            ]
            targets.append(
                compared(f"{what}: meshdist / DTensor", *taken.values(), OF_DTENSORS_CALL)
            )
        md.barrier()
    finish(rank, found, rows, targets)


# -- the run --------------------------------------------------------------------------------------


def start_both(rank: int, num_ranks: int, folder: str, backend: str) -> None:
    """Make our world and torch's, by torch's ``backend``."""
    torch.set_num_threads(1)
    torch._logging.set_logs(all=logging.ERROR)  # DTensor warns of what is to be measured
    ours = "gloo" if backend == "fake" else "shm"  # a rank that waits over Gloo takes no core
    md.init_process_group(ours, f"file://{folder}/ours", world_size=num_ranks, rank=rank)
    meeting: dict[str, Any] = {"init_method": f"file://{folder}/theirs"}
    if backend == "fake":
        meeting = {"store": FakeStore()}
    torch_dist.init_process_group(backend, **meeting, world_size=num_ranks, rank=rank)


def finish(rank: int, found: Path, rows: Rows, targets: Rows) -> None:
    """Add to what has been found, and leave the worlds that there are."""
    if rank == 0:
        told = json.loads(found.read_text())
        found.write_text(json.dumps([told[0] + rows, told[1] + targets]))
    md.barrier()
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()
    md.destroy_process_group()


def measure(options: argparse.Namespace, found: Path) -> None:
    """All parts that are asked for, each in processes of its own."""
    if "transitions" in options.parts:
        for name in options.meshes:
            num_ranks = math.prod(MESHES[name])
            start_ranks(measure_transitions, num_ranks, options, found, name)
    if "pair" in options.parts:
        start_ranks(measure_pair, 4, options, found)
    if "calls" in options.parts:
        start_ranks(measure_calls, 4, options, found)
    if "planning" in options.parts:
        rows, targets = measure_planning(options.rounds)
        told = json.loads(found.read_text())
        found.write_text(json.dumps([told[0] + rows, told[1] + targets]))


def main() -> None:
    """Read the command line, measure and report."""
    parser = parser_of(__doc__, rounds=11)
    parser.add_argument("--parts", type=some_of(PARTS), default=[*PARTS])
    parser.add_argument("--meshes", type=some_of(MESHES), default=[*MESHES])
    parser.add_argument("--transition", action="append", choices=TRANSITIONS, dest="transitions")
    parser.add_argument("--mib", type=float, default=64.0, help="of the array")
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds")
    options = parser.parse_args()
    options.transitions = options.transitions or list(TRANSITIONS)
    if options.quick:
        options.rounds, options.mib = 2, 1.0
    load = f"{os.getloadavg()[0]:.1f}"
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        found.write_text("[[], []]")
        measure(options, found)
        rows, targets = json.loads(found.read_text())
    notes = (
        f"one thread a rank, {options.rounds} interleaved rounds, an array of {options.mib:g} MiB"
    )
    notes += f"; load average before {load}, at the end {os.getloadavg()[0]:.1f}"
    write_report("reshard", rows, notes, options.report, targets=targets)


if __name__ == "__main__":
    main()
