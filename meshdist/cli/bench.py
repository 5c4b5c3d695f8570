"""``meshdist bench``: what communication costs on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .arguments import Parser

__all__ = ["SUMMARY", "main"]

SUMMARY = "measure collectives, ours and the peers', in turn"

_USAGE = "meshdist bench collectives [options]"
_EPILOG = """\
examples:
  meshdist bench collectives
  meshdist bench collectives -n 4 --verbs all_reduce,broadcast --sizes 8,1048576
  meshdist bench collectives --sides meshdist/gloo,torch/gloo --output report.json --plot plot.svg

A size is that of the full buffer in bytes; a time is the median over interleaved rounds of the
slowest rank's time per call. The last columns are the others' time divided by the first's.
"""
_SIZES = "8,4096,65536,1048576,16777216,67108864"


def main(argv: Sequence[str]) -> int:
    """Run the sub-command with the arguments after its name; return the exit code."""
    parser = Parser("meshdist bench", _USAGE, SUMMARY.capitalize() + ".", _EPILOG)
    parser.add_argument("what", choices=("collectives",), help="what to measure")
    parser.add_argument("-n", "--nproc", type=int, default=2, help="ranks of each side (2)")
    parser.add_argument("--verbs", default="", help="a comma list; all by default")
    parser.add_argument("--sizes", default=_SIZES, help=f"bytes, a comma list ({_SIZES})")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (5)")
    parser.add_argument(
        "--sides", default="meshdist/gloo,torch/gloo", help="a comma list, the first compared"
    )
    parser.add_argument("--output", type=Path, help="write every sample as JSON")
    parser.add_argument("--plot", type=Path, help="draw time over size; needs matplotlib")
    arguments = parser.parse_args(argv)
    return _measure(
        arguments.nproc,
        arguments.verbs.split(",") if arguments.verbs else None,
        [int(size) for size in arguments.sizes.split(",")],
        arguments.rounds,
        arguments.sides.split(","),
        arguments.output,
        arguments.plot,
    )


def _measure(
    num_ranks: int,
    verbs: list[str] | None,
    sizes: list[int],
    rounds: int,
    sides: list[str],
    output: Path | None,
    plot_path: Path | None,
) -> int:
    from rich.console import Console
    from rich.table import Table

    from ..bench.measuring import Cell, Entrant, measure, running
    from ..bench.reporting import plot, size_text, table_text, to_json, write
    from ..bench.sides import VERBS

    entrants = [
        Entrant(side, side, ("mpiexec", "--oversubscribe", "-n", "{n}") if side == "mpi" else ())
        for side in sides
    ]
    console = Console()

    def tell(cell: Cell) -> None:
        console.print(f"  {cell.verb} {size_text(cell.num_bytes)}", style="dim", end="\r")

    with running(entrants, num_ranks) as ranks:
        cells = measure(ranks, verbs or VERBS, sizes, rounds, tell)
    head, *rows = table_text(cells, sides)
    table = Table(title=f"{num_ranks} ranks, float32, median of {rounds} rounds")
    for column in head:
        table.add_column(column, justify="left" if column == "verb" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if output is not None:
        write(output, to_json(cells, num_ranks, rounds, "meshdist bench collectives"))
    if plot_path is not None:
        plot(plot_path, cells, sides)
    return 0
