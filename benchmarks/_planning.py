"""How long one rank's plan takes where nothing is kept, on meshes of 4 to 4,096 ranks."""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from typing import Any

import meshdist as md
from benchmarks._step_times import verdict
from benchmarks._transitions import AXES, TRANSITIONS, pattern_of

Rows = list[dict[str, Any]]

# Microseconds that planning may take, and for each peer beyond so many.
MOST_US = 1e3
MOST_AT_4096_US = 1e4
A_PEER_US = 10.0
NUM_FREE_PEERS = 64

SMALL_MESHES = ((2, 2), (2, 4), (4, 4), (2, 2, 4))
LARGE_MESHES = ((64, 64), (16, 16, 16), (512, 8))
PATTERNS = (
    *map(pattern_of, TRANSITIONS),
    "a@(dp,tp) b -> a@dp b@tp",
    "a@(dp,tp) b -> a@(tp,dp) b",
)


def forget() -> None:
    """Drop all that functions of ours keep."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("meshdist.mesh.", "meshdist.sharding.")):
            for one in list(vars(module).values()):
                if hasattr(one, "cache_clear"):
                    one.cache_clear()


def planning_us(pattern: str, sizes: tuple[int, ...], edge: int) -> tuple[float, float, int]:
    """CPU time of the last rank's plan: of its text and of its steps; the most peers of a step."""
    layout = md.Layout.from_shape(sizes, (*AXES, "pp")[: len(sizes)])
    forget()
    gc.collect()
    gc.disable()
    start = time.thread_time()
    plan = md.plan(pattern, mesh=layout, shape=(edge, edge), rank=layout.num_ranks - 1)
    middle = time.thread_time()
    steps = plan.steps
    end = time.thread_time()
    gc.enable()
    num_peers = max((step.price.num_peers for step in steps), default=0)
    return (middle - start) * 1e6, (end - middle) * 1e6, num_peers


def most_us(num_ranks: int, num_peers: int) -> float:
    """What planning may take."""
    if num_ranks <= 16:
        return MOST_US
    return MOST_AT_4096_US + A_PEER_US * max(0, num_peers - NUM_FREE_PEERS)


def measure_planning(rounds: int) -> tuple[Rows, Rows]:
    """Plans anew, of sizes that divide and of sizes that do not."""
    rows, targets = [], []
    gc.freeze()
    for sizes in (*SMALL_MESHES, *LARGE_MESHES):
        num_ranks = math.prod(sizes)
        for pattern in PATTERNS:
            for edge in (8192, 8191):
                planning_us(pattern, sizes, edge)
                found = [planning_us(pattern, sizes, edge) for _ in range(rounds)]
                num_peers = found[0][2]
                rows.append(
                    {
                        "what": f"planning {pattern}",
                        "side": f"{'x'.join(map(str, sizes))} of {edge}",
                        "us": statistics.median(text + steps for text, steps, _ in found),
                        "min us": min(text + steps for text, steps, _ in found),
                        "text us": statistics.median(text for text, _, _ in found),
                        "peers": num_peers,
                        "most us": most_us(num_ranks, num_peers),
                    }
                )
    for is_small, name in ((True, "up to 16"), (False, "4,096")):
        chosen = [row for row in rows if (row["most us"] == MOST_US) == is_small]
        worst = max(chosen, key=lambda row: row["us"] / row["most us"])
        targets.append(
            {
                "what": f"planning at {name} ranks, worst of {len(chosen)}: {worst['what']}",
                "quotient": worst["us"] / worst["most us"],
                "quartiles": f"{worst['us']:.0f} us, {worst['peers']} peers, {worst['side']}",
                "verdict": verdict(1.0, [worst["us"] / worst["most us"]]),
            }
        )
    return rows, targets
