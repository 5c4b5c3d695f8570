"""Futures that are completed by need, and the thread that completes the others."""

from __future__ import annotations

import logging
import pickle
import threading
import time

import pytest
import torch

import meshdist as md
from meshdist.backends.futures import Watcher, WorkFuture, collecting_by_need
from tests.pool import Pool


def future_by_need(value: object = 1) -> WorkFuture:
    """A future that is completed with ``value`` by whoever waits for it."""

    def pull() -> None:
        if not torch._C.Future.done(future):
            future.set_result(value)

    future = WorkFuture(pull, lambda: None)
    return future


def test_whoever_waits_completes_it() -> None:
    future = future_by_need(7)
    assert isinstance(future, torch.futures.Future) and not future.done()
    assert future.wait() == 7 and future.done() and future.value() == 7


def test_looking_may_complete_it() -> None:
    future = WorkFuture(lambda: None, lambda: future.set_result(3))
    assert future.done() and future.value() == 3


def test_it_completes_once() -> None:
    future = future_by_need()
    future.wait()
    with pytest.raises(RuntimeError):
        future.set_result(2)


def test_callbacks_run_in_the_order_added_and_at_once_when_late() -> None:
    future, seen = future_by_need(5), []
    future.add_done_callback(lambda done: seen.append(("first", done.value())))
    chained = future.then(lambda done: seen.append(("second", done.value())) or "chained")
    future.wait()
    future.add_done_callback(lambda done: seen.append(("late", done.value())))
    assert seen == [("first", 5), ("second", 5), ("late", 5)]
    assert chained.wait() == "chained" and future.then(lambda done: 8).value() == 8


def test_an_error_is_raised_at_every_wait_and_in_what_follows() -> None:
    future = WorkFuture(lambda: future.set_exception(ValueError("bad")), lambda: None)
    chained = future.then(lambda done: done.value())
    for each in (future, future, chained):
        with pytest.raises(ValueError, match="bad"):
            each.wait()


def test_a_callbacks_error_is_its_futures() -> None:
    chained = future_by_need().then(lambda done: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        chained.wait()


def test_an_error_that_cannot_be_pickled_completes_a_future_on_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    complete = torch._C.Future.set_result

    def pickled_first(future, value):
        pickle.dumps(value)  # as torch does, for the tensors in the value, where there are devices
        complete(future, value)

    monkeypatch.setattr(torch.futures.Future, "set_result", pickled_first)
    error = ValueError(lambda: "no pickle")
    future = WorkFuture(lambda: future.set_exception(error), lambda: None)
    chained = future.then(lambda done: done.value())
    for each in (future, chained):
        with pytest.raises(ValueError, match="lambda"):
            each.wait()


def test_a_done_callbacks_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    future, seen = future_by_need(), []
    future.add_done_callback(lambda done: 1 / 0)
    future.add_done_callback(seen.append)
    with caplog.at_level(logging.ERROR, "meshdist.futures"):
        future.wait()
    assert seen == [future]
    assert "a callback of a future failed" in caplog.text and "ZeroDivisionError" in caplog.text


def test_what_is_no_exception_passes_through_and_leaves_nobody_waiting() -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    future, seen = future_by_need(), []
    chained = future.then(interrupted)
    future.add_done_callback(seen.append)
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    assert seen == [future]
    with pytest.raises(md.BackendError, match="a callback of a future raised KeyboardInterrupt"):
        chained.wait()


def test_what_torch_collects_is_completed_by_need() -> None:
    original = torch._C._collect_all
    plain: torch.futures.Future = torch.futures.Future()
    with collecting_by_need(), collecting_by_need():
        ours = [future_by_need(n) for n in range(3)]
        both = torch.futures.collect_all([*ours, plain])
        assert not both.done()
        plain.set_result(3)
        assert [future.value() for future in both.wait()] == [0, 1, 2, 3]
        again = [future_by_need(1).then(lambda done: done.value() + 1), future_by_need(5)]
        assert torch.futures.wait_all(again) == [2, 5]
        assert torch.futures.wait_all([plain]) == [3] and torch.futures.wait_all([]) == []
    assert torch._C._collect_all is original


def test_a_collection_raises_the_first_error_when_all_are_done() -> None:
    with collecting_by_need():
        good, bad = future_by_need(), future_by_need().then(lambda done: 1 / 0)
        both = torch.futures.collect_all([good, bad])
        with pytest.raises(ZeroDivisionError):
            both.wait()
    assert good.done() and both.done()


class Completion:
    """Can be completed when the test says so; notes the thread that does it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_due = False
        self.error = error
        self.completed_in: list[str] = []
        self.is_complete = threading.Event()

    def poll(self) -> bool:
        if self.is_due and self.error is not None:
            raise self.error
        return self.is_due

    def complete(self) -> None:
        self.completed_in.append(threading.current_thread().name)
        self.is_complete.set()


def test_the_watcher_completes_each_once_when_it_is_due() -> None:
    watcher, first, second = Watcher(), Completion(), Completion()
    watcher.watch(first.poll, first.complete)
    watcher.watch(second.poll, second.complete)
    second.is_due = True
    assert second.is_complete.wait(10) and not first.is_complete.is_set()
    time.sleep(0.02)
    first.is_due = True
    assert first.is_complete.wait(10)
    watcher.end()
    assert first.completed_in == second.completed_in == ["meshdist-futures"]


def test_the_watcher_outlives_one_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    watcher, bad, good = Watcher(), Completion(ValueError("a bad one")), Completion()
    bad.is_due = good.is_due = True
    with caplog.at_level(logging.ERROR, "meshdist.futures"):
        watcher.watch(bad.poll, bad.complete)
        watcher.watch(good.poll, good.complete)
        assert good.is_complete.wait(10)
    watcher.end()
    assert "a future could not be completed" in caplog.text and "a bad one" in caplog.text


def test_the_watcher_outlives_a_callback_that_ends_its_thread() -> None:
    def end() -> None:
        raise SystemExit(3)

    watcher, ending, good = Watcher(), Completion(), Completion()
    ending.is_due = good.is_due = True
    watcher.watch(ending.poll, end)
    watcher.watch(good.poll, good.complete)
    assert good.is_complete.wait(10)
    watcher.end()


def test_the_interpreter_ends_though_a_collective_is_in_flight(pool: Pool) -> None:
    program = """
import datetime, torch
from meshdist.backends.work import Work
class Never:
    on_stream = False
    def poll(self): return False
work = Work(Never(), datetime.timedelta(hours=1), None, [torch.ones(1)])
work.get_future().add_done_callback(print)
print("over")
"""
    began = time.monotonic()
    (done,) = pool.start(program, is_strict=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")
    assert time.monotonic() - began < 50
