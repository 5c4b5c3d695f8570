"""Operations that one thread does in order."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta

import pytest

from meshdist.backends.requests import BackendTimeout, QueuedRequest, WorkerQueue
from tests.load import is_within
from tests.pool import Pool

SECONDS = timedelta(seconds=5)


@pytest.fixture
def queue() -> WorkerQueue:
    return WorkerQueue(lambda: None)


def test_operations_are_done_in_order_by_one_thread_not_the_callers(
    queue: WorkerQueue,
) -> None:
    seen: list[tuple[int, int]] = []
    jobs = [
        queue.start(lambda k=k: seen.append((k, threading.get_ident())))  # type: ignore[misc]
        for k in range(20)
    ]
    for job in jobs:
        job.finish(SECONDS)
        assert job.poll()
    assert [k for k, _ in seen] == list(range(20))
    assert {thread for _, thread in seen} != {threading.get_ident()}
    assert len({thread for _, thread in seen}) == 1
    queue.end()


def test_a_wait_ends_at_its_timeout(queue: WorkerQueue) -> None:
    gate = threading.Event()
    job = queue.start(lambda: gate.wait(5.0) and None)  # type: ignore[func-returns-value]
    with pytest.raises(BackendTimeout, match=r"not finished after 0.01 s"):
        job.finish(timedelta(seconds=0.01))
    assert not job.poll()
    gate.set()
    job.finish(SECONDS)
    queue.end()


def test_a_failure_is_kept_and_later_operations_are_done(queue: WorkerQueue) -> None:
    def fail() -> None:
        raise KeyError("no such thing")

    first, second = queue.start(fail), queue.start(lambda: None)
    with pytest.raises(KeyError):
        first.finish(SECONDS)
    second.finish(SECONDS)
    assert first.poll() and second.poll()
    queue.end()


def test_nothing_is_kept_of_what_is_done() -> None:
    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    job = QueuedRequest(lambda thing=thing: None)  # type: ignore[misc]
    job.run()
    del thing
    gc.collect()
    assert gone() is None


def test_the_end_releases_a_thread_that_waits() -> None:
    gate = threading.Event()
    queue = WorkerQueue(gate.set)
    job = queue.start(lambda: gate.wait(30.0) and None)  # type: ignore[func-returns-value]
    begin = time.monotonic()
    queue.end()
    took = time.monotonic() - begin
    assert job.poll() and took > 0.9
    assert is_within(took, 3.0)
    queue.end()  # a second end does nothing
    again = queue.start(lambda: None)  # and a new operation begins anew
    again.finish(SECONDS)
    queue.end()


def test_the_thread_ends_with_whoever_could_start_something() -> None:
    queue = WorkerQueue(lambda: None)
    found: list[threading.Thread] = []
    queue.start(lambda: found.append(threading.current_thread())).finish(SECONDS)
    del queue
    gc.collect()
    found[0].join(5.0)
    assert not found[0].is_alive()


def test_a_process_ends_while_an_operation_waits(pool: Pool) -> None:
    program = """
import threading
from meshdist.backends.requests import WorkerQueue
gate = threading.Event()
queue = WorkerQueue(gate.set)
queue.start(lambda: gate.wait(60.0))
"""
    begin = time.monotonic()
    (ended,) = pool.start(program, timeout_s=50.0)
    assert ended.returncode == 0, ended.stderr
    assert time.monotonic() - begin < 45
