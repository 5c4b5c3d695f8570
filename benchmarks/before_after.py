"""Two checkouts of meshdist side by side: is anything slower after than before?

    python benchmarks/before_after.py BEFORE [AFTER] [--report FILE.json] [--rounds 7] [--starts 3]
        [--parts
        import,mesh,demo,ddp-many,ddp-mlp,ddp-gloo,typed,shm,mpi,gloo,collectives-shm,collectives-mpi,
        collectives-gloo,join-{mlp,transformer,many,behind}-{shm,gloo}] [--sizes
        8,4096,1048576,67108864]

BEFORE and AFTER are folders of checkouts, each with its .venv, or interpreters that have meshdist
installed; AFTER is by default the interpreter that runs this. Of either only public names are used.

Both sides keep their processes, asleep while the other is at work; each round asks each side once,
in an order that changes, for the time per call of its slowest rank. ``--starts`` says how often all
processes are started anew, since where they lie in memory and on cores changes little afterwards. A
cell holds both medians, the median over rounds of after / before in the same round, the spread of
these quotients (the distance between their quartiles), and the quotient of the shortest times. A
cell is SLOWER where the median quotient is above 1 by more than the larger of 3 % and the spread.
Exit status: 1 if a cell is, else 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._mpi import OPEN_MPI
from benchmarks._operations import BLOCKING, IN_FLIGHT
from benchmarks._report import REPORTS, interleaved, some_of
from meshdist.bench.measurement import Cell, Entrant, measure, running
from meshdist.bench.reports import size_text, time_text, to_json, write

LABELS = BEFORE, AFTER = ("before", "after")
LEAST = 0.03  # differences below this are not looked at
SIDE = Path(__file__).with_name("_side.py")
SIZES = "8,4096,1048576,67108864"
OPERATIONS = ("all_reduce", "all_gather_into_tensor", "send_recv")
SMALL_CALLS = tuple(name for name in (*BLOCKING, *IN_FLIGHT) if name != "all_reduce")


JOINED = {
    "mlp": "joined DDP step, MLP",
    "transformer": "joined DDP step, transformer",
    "many": "joined DDP step, 2,000 parameters",
    "call": "joined all_reduce, 1 KiB",
    "behind": "all_reduce behind join, 1 KiB",
}


@dataclass(frozen=True)
class Part:
    """What is measured on one world of ranks.

    Args:
        num_ranks: of each side.
        whats: names of collectives, or of what the side does instead.
        has_sizes: whether each is measured at several sizes.
    """

    num_ranks: int
    whats: tuple[str, ...]
    has_sizes: bool = False


WORLDS = {
    "mesh": Part(4, ("make, close mesh (2, 2)",)),
    "demo": Part(4, ("step of train_lm.py, dp=2 tp=2",)),
    "ddp-many": Part(2, ("DDP step, 2,000 parameters",)),
    "ddp-mlp": Part(2, ("DDP step, MLP of 25 million",)),
    "ddp-gloo": Part(2, ("DDP step, 2,000 parameters",)),
    "typed": Part(2, ("typed step, eight layers",)),
    **{
        f"join-{what}-{backend}": Part(2, (text,))
        for what, text in JOINED.items()
        for backend in ("shm", "gloo")
    },
    "shm": Part(2, OPERATIONS, has_sizes=True),
    "mpi": Part(2, OPERATIONS, has_sizes=True),
    "gloo": Part(2, OPERATIONS, has_sizes=True),
    "operations-shm": Part(2, SMALL_CALLS),
    "operations-mpi": Part(2, SMALL_CALLS),
    "operations-gloo": Part(2, SMALL_CALLS),
}
IMPORTS = {
    "import meshdist": "import time; start = time.perf_counter(); import meshdist",
    "import, first use": "import torch, time; start = time.perf_counter(); import meshdist; "
    "meshdist.init_device_mesh; meshdist.all_reduce",
}
ABOUT = """
import json, pathlib, platform, meshdist
from importlib import metadata
versions = {name: metadata.version(name) for name in ("torch", "numpy")}
folder = str(pathlib.Path(meshdist.__file__).parents[1])
print(json.dumps({"folder": folder, "python": platform.python_version(), **versions}))
"""


@dataclass(frozen=True)
class Checkout:
    """One side: an interpreter, and what it has installed."""

    python: str
    about: dict[str, str]

    @staticmethod
    def at(path: Path) -> Checkout:
        """Return the checkout in a folder, or that of an interpreter."""
        python = str(path if path.is_file() else path / ".venv" / "bin" / "python")
        about = json.loads(_output([python, "-c", ABOUT]))
        folder = about.pop("folder")
        git = ["git", "-C", folder]
        changes = _output([*git, "status", "--porcelain", "--untracked-files=no"])
        commit = _output([*git, "log", "-1", "--format=%h %cs %s"])
        return Checkout(python, {"commit": commit + " + changes" * bool(changes), **about})

    def entrant(self, label: str, side: str) -> Entrant:
        """Return this side's ranks for one of ``_side.SIDES``."""
        launch: tuple[str, ...] = ()
        if side in ("mpi", "operations-mpi"):
            launch = (str(Path(self.python).with_name("mpiexec")), "-n", "{n}")
        program = (str(SIDE),)
        return Entrant(label, side, launch, self.python, OPEN_MPI, program)

    def seconds_of(self, code: str) -> float:
        """The time that an interpreter takes for ``code`` from where it sets ``start``."""
        return float(_output([self.python, "-c", f"{code}; print(time.perf_counter() - start)"]))


def _output(command: Sequence[str]) -> str:
    # Elsewhere, since `python -c` looks for modules in the folder where it stands.
    folder = tempfile.gettempdir()
    return subprocess.run(
        command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def measure_imports(checkouts: dict[str, Checkout], rounds: int) -> Iterator[Cell]:
    """The time of importing meshdist, in a new interpreter each time."""
    for what, code in IMPORTS.items():
        sides = {
            label: lambda checkout=checkout, code=code: checkout.seconds_of(code)
            for label, checkout in checkouts.items()
        }
        yield Cell(what, 0, samples=interleaved(sides, rounds))


def measure_world(
    name: str, checkouts: dict[str, Checkout], sizes: Sequence[int], rounds: int
) -> list[Cell]:
    """All cells of one world of ranks."""
    part = WORLDS[name]
    entrants = [checkout.entrant(label, name) for label, checkout in checkouts.items()]
    with running(entrants, part.num_ranks) as ranks:
        return measure(
            ranks, part.whats, sizes if part.has_sizes else (0,), rounds, lambda cell: None
        )


def quotients(cell: Cell) -> list[float]:
    """After / before of each round."""
    pairs = zip(cell.samples[AFTER], cell.samples[BEFORE], strict=True)
    return [after / before for after, before in pairs]


def spread(cell: Cell) -> float:
    """The distance between the quartiles of the quotients."""
    first, _, third = statistics.quantiles(quotients(cell), n=4)
    return third - first


def best(cell: Cell) -> float:
    """The quotient of the shortest times, which other programs disturb least."""
    return min(cell.samples[AFTER]) / min(cell.samples[BEFORE])


def verdict(cell: Cell) -> str:
    """Return "SLOWER", "faster", or "" for what the run cannot distinguish."""
    difference = statistics.median(quotients(cell)) - 1
    if abs(difference) <= max(LEAST, spread(cell)):
        return ""
    return "SLOWER" if difference > 0 else "faster"


def row_text(part: str, cell: Cell) -> str:
    """One line of the table."""
    times = (time_text(cell.median(label)) for label in LABELS)
    return (
        f"{part:<22}{cell.operation:<32}{size_text(cell.num_bytes):>8}"
        + "".join(f"{text:>10}" for text in times)
        + f"{statistics.median(quotients(cell)):>8.3f}{spread(cell):>8.3f}{best(cell):>8.3f}"
        + f"  {verdict(cell)}"
    ).rstrip()


HEAD = (
    f"{'part':<22}{'what':<32}{'size':>8}{BEFORE:>10}{AFTER:>10}"
    f"{'ratio':>8}{'spread':>8}{'best':>8}"
)


def run(
    parts: Sequence[str],
    checkouts: dict[str, Checkout],
    sizes: Sequence[int],
    rounds: int,
    starts: int,
    show: Callable[[str], None],
) -> dict[tuple[str, str, int], Cell]:
    """Measure all parts, with ``starts`` sets of processes, one after the other."""
    found: dict[tuple[str, str, int], Cell] = {}
    for start in range(starts):
        show(f"start {start + 1} of {starts}\n{HEAD}")
        for part in parts:
            cells = (
                measure_imports(checkouts, rounds)
                if part == "import"
                else measure_world(part, checkouts, sizes, rounds)
            )
            for cell in cells:
                whole = found.setdefault((part, cell.operation, cell.num_bytes), cell)
                if whole is not cell:
                    for label, samples in cell.samples.items():
                        whole.samples[label] += samples
                show(row_text(part, whole))
    return found


def write_reports(
    path: Path,
    found: dict[tuple[str, str, int], Cell],
    checkouts: dict[str, Checkout],
    rounds: int,
    starts: int,
) -> str:
    """Write every sample as JSON, and the table as text beside it; return the text."""
    report: dict[str, Any] = to_json(list(found.values()), 0, rounds, __doc__ or "")
    del report["ranks"]
    for entry, ((part, *_), cell) in zip(report["cells"], found.items(), strict=True):
        entry |= {
            "part": part,
            "spread": spread(cell),
            "best": best(cell),
            "verdict": verdict(cell),
        }
        entry["ratio"] = statistics.median(quotients(cell))
        entry["seconds"] = cell.samples  # in the order of the rounds
    sides = {label: checkout.about for label, checkout in checkouts.items()}
    write(path, {**report, "starts": starts, **sides})
    lines = [f"{label + ':':<9}{about['commit']}" for label, about in sides.items()]
    about = report["machine"] | {"rounds": f"{starts} x {rounds}"}
    lines += [f"{name + ':':<9}{value}" for name, value in about.items()]
    lines += ["", HEAD, *(row_text(part, cell) for (part, *_), cell in found.items())]
    text = "\n".join(lines) + "\n"
    path.with_suffix(".txt").write_text(text)
    return text


def main() -> int:
    """Read the command line, measure, and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=Path(sys.executable))
    parser.add_argument("--report", type=Path, default=REPORTS / "before_after.json")
    parser.add_argument("--rounds", type=int, default=7, help="of each start; at least 2")
    parser.add_argument("--starts", type=int, default=3)
    names = ["import", *WORLDS]
    parser.add_argument("--parts", type=some_of(names), default=names)
    parser.add_argument("--sizes", default=SIZES, help="bytes, a comma list")
    options = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)  # each interpreter finds its own
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    checkouts = {
        BEFORE: Checkout.at(options.before.absolute()),
        AFTER: Checkout.at(options.after.absolute()),
    }
    sizes = [int(size) for size in options.sizes.split(",")]
    rounds = max(2, options.rounds)

    def show(line: str) -> None:
        print(line, flush=True)

    found = run(options.parts, checkouts, sizes, rounds, options.starts, show)
    print(write_reports(options.report, found, checkouts, rounds, options.starts))
    slower = [
        row_text(part, cell) for (part, *_), cell in found.items() if verdict(cell) == "SLOWER"
    ]
    print(f"slower: {len(slower)} of {len(found)} cells", *slower, sep="\n")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
