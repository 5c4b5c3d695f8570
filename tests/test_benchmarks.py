"""The benchmarks start both ways: as scripts, and by ``python -m``; two checkouts are compared."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch

import meshdist as md
from benchmarks import (
    _dtensor as dtensor,
    _planning,
    _transitions,
    axis_types,
    checkpoint,
    ddp,
    reshard,
    structure,
)
from benchmarks._report import interleaved
from benchmarks._step_times import Sample, quotient, verdict as outcome_of_target
from benchmarks.before_after import AFTER, BEFORE, best, run, spread, verdict
from benchmarks.busy import busy_processes, row
from tests.inner import Cell

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
    cells = {(one["part"], one["operation"], one["bytes"]): one for one in told["cells"]}
    operations = ("all_reduce", "all_gather_into_tensor", "send_recv")
    assert {key for key in cells if key[0] == "shm"} == {
        ("shm", v, n) for v in operations for n in (8, 64)
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
    assert outcome_of_target(0.3, [0.2, 0.4]) == "MISSED (at most 0.3)"


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


# Bytes that a rank receives on the mean over those of the array, worked out by hand, on (2, 2).
FEWEST = (0.125, 0.25, 0.1875, 0.375, 0.25, 0.375, 1.5, 0.75, 0.5)


@pytest.mark.parametrize(
    ("transition", "fewest"), list(zip(_transitions.TRANSITIONS, FEWEST, strict=True))
)
def test_bounds_of_transitions(transition: str, fewest: float) -> None:
    assert _transitions.bound(transition, (2, 2)) / 4 == fewest


@pytest.mark.parametrize("transition", _transitions.TRANSITIONS)
@pytest.mark.parametrize("sizes", [(2, 2), (2, 4)])
def test_plans_of_transitions_keep_to_the_bound(transition: str, sizes: tuple[int, int]) -> None:
    layout = md.Layout.from_shape(sizes, _transitions.AXES)
    pattern = _transitions.pattern_of(transition)
    plans = [
        md.plan(pattern, mesh=layout, shape=(64, 64), rank=rank) for rank in layout.ranks().flat
    ]
    received = sum(plan.bytes_received(1) for plan in plans)
    assert received == _transitions.bound(transition, sizes) * 64 * 64


def test_partial_sums_of_a_transition_add_up() -> None:
    whole = torch.arange(16.0).view(4, 4)
    partial_sums = [
        _transitions.partial_sum_of(whole, ["P", "P"], (2, 2), coordinate)
        for coordinate in itertools.product(range(2), repeat=2)
    ]
    assert torch.equal(sum(partial_sums, torch.zeros(())), 4 * whole)
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(partial_sums))


def test_transitions_are_compared_with_the_best_of_dtensor() -> None:
    # The machine is ten times slower in the second round.
    times = {
        "DTensor": [30.0, 300.0, 30.0],
        "DTensor/flattened": [20.0, 200.0, 20.0],
        "DTensor/min-cost": [40.0, 400.0, 40.0],
        "DTensor/min-cost/flattened": [40.0, 400.0, 40.0],
        "meshdist/gloo": [10.0, 100.0, 10.0],
        "meshdist/shm": [15.0, 150.0, 15.0],
    }
    received = dict.fromkeys(times, 0.5)
    for transition, fewest, most in (
        ("[S0,S1]->[S1,S0]", 0.125, 0.2),
        ("[S0,R]->[R,S0]", 0.25, 0.667),
        ("[S0,S0]->[R,R]", 0.4, 1.05),
    ):
        rows = reshard.transition_targets("x", transition, times, received, fewest)
        assert [row["quotient"] for row in rows] == [0.5, 0.75, 1.5]
        assert rows[0]["best"] == "DTensor/flattened"
        assert rows[0]["verdict"] == f"{'MISSED' if most < 0.5 else 'met'} (at most {most:g})"
        assert (rows[1]["verdict"], rows[2]["verdict"]) == ("", "MISSED (at most 1.05)")


def test_not_slower_is_within_what_rounds_differ_by() -> None:
    row = reshard.compared("x", [1.0, 1.2, 1.4], [1.0, 1.0, 1.0], reshard.NOT_SLOWER)
    assert (row["quartiles"], row["verdict"]) == ("1.10-1.30", "met (at most 1.2)")
    row = reshard.compared("x", [1.0, 1.3, 1.6], [1.0, 1.0, 1.0], 1.2)
    assert row["verdict"] == "MISSED (at most 1.2)"


def test_planning_may_take_longer_with_more_peers_than_64() -> None:
    found = [_planning.most_us(ranks, peers) for ranks, peers in ((16, 15), (4096, 64), (4096, 65))]
    assert found == [1e3, 1e4, 1e4 + 10]


@pytest.mark.soak
def test_the_benchmark_of_resharding_runs(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "benchmarks/reshard.py", str(report), "--quick", "--meshes", "2x2"]
    chosen = ("[S0,S1]->[S1,S0]", "[P,S0]->[S1,R]")
    for transition in chosen:
        command += ["--transition", transition]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(report.read_text())
    moved = [row for row in told["rows"] if "received" in row]
    assert [(row["what"], row["side"]) for row in moved] == [
        (f"{transition} 2x2", side)
        for transition in chosen
        for side in (*dtensor.SIDES, "meshdist/gloo", "meshdist/shm")
    ]
    assert all(0 < row["min ms"] <= row["ms"] for row in moved)
    over_bound = [row["/ bound"] for row in moved]
    assert over_bound == [6.0] * 4 + [1.0] * 2 + [2.0] * 2 + [1.0] * 4
    targets = [row["what"] for row in told["targets"]]
    assert len(targets) == len(set(targets)) == 2 * 3 + 3 + 2 + 2
    assert {row["side"] for row in told["rows"] if "a lone pair" in row["what"]} == {
        "messages",
        "all_to_all_single",
        "all_to_all",
        "messages to new memory",
        "reshard",
    }
    assert "an array of 1 MiB" in told["notes"]


def test_matrices_of_checkpoints_can_be_cut_by_four_both_ways() -> None:
    for num_bytes in (2048, 300_000, 16 << 20):
        shape = checkpoint.shape_of(num_bytes)
        assert all(size % 4 == 0 for size in shape)
        assert 0.9 * num_bytes < 4 * shape[0] * shape[1] <= num_bytes


def test_checkpoints_are_compared_in_each_round() -> None:
    ours = [Sample(cpu=cpu, wall=1.0) for cpu in (2.0, 20.0, 2.0)]
    dcps = [Sample(cpu=10.0, wall=wall) for wall in (4.0, 2.0, 2.0)]
    name = "small, save of rows, 2 ranks: shm / DCP"
    row = checkpoint.compared(name, "small, save of rows", ours, dcps, by_cpu=True)
    assert row["what"] == name
    assert (row["quotient"], row["verdict"]) == (0.2, "met (at most 0.3)")
    row = checkpoint.compared("x", "load columns from rows", ours, dcps, by_cpu=False)
    assert (row["quotient"], row["quartiles"]) == (0.5, "0.38-0.50")
    assert row["verdict"] == "met (at most 0.5)"


@pytest.mark.soak
def test_the_benchmark_of_checkpoints_runs(tmp_path: Path) -> None:
    report, disk = tmp_path / "report.json", tmp_path / "disk"
    disk.mkdir()
    command = [sys.executable, "benchmarks/checkpoint.py", str(report), "--quick"]
    command += ["--ranks", "2,1", "--disk", str(disk)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not list(disk.iterdir())
    told = json.loads(report.read_text())
    alone = {"torch.save", "safetensors"}
    for ranks, others in ((2, set()), (1, alone)):
        sides: dict[str, set[str]] = {}
        for found in told["rows"]:
            if found["ranks"] == ranks:
                sides.setdefault(found["what"], set()).add(found["side"])
        assert len(sides) == 1 + 3 + 1 + 1 + 2 * 2
        for what, names in sides.items():
            assert names - others == {"DCP", "shm", "gloo"}
            assert alone <= names or ranks == 2 or what.startswith("save_async")
    assert all(0 < row["min ms"] <= row["ms"] for row in told["rows"])
    assert {row["what"] for row in told["rows"] if "read" in row} == {"cold load replicated"}
    targets = [row["what"] for row in told["targets"]]
    assert len(targets) == len(set(targets)) == 2 * 2 * 10
    assert "2 MiB in large arrays" in told["notes"]


def test_the_structure_is_counted_as_in_drawn_files() -> None:
    first = '"""A room."""\nfrom .second import run\nfrom . import second\nx = 1  # barrier\n'
    operations = "all_reduce, broadcast, gather, scatter, barrier, all_gather"
    parameters = "self, a, b, c, d, e, f, g"
    second = f"""
import meshdist.first
class A:
    def seven({parameters}): "It does nothing."
    def eight({parameters}, h): return {operations}
try: pass
except (BackendFailure, OSError): pass
"""
    files = {"meshdist/first.py": first, "meshdist/second.py": second}
    numbers, many = structure.count({PurePosixPath(name): text for name, text in files.items()})
    assert list(numbers.values()) == [2, 11, 11, 2, 1, 1, 1]
    assert many == ["meshdist/second.py:5 eight (8)"]


def test_the_structure_of_this_checkout_is_counted() -> None:
    numbers, many = structure.count(structure.read_here())
    assert numbers["files"] > 100 and numbers["statements"] > 10_000
    assert numbers["functions of more than seven parameters, ours to choose"] == len(many) <= 8
    assert numbers["except BackendFailure"] <= 2
    assert numbers["files that name six collectives"] <= 13


@pytest.mark.parametrize(
    "place", [place for place, theirs in structure.PRESCRIBED.items() if "torch" in theirs]
)
def test_prescribed_parameters_are_those_of_another_library(place: str) -> None:
    library, _, title = structure.PRESCRIBED[place].rpartition(".")
    room = PurePosixPath(place.split()[0]).with_suffix("")
    ours, theirs = (
        {*inspect.signature(getattr(import_module(name), title)).parameters}
        for name in (".".join(room.parts), library)
    )
    assert len(ours & theirs) >= structure.MOST_PARAMETERS, ours - theirs
