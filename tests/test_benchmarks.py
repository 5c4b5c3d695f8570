"""The benchmarks start both ways: as scripts, and by ``python -m``; two checkouts are compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import axis_types, ddp
from benchmarks._report import interleaved
from benchmarks._step_times import Sample, quotient, verdict as verdict_of_target
from benchmarks.before_after import AFTER, BEFORE, best, run, spread, verdict
from benchmarks.busy import busy_processes, row
from meshdist.bench.measuring import Cell

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
# Two processes, forked from one that has imported what takes long.
BOTH_WAYS = """
import os, runpy, sys
import meshdist.collectives, torch
from importlib import import_module

child = os.fork()
for name in {names}:
    if child:
        import_module(f"benchmarks.{{name}}")
    else:
        sys.path[0] = "benchmarks"
        runpy.run_path(f"benchmarks/{{name}}.py")
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.soak
def test_benchmarks_find_what_they_import() -> None:
    command = [sys.executable, "-c", BOTH_WAYS.format(names=NAMES)]
    done = subprocess.run(
        command, cwd=ROOT, env={}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ([1.02, 2.04, 3.06, 4.08], ""),  # within 3 %
        ([1.04, 2.08, 3.12, 4.16], "SLOWER"),  # in every round, while the machine became slower
        ([0.9, 1.8, 2.7, 3.6], "faster"),
        ([1.1, 1.8, 3.6, 4.0], ""),  # within what the rounds differ by
    ],
)
def test_a_cell_is_slower_beyond_what_rounds_differ_by(after: list[float], expected: str) -> None:
    cell = Cell("all_reduce", 8, samples={BEFORE: [1.0, 2.0, 3.0, 4.0], AFTER: after})
    assert verdict(cell) == expected
    assert best(cell) == after[0]


def test_busy_processes_compute_and_end_with_their_context() -> None:
    with busy_processes(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert all(process.returncode < 0 for process in processes)


@pytest.mark.parametrize(
    ("ours", "expected"),
    [([1.0, 2.0, 3.0], (1.0, "met")), ([1.1, 2.2, 1.5], (1.1, "MISSED"))],
)
def test_a_row_beside_busy_processes_compares_each_round(
    ours: list[float], expected: tuple[float, str]
) -> None:
    cell = Cell("all_reduce", 8, samples={"meshdist/shm": ours, "torch/gloo": [1.0, 2.0, 3.0]})
    found = row(cell, 6)
    assert (found["busy"], found["size"]) == (6, "8 B")
    assert (pytest.approx(found["shm / gloo"]), found["verdict"]) == expected


def test_the_spread_is_the_distance_between_quartiles() -> None:
    cell = Cell("x", 8, samples={BEFORE: [1.0] * 7, AFTER: [float(n) for n in range(1, 8)]})
    assert spread(cell) == 6 - 2


@pytest.mark.soak
def test_two_checkouts_are_compared(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "benchmarks/before_after.py", sys.executable]
    command += ["--rounds", "2", "--starts", "1", "--report", str(report)]
    command += ["--parts", "shm", "--sizes", "8,64"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(report.read_text())
    assert told["before"] == told["after"] and told["before"]["torch"]
    cells = {(one["part"], one["verb"], one["bytes"]): one for one in told["cells"]}
    verbs = ("all_reduce", "all_gather_into_tensor", "send_recv")
    assert {key for key in cells if key[0] == "shm"} == {
        ("shm", v, n) for v in verbs for n in (8, 64)
    }
    assert len(cells) == 6
    for cell in cells.values():
        assert [len(samples) for samples in cell["seconds"].values()] == [2, 2]
    text = report.with_suffix(".txt").read_text()
    assert text in done.stdout and "all_gather_into_tensor" in text


class Quick:
    """A checkout whose answers are given."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def seconds_of(self, code: str) -> float:
        assert "import meshdist" in code
        return self.seconds


def test_every_start_measures_imports_in_turn() -> None:
    checkouts: Any = {BEFORE: Quick(1.0), AFTER: Quick(2.0)}
    cells = run(["import"], checkouts, [], 3, 2, lambda line: None)
    assert [cell.samples for cell in cells.values()] == [{BEFORE: [1.0] * 6, AFTER: [2.0] * 6}] * 2


def test_no_side_is_always_asked_first_or_behind_the_same_one() -> None:
    asked: list[str] = []
    samples = interleaved({side: lambda side=side: asked.append(side) for side in "abc"}, 2)
    assert "".join(asked) == "bac" + "abc" + "acb"
    assert [len(taken) for taken in samples.values()] == [2, 2, 2]


def samples_of(**times: list[float]) -> dict[str, list[Sample]]:
    """Both clocks show the same."""
    names = {"shm": "meshdist/shm", "gloo": "meshdist/gloo", "views": "torch/views"}
    return {
        names.get(side, side): [Sample(one, one) for one in taken] for side, taken in times.items()
    }


def test_sides_of_ddp_are_compared_within_each_round() -> None:
    # The machine is ten times slower in the second round.
    samples = samples_of(
        local=[1.0, 10.0, 1.0], torch=[3.0, 30.0, 3.0], views=[2.0, 20.0, 4.0], shm=[1.5, 12.0, 1.4]
    )
    rows = {row["what"]: row for row in ddp.comparison_rows("mlp", samples)}
    assert list(rows) == [
        "exposed: meshdist/shm / torch",
        "exposed: meshdist/shm / torch, best",
    ]
    against_default, against_best = rows.values()
    assert against_default["CPU"] == against_default["wall"] == pytest.approx(0.2)
    assert against_default["verdict"] == "met (at most 0.3)"
    assert (against_best["best"], against_best["verdict"]) == ("torch", "")


def test_a_target_of_ddp_is_missed_where_one_clock_misses_it() -> None:
    samples = samples_of(torch=[2.0], views=[1.0], gloo=[1.5])
    (row,) = ddp.comparison_rows("many", samples)
    assert (row["what"], row["best"]) == ("step: meshdist/gloo / torch, best", "torch/views")
    assert (row["CPU"], row["verdict"]) == (1.5, "MISSED (at most 1)")
    assert verdict_of_target(0.3, [0.2, 0.4]) == "MISSED (at most 0.3)"


def test_a_round_whose_divisor_says_nothing_counts_as_infinite() -> None:
    samples = samples_of(local=[2.0, 2.0, 2.0], torch=[1.0, 2.0, 4.0], shm=[1.0, 1.0, 1.0])
    assert ddp.comparison_rows("mlp", samples)[0]["CPU"] == "inf"


@pytest.mark.soak
def test_the_benchmark_of_ddp_runs(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "benchmarks/ddp.py", str(report), "--quick", "--models", "many,mlp"]
    sides = ["local", "torch", "meshdist/gloo", "meshdist/shm"]
    command += ["--sides", ",".join(sides)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(report.read_text())
    assert [(row["model"], row["side"]) for row in told["rows"]] == [
        (model, side) for model in ("many", "mlp") for side in sides
    ]
    assert all(row["CPU ms"] > 0 and row["wall ms"] > 0 for row in told["rows"])
    memory = [row["bytes"] for row in told["targets"] if row["what"].startswith("memory")]
    assert len(memory) == 4 and all(0.99 < one < 1.05 for one in memory)
    assert "models 10 times smaller" in told["notes"]
    assert "exposed: meshdist/shm / torch" in done.stdout


def test_costs_of_types_are_compared_within_each_round() -> None:
    # The machine is ten times slower in the second round.
    assert quotient([1.5, 20.0, 1.6], [1.0, 10.0, 1.0]) == 1.6
    taken = {
        "typed": [Sample(2.0, 3.0), Sample(20.0, 30.0)],
        "DDP": [Sample(1.0, 2.0), Sample(10.0, 20.0)],
    }
    assert axis_types.quotients(taken) == (2.0, 1.5)
    row = axis_types.target("step", 1.6, *axis_types.quotients(taken))
    assert row == {"what": "step", "CPU": 2.0, "wall": 1.5, "verdict": "MISSED (at most 1.6)"}
    assert axis_types.target("call", 10, 9.5)["verdict"] == "met (at most 10)"


@pytest.mark.soak
def test_the_benchmark_of_types_runs(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "benchmarks/axis_types.py", str(report), "--quick"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(report.read_text())
    sides = {row["side"] for row in told["rows"]}
    assert sides == {"plain", "empty mode", "typed", "DDP", "meshdist", "torch"}
    assert all(0 < row["min"] <= row["median"] for row in told["rows"])
    targets = [row["what"] for row in told["targets"]]
    assert len(targets) == len(set(targets)) == 2 * 4 + 1 + 2 + 4
    assert "sizes 8 times smaller" in told["notes"]
