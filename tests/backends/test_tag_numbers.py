"""Numbers for large tags: equal for all members, drawn once."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from meshdist.backends import messages
from meshdist.backends.messages import TagNumbers
from meshdist.backends.requests import BackendAborted, BackendTimeout
from tests.load import is_within


def never() -> bool:
    return False


def test_all_members_have_the_same_numbers() -> None:
    store = HashStore()
    one, other = TagNumbers(store), TagNumbers(store)
    assert [one.number_of(tag, never) for tag in (900, 70, 900)] == [0, 1, 0]
    assert [other.number_of(tag, never) for tag in (70, 5000, 900)] == [1, 2, 0]
    assert one.number_of(5000, never) == 2


def test_who_waits_for_a_number_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    store.add("tag/7/users", 1)  # another member draws it, and never says which
    with pytest.raises(BackendAborted, match="aborted while waiting for the number of a tag"):
        TagNumbers(store).number_of(7, lambda: True)
    monkeypatch.setattr(messages, "DRAWING_S", 0.05)
    begin = time.monotonic()
    with pytest.raises(
        BackendTimeout, match="the rank that must assign a number to a tag did not respond"
    ):
        TagNumbers(store).number_of(7, never)
    assert is_within(time.monotonic() - begin, 5)
