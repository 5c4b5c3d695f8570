"""Operations: done ones, several as one, and late starters."""

from __future__ import annotations

from datetime import timedelta

import pytest

from meshdist.backends.requests import (
    DONE,
    BackendFailure,
    Chain,
    Done,
    Request,
    followed,
)
from meshdist.errors import BackendError

SECONDS = timedelta(seconds=9)


class Step(Request):
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
    chain = Chain([Step(), Step(BackendFailure("cut")), DONE], lambda: acts.append(1))
    with pytest.raises(BackendFailure, match="cut"):
        chain.finish(SECONDS)
    assert acts == []


def test_a_chain_of_one_receive_has_its_source() -> None:
    assert Chain([Chain([Done(4)])]).source() == 4
    for parts in ([], [Done(1), Done(1)], [DONE]):
        with pytest.raises(BackendError, match="only a receive has a source"):
            Chain(parts).source()


def test_a_result_that_was_not_completed_is_never_there() -> None:
    calls: list[str] = []

    def complete() -> None:
        calls.append("begun")
        raise KeyboardInterrupt

    chain = Chain([DONE], complete)
    with pytest.raises(KeyboardInterrupt):
        chain.finish(SECONDS)
    for _ in range(2):
        with pytest.raises(BackendError, match="the result is incomplete"):
            chain.finish(SECONDS)
    assert calls == ["begun"]
