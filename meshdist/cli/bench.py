"""Implement ``meshdist bench``: measure communication on this machine."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from ..bench.measurement import Cell, Entrant, SideFailedError, measure, running
from ..bench.reports import plot, size_text, table_text, to_json, write
from ..bench.sides import DTYPES, OPERATIONS, SIDES
from ..launching.rank_environment import find_mpiexec, mpiexec_environment
from ..runtime.integers import find_integer
from .flags import Parser

SUMMARY = "measure collectives of meshdist and of other libraries"

_USAGE = "meshdist bench collectives [options]"
_EPILOG = """\
examples:
  meshdist bench collectives
  meshdist bench collectives -n 4 --operations all_reduce,broadcast --sizes 8,1M
  meshdist bench collectives --sides meshdist/gloo,torch/gloo --output report.json --plot plot.svg

Sizes are those of the full buffer. Times are the slowest rank's time per call, as the median over
interleaved rounds. The last columns divide each side's time by the first side's: they show the
median of the ratios of all rounds, which can differ from the ratio of the two times shown.
"""
_SIZES = "8,4K,64K,1M,16M,64M"
_SIZE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]+)?)\s*(?:([KMG])(?:iB)?|B)?\s*", re.IGNORECASE)


def main(argv: Sequence[str]) -> int:
    """Run the sub-command with its arguments; return the exit code."""
    parser = Parser("meshdist bench", _USAGE, SUMMARY.capitalize() + ".", _EPILOG)
    parser.add_argument(
        "what", choices=("collectives",), metavar="collectives", help="what to measure"
    )
    parser.add_argument(
        "-n", "--nproc", type=_count, default=2, help="ranks of each side (default: 2)"
    )
    parser.add_argument(
        "--operations",
        type=_some_of(OPERATIONS),
        default=OPERATIONS,
        help=f"comma-separated list of {', '.join(OPERATIONS)} (default: all)",
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=_SIZES,
        help=f"comma-separated list, in bytes (default: {_SIZES})",
    )
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help=" or ".join(DTYPES))
    parser.add_argument("--rounds", type=_count, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument(
        "--sides",
        type=_some_of(tuple(SIDES)),
        default=f"meshdist/{'shm' if sys.platform == 'linux' else 'gloo'},torch/gloo",
        help=f"comma-separated list of {', '.join(SIDES)}; the first is the baseline "
        "(default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, help="write every sample as JSON")
    parser.add_argument("--plot", type=Path, help="plot time over size; needs matplotlib")
    arguments = parser.parse_args(argv)
    if arguments.plot is not None and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    try:
        _measure(arguments)
    except SideFailedError as error:
        print(f"meshdist bench: {error}", file=sys.stderr)
        return 1
    return 0


def _count(text: str) -> int:
    number = find_integer(text)
    if not number:
        raise ArgumentTypeError(f"must be an integer of at least 1, not {text!r}")
    return number


def _sizes(text: str) -> list[int]:
    """Parse comma-separated sizes, with or without units, to bytes."""
    sizes = []
    for word in text.split(","):
        found = _SIZE.fullmatch(word)
        unit = " KMG".index(found[2].upper()) if found and found[2] else 0
        number = 0 if found is None else round(float(found[1]) * (1 << 10 * unit))
        if not number:
            expected = "a size, such as 8, 256K or 64 MiB, in bytes or powers of 1024"
            raise ArgumentTypeError(f"{word!r} is not {expected}")
        sizes.append(number)
    return sizes


def _some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated words that raises for words not in ``known``."""

    def listed(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in known:
                close = get_close_matches(word, known, n=1)
                meant = f"; did you mean {close[0]!r}?" if close else ""
                raise ArgumentTypeError(f"{word!r} is not one of {', '.join(known)}{meant}")
        return words

    return listed


def _measure(arguments: Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    num_ranks, rounds, sides = arguments.nproc, arguments.rounds, arguments.sides
    by_mpi = find_mpiexec() or "mpiexec", "-n", "{n}"
    entrants = [
        Entrant(side, side, by_mpi, environment=mpiexec_environment({}))
        if side == "mpi"
        else Entrant(side, side)
        for side in sides
    ]
    console = Console()

    with running(entrants, num_ranks) as ranks, console.status("", refresh_per_second=1) as status:

        def show(cell: Cell) -> None:
            status.update(f"{cell.operation} {size_text(cell.num_bytes)}")

        cells = measure(ranks, arguments.operations, arguments.sizes, rounds, show, arguments.dtype)
    head, *rows = table_text(cells, sides)
    table = Table(title=f"{num_ranks} ranks, {arguments.dtype}, median of {rounds} rounds")
    for column in head:
        is_name = column == "operation"
        table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if arguments.output is not None:
        report = to_json(cells, num_ranks, rounds, "meshdist bench collectives")
        write(arguments.output, report)
    if arguments.plot is not None:
        plot(arguments.plot, cells, sides)
