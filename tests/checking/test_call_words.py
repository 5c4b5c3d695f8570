"""Call words: what members show is seen, in whatever order they run, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from meshdist.checking import call_words
from meshdist.checking.call_words import (
    WINDOW,
    CallWords,
    StatementTooLong,
    most_statement_bytes,
)
from meshdist.checking.shared_words import Regions, SharedWords, find_view

KEY = 77


def said(kind: int) -> bytes:
    """A statement of a kind; of each ten another length."""
    return b"%d" % kind * (1 + kind % 10)


class Team:
    """The words of one group, each in a memory of its own, driven one step at a time."""

    def __init__(self, size: int) -> None:
        self.memories = [SharedWords() for _ in range(size)]
        views = [find_view(memory.address) for memory in self.memories]
        self.members = [
            CallWords(memory, KEY, me, size, Regions(lambda member: (views[member], KEY)))
            for me, memory in enumerate(self.memories)
        ]
        assert all(member.sees_all() for member in self.members)

    def close(self) -> None:
        for memory in self.memories:
            memory.close()


@pytest.fixture
def pair() -> Iterator[Team]:
    team = Team(2)
    yield team
    team.close()


@settings(max_examples=60)
@given(st.integers(2, 4), st.data())
def test_members_see_what_was_shown_in_any_order(size: int, data: st.DataObject) -> None:
    """Oracle: lists of what each has shown. Each half has room for two or three statements.

    A member reads what all show at its number, or goes on without, as far as there is room.
    """
    team = Team(size)
    shown: list[list[bytes]] = [[] for _ in range(size)]
    schedule = data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 29))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_words, "_HALF", 5)
        for me, kind in [*schedule, *[(member, 5) for member in range(size)]]:
            words, number = team.members[me], len(shown[me])
            silent = [member for member, those in enumerate(shown) if len(those) < number]
            if number:
                assert words.find_silent() == silent
                wanted = None if silent else [those[number - 1] for those in shown]
                assert words.find_all() == wanted
            assert words.is_awaited() == any(len(those) > number for those in shown)
            if words.has_room(said(kind)):
                words.show(said(kind))
                shown[me].append(said(kind))
            else:
                assert silent
    team.close()


def test_what_is_half_written_is_not_read(pair: Team) -> None:
    first, second = pair.members
    first.show(b"0123456789abcdef")
    second.show(b"mine")
    assert second.find_all() == [b"0123456789abcdef", b"mine"]
    place = call_words._FIRST + 2
    first._mine[place] ^= 1  # as if one of its words had come late
    assert second.find_all() is None
    assert second.find_silent() == []
    first._mine[place] ^= 1
    assert second.find_all() == [b"0123456789abcdef", b"mine"]


def test_what_an_earlier_turn_has_left_is_not_read(
    pair: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_words, "_HALF", 2)  # room for one
    first, second = pair.members
    place = slice(call_words._FIRST, call_words._FIRST + 2)
    first.show(b"a")
    second.show(b"mine")
    before = first._mine[place].tobytes()
    for data in (b"b", b"c"):
        first.show(data)
        second.show(b"mine")
    assert second.find_all() == [b"c", b"mine"]
    first._mine[place] = memoryview(before).cast("Q")  # as if the new words had come late
    assert second.find_all() is None


def test_a_half_is_written_over_once_all_have_read_it(
    pair: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_words, "_HALF", 2)  # room for one
    first, second = pair.members
    first.show(b"a")
    assert first.has_room(b"a")
    assert not first.has_room(b"b")  # the other may still read what is in the other half
    second.show(b"mine")
    assert first.has_room(b"b")
    first.show(b"b")
    assert second.find_all() == [b"a", b"mine"]
    assert not first.has_room(b"c")


def test_a_member_that_reads_nothing_may_be_a_window_ahead(pair: Team) -> None:
    first, second = pair.members
    second.show(b"mine")
    first.show(b"first")
    for _ in range(WINDOW - 1):
        assert first.has_room(b"a")
        first.show(b"a")
    assert not first.has_room(b"a")
    assert second.find_all() == [b"first", b"mine"]
    second.show(b"mine")
    assert first.has_room(b"a")


def test_a_statement_may_fill_a_half(pair: Team) -> None:
    first, second = pair.members
    for data in (b"x" * most_statement_bytes(), b"a", b"y" * most_statement_bytes()):
        second.show(b"mine")
        assert first.has_room(data)
        first.show(data)
        assert second.find_all() == [data, b"mine"]
    with pytest.raises(StatementTooLong):
        first.show(b"x" * (most_statement_bytes() + 1))
    assert not second.is_awaited()


def test_a_member_that_has_left_is_seen_by_those_that_go_on(pair: Team) -> None:
    first, second = pair.members
    for words in pair.members:
        words.begin()
        words.show(b"a")
    first.leave(first.number)
    assert second.find_left() is None  # the call of this number was made
    second.show(b"a")
    assert second.find_left() == 0
    assert first.is_awaited()
    first.begin()
    assert second.find_left() is None


def test_the_words_of_a_group_that_is_closed_are_not_seen(pair: Team) -> None:
    first, second = pair.members
    first.show(b"a")
    first.close()
    assert not second.is_awaited()


def test_rounds_by_the_wire_are_awaited_apart(pair: Team) -> None:
    first, second = pair.members
    first.show_round()
    assert second.is_awaited(by_wire=True)
    assert not second.is_awaited()
    second.show_round()
    assert not second.is_awaited(by_wire=True)
    assert second.find_all() is None  # a round says it
