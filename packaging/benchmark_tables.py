"""Make the tables of docs/explanation/benchmarks.md from benchmarks/reports."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPORTS = Path(__file__).resolve().parents[1] / "benchmarks" / "reports"
Cells = tuple[Sequence[str], Sequence[Sequence[str]]]  # the head, and the rows

_MIB = 2**20
_MODELS = {"mlp": "perceptron, 25 M", "transformer": "transformer, 10 M", "many": "2,000 weights"}


def _report(name: str, part: str = "rows") -> Any:
    return json.loads((REPORTS / f"{name}.json").read_text(encoding="utf-8"))[part]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _short(value: float) -> str:
    """Return a number with two digits, or all digits before the point."""
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


def _time(seconds: float) -> str:
    unit, factor = ("us", 1e6) if seconds < 1e-3 else ("ms", 1e3)
    return f"{seconds * factor:.3g} {unit}"


def _size(num_bytes: int) -> str:
    for unit, factor in (("MiB", _MIB), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes // factor} {unit}"
    return f"{num_bytes} B"


def meshes() -> Cells:
    """Return the times to make a mesh, from two reports."""
    rows = []
    for row in [*_report("mesh_creation"), *_report("mesh_creation_64")]:
        num_axes = row["shape"].rstrip(",)").count(",") + 1
        if row["what"] == "gloo, ms" and num_axes in (1, 3):
            what = f"{num_axes}-D mesh, {row['ranks']} processes"
            rows.append((what, *(_short(row[side]) for side in ("torch", "ours, file", "ours"))))
    return ("ms", "torch", "meshdist, file store", "meshdist, TCP store"), rows


def calls() -> Cells:
    """Return the costs of layouts, slices, calls, imports and a step of the demo."""
    rows = []
    for row in _report("mesh_creation"):
        if row["ranks"] == 16384 and row["shape"] == "(512, 4, 8)":
            what = {"no backend, ms": "layout of", "slice, us": "slice again"}[row["what"]]
            unit = row["what"].partition(", ")[2]
            what += f" a 3-D mesh of {row['ranks']:,} ranks, {unit}"
            rows.append((what, _short(row["torch"]), _short(row["ours"])))
    above = {row["what"]: row.get("best above bare") for row in _report("overheads")}
    groups = [above[f"all_reduce, meshdist, group={x}"] for x in ("ProcessGroup", "mesh", "None")]
    rows += [
        (
            "`all_reduce` above the bare c10d call, best, us",
            _short(above["all_reduce, torch.distributed"]),
            f"{_short(min(groups))} to {_short(max(groups))}",
        ),
        (
            "import above `import torch`, best, ms",
            "",
            _short(above["import torch, meshdist, one use"]),
        ),
    ]
    step = {row["side"]: row["ms per step"] for row in _report("demo_step")}
    torch = sorted((step["torch"], step["torch, views"]))
    what = "a step of the demo, (dp=2, tp=2), 4 processes, ms"
    rows.append((what, f"{torch[0]:.0f} to {torch[1]:.0f}", _short(step["meshdist"])))
    return ("measured", "torch", "meshdist"), rows


def ddp() -> Cells:
    """Return ratios of steps and exposed times of data parallelism, CPU (wall)."""
    found = {
        (row["what"], row["model"]): f"{_ratio(row['CPU'])} ({_ratio(row['wall'])})"
        for row in _report("ddp", "targets")
        if "CPU" in row
    }
    for row in _report("torch_ddp"):
        if row["backend"] == "shm":
            key = ("step of torch's DDP, wall: torch/gloo / meshdist/shm", row["model"])
            found[key] = f"({_ratio(row['gloo / this'])})"
    whats = dict.fromkeys(what for what, _ in found)
    rows = [(what, *(found.get((what, model), "") for model in _MODELS)) for what in whats]
    return ("this / that", *_MODELS.values()), rows


def axis_types() -> Cells:
    """Return the cost of md.typed."""
    rows = [
        (row["what"], _ratio(row["CPU"]), _ratio(row.get("wall")))
        for row in _report("axis_types", "targets")
        if " / " in row["what"]
    ]
    return ("this / that", "CPU", "wall"), rows


def reshard() -> Cells:
    """Return bytes and times of changes of a sharding on a (2, 2) mesh."""
    received = {(row["what"], row["side"]): row.get("received") for row in _report("reshard")}
    found: dict[str, dict[str, Any]] = {}
    for row in _report("reshard", "targets"):
        what, _, sides = row["what"].partition(": ")
        if "2x2" in what and "best" in row and sides.endswith("DTensor, best"):
            found.setdefault(what, {"best": row["best"]})[sides.partition(" ")[0]] = row["quotient"]
    rows = [
        (
            f"`{what.removesuffix(' 2x2')}`",
            f"{received[what, each['best']]:g}",
            f"{received[what, 'meshdist/gloo']:g}",
            _ratio(each["gloo"]),
            _ratio(each["shm"]),
        )
        for what, each in found.items()
    ]
    head = ("change", "bytes, DTensor", "bytes, meshdist", "Gloo / DTensor", "shm / DTensor")
    return head, rows


def transformer_block() -> Cells:
    """Return the exposed time of a transformer block, against torch's parallel layers."""
    found = {(r["what"], r["width"]): r["CPU"] for r in _report("transformer_block", "targets")}
    widths = list(dict.fromkeys(width for _, width in found))
    rows = [
        (what, *(_ratio(found[what, width]) for width in widths))
        for what in dict.fromkeys(what for what, _ in found)
    ]
    return ("this / that", *(f"width {width}" for width in widths)), rows


def checkpoint() -> Cells:
    """Return times to save and load, against DCP, and against safetensors on one rank."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in _report("checkpoint", "targets"):
        what, _, rest = row["what"].rpartition(", ")
        ranks, _, sides = rest.partition(": ")
        found.setdefault((what, ranks), {})[sides.partition(" ")[0]] = row["quotient"]
    whats = dict.fromkeys(what for what, _ in found)
    rows = [
        (what, *(_ratio(found[what, ranks][x]) for ranks in ("2 ranks", "4 ranks") for x in _SIDES))
        for what in whats
    ]
    head = [f"{ranks}, {side}" for ranks in ("2 ranks", "4 ranks") for side in _SIDES]
    return ("meshdist / DCP", *head), rows


_SIDES = ("shm", "gloo")
_CALLS = (
    "all_reduce",
    "all_gather_into_tensor",
    "broadcast",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "send_recv",
)
_LIBRARIES = {
    "meshdist/shm": "shm",
    "torch/gloo": "torch, Gloo",
    "Open MPI": "Open MPI",
    "MPICH": "MPICH",
    "JAX": "JAX",
}


def collectives() -> Cells:
    """Return times of collectives over shared memory and of other libraries."""
    rows = []
    for cell in _report("collectives_shm", "cells"):
        is_shown = cell["operation"] in _CALLS and cell["dtype"] == "float32"
        if is_shown and cell["bytes"] in (8, 2**16, _MIB, 64 * _MIB):
            times = [cell["seconds"].get(side) for side in _LIBRARIES]
            shown = [_time(statistics.median(each)) if each else "" for each in times]
            rows.append((f"{cell['operation']} {_size(cell['bytes'])}", *shown))
    return ("collective", *_LIBRARIES.values()), rows


def gloo() -> Cells:
    """Return ratios of collectives over Gloo, bold if slower by more than the spread of the run."""
    slower = _report("collectives_gloo", "slower")
    found: dict[str, dict[int, str]] = {}
    for cell in _report("collectives_gloo", "cells"):
        ours, torch = (cell["seconds"][f"{side}/gloo"] for side in ("meshdist", "torch"))
        ratio = _ratio(statistics.median(ours) / statistics.median(torch))
        is_slower = f"{cell['operation']} {_size(cell['bytes'])}" in slower
        shown = f"**{ratio}**" if is_slower else ratio
        found.setdefault(cell["operation"], {})[cell["bytes"]] = shown
    found.pop("barrier")  # has no size
    return _by_size("meshdist / torch, Gloo", found)


def mpi() -> Cells:
    """Return ratios of operations over shared memory and MPI, to mpi4py's blocking calls.

    At 8 bytes over MPI a difference says more: an operation takes a fixed time longer.
    """
    found: dict[str, dict[str, str]] = {}
    for report, side in (("shm_beside_mpi", "shm"), ("mpi_operations", "mpi")):
        for row in _report(report):
            is_difference = side == "mpi" and row["bytes"] == 8
            key = f"{side}, {_size(row['bytes'])}" + is_difference * ", us more"
            shown = _short(row["above us"]) if is_difference else _ratio(row["ratio"])
            found.setdefault(row["operation"], {})[key] = shown
    return _by_size("meshdist / mpi4py", found, name=str)


def _by_size(
    what: str, found: dict[str, dict[Any, str]], *, name: Callable[[Any], str] = _size
) -> Cells:
    columns = list(dict.fromkeys(key for each in found.values() for key in each))
    rows = [(call, *(each.get(key, "") for key in columns)) for call, each in found.items()]
    return (what, *map(name, columns)), rows


def busy() -> Cells:
    """Return ratios of an all-reduce over shared memory, to torch's Gloo, on busy cores."""
    found: dict[str, dict[str, str]] = {}
    for row in _report("busy"):
        found.setdefault(str(row["busy"]), {})[row["size"]] = _ratio(row["shm / gloo"])
    return _by_size("busy processes", found, name=str)


def parallelism() -> Cells:
    """Return ratios of attention, experts and pipelines on four ranks."""
    rows = []
    for row in _report("parallelism", "targets"):
        target, reached = row["to reach"], row["reached"]
        shown = "" if target is None else f"{target:g}" + ("" if reached else " (missed)")
        rows.append((f"{row['what']} / {row['beside']}", _ratio(row["quotient"]), shown))
    return ("this / that", "ratio", "target"), rows


def large_pages() -> Cells:
    """Return values with pages of 2 MiB and of 4 KiB."""
    names = {"4 KiB": "4 KiB", "2 MiB": "2 MiB", "2 MiB / 4 KiB": "ratio"}
    rows = [
        (row["what"], *(f"{row[name]:.3g}" for name in names))
        for row in _report("thp")
        if row["library"] == "meshdist, shm" and row["what"] != "on huge pages, MiB"
    ]
    return ("measured", *names.values()), rows


TABLES: dict[str, Callable[[], Cells]] = {
    f"{table.__name__.replace('_', ' ')} benchmark": table
    for table in (
        *(meshes, calls, ddp, axis_types, reshard, transformer_block, checkpoint),
        *(collectives, gloo, mpi, busy, parallelism, large_pages),
    )
}
"""The tables by the names of their places on the page."""
