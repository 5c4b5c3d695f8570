"""The quick part of the suite: what it names exists, what it leaves out, and that it says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import quick

WRITTEN = """
import pytest

@pytest.fixture
def pool():
    return None

def test_that_is_pure():
    pass

@pytest.mark.parametrize("backend", ["simulated", "gloo", "shm"])
def test_on_a_backend(backend, pool):
    pass

def test_of_the_pool(pool):
    pass

@pytest.mark.mpi
def test_over_mpi():
    pass
"""


def test_what_is_left_out_exists_and_has_tests() -> None:
    paths = quick.left_out_paths()
    assert [path for path in paths if not path.exists()] == []
    assert [path for path in paths if quick.num_functions(path) == 0] == []


def test_nothing_is_left_out_twice() -> None:
    paths = quick.left_out_paths()
    assert len(paths) == sum(len(names.split()) for names in quick.LEFT_OUT.values())
    assert [path for path in paths if {*path.parents} & paths.keys()] == []


@pytest.mark.parametrize("workers", ["0", "1"])
def test_it_runs_what_needs_no_other_backend_and_says_what_it_left_out(
    tmp_path: Path, workers: str
) -> None:
    file = tmp_path / "test_written_here.py"
    file.write_text(WRITTEN)
    command = [sys.executable, "-m", "pytest", "-p", "tests.quick", "-p", "no:cacheprovider"]
    command += ["-n", workers, "-c", str(quick.TESTS.parent / "pyproject.toml"), str(file)]
    done = subprocess.run(command, cwd=quick.TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "2 passed" in lines[-1]
    assert "1 tests: gloo" in lines
    assert "1 tests: mpi" in lines
    assert "2 tests: ranks of the pool over a backend that no parameter names" in lines
    for why in quick.LEFT_OUT:
        assert any(f"test functions: {why}: " in line for line in lines)
