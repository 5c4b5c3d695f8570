"""The suite itself: it runs in the background, no test runs for ever, and nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pool import OF_LAUNCHERS
from tests.test_pool import is_running

pytestmark = pytest.mark.soak  # each test runs a suite of its own

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
# As tests/conftest.py does for the tests that lie there.
OPENING = """
import os, time
import pytest
from tests.pool import Pool

@pytest.fixture(scope="session")
def pool():
    with Pool() as workers:
        workers.call(int, 2)  # so that no test waits for their start
        yield workers
"""
ENDLESS = """
@pytest.mark.timeout(5, func_only=True)
def test_that_spins(pool):
    def spin(rank):
        while True:
            pass

    pool.call(spin, 2)

def test_that_follows(pool):
    assert pool.call(lambda rank: rank, 2) == [0, 1]
"""
ENDLESS_IN_C = """
import ctypes

def test_that_stays_in_c():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
KILLED = """
def test_that_spins(pool):
    def tell_and_spin(rank):
        path = os.path.join({folder!r}, f"worker-{{rank}}")
        with open(path + ".part", "w") as file:
            file.write(f"{{os.getpid()}} {{os.getppid()}}")
        os.rename(path + ".part", path)
        while True:
            pass

    with open(os.path.join({folder!r}, "test"), "w") as file:
        file.write(str(os.getpid()))
    pool.call(tell_and_spin, 2)
"""


def environment() -> dict[str, str]:
    kept = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    kept = {name: x for name, x in kept.items() if not name.startswith(OF_LAUNCHERS)}
    return {**kept, "PYTHONPATH": str(ROOT)}


def run_tests(*words: object, ignored: str = "") -> subprocess.CompletedProcess[str]:
    """Run pytest in a process that begins with the signals ``ignored``, as in a background job."""
    command = [*PYTEST, *map(str, words)]
    return subprocess.run(
        ["sh", "-c", f"trap '' {ignored}; exec \"$@\"" if ignored else 'exec "$@"', "sh", *command],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    """The file of the tests that a test here runs."""
    return tmp_path / "test_written_here.py"


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_suite_in_the_background_can_be_interrupted(workers: int) -> None:
    words = ("-n", workers, "--timeout", 60, "tests/worlds/test_simulation.py", "-k", "ctrl_c")
    done = run_tests(*words, ignored="INT HUP")
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


def test_a_time_limit_fails_the_test_and_shows_all_stacks(tests: Path) -> None:
    tests.write_text(OPENING + ENDLESS)
    done = run_tests("-c", ROOT / "pyproject.toml", tests)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "Failed: Timeout (>5.0s)" in done.stdout
    for rank in range(2):
        assert f"rank {rank} was here:" in done.stdout
    assert done.stdout.count("in spin\n") == 2  # of each worker


def test_what_stays_in_c_ends_with_its_process(tests: Path) -> None:
    tests.write_text(ENDLESS_IN_C)
    limits = ("--timeout", 1, "-o", "faulthandler_timeout=3")
    done = run_tests("-c", ROOT / "pyproject.toml", *limits, tests)
    assert done.returncode == 1
    assert "in test_that_stays_in_c\n" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_killed_suite_leaves_nothing_that_spins(tests: Path, workers: int) -> None:
    tests.write_text(OPENING + KILLED.format(folder=str(tests.parent)))
    words = ("-c", str(ROOT / "pyproject.toml"), "-p", "conftest", "-n", str(workers), str(tests))
    suite = subprocess.Popen(
        [*PYTEST, *words], cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL
    )
    try:
        files = [tests.parent / name for name in ("test", "worker-0", "worker-1")]
        end = time.monotonic() + 100
        while not all(file.exists() for file in files) and time.monotonic() < end:
            time.sleep(0.05)
        pids = [int(word) for file in files for word in file.read_text().split()]
        assert len(pids) == 5
        assert all(map(is_running, pids))
        suite.send_signal(signal.SIGKILL)
        suite.wait()
        end = time.monotonic() + 10
        while any(map(is_running, pids)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(map(is_running, pids))
    finally:
        suite.kill()
        suite.wait()
