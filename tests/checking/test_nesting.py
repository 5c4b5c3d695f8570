"""What the main thread is in: known while it lasts, however it ends, and of that thread alone."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from meshdist.checking import call_sites
from meshdist.checking.call_sites import check_unnested, is_nested, never_nested, run_unnested
from meshdist.errors import NestedCollectiveError


def test_one_at_a_time() -> None:
    @never_nested
    def inner(x: int) -> int:
        return x + 1

    assert inner(1) == 2
    assert not is_nested()
    with pytest.raises(NestedCollectiveError, match="inner was called inside outer"):
        run_unnested("outer", inner, 1)
    assert call_sites.under_way == [None]
    assert inner.__name__ == "inner"


def test_an_exception_ends_it_too() -> None:
    def fail() -> None:
        assert is_nested()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_unnested("outer", fail)
    check_unnested("another")


def test_other_threads_are_free() -> None:
    found: list[Any] = []

    def elsewhere() -> None:
        found.append((is_nested(), run_unnested("there", run_unnested, "nested", lambda: 3)))

    def outer() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    run_unnested("here", outer)
    assert found == [(False, 3)]


def test_a_forked_child_is_in_none() -> None:
    def outer() -> int:
        child = os.fork()
        if child == 0:
            os._exit(7 if is_nested() else 0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run_unnested("here", outer) == 0
