"""Announcement tables: what members say arrives, in whatever order they run, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from meshdist.checking.announcement_table import NUM_ROWS, AnnouncementTable
from meshdist.checking.shared_words import Regions, SharedWords, find_view

KEY = 77


class Team:
    """The tables of one group, each in words of its own, driven one step at a time."""

    def __init__(self, size: int, key: int = KEY) -> None:
        self.words = [SharedWords() for _ in range(size)]
        views = [find_view(one.address) for one in self.words]
        self.tables = [
            AnnouncementTable(one, key, me, size, Regions(lambda member: (views[member], key)))
            for me, one in enumerate(self.words)
        ]
        assert all(table.sees_all() for table in self.tables)

    def close(self) -> None:
        for words in self.words:
            words.close()


@pytest.fixture
def pair() -> Iterator[Team]:
    team = Team(2)
    yield team
    team.close()


@settings(max_examples=30)
@given(st.integers(2, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 600))))
def test_members_read_what_was_said_however_far_the_others_are(
    size: int, schedule: list[tuple[int, int]]
) -> None:
    """Oracle: lists of what each has said. A member reads all of a number before it goes on."""
    team = Team(size)
    said: list[list[bytes]] = [[] for _ in range(size)]
    try:
        for member, length in [*schedule, *[(member, 5) for member in range(size)]]:
            me, table = member % size, team.tables[member % size]
            number = len(said[me])
            all_have = all(len(one) >= number for one in said)
            found = table.find_said() if number else []
            assert (found is not None) == (not number or all_have)
            assert table.is_awaited() == any(len(one) > number for one in said)
            if not table.has_room():
                assert number + 2 - NUM_ROWS > min(len(one) for one in said)
                continue
            if number and all_have:
                expected = [one[number - 1] for one in said]
                assert found == [(len(one), one[: table.num_bytes]) for one in expected]
            said[me].append(bytes([me, len(said[me]) % 251]) * (length // 2))
            table.say(said[me][-1])
    finally:
        team.close()


def test_a_member_that_reads_nothing_may_be_a_ring_ahead(pair: Team) -> None:
    first, second = pair.tables
    second.say(b"")
    for number in range(NUM_ROWS):
        assert first.has_room()
        first.say(b"%d" % number)
    assert not first.has_room()  # the other may still read the first row
    assert second.find_said() == [(1, b"0"), (0, b"")]
    second.say(b"")
    assert first.has_room()


def test_a_row_that_is_half_written_is_not_read(pair: Team) -> None:
    first, second = pair.tables
    second.say(b"mine")
    first.say(b"an announcement")
    assert second.find_silent() == []
    first._mine[first._row_start() + 2] ^= 1  # as if one of its words had come late
    second._rows = {1: (4, b"mine")}
    assert second.find_said() is None
    assert second.find_silent() == [0]
    first._mine[first._row_start() + 2] ^= 1
    assert second.find_said() == [(15, b"an announcement"), (4, b"mine")]


def test_a_row_of_another_group_in_the_same_words_is_not_read() -> None:
    team = Team(2)
    team.tables[0].close()
    later = AnnouncementTable(team.words[0], KEY + 2, 0, 2, Regions(lambda _: None))
    assert later._mine.obj is team.tables[0]._mine.obj
    later.say(b"of another group")
    team.tables[1].say(b"mine")
    assert team.tables[1].find_said() is None
    team.tables[1].number -= 1
    assert not team.tables[1].is_awaited()
    team.close()


def test_a_member_that_has_left_is_seen_by_those_that_go_on(pair: Team) -> None:
    first, second = pair.tables
    for table in pair.tables:
        table.begin()
        table.say(b"a call")
        table.settle()
    first.leave()
    assert second.find_left() is None  # the call of this number was made
    assert not first.is_anyone_beyond()
    second.say(b"the next")
    assert second.find_left() == 0
    assert first.is_anyone_beyond()
    first.begin()
    assert second.find_left() is None


def test_a_call_that_was_announced_alone_is_not_made(pair: Team) -> None:
    first, second = pair.tables
    for table in pair.tables:
        table.begin()
        table.say(b"a call")
    first.leave()
    assert second.find_left() == 0
    assert first.is_anyone_beyond()


def test_a_member_that_has_ended_behind_a_number_that_all_came_to_is_gone(pair: Team) -> None:
    first, second = pair.tables
    for table in pair.tables:
        table.say(b"a call")
    assert second.find_gone() is None
    first.say(b"the next")
    first.close()
    assert second.find_gone() is None  # it has come to the next before it ended
    second.say(b"the next")
    assert second.find_gone() == 0


def test_rounds_by_the_wire_are_counted_apart(pair: Team) -> None:
    first, second = pair.tables
    first.say(b"a call")
    assert not second.is_awaited_by_wire()
    first.count_by_wire()
    assert second.is_awaited_by_wire()
    assert not first.is_awaited_by_wire()
    second.count_by_wire()
    assert not second.is_awaited_by_wire()
