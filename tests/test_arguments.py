"""What a timeout may be."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import meshdist as md
from meshdist.arguments import check_timeout


def test_none_and_positive_times_pass() -> None:
    check_timeout(None)
    check_timeout(timedelta(microseconds=1))


@pytest.mark.parametrize("wrong", [5, 5.0, "5 s"])
def test_anything_but_a_timedelta_is_rejected(wrong: object) -> None:
    with pytest.raises(md.KindError) as caught:
        check_timeout(wrong)
    assert str(caught.value) == (
        f"timeout must be a datetime.timedelta, not {wrong!r}\n"
        f"  found:    {type(wrong).__name__}\n"
        "  fix:      pass for example timedelta(seconds=60)"
    )


def test_times_that_no_clock_can_count_are_rejected() -> None:
    check_timeout(timedelta(days=36500))
    with pytest.raises(md.ArgumentError) as caught:
        check_timeout(timedelta.max)
    assert str(caught.value) == (
        "timeout is too long\n  expected: at most 36500 days\n"
        "  found:    999999999 days, 23:59:59.999999"
    )


@pytest.mark.parametrize("seconds", [0, -1])
def test_times_that_are_over_before_they_begin_are_rejected(seconds: int) -> None:
    with pytest.raises(md.ArgumentError, match=r"^timeout must be positive\n  found: "):
        check_timeout(timedelta(seconds=seconds))


@pytest.mark.parametrize(
    "call",
    [
        lambda timeout: md.AxisOptions(timeout=timeout),
        lambda timeout: md.init_device_mesh("cpu", (1,), timeout=timeout),
        lambda timeout: md.new_group(timeout=timeout),
        lambda timeout: md.barrier(timeout=timeout),
    ],
)
def test_whoever_takes_a_timeout_checks_it(call: Callable[[Any], Any]) -> None:
    def program() -> None:
        with pytest.raises(md.KindError, match=r"must be a datetime\.timedelta, not 5"):
            call(5)
        with pytest.raises(md.ArgumentError, match="timeout must be positive"):
            call(timedelta(0))

    md.simulate(program, 1)
