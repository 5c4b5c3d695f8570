"""Calls that can be left behind, also while no thread can be started any more."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import pytest

from meshdist.runtime import timeout_calls
from meshdist.runtime.deadlines import Deadline, wait_until
from meshdist.runtime.timeout_calls import TimeoutCall, begin_elsewhere, keep_thread

SHORT = timedelta(seconds=0.2)
LONG = timedelta(seconds=20)


def test_it_returns_or_raises_what_the_call_does() -> None:
    assert TimeoutCall(lambda: 7, "test").wait(LONG) == 7
    with pytest.raises(ZeroDivisionError):
        TimeoutCall(lambda: 1 // 0, "test").wait(LONG)


def test_a_call_that_stays_is_left_behind() -> None:
    go_on = threading.Event()
    call = TimeoutCall(go_on.wait, "test")
    with pytest.raises(TimeoutError, match=r"not finished after 0.2 s"):
        call.wait(SHORT)
    go_on.set()
    assert call.wait(LONG)


def test_it_lets_go_of_what_it_called() -> None:
    class Held:
        def call(self) -> None:
            pass

    held = Held()
    alive = weakref.ref(held)
    call = TimeoutCall(held.call, "test")
    call.wait(LONG)
    del held
    end = time.monotonic() + 10
    while alive() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert alive() is None
    call.wait(LONG)


def test_at_the_interpreters_end_a_thread_that_was_kept_makes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reject(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    keep_thread()
    monkeypatch.setattr(threading.Thread, "start", reject)
    go_on = threading.Event()
    call = TimeoutCall(lambda: go_on.wait() and threading.current_thread().name, "test")
    with pytest.raises(TimeoutError):
        call.wait(SHORT)
    go_on.set()
    assert call.wait(LONG) == "meshdist-last-calls"


def test_calls_that_come_often_share_threads_and_hold_up_none() -> None:
    def run(call: Callable[[], object]) -> str:
        names: list[str] = []
        done = threading.Event()

        def told() -> None:
            call()
            names.append(str(threading.get_ident()))
            done.set()

        begin_elsewhere(told)
        assert done.wait(60)
        return names[0]

    def pause() -> None:
        time.sleep(0.05)  # the thread before is back at its queue

    go_on, held = threading.Event(), []
    begin_elsewhere(lambda: held.append(go_on.wait(60)))  # it blocks one thread, and no other call
    first = run(pause)
    assert wait_until(lambda: run(pause) == first, Deadline(60))
    assert len({run(pause) for _ in range(20)}) <= 3
    go_on.set()
    assert wait_until(lambda: held == [True], Deadline(60))


def test_threads_without_calls_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeout_calls, "IDLE_S", 0.01)
    found: list[threading.Thread] = []
    for _ in range(50):  # one may come just as a thread ends
        begin_elsewhere(lambda: found.append(threading.current_thread()))
        time.sleep(0.01)
    assert wait_until(lambda: len(found) == 50, Deadline(60))
    assert wait_until(lambda: not any(one.is_alive() for one in found), Deadline(60))


def test_calls_elsewhere_are_awaited() -> None:
    go_on, ended = threading.Event(), []
    for _ in range(3):
        begin_elsewhere(lambda: ended.append(go_on.wait(60)))
    assert not timeout_calls.await_calls_elsewhere(0.05)
    go_on.set()
    assert timeout_calls.await_calls_elsewhere(60)
    assert ended == [True] * 3


CALLS_WITHOUT_THREADS = """
import threading
from meshdist.runtime.timeout_calls import await_calls_elsewhere, begin_elsewhere, keep_thread

def reject(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def report():
    print(threading.current_thread().name)

start, threading.Thread.start = threading.Thread.start, reject
try:
    begin_elsewhere(report)
except RuntimeError as error:
    print(error)
assert await_calls_elsewhere(60)
threading.Thread.start = start
keep_thread()
threading.Thread.start = reject
for _ in range(2):
    begin_elsewhere(report)
assert await_calls_elsewhere(60)
"""


def test_where_no_thread_can_be_started_the_kept_one_makes_calls_elsewhere() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALLS_WITHOUT_THREADS], capture_output=True, text=True, timeout=60
    )
    rejected = "can't create new thread at interpreter shutdown"
    expected = [rejected, "meshdist-last-calls", "meshdist-last-calls"]
    assert (done.stdout.splitlines(), done.stderr) == (expected, "")
