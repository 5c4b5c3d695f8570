"""Call words: what members show is seen, in whatever order they run, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st

import meshdist as md
from meshdist.checking import call_words
from meshdist.checking.call_words import (
    GATHERED,
    NOTHING,
    ROUND,
    WINDOW,
    CallTooLong,
    CallWords,
    num_bytes,
)
from meshdist.checking.calls import Call, get_call
from meshdist.checking.shared_words import Regions, SharedWords, find_view

KEY = 77
SUM = md.ReduceOp.SUM


def call_of(size: int, title: str = "") -> Call:
    return get_call("all_reduce", torch.ones(size), SUM, title=title)


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


def shown_to(words: CallWords) -> dict[int, Call | int | None]:
    """The call that each member shows that has come as far, or what it shows in place."""
    return {
        member: words.find_call(member, word) if word > ROUND else word
        for member, word in words.find_shown().items()
    }


@settings(max_examples=40)
@given(st.integers(2, 4), st.data())
def test_members_see_what_was_shown_in_any_order(size: int, data: st.DataObject) -> None:
    """Oracle: lists of what each has shown. Each half has room for two or three kinds of calls.

    A member reads what all show at its number, or goes on without, as far as there is room.
    """
    team = Team(size)
    shown: list[list[Call | int]] = [[] for _ in range(size)]
    schedule = data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 9))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_words, "_HALF", 28)
        for me, kind in [*schedule, *[(member, 5) for member in range(size)]]:
            words, number = team.members[me], len(shown[me])
            seen = {
                member: those[number - 1]
                for member, those in enumerate(shown)
                if len(those) >= number > 0
            }
            if len(seen) == size:
                assert shown_to(words) == seen
            assert words.is_awaited() == any(len(those) > number for those in shown)
            call = None if kind < 2 else call_of(10**kind if kind < 8 else kind)
            if not words.has_room(call):
                assert call is not None
                assert any(len(those) < number for those in shown)
            elif call is None:
                what = (NOTHING, GATHERED)[kind]
                words.enter(what)
                shown[me].append(what)
            else:
                words.show(call)
                shown[me].append(call)
    team.close()


def test_a_joined_member_shows_that_it_has_joined(pair: Team) -> None:
    first, second = pair.members
    first.show(call_of(2))
    assert second.is_awaited()
    second.show(call_of(2), 1)
    mine, theirs = first.find_shown().values()
    assert (mine & 1, theirs & 1) == (0, 1)
    assert first.find_call(1, theirs) is call_of(2)


def test_what_is_half_written_is_not_read(pair: Team) -> None:
    first, second = pair.members
    second.enter(NOTHING)
    first.show(call_of(2))
    assert shown_to(second) == {0: call_of(2), 1: NOTHING}
    place = call_words._FIRST + 2
    first._mine[place] ^= 1  # as if one of its words had come late
    assert shown_to(second) == {0: None, 1: NOTHING}
    first._mine[place] ^= 1
    assert shown_to(second) == {0: call_of(2), 1: NOTHING}


def test_what_an_earlier_turn_has_left_is_not_read(
    pair: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_words, "_HALF", 12)  # room for one call
    first, second = pair.members
    first.show(call_of(1))
    second.enter(NOTHING)
    before = first._mine[call_words._FIRST : call_words._FIRST + 12].tolist()
    for size in (2, 3):
        first.show(call_of(size))
        second.enter(NOTHING)
    assert shown_to(second)[0] is call_of(3)
    first._mine[call_words._FIRST : call_words._FIRST + 12] = memoryview(
        b"".join(word.to_bytes(8, "little") for word in before)
    ).cast("Q")
    assert shown_to(second)[0] is None


def test_calls_of_equal_headers_keep_their_shapes(pair: Team) -> None:
    first, second = pair.members
    flat, square = call_of(4), get_call("all_reduce", torch.ones(2, 2), SUM)
    assert flat.header == square.header
    for call in (flat, square, flat):
        first.show(call)
        second.enter(NOTHING)
        assert shown_to(second)[0] is call


def test_a_half_is_written_over_once_all_have_read_it(
    pair: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_words, "_HALF", 12)  # room for one call
    first, second = pair.members
    first.show(call_of(1))
    assert first.has_room(call_of(1))
    assert first.has_room(None)
    assert not first.has_room(call_of(2))  # the other may still read what is in the other half
    second.enter(NOTHING)
    assert first.has_room(call_of(2))
    first.show(call_of(2))
    assert shown_to(second)[0] is call_of(1)
    assert not first.has_room(call_of(3))


def test_a_member_that_reads_nothing_may_be_a_window_ahead(pair: Team) -> None:
    first, second = pair.members
    second.enter(NOTHING)
    first.show(call_of(1))
    for _ in range(WINDOW - 1):
        assert first.has_room(call_of(1))
        first.show(call_of(1))
    assert not first.has_room(call_of(1))
    assert shown_to(second)[0] is call_of(1)
    second.enter(NOTHING)
    assert first.has_room(call_of(1))


def test_a_call_that_is_too_long_is_told_to_all(pair: Team) -> None:
    first, second = pair.members
    for words in pair.members:
        words.begin()
        words.show(call_of(1))
    long = call_of(1, "x" * num_bytes())
    assert [words.find_full() for words in pair.members] == [None, None]
    assert not second.is_awaited()
    with pytest.raises(CallTooLong):
        first.show(long)
    assert [words.find_full() for words in pair.members] == [0, 0]
    assert second.is_awaited()
    assert second.find_left() is None  # what both have shown was called
    second.enter(NOTHING)
    assert second.find_left() == 0
    first.close()
    assert second.find_full() is None  # its words are another group's now


def test_a_call_that_fills_a_half_is_shown(pair: Team) -> None:
    first, second = pair.members
    longest = next(
        call
        for call in (call_of(1, "x" * (num_bytes() - less)) for less in range(40, 100))
        if call_words._num_words(call) == call_words._HALF
    )
    for call in (longest, call_of(1), longest):
        second.enter(NOTHING)
        assert first.has_room(call)
        first.show(call)
        assert shown_to(second)[0] is call


def test_a_member_that_has_left_is_seen_by_those_that_go_on(pair: Team) -> None:
    first, second = pair.members
    for words in pair.members:
        words.begin()
        words.show(call_of(2))
    first.leave(first.number)
    assert second.find_left() is None  # the call of this number was made
    second.show(call_of(2))
    assert second.find_left() == 0
    assert first.is_awaited()
    first.begin()
    assert second.find_left() is None


def test_the_words_of_a_group_that_is_closed_are_not_seen(pair: Team) -> None:
    first, second = pair.members
    first.show(call_of(2))
    first.close()
    assert not second.is_awaited()


def test_rounds_by_the_wire_are_awaited_apart(pair: Team) -> None:
    first, second = pair.members
    first.enter(ROUND)
    assert second.is_awaited(by_wire=True)
    assert not second.is_awaited()
    second.enter(ROUND)
    assert not second.is_awaited(by_wire=True)
