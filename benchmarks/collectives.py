"""Every collective, ours beside the others: torch's Gloo, Open MPI, MPICH and JAX.

    python -m benchmarks.collectives [gloo] [shm] [crowded] [--rounds 5] [--collectives
    all_reduce,...]

``gloo`` is ours over Gloo beside torch.distributed over Gloo, 2 ranks. ``shm`` is ours through
shared memory beside all the others, 2 ranks; ``crowded`` the same with 4 ranks. All of them by
default.

All sides keep their processes, asleep while another is at work; each round asks each side once for
each collective and size. A cell is the median over rounds of the slowest rank's time per call; a
ratio is the median over rounds of the other's time divided by ours in the same round. MPI is called
through mpi4py on NumPy arrays, which lie on pages of the size that torch's tensors lie on; it and
JAX take part where they are installed, MPICH from an environment of its own (build/mpich), since
its mpiexec has the name of Open MPI's. `meshdist bench collectives` measures whatever is named.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._mpi import PACKAGES, mpich_python
from meshdist.bench.measurement import Cell, Entrant, measure, running
from meshdist.bench.reports import plot, size_text, table_text, to_json, write
from meshdist.bench.sides import OPERATIONS

ROOT = Path(__file__).resolve().parents[1]
REPORTS = Path(__file__).resolve().parent / "reports"
KIB, MIB = 1 << 10, 1 << 20
SHM, SHARED, COPY, TORCH, OPEN_MPI, MPICH, JAX = (
    "meshdist/shm",
    "meshdist/shm/shared",
    "copy",
    "torch/gloo",
    "Open MPI",
    "MPICH",
    "JAX",
)


@dataclass(frozen=True)
class Part:
    """One run of the benchmark.

    Args:
        name: its report's.
        num_ranks: of each side.
        sizes: in bytes.
        also: further cells: collective, size and dtype.
    """

    name: str
    num_ranks: int
    sizes: tuple[int, ...]
    also: tuple[tuple[str, int, str], ...] = ()


PARTS = {
    "gloo": Part("collectives_gloo", 2, (8, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)),
    "shm": Part(
        "collectives_shm",
        2,
        (8, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 64 * MIB, 256 * MIB),
        (("all_reduce", 64 * MIB, "bfloat16"), ("all_reduce", 25 * MIB, "float32")),
    ),
    "crowded": Part("collectives_shm_4", 4, (8, 4 * KIB, 256 * KIB, 4 * MIB, 64 * MIB)),
}


@dataclass(frozen=True)
class Target:
    """How many times as fast as the fastest of ``others`` a collective shall be at some sizes.

    Args:
        collective: its name.
        sizes: in bytes.
        others: whom it is compared with.
        times: how many times as fast.
        most_us: how long it may take, in microseconds, whatever the others take.
    """

    operation: str
    sizes: tuple[int, ...]
    others: tuple[str, ...] = ()
    times: float = 0.0
    most_us: float | None = None


MPI = (OPEN_MPI, MPICH)
FROM_1_MIB = (MIB, 4 * MIB, 64 * MIB, 256 * MIB)
MOVED = ("broadcast", "all_to_all_single", "send_recv")
TARGETS = {
    "shm": (
        Target("all_reduce", (64 * MIB, 256 * MIB), (OPEN_MPI,), 2.5),
        Target("all_reduce", (64 * MIB, 256 * MIB), (TORCH,), 4.5),
        Target("all_reduce", (64 * MIB, 256 * MIB), (COPY,), 0.8),
        Target("all_reduce", (256 * KIB, MIB, 4 * MIB), MPI, 1.5),
        Target("all_reduce", (8,), (TORCH,), 100.0, 3.0),
        Target("all_reduce", (4 * KIB,), (OPEN_MPI,), 1.0),
        Target("reduce_scatter_tensor", (64 * MIB,), MPI, 3.0),
        Target("reduce_scatter_tensor", (64 * MIB,), (TORCH,), 10.0),
        Target("all_gather_into_tensor", FROM_1_MIB, MPI, 1.0),
        Target("all_gather_into_tensor", FROM_1_MIB, (TORCH,), 5.0),
        *(Target(operation, FROM_1_MIB, MPI, 0.9) for operation in MOVED),
        *(Target(operation, FROM_1_MIB, (TORCH,), 2.5) for operation in MOVED),
        Target("all_reduce", (25 * MIB,), (SHM,), 1.3),
    ),
    "crowded": (
        Target("all_reduce", (8,), (OPEN_MPI,), 1 / 1.5),
        Target("all_reduce", (64 * MIB,), (OPEN_MPI,), 2.0),
    ),
}


def is_slower(cell: Cell, ours: str, other: str) -> bool:
    """Whether ours is slower than the other by more than 5 % and more than the run's own spread."""
    samples = cell.samples[ours], cell.samples[other]
    ratio = statistics.median(samples[0]) / statistics.median(samples[1])
    spread = min(max(one) / min(one) for one in samples)
    return ratio > max(1.05, spread)


def outcomes(part: str, cells: Sequence[Cell]) -> list[str]:
    """One line for each target and size: what was reached, and whether that is enough."""
    found = {(cell.operation, cell.num_bytes, cell.dtype): cell for cell in cells}
    lines = []
    for target in TARGETS.get(part, ()):
        ours = SHARED if target.others == (SHM,) else SHM
        for size in target.sizes:
            cell = found.get((target.operation, size, "float32"))
            if cell is None:
                continue
            what = f"{target.operation} {size_text(size)}"
            ratios = {other: ratio for other in target.others if (ratio := cell.ratio(other, ours))}
            mine = cell.median(ours)
            if not ratios or mine is None:
                lines.append(f"ABSENT {what}: nothing of {', '.join((ours, *target.others))}")
                continue
            is_met = min(ratios.values()) >= target.times
            reached = " and ".join(f"{ratio:.2f} times {other}" for other, ratio in ratios.items())
            text = f"{what}: {reached}, at least {target.times:.3g}"
            if target.most_us is not None:
                is_met = is_met and mine * 1e6 <= target.most_us
                text += f"; {mine * 1e6:.2f} us, at most {target.most_us:g}"
            lines.append(f"{'met   ' if is_met else 'MISSED'} {text}")
    half = found.get(("all_reduce", 64 * MIB, "bfloat16"))
    full = found.get(("all_reduce", 64 * MIB, "float32"))
    if half and full and (a := half.median(SHM)) and (b := full.median(SHM)):
        more = 2 * b / a  # 64 MiB are twice as many elements
        verdict = "met   " if more >= 1.6 else "MISSED"
        lines.append(f"{verdict} all_reduce 64 MiB bfloat16: {more:.2f} times float32's elements/s")
    return lines


def entrants_of(part: str) -> list[Entrant]:
    """All sides of a part that this machine can run; ours comes first."""
    if part == "gloo":
        return [Entrant("meshdist/gloo", "meshdist/gloo"), Entrant(TORCH, TORCH)]
    sides = [Entrant(SHM, SHM), Entrant(TORCH, TORCH)]
    if part == "shm":
        sides[1:1] = [Entrant(SHARED, SHARED), Entrant(COPY, COPY)]
    mpiexec = Path(sys.executable).with_name("mpiexec")
    path = os.environ.get("PYTHONPATH", "")
    here = {"PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)}
    if find_spec("mpi4py") and mpiexec.exists():
        launch = (str(mpiexec), "--oversubscribe", "-n", "{n}")
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        sides.append(Entrant(OPEN_MPI, "mpi", launch, environment=here | root))
    python = mpich_python()
    if python is not None:
        launch = (str(python.with_name("mpiexec")), "-n", "{n}")
        sides.append(Entrant(MPICH, "mpi", launch, str(python), here))
    if find_spec("jax"):
        sides.append(Entrant(JAX, "jax"))
    return sides


def run(
    name: str, operations: Sequence[str], rounds: int, sizes: Sequence[int], folder: Path
) -> None:
    """Measure one part, print its cells, and write its report."""
    part, entrants = PARTS[name], entrants_of(name)
    labels = [entrant.label for entrant in entrants]
    print("  ".join(f"{text:>14}" for text in table_text([], labels)[0]), flush=True)

    def show(cell: Cell) -> None:
        row = table_text([cell], labels)[1]
        slow = name == "gloo" and is_slower(cell, *labels)
        print("  ".join(f"{text:>14}" for text in row), "slower" * slow, flush=True)

    with running(entrants, part.num_ranks) as ranks:
        cells = measure(ranks, operations, sizes or part.sizes, rounds, show)
        for operation, num_bytes, dtype in part.also if not sizes else ():
            if operation in operations:
                cells += measure(ranks, [operation], [num_bytes], rounds, show, dtype)
    report = to_json(cells, part.num_ranks, rounds, __doc__)
    report["mpich"] = PACKAGES
    if name == "gloo":
        slower = [f"{c.operation} {size_text(c.num_bytes)}" for c in cells if is_slower(c, *labels)]
        print("slower than torch beyond 5 % and the run's spread:", ", ".join(slower) or "none")
        report["slower"] = slower
    else:
        report["targets"] = outcomes(name, cells)
        print(*report["targets"], sep="\n")
    write(folder / f"{part.name}.json", report)
    plot(folder / f"{part.name}.svg", cells, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--operations", default=",".join(OPERATIONS))
    parser.add_argument("--sizes", default="", help="bytes, a comma list")
    parser.add_argument("--output", type=Path, default=REPORTS, help="the folder of the reports")
    arguments = parser.parse_args()
    is_whole = arguments.operations == parser.get_default("operations") and not arguments.sizes
    if not is_whole and arguments.output == REPORTS:
        parser.error(
            "some of the collectives or sizes would replace the whole reports: add --output FOLDER"
        )
    if find_spec("matplotlib") is None:
        parser.error("the reports' pictures need matplotlib: pip install matplotlib")
    sizes = [int(size) for size in arguments.sizes.split(",") if size]
    for name in arguments.parts or PARTS:
        run(name, arguments.operations.split(","), arguments.rounds, sizes, arguments.output)


if __name__ == "__main__":
    main()
