"""What the benchmarks share: their command line, interleaved rounds, and the report of a run.

A report holds rows, versions, date and kind of machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

import meshdist as md
from meshdist.bench.reports import machine

T = TypeVar("T")
REPORTS = Path(__file__).resolve().parent / "reports"


def parser_of(doc: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser of REPORT and, unless ``rounds`` is None, of ``--rounds``.

    ``doc`` is the script's docstring; its first line says what is measured.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("report", nargs="?", type=Path, help="where the JSON report goes")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def some_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Return what reads a comma list of ``names`` from the command line."""
    known = list(names)

    def read(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(known):
            listed = f"{', '.join(sorted(unknown))} (there are {', '.join(known)})"
            raise argparse.ArgumentTypeError(f"unknown: {listed}")
        return text.split(",")

    return read


def start_ranks(measure: Callable[..., None], num_ranks: int, *arguments: Any) -> None:
    """Run ``measure(rank, folder, *arguments)`` in one process a rank; they share the folder."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (folder, *arguments), num_ranks)


def interleaved(
    sides: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 1
) -> dict[str, list[T]]:
    """Return each side's samples; every round asks all of them in turn.

    Each round begins with another side, and every second one goes the other way round, so that none
    always follows the same one.
    """
    samples: dict[str, list[T]] = {side: [] for side in sides}
    names = list(sides)
    for number in range(-warm_up, rounds):
        first = number % len(names)
        order = names[first:] + names[:first]
        for side in order[::-1] if number % 2 else order:
            taken = sides[side]()
            if number >= 0:
                samples[side].append(taken)
    return samples


def ms_per_step(step: Callable[[], Any], num_steps: int, library: Any = md) -> float:
    """The slowest rank's time per step; ``library`` is whose ranks they are, ours or torch's."""
    library.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    taken = torch.tensor((time.perf_counter() - start) / num_steps, dtype=torch.float64)
    library.all_reduce(taken, library.ReduceOp.MAX)
    return taken.item() * 1e3


def spread(samples: Sequence[float], unit: str) -> dict[str, float]:
    """Columns of a row: median, minimum and maximum of ``samples``."""
    return {
        unit: statistics.median(samples),
        f"min {unit}": min(samples),
        f"max {unit}": max(samples),
    }


def write_report(
    name: str,
    rows: list[dict[str, Any]],
    notes: str,
    path: Path | None = None,
    *,
    targets: Sequence[dict[str, Any]] = (),
) -> None:
    """Print the rows as a table and write them, with the machine, as JSON.

    The report goes to ``path``, or else to ``reports/NAME.json``. What was found of ``targets``, if
    there are any, is a second table, and a list of its own.
    """
    _print_table(name, rows)
    if targets:
        _print_table(f"{name}: targets", targets)
    path = path or REPORTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    about = {**machine(), "gpu": gpu}
    report: dict[str, Any] = {"benchmark": name, "notes": notes, "machine": about, "rows": rows}
    if targets:
        report["targets"] = list(targets)
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {path}")


def _print_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        table.add_row(*(f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells))
    Console(width=140).print(table)
