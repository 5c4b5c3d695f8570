"""Processes started from Python: results, failures, and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import meshdist as md
from tests.load import is_within

ROOT = Path(__file__).resolve().parents[2]

# The processes of these tests cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def run_script(tmp_path: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, *options, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def test_it_works_under_pdb(tmp_path: Path) -> None:
    text = """
        import meshdist as md
        def rank_times(factor):
            return md.get_rank() * factor
        if __name__ == "__main__":
            print("found", md.spawn(rank_times, (7,), 3))
"""
    done = run_script(tmp_path, text, "-m", "pdb", "-c", "continue", "-c", "quit")
    assert "found [0, 7, 14]" in done.stdout, done.stderr


# -- results ------------------------------------------------------------------------------------


def environment_and_sum(offset: int) -> dict[str, Any]:
    import torch

    md.init_process_group()
    x = torch.tensor([md.get_rank() + offset])
    md.all_reduce(x)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    answer = {name: os.environ.get(name) for name in names}
    answer["sum"] = x.item()
    for name in ("OMP_NUM_THREADS", "THP_MEM_ALLOC_ENABLE"):
        answer[name] = os.environ.get(name)
    md.destroy_process_group()
    return answer


def test_ranks_find_themselves_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    monkeypatch.setenv("RANK", "7")  # of the caller's own launcher, which must not be inherited
    results = md.spawn(environment_and_sum, (10,), nprocs=2)
    expected = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "sum": 21,
        "OMP_NUM_THREADS": "1",
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    for rank, result in enumerate(results):
        assert result == {**expected, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    assert os.environ["RANK"] == "7"


SCRIPT_WITH_OWN_CLASS = """
    import pickle
    import meshdist as md

    class Point:
        def __init__(self, x):
            self.x = x

    def program(point):
        # Also by name: the class is the one of the main module in every process.
        return pickle.loads(pickle.dumps(Point(point.x + 1)))

    if __name__ == "__main__":
        points = md.spawn(program, (Point(4),), nprocs=2)
        assert all(type(point) is Point for point in points)
        print([point.x for point in points])
"""


def test_functions_and_classes_of_a_script(tmp_path: Path) -> None:
    done = run_script(tmp_path, SCRIPT_WITH_OWN_CLASS, "-W", "error")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[5, 5]", "")


def test_a_function_of_no_file_as_in_a_notebook() -> None:
    code = """
import meshdist as md
unit = 10
def program(x):
    return lambda: unit * x
results = md.spawn(program, (3,), nprocs=1)
print(results[0]())
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-"],
        input=code,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "30\n", "")


# -- failures -----------------------------------------------------------------------------------


def test_an_exception_comes_back_with_its_rank_and_stops_the_others() -> None:
    def program() -> None:
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("by rank one")
        time.sleep(600)

    started = time.monotonic()
    with pytest.raises(md.RankFailedError) as caught:
        md.spawn(program, nprocs=2)
    # Two interpreters start, then the other rank has five seconds at the most.
    assert time.monotonic() - started < 60
    error = caught.value
    assert error.rank == 1
    assert error.summary == "rank 1 raised ZeroDivisionError: by rank one"
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "in program" in str(error)
    assert "Traceback (most recent call last)" in str(error)


def test_the_others_are_stopped_within_five_seconds(tmp_path: Path) -> None:
    folder = str(tmp_path)

    def program() -> None:
        import signal as signals

        # Deaf to what asks it to end, as a process inside a C++ call is.
        signals.signal(signals.SIGTERM, signals.SIG_IGN)
        rank = os.environ["RANK"]
        Path(folder, rank).write_text(str(os.getpid()))
        if rank == "0":
            time.sleep(600)
        while not Path(folder, "0").exists():
            time.sleep(0.01)
        Path(folder, "failed").write_text(str(time.monotonic()))
        os._exit(9)

    with pytest.raises(md.RankFailedError, match=r"rank 1 .*failed with exit code 9") as caught:
        md.spawn(program, nprocs=2)
    assert is_within(time.monotonic() - float(Path(folder, "failed").read_text()), 5)
    assert caught.value.rank == 1
    assert caught.value.__cause__ is None
    assert wait_until_gone([int(Path(folder, name).read_text()) for name in "01"]) == []


def test_a_rank_that_is_killed_is_named() -> None:
    def program() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        md.init_process_group()

    with pytest.raises(md.RankFailedError, match=r"rank 1 \(process \d+\) was ended by SIGKILL"):
        md.spawn(program, nprocs=2)


def test_a_rank_that_leaves_without_an_answer_stops_the_others() -> None:
    def leave(rank_of_leaver: int) -> None:
        if int(os.environ["RANK"]) == rank_of_leaver:
            os._exit(0)
        time.sleep(600)

    start = time.monotonic()
    with pytest.raises(md.RankFailedError) as caught:
        md.spawn(leave, (1,), nprocs=2)
    assert caught.value.rank == 1
    assert caught.value.summary == "rank 1 exited with code 0 without returning a result"
    assert "return from the function instead of calling os._exit()" in str(caught.value)
    assert is_within(time.monotonic() - start, 60.0)


def test_exit_codes_of_sys_exit() -> None:
    assert md.spawn(sys.exit, (0,), nprocs=1) == [None]
    with pytest.raises(md.RankFailedError, match="rank 0 raised SystemExit: 3"):
        md.spawn(sys.exit, (3,), nprocs=1)


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(md.RankFailedError, match="the result, a frame, cannot be sent"):
        md.spawn(lambda: sys._getframe(), nprocs=1)


def test_an_exception_that_cannot_be_sent_comes_as_its_text() -> None:
    def program() -> None:
        error = ValueError("no data left")
        error.frame = sys._getframe()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(
        md.RankFailedError, match="rank 0 raised ValueError: no data left"
    ) as caught:
        md.spawn(program, nprocs=1)
    assert "in program" in str(caught.value) and "raise error" in str(caught.value)


def test_a_timeout_names_the_late_ranks() -> None:
    def program() -> None:
        if os.environ["RANK"] == "1":
            time.sleep(600)

    with pytest.raises(md.CollectiveTimeoutError, match=r"did not return within 0\.5 s"):
        md.spawn(program, nprocs=2, timeout=timedelta(seconds=0.5))


UNGUARDED = """
    import meshdist as md

    def program():
        return 1

    md.spawn(program, nprocs=2)
"""


@pytest.mark.soak
def test_a_script_without_a_guard(tmp_path: Path) -> None:
    done = run_script(tmp_path, UNGUARDED)
    assert done.returncode == 1
    assert "spawn was called while a spawned process imports the module" in done.stderr
    assert 'fix:      put the main part of the script under: if __name__ == "__main__":' in (
        done.stderr
    )


def test_a_function_that_the_ranks_cannot_load() -> None:
    import types

    module = types.ModuleType("nowhere_to_be_found")
    exec("def program(): pass", module.__dict__)
    sys.modules["nowhere_to_be_found"] = module
    try:
        with pytest.raises(md.RankFailedError) as caught:
            md.spawn(module.program, nprocs=1)
    finally:
        del sys.modules["nowhere_to_be_found"]
    assert caught.value.summary.startswith(
        "rank 0 could not load the function: ModuleNotFoundError: No module named"
    )
    assert "meshdist.simulate(fn, nprocs, args)" in str(caught.value)


def test_arguments_that_cannot_be_sent_point_to_simulate() -> None:
    import threading

    with pytest.raises(md.ArgumentError, match="cannot be sent to other processes") as caught:
        md.spawn(print, (threading.Lock(),), nprocs=1)
    assert "meshdist.simulate(fn, nprocs, args)" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((3,), md.KindError, "spawn needs a function"),
        ((print, "text"), md.KindError, r"pass args=\(x,\) for one argument"),
        ((print, (), "2"), md.KindError, "nprocs must be an integer"),
        ((print, (), True), md.KindError, "nprocs must be an integer"),
        ((print, (), 0), md.ArgumentError, "nprocs is 0"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        md.spawn(*arguments)


def test_a_timeout_is_a_timedelta() -> None:
    with pytest.raises(md.KindError, match=r"timeout must be a datetime\.timedelta, not 3"):
        md.spawn(print, (), 1, timeout=3)  # type: ignore[arg-type]


# -- nothing is left ----------------------------------------------------------------------------

SLEEPING = """
    import os, sys, time
    import meshdist as md

    def program(folder):
        with open(os.path.join(folder, os.environ["RANK"] + ".part"), "w") as file:
            file.write(str(os.getpid()))
        os.rename(file.name, file.name[:-5])
        time.sleep(600)

    if __name__ == "__main__":
        md.spawn(program, (sys.path[0],), nprocs=2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGKILL]
)
def test_no_process_outlives_its_parent(tmp_path: Path, number: int) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(SLEEPING))
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        end = time.monotonic() + 60
        files = [tmp_path / "0", tmp_path / "1"]
        while not all(file.exists() for file in files) and time.monotonic() < end:
            time.sleep(0.05)
        pids = [int(file.read_text()) for file in files]
        parent.send_signal(number)
        _, errors = parent.communicate(timeout=20)
        assert wait_until_gone(pids) == []
        if number == signal.SIGINT:
            assert errors.strip().endswith("KeyboardInterrupt")
    finally:
        parent.kill()
        parent.wait()
