"""Locks of modules in forked children."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshdist.runtime.fork_safe_locks import ForkSafeLock

PACKAGE = Path(__file__).resolve().parents[2] / "meshdist"

# Who takes another in a forked child by itself, or is held while a program runs.
OTHER_LOCKS = {"bootstrap/store_cache.py", "worlds/simulation.py"}


def code_of_child(body: Callable[[], Any]) -> int:
    """How a forked child ends that does something within five seconds."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def enter_twice(lock: ForkSafeLock) -> None:
    for _ in range(2):
        with lock.current:
            pass


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_a_lock_that_another_thread_holds_is_open_in_a_forked_child(
    make: Callable[[], Any],
) -> None:
    lock, is_held, leaves = ForkSafeLock(make), threading.Event(), threading.Event()

    def hold() -> None:
        with lock.current:
            is_held.set()
            leaves.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(10)
    assert code_of_child(lambda: enter_twice(lock)) == 0
    leaves.set()
    holder.join()
    enter_twice(lock)


def test_a_thread_that_forks_inside_leaves_in_both_processes() -> None:
    lock = ForkSafeLock()
    with lock.current:
        child = os.fork()
    if child == 0:
        os._exit(code_of_child(lambda: enter_twice(lock)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    enter_twice(lock)


def test_locks_of_modules_are_such_locks() -> None:
    bare = re.compile(r"^\w+(: [^=]+)? = (threading\.)?R?Lock\(\)", re.MULTILINE)
    found = {
        str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if bare.search(p.read_text())
    }
    assert found == OTHER_LOCKS
