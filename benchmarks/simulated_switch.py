"""A switch between simulated ranks: CPU time with torch's record of groups a rank, and without.

    python benchmarks/simulated_switch.py [REPORT.json] [--rounds 40]

Four ranks in one process ask whether a message has come that nobody has sent yet, and each ask
hands the turn on: what is measured is a switch and little else. "as it is" is ``md.simulate``;
"without torch's record" is the same with the rooms that give each rank a record of torch's groups
left out; "with torch's world" is a program that has begun torch's world on every rank. All sides
are interleaved.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist as md
import meshdist.torch_backends  # offers "simulated" to torch
from benchmarks._report import interleaved, parser_of, spread, write_report
from meshdist.runtime import generators
from meshdist.worlds import simulation

NUM_RANKS, TURNS = 4, 3000
TARGETS = (
    ("as it is", "without torch's record", 1.03),
    ("with torch's world", "without torch's record", None),
)


def us_per_switch(*, has_record: bool = True, has_world: bool = False) -> float:
    """Microseconds of CPU time of a switch, of all ranks together."""

    def program() -> float:
        if has_world:
            dist.init_process_group("simulated", init_method="simulated://")
        rank = md.get_rank()
        awaited = md.irecv(torch.empty(1), src=(rank + 1) % NUM_RANKS)
        md.barrier()
        start = time.process_time()
        for _ in range(TURNS):
            awaited.is_completed()
        taken = time.process_time() - start
        md.barrier()
        md.send(torch.ones(1), dst=(rank - 1) % NUM_RANKS)
        awaited.wait()
        return taken

    with ExitStack() as left_out:
        if not has_record:
            rooms = (simulation, "callers_torch_world"), (generators, "begin_record")
            for (room, name), stand_in in zip(rooms, (nullcontext, lambda: None), strict=True):
                left_out.enter_context(mock.patch.object(room, name, stand_in))
        return max(md.simulate(program, NUM_RANKS)) / (NUM_RANKS * TURNS) * 1e6


def main() -> None:
    """Read the command line, measure, and write the report."""
    options = parser_of(__doc__, rounds=40).parse_args()
    torch.set_num_threads(1)
    samples = interleaved(
        {
            "as it is": us_per_switch,
            "without torch's record": partial(us_per_switch, has_record=False),
            "with torch's world": partial(us_per_switch, has_world=True),
        },
        options.rounds,
    )
    medians = {side: statistics.median(taken) for side, taken in samples.items()}
    targets = [
        {
            "what": side,
            "beside": other,
            "quotient": medians[side] / medians[other],
            "to reach": most,
        }
        for side, other, most in TARGETS
    ]
    for target in targets:
        most = target["to reach"]
        target["reached"] = "" if most is None else target["quotient"] <= most
    write_report(
        "simulated_switch",
        [{"side": side, **spread(taken, "us")} for side, taken in samples.items()],
        f"{NUM_RANKS} simulated ranks, {TURNS} turns of each, {options.rounds} interleaved rounds; "
        "CPU time of the process a switch",
        options.report,
        targets=targets,
    )


if __name__ == "__main__":
    main()
