"""What every benchmark's report holds: rows, versions, date and kind of machine."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from meshdist.bench.reporting import machine

REPORTS = Path(__file__).resolve().parent / "reports"


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum of ``samples``."""
    return {
        "median": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
    }


def report_path(name: str) -> Path:
    """Where the report goes: the command line's first argument, or ``reports/NAME.json``."""
    return Path(sys.argv[1]) if len(sys.argv) > 1 else REPORTS / f"{name}.json"


def write_report(
    name: str, rows: list[dict[str, Any]], notes: str, path: Path | None = None
) -> None:
    """Print the rows as a table and write them, with the machine, as JSON."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=name)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        table.add_row(*(f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells))
    Console(width=140).print(table)
    path = path or report_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    about = {**machine(), "gpu": gpu}
    report = {"benchmark": name, "notes": notes, "machine": about, "rows": rows}
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {path}")
