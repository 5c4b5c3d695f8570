"""Operations: done ones, several as one, and late starters."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from meshdist.errors import BackendError
from meshdist.wires.operations import (
    DONE,
    Chain,
    Deferred,
    Done,
    Operation,
    WireFailure,
    WireTimeout,
    followed,
)

SECONDS = timedelta(seconds=9)


class Step(Operation):
    """An operation that is finished as soon as it is waited for; notes what it is asked."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.limits: list[timedelta] = []
        self.is_done = False

    def finish(self, timeout: timedelta) -> None:
        self.limits.append(timeout)
        if self.failure is not None:
            raise self.failure
        self.is_done = True

    def poll(self) -> bool:
        return self.is_done


def test_what_is_done_is_done_and_only_a_receive_has_a_source() -> None:
    DONE.finish(SECONDS)
    assert DONE.poll()
    with pytest.raises(BackendError, match="only a receive has a source"):
        DONE.source()
    assert Done(2).source() == 2 and Done(0).source() == 0


def test_a_chain_finishes_its_parts_in_one_timeout_and_then_acts_once() -> None:
    parts, acts = [Step(), Step()], []
    chain = Chain(parts, lambda: acts.append([part.is_done for part in parts]))
    assert not chain.poll() and acts == []
    parts[0].is_done = True
    assert not chain.poll()
    chain.finish(SECONDS)
    assert chain.poll() and acts == [[True, True]]
    first, second = (part.limits[0] for part in parts)
    assert SECONDS >= first >= second > timedelta(seconds=5)
    chain.finish(SECONDS)
    assert acts == [[True, True]]


def test_what_follows_a_done_operation_is_done_at_once_and_else_behind_it() -> None:
    acts: list[str] = []
    assert followed(DONE, lambda: acts.append("at once")) is DONE and acts == ["at once"]
    step = Step()
    assert followed(step, None) is step
    chain = followed(step, lambda: acts.append("behind"))
    assert acts == ["at once"]
    chain.finish(SECONDS)
    assert step.is_done and acts == ["at once", "behind"]


def test_a_part_that_fails_is_the_chains_failure() -> None:
    acts: list[int] = []
    chain = Chain([Step(), Step(WireFailure("cut")), DONE], lambda: acts.append(1))
    with pytest.raises(WireFailure, match="cut"):
        chain.finish(SECONDS)
    assert acts == []


def test_a_chain_of_one_receive_has_its_source() -> None:
    assert Chain([Chain([Done(4)])]).source() == 4
    for parts in ([], [Done(1), Done(1)], [DONE]):
        with pytest.raises(BackendError, match="only a receive has a source"):
            Chain(parts).source()


class Late:
    """Starts a deferred operation at the third call, or says why it never will."""

    def __init__(self, started: Operation | None, failure: Exception | None = None) -> None:
        self.calls = 0
        self.started = started
        self.failure = failure
        self.deferred = Deferred(self.start, self.wait_for)

    def start(self) -> None:
        self.calls += 1
        if self.calls == 3:
            self.deferred.started, self.deferred.failure = self.started, self.failure

    def wait_for(self, condition: Callable[[], bool], timeout: timedelta) -> None:
        for _ in range(5):
            if condition():
                return
        raise WireTimeout.after(timeout)


def test_a_deferred_operation_starts_and_then_finishes() -> None:
    late = Late(Step())
    assert not late.deferred.poll()
    with pytest.raises(BackendError, match="the sender of a receive that is not finished"):
        late.deferred.source()
    late.deferred.finish(SECONDS)
    assert late.deferred.poll() and late.calls == 3
    assert not late.deferred.is_cancelled
    received = Late(Done(7))
    received.deferred.finish(SECONDS)
    assert received.deferred.source() == 7


def test_one_that_never_starts_fails_as_it_says() -> None:
    late = Late(None, WireFailure("its sender has ended"))
    with pytest.raises(WireFailure, match="its sender has ended"):
        late.deferred.finish(SECONDS)
    assert late.deferred.poll() and not late.deferred.is_cancelled


def test_one_that_is_given_up_is_cancelled() -> None:
    late = Late(Step())
    late.calls = 100
    with pytest.raises(WireTimeout, match="not finished after 9 s"):
        late.deferred.finish(SECONDS)
    assert late.deferred.is_cancelled


def test_a_result_that_was_not_completed_is_never_there() -> None:
    calls: list[str] = []

    def complete() -> None:
        calls.append("begun")
        raise KeyboardInterrupt

    chain = Chain([DONE], complete)
    with pytest.raises(KeyboardInterrupt):
        chain.finish(SECONDS)
    for _ in range(2):
        with pytest.raises(BackendError, match="its result is not complete"):
            chain.finish(SECONDS)
    assert calls == ["begun"]
