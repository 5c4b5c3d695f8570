"""Children are launched: the order of their ends, and how the others are stopped."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import pytest

from meshdist.launching.child_processes import GRACE_S, Launch, ProcessExit, is_dying
from tests.inner import Deadline, wait_until
from tests.load import is_within

PYTHON = [sys.executable, "-S", "-c"]
SLEEP = [*PYTHON, "import time; time.sleep(60)"]
DEAF = [
    *PYTHON,
    "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)",
]


@pytest.mark.parametrize(
    ("code", "exit_code", "text"),
    [
        (1, 1, "failed with exit code 1"),
        (-11, 139, "was ended by SIGSEGV"),
        (-15, 143, "was ended by SIGTERM"),
        (-9, 137, "was ended by SIGKILL (the system does this when memory runs out)"),
        (-40, 168, "was ended by signal 40"),
    ],
)
def test_an_ending_is_told_in_words(code: int, exit_code: int, text: str) -> None:
    assert str(ProcessExit(0, 1, code)) == text
    assert ProcessExit(0, 1, code).exit_code == exit_code


@pytest.fixture(params=["told by the system", "polled"])
def launch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    if request.param == "polled":

        def reject(pid: int) -> int:
            raise OSError

        monkeypatch.setattr(os, "pidfd_open", reject, raising=False)
    launch = Launch()
    yield launch
    launch.stop(())
    launch.close()


def start(command: list[str], *, leads: bool = True) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, start_new_session=leads, stdout=subprocess.PIPE)


def end_of(launch: Launch) -> list[ProcessExit]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if ended := launch.step(0.5):
            return ended
    raise AssertionError("nobody ended")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of a system call")
def test_a_rank_that_dies_slowly_has_failed_first(launch: Launch) -> None:
    dying = """
import ctypes, os, threading, time
threading.Thread(target=lambda: (time.sleep(0.5), os._exit(7))).start()
print(flush=True)
ctypes.CDLL(None).syscall(60, 0)  # of the first thread alone
"""
    slow = subprocess.Popen([*PYTHON, dying], stdout=subprocess.PIPE)
    launch.add(0, slow)
    assert slow.stdout is not None
    with slow.stdout:
        slow.stdout.readline()
    wait_until(lambda: is_dying(slow.pid), Deadline(60))
    launch.add(1, subprocess.Popen([*PYTHON, "raise SystemExit(3)"]))
    ended = end_of(launch)
    assert [(one.rank, one.code) for one in ended] == [(0, 7), (1, 3)]
    assert launch.failed is not None and launch.failed.rank == 0


def test_of_two_that_have_ended_the_first_stays_the_first(launch: Launch) -> None:
    for rank, code in enumerate((3, 4)):
        child = subprocess.Popen([*PYTHON, f"raise SystemExit({code})"])
        launch.add(rank, child)
        seen = partial(os.waitid, os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        assert wait_until(seen, Deadline(60))
    assert [exit.code for exit in launch.step(0.5)] == [3, 4]
    assert launch.failed is not None and launch.failed.rank == 0


def test_endings_are_told_in_order_and_the_first_failure_is_kept(launch: Launch) -> None:
    gate = [*PYTHON, "import sys; sys.exit(int(sys.stdin.readline()))"]
    children = [subprocess.Popen(gate, stdin=subprocess.PIPE, text=True) for _ in range(3)]
    for rank, child in enumerate(children):
        launch.add(rank, child)
    for rank, code in [(2, 0), (1, 7), (0, 3)]:
        children[rank].communicate(f"{code}\n")
        assert end_of(launch) == [ProcessExit(rank, children[rank].pid, code)]
    assert launch.failed == ProcessExit(1, children[1].pid, 7)
    assert launch.running == {}


def test_a_step_without_news_ends_at_its_time(launch: Launch) -> None:
    with start(SLEEP) as child:
        launch.add(0, child)
        begin = time.monotonic()
        assert launch.step(0.05) == []
        assert is_within(time.monotonic() - begin, 2)
        launch.stop()


def test_stop_asks_first_and_kills_who_does_not_listen(launch: Launch) -> None:
    with start(SLEEP) as willing, start(DEAF) as deaf:
        assert deaf.stdout is not None
        deaf.stdout.readline()
        launch.add(0, willing)
        launch.add(1, deaf)
        begin = time.monotonic()
        launch.stop([(signal.SIGTERM, 0.3)])
        assert is_within(time.monotonic() - begin, 3)
    assert [(e.rank, e.code) for e in launch.endings] == [(0, -15), (1, -9)]


def test_stop_in_a_hurry_does_not_wait(launch: Launch) -> None:
    with start(DEAF) as deaf:
        assert deaf.stdout is not None
        deaf.stdout.readline()
        launch.add(0, deaf)
        launch.hurried = True
        begin = time.monotonic()
        launch.stop([(signal.SIGTERM, 30.0)])
        (ended,) = launch.endings
        assert ended.code == -9
        assert is_within(time.monotonic() - begin, 5)


def test_a_child_of_the_callers_own_process_group_is_signalled_alone(launch: Launch) -> None:
    with start(SLEEP, leads=False) as child:
        assert os.getpgid(child.pid) == os.getpgid(0)
        launch.add(0, child)
        launch.stop()
        (ended,) = launch.endings
    assert ended.code == -15


def test_the_grace_leaves_room_within_five_seconds() -> None:
    assert GRACE_S + 1 < 5
