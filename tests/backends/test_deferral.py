"""Callbacks that wait: they run where a future is waited for, in the order of the futures."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.backends.futures import Deferral, find_deferral
from meshdist.backends.requests import Request
from meshdist.backends.work import Work
from tests.pool import Pool


def started() -> Any:
    return md.all_reduce(torch.ones(1), async_op=True)


@pytest.mark.parametrize("backend", ["simulated", "shm", "gloo"])
def test_callbacks_run_in_order_on_the_thread_that_settles(backend: str, pool: Pool) -> None:
    def program() -> list[Any]:
        told: list[Any] = []
        here = threading.get_ident()

        def note(name: str) -> Any:
            return lambda done: told.append((name, threading.get_ident() == here))

        def nested(done: Any) -> None:
            note("second")(done)
            started().get_future().then(note("of the second's callback"))

        deferral = Deferral()
        with deferral.entered():
            first, second, third = (started() for _ in range(3))
            second.get_future().then(nested)
            first.get_future().then(note("first"))
            third.get_future().then(note("third"))
        md.barrier()  # simulated ranks complete what they can when they have waited
        told.append("settled")
        assert deferral.finalize() is None
        return told

    runs = {
        "simulated": lambda: md.simulate(program, 2),
        "shm": lambda: pool.run(program, 2, backend="shm"),
        "gloo": lambda: pool.run(program, 2),
    }
    names = ["second", "first", "third", "of the second's callback"]
    assert runs[backend]() == [["settled", *((name, True) for name in names)]] * 2


class Enqueued(Request):
    """A collective that a device does later, as on NCCL."""

    on_stream = True

    def finish(self, timeout: timedelta) -> None:
        pass

    def poll(self) -> bool:
        return False

    def has_ended(self) -> bool:
        return False


def test_where_collectives_are_enqueued_callbacks_run_at_once_on_the_thread_that_calls() -> None:
    told: list[Any] = []

    def work_of(name: str) -> Work:
        return Work(Enqueued(), timedelta(minutes=1), lambda failure, note: failure, [name])

    deferral = Deferral()
    with deferral.entered():
        for name in ("first", "second"):
            future = work_of(name).get_future()
            future.then(lambda done: told.append((done.value(), threading.get_ident())))
            told.append(f"behind {name}")
    here = threading.get_ident()
    assert told == [(["first"], here), "behind first", (["second"], here), "behind second"]
    assert deferral.finalize() is None and len(told) == 4


def test_what_is_waited_for_runs_at_once() -> None:
    def program() -> list[str]:
        told: list[str] = []
        deferral = Deferral()
        with deferral.entered():
            one, two = started().get_future(), started().get_future()
            one.then(lambda done: told.append("one"))
            told.append(f"sum {two.then(lambda done: done.value()[0].item()).wait()}")
            both = torch.futures.collect_all([one, started().get_future()])
            told.append(f"together {len(both.wait())}")
        deferral.finalize()
        return told

    assert md.simulate(program, 2) == [["sum 2.0", "one", "together 2"]] * 2


def test_collected_futures_are_completed_by_need(pool: Pool) -> None:
    def program() -> list[Any]:
        told: list[Any] = []
        deferral = Deferral()
        with deferral.entered():
            told.append(len(torch.futures.wait_all([started().get_future() for _ in range(3)])))
            both = torch.futures.collect_all([started().get_future() for _ in range(2)])
            both.then(lambda done: told.append([one.value()[0].item() for one in done.value()]))
        told.append("left")
        deferral.finalize()
        return told

    assert pool.run(program, 2) == [[3, "left", [2.0, 2.0]]] * 2


def test_the_first_error_is_told_once_all_have_run() -> None:
    def program() -> list[str]:
        told: list[str] = []
        deferral = Deferral()
        with deferral.entered():
            bad = started().get_future().then(lambda done: 1 / 0)
            deferral.add(bad)
            started().get_future().then(lambda done: told.append("ran"))
        error = deferral.finalize()
        return [*told, type(error).__name__]

    assert md.simulate(program, 2) == [["ran", "ZeroDivisionError"]] * 2


def test_a_context_ends_and_may_lie_in_another() -> None:
    outer, inner = Deferral(), Deferral()
    assert find_deferral() is None
    with outer.entered():
        with inner.entered():
            assert find_deferral() is inner
        assert find_deferral() is outer
        with pytest.raises(ZeroDivisionError), inner.entered():
            1 / 0  # noqa: B018
        assert find_deferral() is outer
    assert find_deferral() is None


def test_outside_of_it_futures_are_completed_as_ever(pool: Pool) -> None:
    def program() -> float:
        came = threading.Event()
        future = started().get_future()
        future.add_done_callback(lambda done: came.set())
        assert came.wait(30)
        return float(future.value()[0].item())

    assert pool.run(program, 2) == [2.0, 2.0]
