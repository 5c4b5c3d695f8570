"""The scheduler: which rank runs, and what ends a run."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import sys
import threading
import traceback
from typing import Any

import numpy as np
import pytest
import torch

from meshdist.backends.simulated import scheduler as scheduling
from meshdist.backends.simulated.scheduler import Rank, Scheduler, find_rank_here
from meshdist.errors import DeadlockError, WorldError
from tests.backends.simulated.waits import Until, here, pass_round


def test_another_rank_runs_in_rank_order_at_a_wait_only() -> None:
    trace: list[int] = []
    arrived: dict[int, int] = {}

    def body(rank: int) -> int:
        for _ in range(3):
            trace.append(rank)
            trace.append(rank)
            pass_round(arrived, rank, 3)
        return rank * 10

    assert Scheduler[int](3).run(body) == [0, 10, 20]
    # The last of a round need not wait, and so begins the next.
    assert trace == [0, 0, 1, 1, 2, 2, 2, 2, 0, 0, 1, 1, 1, 1, 2, 2, 0, 0]


def test_equal_programs_run_equally() -> None:
    def run() -> list[tuple[int, float, float, float]]:
        trace: list[tuple[int, float, float, float]] = []
        arrived: dict[int, int] = {}

        def body(rank: int) -> None:
            for step in range(5):
                for _ in range((rank + step) % 3):
                    trace.append(
                        (rank, torch.rand(()).item(), float(np.random.rand()), random.random())
                    )
                pass_round(arrived, rank, 4)

        Scheduler[None](4).run(body)
        return trace

    first = run()
    torch.rand(3), np.random.rand(3), random.random()
    assert run() == first
    assert len({draw[1] for draw in first}) == len(first)  # ranks draw different numbers


def test_deadlock_is_found_at_once_and_told_to_every_waiting_rank() -> None:
    def body(rank: int) -> str:
        if rank == 1:
            return "done"
        try:
            here().wait(Until(lambda: False, f"test {rank % 2}"))
        except DeadlockError as error:
            return str(error.found)
        return "not reached"

    report = "ranks 0, 2: waits in test 0\nrank 1: returned\nrank 3: waits in test 1"
    assert Scheduler[str](4).run(body) == [report, "done", report, report]


def test_after_a_deadlock_the_lowest_rank_raises_first() -> None:
    def body(rank: int) -> None:
        here().wait(Until(lambda: False))

    with pytest.raises(DeadlockError) as caught:
        Scheduler[None](3).run(body)
    assert caught.value.rank == 0  # type: ignore[attr-defined]


def fail_on(rank: int) -> None:
    raise KeyError(f"from rank {rank}")


def test_the_first_exception_ends_the_run_with_its_rank_and_traceback() -> None:
    ended: list[tuple[int, str]] = []
    began: list[int] = []

    def body(rank: int) -> None:
        began.append(rank)
        if rank == 2:
            fail_on(rank)
        try:
            here().wait(Until(lambda: False))
        except Exception:
            ended.append((rank, "swallowed"))
        finally:
            ended.append((rank, "finally"))
            here().wait(Until(lambda: True))  # not even what is ready goes on
            ended.append((rank, "waited"))

    with pytest.raises(KeyError, match="from rank 2") as caught:
        Scheduler[None](4).run(body)
    error: Any = caught.value
    assert error.rank == 2
    assert began == [0, 1, 2]
    assert sorted(ended) == [(0, "finally"), (1, "finally")]
    text = "".join(traceback.format_exception(error))
    assert "raised on simulated rank 2 of 4" in text
    assert text.count(", in fail_on\n") == 1
    inside = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert inside[-2:] == ["body", "fail_on"]
    assert not set(inside) & {"_live", "_call"}


def test_before_exceptions_had_notes_the_rank_is_chained(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> None:
        try:
            int("x")
        except ValueError as error:
            raise KeyError("mine") from error

    monkeypatch.setattr(scheduling.sys, "version_info", (3, 10, 14))
    with pytest.raises(KeyError) as caught:
        Scheduler[None](2).run(body)
    monkeypatch.undo()
    text = "".join(traceback.format_exception(caught.value))
    assert "the exception below was raised on simulated rank 0 of 2" in text
    assert isinstance(caught.value.__cause__, ValueError)
    assert getattr(caught.value, "rank", None) == 0


def test_a_rank_may_fail_before_the_others_begin() -> None:
    began = []

    def body(rank: int) -> None:
        began.append(rank)
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        Scheduler[None](3).run(body)
    assert began == [0]


def test_no_thread_is_left() -> None:
    before = threading.enumerate()
    Scheduler[None](3).run(lambda rank: None)
    with pytest.raises(ValueError):  # noqa: PT011 - the text is not the point
        Scheduler[None](3).run(lambda rank: int("x"))
    with pytest.raises(DeadlockError):
        Scheduler[None](3).run(lambda rank: here().wait(Until(lambda: False)))
    assert threading.enumerate() == before


def test_threads_that_cannot_start_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    began = []

    def reject(thread: threading.Thread) -> None:
        if thread.name == "simulated rank 2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", reject)
    before = threading.enumerate()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Scheduler[None](4).run(began.append)
    assert began == []
    assert threading.enumerate() == before


@pytest.mark.parametrize("is_waiting", [True, False], ids=["waiting", "busy"])
def test_an_interruption_of_the_caller_ends_all_ranks(is_waiting: bool) -> None:
    ended: list[int] = []
    scheduler = Scheduler[None](3)

    def body(rank: int) -> None:
        try:
            if rank < 2:
                here().wait(Until(lambda: False))
            os.kill(os.getpid(), signal.SIGINT)  # whose handler runs in the caller
            while True:
                if is_waiting:
                    here().poll(Until(lambda: False))
        finally:
            ended.append(rank)

    before = threading.enumerate()
    # Python swallows an exception that reaches a thread inside of a callback of its collector, such
    # as hypothesis', and warns; the rank ends at its next wait, but a warning is a failure here.
    gc.disable()
    try:
        with pytest.raises(KeyboardInterrupt):
            scheduler.run(body)
    finally:
        gc.enable()
    assert sorted(ended) == [0, 1, 2]
    assert threading.enumerate() == before


def test_an_interruption_between_any_two_turns_ends_the_run() -> None:
    for number in range(30):
        ended: list[int] = []

        def body(rank: int, number: int = number, ended: list[int] = ended) -> None:
            try:
                for turn in itertools.count():
                    if turn == number and rank == number % 2:
                        os.kill(os.getpid(), signal.SIGINT)
                    here().poll(Until(lambda: False))
            finally:
                ended.append(rank)

        gc.disable()
        try:
            with pytest.raises(KeyboardInterrupt):
                Scheduler[None](2).run(body)
        finally:
            gc.enable()
        assert set(ended) <= {0, 1}  # rank 1 may not have begun


def test_another_thread_is_rejected() -> None:
    def body(rank: int) -> str:
        mine = here()
        errors: list[BaseException] = []

        def other() -> None:
            assert find_rank_here() is None
            try:
                mine.wait(Until(lambda: True))
            except WorldError as error:
                errors.append(error)

        thread = threading.Thread(target=other, name="loader")
        thread.start()
        thread.join()
        return str(errors[0])

    for rank, text in enumerate(Scheduler[str](2).run(body)):
        lines = text.splitlines()
        assert lines[0] == f"simulated rank {rank} was used from another thread"
        assert lines[1].startswith(f"  where:    thread 'loader', called at {__file__}:")
        assert lines[2].startswith(
            "  expected: collectives and store waits on the rank's own thread"
        )
        assert lines[3].endswith("run the program as processes (meshdist run, meshdist.spawn)")


def test_the_version_of_python_has_notes_or_the_chain() -> None:
    def body(rank: int) -> None:
        raise ValueError("plain")

    with pytest.raises(ValueError, match="plain") as caught:
        Scheduler[None](1).run(body)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["raised on simulated rank 0 of 1"]
    else:
        assert "raised on simulated rank 0 of 1" in str(caught.value.__cause__)


def test_a_rank_shows_its_place() -> None:
    assert repr(Rank(1, Scheduler(2))) == "<simulated rank 1 of 2>"
