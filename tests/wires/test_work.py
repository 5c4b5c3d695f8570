"""A verb in flight, over a communicator that finishes when the test says so."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from meshdist.errors import BackendError
from meshdist.wires.base import WireFailure
from meshdist.wires.work import Work


class Hand:
    """A communicator's part that a Work uses, moved by hand."""

    def __init__(self) -> None:
        self.is_done = False
        self.failure: WireFailure | None = None
        self.waited: list[timedelta] = []

    def finish(self, pending: object, timeout: timedelta) -> None:
        self.waited.append(timeout)
        if self.failure is not None:
            raise self.failure
        self.is_done = True

    def is_finished(self, pending: object) -> bool:
        return self.is_done

    def source(self, pending: object) -> int:
        if pending == "recv":
            return 3
        raise WireFailure("only a receive has a source")


def work_of(hand: Hand, pending: str = "verb", settled: list | None = None) -> Work:
    x = torch.ones(2)
    settle = None if settled is None else lambda: settled.append(1)
    return Work(
        hand,
        pending,
        timedelta(seconds=9),
        lambda failure: BackendError(f"explained: {failure}"),
        lambda: [x],
        settle,
    )


def test_waiting_settles_once_and_zero_means_the_groups_timeout() -> None:
    hand, settled = Hand(), []
    work = work_of(hand, settled=settled)
    assert not work.is_completed() and not work.is_success()
    assert work.wait() is True and work.wait(timedelta(seconds=1)) is True
    work.synchronize()
    assert settled == [1]
    assert hand.waited == [timedelta(seconds=9)]
    assert work.is_completed() and work.is_success() and work.exception() is None


def test_a_given_timeout_goes_to_the_wire() -> None:
    hand = Hand()
    work_of(hand).wait(timedelta(seconds=2))
    assert hand.waited == [timedelta(seconds=2)]


def test_a_failure_is_explained_and_raised_at_every_wait() -> None:
    hand = Hand()
    hand.failure = WireFailure("the line is cut")
    work = work_of(hand)
    for _ in range(2):
        with pytest.raises(BackendError, match="explained: the line is cut"):
            work.wait()
    assert work.is_completed() and not work.is_success()
    assert isinstance(work.exception(), BackendError)


def test_result_waits() -> None:
    hand = Hand()
    (x,) = work_of(hand).result()
    assert hand.is_done and x.tolist() == [1.0, 1.0]


def test_source_rank_of_receives_alone() -> None:
    hand = Hand()
    assert work_of(hand, "recv").source_rank() == 3
    with pytest.raises(BackendError, match="only a receive has a source rank") as caught:
        work_of(hand).source_rank()
    assert isinstance(caught.value, RuntimeError)  # as in torch


def test_the_future_chains_and_carries_errors() -> None:
    hand = Hand()
    future = work_of(hand).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).then(lambda done: done.value() + 1)
    assert not hand.is_done
    assert doubled.wait().tolist() == [3.0, 3.0]
    assert hand.is_done and future.done()

    broken = Hand()
    broken.failure = WireFailure("cut")
    with pytest.raises(RuntimeError, match="explained: cut"):
        work_of(broken).get_future().then(lambda done: done.value()).wait()


def test_a_callback_of_the_future_runs_when_it_is_resolved() -> None:
    seen = []
    future = work_of(Hand()).get_future()
    future.add_done_callback(lambda done: seen.append(done.value()[0].tolist()))
    future.wait()
    assert seen == [[1.0, 1.0]]


def test_a_future_is_done_when_its_verb_is_though_nobody_has_waited() -> None:
    hand, seen = Hand(), []
    future = work_of(hand).get_future()
    chained = future.then(lambda done: seen.append(done.value()))
    assert not future.done() and not chained.done() and hand.waited == []
    hand.is_done = True
    assert chained.done() and future.done() and len(seen) == 1
