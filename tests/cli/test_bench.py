"""meshdist bench as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from meshdist.cli import bench
from tests.inner import Entrant, SideFailedError, measure, running, size_text

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
def test_two_sides_in_turn(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["--operations", "all_reduce,barrier", "--sizes", "8,64", "--rounds", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "meshdist", "bench", "collectives", *words, "--output", str(report)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "torch/gloo / meshdist/shm" in " ".join(done.stdout.split())
    cells = json.loads(report.read_text())["cells"]
    assert [(cell["operation"], cell["bytes"]) for cell in cells] == [
        ("all_reduce", 8),
        ("all_reduce", 64),
        ("barrier", 0),
    ]
    for cell in cells:
        assert {label: len(times) for label, times in cell["seconds"].items()} == {
            "meshdist/shm": 2,
            "torch/gloo": 2,
        }
        assert min(min(times) for times in cell["seconds"].values()) > 0


@pytest.mark.mpi
def test_on_80_columns_names_are_whole_and_mpi_starts_as_any_user() -> None:
    words = ["--operations", "all_gather_into_tensor", "--sizes", "8", "--rounds", "1"]
    words += ["--sides", "meshdist/shm,mpi"]
    done = subprocess.run(
        [sys.executable, "-m", "meshdist", "bench", "collectives", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    title, *table = done.stdout.splitlines()
    assert title.strip() == "2 ranks, float32, median of 1 rounds"  # without progress, in a pipe
    (row,) = [line for line in table if "8 B" in line]
    assert row.split("│")[1].strip() == "all_gather_into_tensor"
    assert all(len(line) <= 80 for line in table)


def test_what_takes_tensors_is_measured_at_every_size_whatever_its_name() -> None:
    class Ranks:
        def sample(self, operation: str, num_bytes: int, dtype: str) -> float:
            return 1.0

    ranks: Any = {"ours": Ranks()}
    cells = measure(ranks, ["send_recv", "barrier"], [8, 64], 1, lambda cell: None)
    found = [(cell.operation, cell.num_bytes) for cell in cells]
    assert found == [("send_recv", 8), ("send_recv", 64), ("barrier", 0)]
    (cell,) = measure(ranks, ["all_reduce"], [8], 3, lambda cell: None, "bfloat16")
    assert (cell.dtype, cell.samples) == ("bfloat16", {"ours": [1.0] * 3})


AMONG_STRANGERS = """
import os, runpy, socket
from meshdist.bench.worker import ADDRESS
path, secret = os.environ[ADDRESS].rsplit(" ", 1)
told = ['{"rank": 0}', '{"secret": "no", "rank": 0}', f'{{"secret": "{secret}"}}', "[]"]
told += [f'{{"secret": "{secret}", "rank": 1e400}}', "[" * 3000]
strangers = []
for text in ["", "x", *told]:
    strangers.append(socket.socket(socket.AF_UNIX))
    strangers[-1].connect(path)
    strangers[-1].sendall(f"{text}\\n".encode() if text else b"")
strangers.pop().close()
runpy.run_module("meshdist.bench.worker", run_name="__main__")
"""


def test_strangers_that_connect_are_no_ranks() -> None:
    entrant = Entrant("ours", "meshdist/shm", program=("-c", AMONG_STRANGERS))
    with running([entrant], 2) as ranks:
        (cell,) = measure(ranks, ["barrier"], [0], 1, lambda cell: None)
    assert len(cell.samples["ours"]) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--operations", "all_reduce,shout"], "'shout' is not one of all_reduce, reduce, "),
        (["--operations", "allreduce"], "send_recv, barrier; did you mean 'all_reduce'?\n"),
        (["--sides", "torch/executor"], "'torch/executor' is not one of meshdist/shm, "),
        (["--sizes", "8,many"], "'many' is not a size, such as 8, 256K or 64 MiB"),
        (["--sizes", "0"], "'0' is not a size"),
        (["--sizes", "1MB"], "'1MB' is not a size"),
        (["-n", "0"], "must be an integer of at least 1, not '0'"),
        (["--rounds", "-1"], "must be an integer of at least 1, not '-1'"),
    ],
)
def test_wrong_arguments(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(["collectives", *words])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_sizes_are_read_as_they_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def measure_nothing(ranks: Any, operations: Any, sizes: list[int], *more: Any) -> list[Any]:
        asked.append(sizes)
        return []

    monkeypatch.setattr(bench, "running", lambda *_: nullcontext({}))
    monkeypatch.setattr(bench, "measure", measure_nothing)
    shown = [8, 1000, 1 << 10, 1536, 256 << 10, 1 << 20, 64 << 20]
    typed = [["1M"], ["1m,8,4KiB,2G"], [",".join(size_text(size) for size in shown)], []]
    for sizes in typed:
        words = ["--sizes", *sizes] if sizes else []
        assert bench.main(["collectives", *words]) == 0
    usual = [8, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
    assert asked == [[1 << 20], [1 << 20, 8, 4096, 2 << 30], shown, usual]


def test_what_to_measure_has_to_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main([])
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "meshdist bench: the following arguments are required: collectives"
    assert rest[0] == "  expected: meshdist bench collectives [options]"
    with pytest.raises(SystemExit) as caught:
        bench.main(["--help"])
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "comma-separated list of all_reduce, reduce, broadcast," in shown


def test_a_side_whose_ranks_end_is_told_at_once() -> None:
    python = ROOT / "no such python"
    entrant = Entrant("ours", "meshdist/gloo", ("sh", "-c", "exit 3"))
    with pytest.raises(SideFailedError) as caught, running([entrant], 2):
        pass
    assert str(caught.value).splitlines() == [
        "a rank of ours ended before it could be measured",
        "  found:    exit codes [3]",
        "  fix:      check the stderr of the rank for an error",
    ]
    with (
        pytest.raises(SideFailedError) as caught,
        running([Entrant("mpi", "mpi", (str(python),))], 2),
    ):
        pass
    assert str(caught.value).startswith(f"cannot start mpi: command {str(python)!r} was not found")


def test_a_rank_that_ends_while_it_is_measured(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(SideFailedError) as caught,
        running([Entrant("ours", "torch/gloo")], 1) as ranks,
    ):
        measure(ranks, ["no collective"], [8], 1, print)
    assert str(caught.value).splitlines()[:2] == [
        "a rank of ours ended while it was measured",
        "  where:    no collective of 8 bytes, rank 0",
    ]
    assert "has no attribute 'no collective'" in capfd.readouterr().err
