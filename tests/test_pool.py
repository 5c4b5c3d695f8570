"""The pool of worker processes: what the tests of every other room stand on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import meshdist as md
from tests.pool import TESTS, Failure, Pool, WorkerLost, places


def who() -> tuple[int, int, int]:
    return md.get_rank(), md.get_world_size(), os.getpid()


def test_results_come_back_by_rank(pool: Pool) -> None:
    offset = 10
    results = pool.run(lambda x: md.get_rank() * x + offset, 4, 3)
    assert results == [10, 13, 16, 19]


def test_workers_are_reused_and_worlds_are_not(pool: Pool) -> None:
    first = pool.run(who, 2)
    second = pool.run(who, 3)
    assert [size for _, size, _ in first] == [2, 2]
    assert [size for _, size, _ in second] == [3, 3, 3]
    assert [pid for _, _, pid in second[:2]] == [pid for _, _, pid in first]


def test_the_world_communicates(pool: Pool) -> None:
    def program() -> float:
        x = torch.full((3,), float(md.get_rank() + 1))
        md.all_reduce(x)
        return x[0].item()

    assert pool.run(program, 3) == [6.0, 6.0, 6.0]


def test_five_ranks(pool: Pool) -> None:
    assert [rank for rank, _, _ in pool.run(who, 5)] == [0, 1, 2, 3, 4]


def test_an_exception_comes_back_with_its_rank_and_traceback(pool: Pool) -> None:
    def program() -> None:
        if md.get_rank() == 1:
            raise ZeroDivisionError("by rank one")

    with pytest.raises(ZeroDivisionError, match="by rank one") as caught:
        pool.run(program, 2)
    assert caught.value.rank == 1
    assert "in program" in str(caught.value.__cause__)


def test_outcomes_of_all_ranks(pool: Pool) -> None:
    def program() -> str:
        if md.get_rank() == 0:
            raise ValueError("no")
        return "yes"

    failure, result = pool.outcomes(program, 2)
    assert isinstance(failure, Failure)
    assert failure.rank == 0
    assert str(failure.exception) == "no"
    assert result == "yes"


def test_a_worker_that_dies_is_replaced(pool: Pool) -> None:
    before = pool.run(who, 2)

    def program() -> None:
        if md.get_rank() == 1:
            os._exit(3)

    with pytest.raises(WorkerLost, match="rank 1's process ended"):
        pool.run(program, 2)
    after = pool.run(who, 2)
    assert after[1][2] != before[1][2]


def test_a_worker_that_hangs_is_shown_and_replaced(pool: Pool) -> None:
    def program() -> None:
        if md.get_rank() == 0:
            time.sleep(600)

    with pytest.raises(WorkerLost, match="rank 0 did not finish") as caught:
        pool.run(program, 2, timeout_s=1.0)
    assert "in program" in str(caught.value)
    assert [rank for rank, _, _ in pool.run(who, 2)] == [0, 1]


def test_a_result_that_cannot_be_sent_is_an_error(pool: Pool) -> None:
    with pytest.raises(RuntimeError, match="cannot be sent back"):
        pool.run(lambda: sys._getframe(), 1)


def test_calls_without_a_world(pool: Pool) -> None:
    assert pool.call(lambda rank, x: (rank, x, md.is_initialized()), 2, "a") == [
        (0, "a", False),
        (1, "a", False),
    ]


def test_the_environment_is_restored(pool: Pool) -> None:
    def program(rank: int) -> str | None:
        os.environ["LEFT_BEHIND"] = "yes"
        return os.environ.get("FOR_THIS_CALL")

    assert pool.call(program, 1, env={"FOR_THIS_CALL": "1"}) == ["1"]
    assert pool.call(lambda rank: os.environ.get("LEFT_BEHIND"), 1) == [None]


def test_warnings_are_errors_in_workers(pool: Pool) -> None:
    def program() -> None:
        import warnings

        warnings.warn("careful", stacklevel=1)

    with pytest.raises(UserWarning, match="careful"):
        pool.run(program, 1)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


SESSION = """
import os, sys
from tests.mpi_job import MpiJob
from tests.pool import Pool

def spin(rank):
    os.write(1, b"spinning\\n")
    while True:
        pass

pool = MpiJob(2) if "mpi" in sys.argv else Pool()
pids = pool.call(lambda rank: (os.getpid(), os.getppid()), 2)
print(*(pid for pair in pids for pid in pair), flush=True)
pool.call(spin, 2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("kind", ["forked", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_workers_that_spin_end_with_a_killed_test_session(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "session.py"
    script.write_text(SESSION)
    session = subprocess.Popen(
        [sys.executable, str(script), kind],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent), "TMPDIR": str(tmp_path)},
    )
    try:
        assert session.stdout is not None
        pids = [int(word) for word in session.stdout.readline().split()]
        assert len(pids) == 4
        assert all(map(is_running, pids))
        assert [session.stdout.readline() for _ in range(2)] == ["spinning\n"] * 2
        session.send_signal(signal.SIGKILL)
        session.wait()
        end = time.monotonic() + 10
        while any(map(is_running, pids)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(map(is_running, pids))
    finally:
        session.kill()
        session.wait()
        session.stdout.close()


# -- programs -------------------------------------------------------------------------------------

ENDING = """
import atexit, os, sys, warnings
atexit.register(print, "at the end")
print(__name__, os.path.basename(__file__), sys.argv[1:], os.environ.get("RANK"))
if os.environ.get("RANK") == "1":
    sys.exit(7)
if os.environ.get("RANK") == "2":
    os.kill(os.getpid(), 9)
if "warns" in sys.argv:
    warnings.warn("a warning")
raise ValueError("unwell")
"""


@pytest.mark.parametrize("has_teardown", [True, False])
def test_programs_end_as_programs_do(pool: Pool, has_teardown: bool) -> None:
    first, second, third = pool.start(ENDING, places(3), "a", "b", has_teardown=has_teardown)
    assert [one.returncode for one in (first, second, third)] == [1, 7, -signal.SIGKILL]
    assert first.stdout == "__main__ program.py ['a', 'b'] 0\nat the end\n"
    assert first.stderr.startswith("Traceback (most recent call last):\n")
    assert first.stderr.endswith("\nValueError: unwell\n")
    assert (second.stdout[-11:], second.stderr) == ("at the end\n", "")
    assert third.stderr == ""


def test_a_program_alone_has_no_place_and_its_warnings_may_be_errors(pool: Pool) -> None:
    for is_strict, error in ((True, "UserWarning: a warning"), (False, "ValueError: unwell")):
        (done,) = pool.start(ENDING, [{"MINE": "x"}], "warns", is_strict=is_strict)
        assert done.stdout == "__main__ program.py ['warns'] None\nat the end\n"
        assert done.stderr.endswith(f"{error}\n")


LAST = """
import sys, threading, time
class Here:
    def __del__(self):
        print("torn down")
here = Here()
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
sys.exit(None if "well" in sys.argv else "unwell")
"""


@pytest.mark.parametrize("has_teardown", [True, False])
def test_the_teardown_alone_may_be_left_out(pool: Pool, has_teardown: bool) -> None:
    last = "torn down\n" if has_teardown else ""
    for words, code, error in ((("well",), 0, ""), ((), 1, "unwell\n")):
        (done,) = pool.start(LAST, [{}], *words, has_teardown=has_teardown)
        assert (done.returncode, done.stdout) == (code, f"a thread\n{last}")
        assert done.stderr == error


def test_a_program_that_does_not_end_is_an_error(pool: Pool) -> None:
    program = """
import os, time
os.write(1, b"begun")
if os.environ["RANK"] == "1":
    time.sleep(60)
os._exit(0)
"""
    with pytest.raises(WorkerLost) as caught:
        pool.start(program, places(2), timeout_s=3.0)
    assert str(caught.value) == "did not end within 3.0 s; what they had said: {1: ['begun', '']}"
