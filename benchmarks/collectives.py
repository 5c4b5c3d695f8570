"""Every verb over Gloo: ours against torch.distributed, in one run.

    python -m benchmarks.collectives [--ranks 2] [--rounds 7] [--verbs all_reduce,...]

Both sides keep their processes, asleep while the other is at work; each round asks each side once
for each verb and size. A cell is the median over rounds of the slowest rank's time per call; the
ratio is the median over rounds of torch's time divided by ours in the same round, beside the
spread of ours (highest by lowest). `meshdist bench collectives` measures whatever is named.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from meshdist.bench.measuring import Cell, Entrant, measure, running
from meshdist.bench.reporting import plot, size_text, table_text, to_json, write
from meshdist.bench.sides import VERBS

REPORTS = Path(__file__).resolve().parent / "reports"
SIDES = ("meshdist/gloo", "torch/gloo")
SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)


def is_slower(cell: Cell) -> bool:
    """Whether ours is slower than torch's by more than 5 % and more than the run's own spread."""
    ours, theirs = (cell.samples[side] for side in SIDES)
    ratio = statistics.median(ours) / statistics.median(theirs)
    spread = min(max(samples) / min(samples) for samples in (ours, theirs))
    return ratio > max(1.05, spread)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--verbs", default=",".join(VERBS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--output", type=Path, default=REPORTS / "collectives_gloo.json")
    arguments = parser.parse_args()
    verbs = arguments.verbs.split(",")
    sizes = [int(size) for size in arguments.sizes.split(",")]

    def tell(cell: Cell) -> None:
        row = table_text([cell], SIDES)[1]
        print("  ".join(f"{text:>12}" for text in row), "slower" * is_slower(cell), flush=True)

    entrants = [Entrant(side, side) for side in SIDES]
    with running(entrants, arguments.ranks) as ranks:
        cells = measure(ranks, verbs, sizes, arguments.rounds, tell)
    slower = [f"{cell.verb} {size_text(cell.num_bytes)}" for cell in cells if is_slower(cell)]
    print("slower than torch beyond 5 % and the run's spread:", ", ".join(slower) or "none")
    write(arguments.output, to_json(cells, arguments.ranks, arguments.rounds, __doc__))
    plot(arguments.output.with_suffix(".svg"), cells, SIDES)


if __name__ == "__main__":
    main()
