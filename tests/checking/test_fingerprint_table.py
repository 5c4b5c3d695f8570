"""Header tables: what members tell each other, whatever the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from meshdist.checking import fingerprint_table as module
from meshdist.checking.fingerprint_table import CHECK_EVERY, WINDOW, FingerprintTable
from tests.inner import core

ROOT = Path(__file__).resolve().parents[2]

schedules = st.lists(st.integers(0, 3), max_size=60)
sizes = st.integers(2, 4)
headers = st.integers(0, 2**32 - 1)
NEW_LOG = None if core is None else core.MessageLog


class Words:
    """A process's shared words with one region, which is given."""

    def __init__(self, region: memoryview) -> None:
        self.region = region

    def reserve(self, key: int, num_words: int) -> memoryview:
        return self.region[:num_words]

    def release(self, key: int) -> None:
        pass


class Team:
    """Header tables of one group over plain memory, driven one call at a time."""

    def __init__(
        self, size: int, base: int = 0, new_log: Callable[..., Any] | None = NEW_LOG
    ) -> None:
        self.size = size
        self.regions = [
            memoryview(bytearray(8 * FingerprintTable.num_words(size))).cast("Q")
            for _ in range(size)
        ]
        self.present = set(range(size))
        self.gone: set[int] = set()
        self.dead: set[int] = set()
        self.reached = [base] * size
        self.logs: list[list[Any]] = [[] for _ in range(size)]
        """The logs of messages that each table has made."""

        def recorded(logs: list[Any]) -> Callable[..., Any] | None:
            def make(*args: Any) -> Any:
                assert new_log is not None
                logs.append(new_log(*args))
                return logs[-1]

            return None if new_log is None else make

        self.tables = [
            FingerprintTable(Words(region), 1, (0,) * size, me, self, recorded(logs))
            for me, (region, logs) in enumerate(zip(self.regions, self.logs, strict=True))
        ]
        for number in range(max(base - WINDOW, 0) + 1, base + 1):
            for one in self.tables:
                assert one.enter(number, 1) == []

    def find(self, member: int, num_words: int) -> memoryview | None:
        return self.regions[member][:num_words] if member in self.present else None

    def is_current(self, member: int) -> bool:
        return member not in self.gone

    def is_alive(self, member: int) -> bool:
        return member not in self.gone | self.dead

    def is_held(self, member: int, *, uneven: bool = False) -> bool:
        """Whether the member's next call has to wait, asked as channels ask."""
        number = self.reached[member] + 1
        if not uneven and number % CHECK_EVERY:
            return False
        return self.tables[member].find_lagging(number, uneven) is not None

    def enter(self, member: int, header: int, *more: Any) -> list[int]:
        self.reached[member] += 1
        return self.tables[member].enter(self.reached[member], header, *more)


def has_published(team: Team, member: int) -> bool:
    """Let a member write notes of messages that had no room before; whether none is left."""
    return all(log.publish() for log in team.logs[member])


def turns(schedule: Sequence[int], size: int, length: int) -> Iterator[int]:
    """Members in the order of ``schedule``, then in turn, until each has had ``length`` turns."""
    left = [length] * size
    for member in [*schedule, *[m for _ in range(length) for m in range(size)]]:
        if member < size and left[member]:
            left[member] -= 1
            yield member


@given(sizes, st.lists(headers, max_size=12), schedules)
def test_equal_programs_never_differ(size: int, program: list[int], schedule: list[int]) -> None:
    team = Team(size)
    for member in turns(schedule, size, len(program)):
        assert team.enter(member, program[team.reached[member]]) == []


@given(sizes, st.integers(1, 12), st.data(), schedules, st.sampled_from([0, 2**32 - 6]))
def test_a_call_that_differs_is_seen_there_by_the_later_ones(
    size: int, length: int, data: st.DataObject, schedule: list[int], base: int
) -> None:
    odd = data.draw(st.integers(0, size - 1))
    place = data.draw(st.integers(0, length - 1))
    team = Team(size, base)
    arrived: list[int] = []
    for member in turns(schedule, size, length):
        index = team.reached[member] - base
        header = 7 + (index == place and member == odd)
        found = team.enter(member, header)
        if index != place:
            assert found == []
            continue
        expected = arrived if member == odd else [odd] if odd in arrived else []
        assert sorted(found) == sorted(expected)
        arrived.append(member)


@given(sizes, st.data(), schedules, st.sampled_from([0, 2**32 - 3]), st.booleans())
def test_who_looks_again_sees_whoever_has_come_since(
    size: int, data: st.DataObject, schedule: list[int], base: int, is_uneven: bool
) -> None:
    length = 5
    place = data.draw(st.integers(0, length - 1))
    kinds = [data.draw(st.integers(0, 1)) for _ in range(size)]
    team = Team(size, base)
    for member in turns(schedule, size, length):
        index = team.reached[member] - base
        odd = kinds[member] if index == place else 0
        # As sizes member j takes from i another number than i sends, if one of them is odd.
        sent_taken = [[odd] * size, [odd] * size] if is_uneven else []
        team.enter(member, 7 if is_uneven else 7 + odd, *sent_taken)
        number = base + place + 1
        here = [one for one in range(size) if team.reached[one] >= number]
        for me, fingerprint_table in enumerate(team.tables):
            differing = [one for one in here if me in here and kinds[one] != kinds[me]]
            are_all_here = len(here) == size
            found = fingerprint_table.look_again(number)
            assert (found is None) == (not differing and not are_all_here)
            assert sorted(found or []) == differing


@pytest.mark.parametrize("theirs", [7, 8])
def test_a_member_whose_words_are_found_late_is_compared_when_they_are(theirs: int) -> None:
    team = Team(2)
    team.present.remove(1)
    assert team.enter(0, 7) == []
    assert team.tables[0].look_again(1) is None
    team.enter(1, theirs)
    team.present.add(1)
    assert team.tables[0].look_again(1) == ([] if theirs == 7 else [1])


@pytest.mark.parametrize(("num_reads", "at_once"), [(1, [1]), (2, None)])
def test_a_member_that_comes_during_a_look_is_compared_then_or_at_the_next(
    num_reads: int, at_once: list[int] | None
) -> None:
    """Member 1 comes when member 0 has read its word so many times."""
    team = Team(2, new_log=None)
    team.present.remove(1)
    team.enter(0, 7)
    read: list[int] = []

    class Theirs:
        def __getitem__(self, place: int) -> int:
            word = team.regions[1][place]
            read.append(word)
            if len(read) == num_reads:
                team.enter(1, 8)
            return word

    with mock.patch.object(team, "find", return_value=Theirs()):
        assert team.tables[0].look_again(1) == at_once
    assert team.tables[0].look_again(1) == [1]


@given(sizes, st.integers(1, 8), st.data(), schedules)
def test_uneven_sizes_are_compared_pair_by_pair(
    size: int, length: int, data: st.DataObject, schedule: list[int]
) -> None:
    amount = st.integers(0, 2**40)
    matrices = [
        [[data.draw(amount) for _ in range(size)] for _ in range(size)] for _ in range(length)
    ]
    odd = data.draw(st.integers(0, size - 1))
    peer = data.draw(st.integers(0, size - 1).filter(lambda peer: peer != odd))
    place = data.draw(st.integers(0, length))  # the last means nowhere
    is_sent = data.draw(st.booleans())
    team = Team(size)
    arrived: set[int] = set()
    for member in turns(schedule, size, length):
        index = team.reached[member]
        sent = list(matrices[index][member])
        taken = [row[member] for row in matrices[index]]
        if index == place and member == odd:
            (sent if is_sent else taken)[peer] += 1
        found = team.enter(member, 7, sent, taken)
        other = {odd: peer, peer: odd}.get(member)
        assert found == ([other] if index == place and other in arrived else [])
        if index == place:
            arrived.add(member)


def test_uneven_and_even_calls_under_one_header_are_told_apart_by_the_header_alone() -> None:
    team = Team(2)
    assert team.enter(0, 7) == []
    assert team.enter(1, 7, [1, 2], [3, 4]) == []  # the fingerprint shows it, not the header table


@pytest.mark.parametrize("base", [0, 2**32 - 1500])
@pytest.mark.parametrize(("uneven", "most"), [(False, WINDOW - 1), (True, 63)])
def test_a_member_far_ahead_is_held_back_and_none_of_its_words_are_lost(
    uneven: bool, most: int, base: int
) -> None:
    lists = ([1, 1], [1, 1]) if uneven else ()
    team = Team(2, base)
    found = 0
    for slow in range(3000):
        while team.reached[0] < base + 3000 and not team.is_held(0, uneven=uneven):
            odd = (team.reached[0] - base) % 5 == 0
            assert team.enter(0, 8 if odd else 7, *lists) == []
        ahead = team.reached[0] - team.reached[1]
        assert ahead <= most
        assert team.reached[0] == base + 3000 or ahead > most - CHECK_EVERY
        differing = team.enter(1, 7, *lists)
        assert differing == ([0] if slow % 5 == 0 else [])
        found += len(differing)
    assert found == 600


def test_who_is_behind_is_named_and_no_more_awaited_once_gone() -> None:
    team = Team(3)
    for _ in range(CHECK_EVERY * 4 - 1):
        team.enter(0, 7)
        team.enter(2, 7)
    assert team.tables[0].find_lagging(CHECK_EVERY * 4, False) == 1
    team.gone.add(1)
    assert team.tables[0].find_lagging(CHECK_EVERY * 4, False) is None


def test_the_dead_are_not_awaited_though_their_words_stay() -> None:
    team = Team(2)
    for number in range(1, 1024):
        team.tables[0].enter(number, 7)
    assert team.tables[0].find_lagging(1024, False) == 1
    team.dead.add(1)
    assert team.tables[0].find_lagging(1024, False) is None


def test_words_of_a_group_that_is_gone_differ_from_nothing() -> None:
    team = Team(2)
    team.enter(0, 7)
    team.gone.add(0)
    assert team.enter(1, 8) == []
    assert team.tables[0].note(1, 0, 1, is_send=False) is None
    assert team.tables[1].note(0, 0, 2, is_send=True) is None


def test_a_member_that_comes_late_is_found_by_and_by() -> None:
    team = Team(2)
    team.present.clear()
    for _ in range(10):
        assert team.enter(0, 7) == []
    team.present.update({0, 1})
    for _ in range(10):
        assert team.enter(1, 7) == []
    assert team.enter(1, 8) == []
    assert team.enter(0, 7) == [1]


def test_a_member_that_never_comes_costs_little() -> None:
    team = Team(2)
    with mock.patch.object(team, "find", return_value=None) as find:
        for number in range(1, 10_001):
            assert team.tables[0].enter(number, 7) == []
    assert 64 <= find.call_count < 300


def test_a_closed_table_compares_nothing() -> None:
    team = Team(2)
    team.enter(1, 8)
    team.tables[0].enter(9, 1)
    team.tables[0].close()
    assert team.enter(0, 7) == []
    assert team.tables[0].note(1, 0, 3, is_send=True) is None
    assert team.tables[0].find_lagging(CHECK_EVERY * 4, False) is None


def test_uneven_words_that_arrive_late_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(2)
    team.enter(0, 7, [0, 12345], [0, 6])
    place = team.regions[0].tolist().index(12345)
    team.regions[0][place] = 99  # as if it had not arrived yet

    def arrive(seconds: float) -> None:
        team.regions[0][place] = 12345

    monkeypatch.setattr(module.time, "sleep", arrive)
    assert team.enter(1, 7, [6, 0], [12345, 0]) == []


# -- messages ------------------------------------------------------------------------------------

compares_messages = pytest.mark.skipif(core is None, reason="no native core here")

Step = tuple[str, int, int, int]
"""send, recv or any; the peer; the tag; the header."""


def take(team: Team, member: int, step: Step) -> int | None:
    kind, peer, tag, header = step
    if kind == "any":
        team.tables[member].recv_any(tag)
        return None
    return team.tables[member].note(peer, tag, header, is_send=kind == "send")


def interleaved(programs: Sequence[list[Step]], schedule: Sequence[int]) -> Iterator[int]:
    left = [len(program) for program in programs]
    longest = max(left, default=0)
    for member in [*schedule, *[m for _ in range(longest) for m in range(len(left))]]:
        if member < len(left) and left[member]:
            left[member] -= 1
            yield member


messages = st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 3))
"""Whether member 0 sends it (else 1), its tag, its header."""


def stirred(steps: list[Step], order: Sequence[int]) -> list[Step]:
    """Another order, in which steps of one direction and tag stay as they are."""
    lanes: dict[tuple[str, int], list[Step]] = {}
    for step in steps:
        lanes.setdefault((step[0], step[2]), []).append(step)
    result = []
    for pick in [*order, *[0] * len(steps)]:
        open_lanes = [lane for lane in lanes.values() if lane]
        if not open_lanes:
            break
        result.append(open_lanes[pick % len(open_lanes)].pop(0))
    return result


def both_sides(
    drawn: Sequence[tuple[bool, int, int]], orders: Sequence[Sequence[int]]
) -> list[list[Step]]:
    programs: list[list[Step]] = [[], []]
    for from_first, tag, header in drawn:
        sender = 0 if from_first else 1
        programs[sender].append(("send", 1 - sender, tag, header))
        programs[1 - sender].append(("recv", sender, tag, header))
    return [stirred(steps, order) for steps, order in zip(programs, orders, strict=True)]


orders = st.tuples(*[st.lists(st.integers(0, 5), max_size=40)] * 2)


@compares_messages
@given(st.lists(messages, max_size=40), orders, schedules)
def test_the_nth_send_meets_the_nth_receive_of_its_tag(drawn, orders, schedule) -> None:
    team = Team(2)
    programs = both_sides(drawn, orders)
    steps = [iter(program) for program in programs]
    for member in interleaved(programs, schedule):
        assert take(team, member, next(steps[member])) is None


@compares_messages
@given(st.lists(messages, min_size=1, max_size=40), st.data(), orders, schedules)
def test_a_message_that_differs_is_seen_there_by_the_later_side(
    drawn, data, orders, schedule
) -> None:
    odd = data.draw(st.integers(0, len(drawn) - 1))
    from_first, tag, _ = drawn[odd]
    number = sum(one[:2] == (from_first, tag) for one in drawn[: odd + 1])
    sender = 0 if from_first else 1
    team = Team(2)
    programs = both_sides(drawn, orders)
    receiver = programs[1 - sender]
    places = [i for i, step in enumerate(receiver) if (step[0], step[2]) == ("recv", tag)]
    receiver[places[number - 1]] = ("recv", sender, tag, 9)
    steps = [iter(program) for program in programs]
    counts: dict[tuple[int, str, int], int] = {}
    seen = []
    for member in interleaved(programs, schedule):
        step = next(steps[member])
        lane = (member, step[0], step[2])
        counts[lane] = counts.get(lane, 0) + 1
        found = take(team, member, step)
        kind = "send" if member == sender else "recv"
        if step[0] == kind and step[2] == tag and counts[lane] == number:
            seen.append(found)
        else:
            assert found is None
    assert seen == [None, number]


@compares_messages
@given(
    st.lists(st.tuples(st.integers(0, 1), st.booleans(), headers), max_size=60),
    st.integers(0, 300),
    st.lists(st.integers(0, 2), max_size=60),
)
def test_receives_from_anybody_raise_no_false_alarm(deliveries, more, schedule) -> None:
    """Deliveries to member 2: from whom, whether it named the sender, and what."""
    team = Team(3)
    deliveries = [*deliveries, *[(i % 2, False, i) for i in range(more)]]
    programs: list[list[Step]] = [[], [], []]
    for source, is_any, header in deliveries:
        programs[source].append(("send", 2, 0, header))
        programs[2].append(("any" if is_any else "recv", source, 0, header))
    steps = [iter(program) for program in programs]
    for member in interleaved(programs, schedule):
        assert take(team, member, next(steps[member])) is None


@compares_messages
def test_a_receive_from_anybody_makes_its_tag_loose_and_no_other() -> None:
    team = Team(2)
    team.tables[1].recv_any(3)
    assert team.tables[0].note(1, 3, 10, is_send=True) is None
    assert team.tables[0].note(1, 4, 10, is_send=True) is None
    assert team.tables[1].note(0, 3, 11, is_send=False) is None
    assert team.tables[1].note(0, 4, 11, is_send=False) == 1


@compares_messages
def test_a_receive_from_anybody_whose_note_was_overwritten() -> None:
    """The sender reads only what is left of the receiver's log; it must not take it for all."""
    team = Team(2)
    team.tables[1].recv_any(0)  # meets the first send
    for number in range(2, 202):
        team.tables[1].note(0, 0, number, is_send=False)
    for number in range(1, 202):
        assert team.tables[0].note(1, 0, number, is_send=True) is None


@compares_messages
def test_a_note_that_has_arrived_by_half_is_read_later() -> None:
    team = Team(2)
    first, second = team.tables
    first.note(1, 0, 10, is_send=True)
    words = second.message_words(team.regions[0], 1)
    entry = words[3]
    words[3] = 0
    assert second.note(0, 0, 11, is_send=False) is None
    words[3] = entry
    first.note(1, 0, 20, is_send=True)
    assert second.note(0, 0, 21, is_send=False) == 2


@compares_messages
def test_large_tags_and_messages_to_those_who_share_no_memory() -> None:
    team = Team(2)
    assert team.tables[0].note(1, 2**30 - 1, 2**32 - 1, is_send=True) is None
    assert team.tables[1].note(0, 2**30 - 1, 0, is_send=False) == 1
    assert team.tables[0].note(0, 0, 1, is_send=True) is None  # to itself
    alone = FingerprintTable(Words(team.regions[0]), 1, (0, 1, 1), 0, team)
    assert alone.note(2, 0, 1, is_send=True) is None
    assert alone.enter(1, 1) == []


@compares_messages
def test_what_nobody_will_read_does_not_wait() -> None:
    team = Team(2)
    team.tables[0].note(1, 0, 0, is_send=False)
    for _ in range(300):
        team.tables[0].note(1, 4, 7, is_send=True)
    assert not has_published(team, 0)
    team.dead |= {1}
    assert has_published(team, 0)
