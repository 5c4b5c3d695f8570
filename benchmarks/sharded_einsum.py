"""What a cached ``md.einsum`` costs in Python beside DTensor, and what planning one anew costs.

    python benchmarks/sharded_einsum.py [REPORT.json] [--rounds 21] [--parts calls,planning]

calls: a column-parallel product of small arrays, which sends nothing: by ``md.einsum`` on one of
two simulated ranks; by DTensor's ``torch.einsum`` and ``linear`` on torch's fake group of two; by
``torch.matmul`` of the shards alone. Without gradients, and with those of both operands recorded.
planning: the plan of an einsum, with its steps forward and backward, on a mesh of 64 ranks; all
caches of plans are empty.

CPU time of the thread, one thread. Every round asks all sides, each time another first. A target is
compared with the median over rounds of the quotients of each round.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as torch_dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist as md
from benchmarks._report import interleaved, parser_of, some_of, write_report
from benchmarks._step_times import quotient, thread_us, verdict
from meshdist.sharding import einsum_layouts, placement_diff, plans, routes

PARTS = ("calls", "planning")
CALLS = 200
OVER_DTENSOR_EINSUM, OVER_DTENSOR_LINEAR = 0.25, 1.0
PLANNING_MS = 6.0
# On (dp, tp, cp) = (4, 4, 4).
PLANNED = {
    "column": "b@dp s d, d f@tp -> b@dp s f@tp",
    "fully sharded": "b@dp s d, d@dp f@tp -> b@dp s f@tp",
    "three axes compete": "b@dp s@tp d@cp, d@dp f@tp g@cp -> b@tp s@dp f@cp g",
    "three operands": "b@dp s d, d@dp r@tp, r@cp f -> b@dp s@tp f@cp",
}

Rows = list[dict[str, Any]]


def measure_calls(rounds: int, *, has_gradient: bool) -> tuple[Rows, Rows]:
    """The cost of a call that sends nothing."""
    store = FakeStore()  # type: ignore[no-untyped-call]
    torch_dist.init_process_group("fake", rank=0, world_size=2, store=store)
    torchs = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def leaf(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, requires_grad=has_gradient)

    def of_torch(local: torch.Tensor, placement: Any) -> DTensor:
        return DTensor.from_local(local.detach(), torchs, [placement]).requires_grad_(has_gradient)

    X, W = of_torch(leaf(2, 4, 8), Replicate()), of_torch(leaf(8, 4), Shard(1))
    L = of_torch(leaf(4, 8), Shard(0))

    def program() -> dict[str, list[float]] | None:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x, w = leaf(2, 4, 8), leaf(8, 4)
        text = "b s d, d f@tp -> b s f@tp"
        if md.get_rank():
            md.einsum(text, x, w, mesh=mesh)
            return None
        calls: dict[str, Callable[[], Any]] = {
            "md.einsum": lambda: md.einsum(text, x, w, mesh=mesh),
            "DTensor, torch.einsum": lambda: torch.einsum("bsd,df->bsf", X, W),
            "DTensor, linear": lambda: torch.nn.functional.linear(X, L),
            "shards, torch.matmul": lambda: torch.matmul(x, w),
        }
        return interleaved(
            {side: partial(thread_us, call, CALLS) for side, call in calls.items()}, rounds
        )

    taken = md.simulate(program, 2)[0]
    torch_dist.destroy_process_group()
    assert taken is not None
    what = "a call, gradients recorded" if has_gradient else "a call"
    rows = [
        {"what": what, "side": side, "unit": "us, CPU", **spread(one)}
        for side, one in taken.items()
    ]
    ours = taken["md.einsum"]
    targets = [
        target(f"{what}: md.einsum / {side}", most, quotient(ours, taken[side]))
        for side, most in (
            ("DTensor, torch.einsum", OVER_DTENSOR_EINSUM),
            ("DTensor, linear", OVER_DTENSOR_LINEAR),
        )
    ]
    return rows, targets


def forget_plans() -> None:
    """Empty the caches of plans."""
    einsum_layouts.lay_out_einsum.cache_clear()
    plans.make_plan.cache_clear()
    routes.find_route.cache_clear()
    routes.num_received_by_all.cache_clear()
    placement_diff.change_between.cache_clear()
    placement_diff.overlap_table.cache_clear()


def measure_planning(rounds: int) -> tuple[Rows, Rows]:
    """The cost of planning anew at 64 ranks."""
    layout = md.Layout.from_shape((4, 4, 4), ("dp", "tp", "cp"))
    sizes = {"b": 64, "s": 128, "d": 256, "f": 512, "g": 16, "r": 32}

    def planned(text: str) -> float:
        forget_plans()
        named = {name: size for name, size in sizes.items() if name in text.replace("dp", "")}
        start = time.thread_time()
        plan = md.plan(text, mesh=layout, **named)
        for one in (*plan.operands, plan.result):
            _ = one.steps, one.T.steps
        return (time.thread_time() - start) * 1e3

    taken = interleaved({name: partial(planned, text) for name, text in PLANNED.items()}, rounds)
    rows = [
        {"what": f"planning: {name}", "side": "md.plan", "unit": "ms, CPU", **spread(one)}
        for name, one in taken.items()
    ]
    return rows, [
        target(f"planning: {name}, ms", PLANNING_MS, statistics.median(one))
        for name, one in taken.items()
    ]


def spread(taken: list[float]) -> dict[str, float]:
    """Columns of a side."""
    return {"median": statistics.median(taken), "min": min(taken)}


def target(what: str, most: float, found: float) -> dict[str, Any]:
    """A row of what was aimed at."""
    return {"what": what, "CPU": found, "verdict": verdict(most, [found])}


def main() -> None:
    parser = parser_of(__doc__, rounds=21)
    parser.add_argument("--parts", type=some_of(PARTS), default=list(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: Rows = []
    targets: Rows = []
    load = os.getloadavg()[0]
    parts: dict[str, list[Callable[[], tuple[Rows, Rows]]]] = {
        "calls": [
            partial(measure_calls, options.rounds, has_gradient=False),
            partial(measure_calls, options.rounds, has_gradient=True),
        ],
        "planning": [partial(measure_planning, options.rounds)],
    }
    for part in options.parts:
        for measure in parts[part]:
            more, found = measure()
            rows += more
            targets += found
    notes = (
        f"{options.rounds} rounds. Load of the machine {load:.1f} on {os.cpu_count()} cores before "
        f"the run, {os.getloadavg()[0]:.1f} after it."
    )
    write_report("sharded_einsum", rows, notes, options.report, targets=targets)


if __name__ == "__main__":
    main()
