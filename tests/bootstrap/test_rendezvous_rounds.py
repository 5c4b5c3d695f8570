"""How ranks find each other in a store: threads stand for processes, since no world is made."""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

import meshdist as md
from meshdist.bootstrap.rendezvous_rounds import Rendezvous, RendezvousRound
from meshdist.bootstrap.timeout_store import TimeoutStore
from tests.inner import my_process_info

LONG = timedelta(seconds=30)
SHORT = timedelta(seconds=0.3)


def join_all(
    store: md.Store, calls: Sequence[Callable[[md.Store], Rendezvous]]
) -> list[Rendezvous | md.MeshdistError]:
    """Let one thread per call join; return by call what it got, or its error."""
    outcomes: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            outcomes[number] = calls[number](store.clone())
        except md.MeshdistError as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return outcomes


def as_rank(
    rank: int | None, size: int, timeout: timedelta = LONG, **settings: Any
) -> Callable[[md.Store], Rendezvous]:
    return lambda store: RendezvousRound(
        TimeoutStore(store, LONG), rank, size, timeout, "a test", **settings
    ).join()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_gets_its_own_number(size: int) -> None:
    found = join_all(md.HashStore(), [as_rank(rank, size) for rank in range(size)])
    assert [one.rank for one in found] == list(range(size))
    assert {(one.size, one.round_number, one.hosts) for one in found} == {(size, 0, (0,) * size)}
    assert [(one.local_rank, one.local_size) for one in found] == [(r, size) for r in range(size)]


def test_all_learn_which_backends_all_of_them_can_use() -> None:
    usable = [{"shm", "gloo", "nccl"}, {"gloo", "shm"}, {"gloo"}]
    found = join_all(md.HashStore(), [as_rank(k, 3, backends=w) for k, w in enumerate(usable)])
    assert {one.backends for one in found} == {frozenset({"gloo"})}
    (alone,) = join_all(md.HashStore(), [as_rank(0, 1, backends=usable[0])])
    assert alone.backends == usable[0]


def test_numbers_are_given_in_the_order_of_arrival() -> None:
    found = join_all(md.HashStore(), [as_rank(None, 4)] * 4)
    assert sorted(one.rank for one in found) == [0, 1, 2, 3]


def test_generations_do_not_see_each_others_keys() -> None:
    store = md.HashStore()
    for generation in range(5):
        calls = [as_rank(None, 2)] * 2 if generation % 2 else [as_rank(0, 2), as_rank(1, 2)]
        first, second = join_all(store, calls)
        assert first.round_number == second.round_number == generation
        assert not first.store.check(["key"])
        first.store.set("key", str(generation))
        assert second.store.get("key") == str(generation).encode()


def test_a_store_that_outlives_its_world_raises_our_error() -> None:
    (joined,) = join_all(md.HashStore(), [as_rank(0, 1)])
    store = joined.store
    joined.handle.close()
    del joined
    gc.collect()
    for call in (lambda: store.multi_get(["key"]), lambda: store.compare_set("key", "", "1")):
        with pytest.raises(md.StoreError, match="of this world is closed in this process"):
            call()


def test_sizes_may_change_from_one_generation_to_the_next() -> None:
    store = md.HashStore()
    for size in (3, 1, 2):
        found = join_all(store, [as_rank(rank, size) for rank in range(size)])
        assert [one.size for one in found] == [size] * size


# -- what goes wrong is told to all -------------------------------------------------------------


def test_a_missing_rank_is_named_by_everyone_who_waits() -> None:
    present = (0, 2, 4)
    outcomes = join_all(md.HashStore(), [as_rank(rank, 6, SHORT) for rank in present])
    assert all(isinstance(one, md.RendezvousError) for one in outcomes)
    texts = {str(one) for one in outcomes}
    assert len(texts) == 1
    text = texts.pop()
    assert "ranks 1, 3, 5 have not joined the world of 6 within 0.3 s" in text
    assert "joined: ranks 0, 2, 4" in text
    assert f"rank 2: {my_process_info()}" in text
    assert "where:    a test" in text


def test_one_of_those_who_wait_long_says_who_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("meshdist.bootstrap.rendezvous_rounds.WARN_AFTER_S", 1.0)
    join_all(md.HashStore(), [as_rank(rank, 5, timedelta(seconds=2)) for rank in (0, 2, 3)])
    assert [record.getMessage() for record in caplog.records] == [
        "meshdist: the ranks have waited for 1 s for ranks 1, 4 to join the world of 5; "
        "the timeout is 2 s"
    ]


def test_one_missing_rank() -> None:
    (outcome,) = join_all(md.HashStore(), [as_rank(0, 2, SHORT)])
    assert str(outcome).startswith("rank 1 has not joined the world of 2 within 0.3 s")


def test_after_a_failure_the_next_generation_begins() -> None:
    store = md.HashStore()
    join_all(store, [as_rank(0, 2, SHORT)])
    # Rank 1 comes late: nobody is left in the generation that it has missed.
    found = join_all(store, [as_rank(1, 2), as_rank(0, 2)])
    assert [one.round_number for one in found] == [1, 1]


def test_a_process_for_which_no_world_stays_open_says_so() -> None:
    """Where others end world after world, each closed before this process has read of it."""

    class Closing(md.HashStore):
        number = 6

        def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
            if not key.endswith("open"):
                return super().compare_set(key, expected, desired)
            self.number += 1
            return f"[{self.number}]".encode()

    with pytest.raises(md.RendezvousError) as caught:
        as_rank(0, 2)(Closing())
    assert str(caught.value) == (
        "cannot join: 8 worlds of the store ended while this process joined\n"
        f"  where:    a test; {my_process_info()}\n"
        "  expected: a world that waits for this process\n"
        "  found:    worlds up to number 14, all closed by other processes\n"
        "  fix:      stop the processes that initialize repeatedly at this address, or use another "
        "address, file or store for this job"
    )


def test_one_rank_claimed_twice() -> None:
    def latecomer(store: md.Store) -> Rendezvous:
        keys = md.PrefixStore("meshdist/0", store)
        while keys.add("joined/0.0", 0) != 0b11:  # when the others wait for it
            time.sleep(0.01)
        return as_rank(1, 3)(store)

    outcomes = join_all(md.HashStore(), [as_rank(0, 3), as_rank(1, 3), latecomer])
    assert len({str(one) for one in outcomes}) == 1
    text = str(outcomes[0])
    assert "rank 1 was claimed by two processes" in text
    assert f"found:    {my_process_info()}; {my_process_info()}" in text


def test_different_sizes() -> None:
    outcomes = join_all(md.HashStore(), [as_rank(0, 2), as_rank(1, 3)])
    assert len({str(one) for one in outcomes}) == 1
    assert "mismatch of world_size between the ranks" in str(outcomes[0])
    assert "pass the same world_size on every rank (WORLD_SIZE, or -n of" in str(outcomes[0])


def test_more_processes_than_ranks() -> None:
    outcomes = join_all(md.HashStore(), [as_rank(None, 2, SHORT)] * 3)
    found = [one for one in outcomes if isinstance(one, Rendezvous)]
    assert sorted(one.rank for one in found) == [0, 1]
    (error,) = (one for one in outcomes if not isinstance(one, Rendezvous))
    assert "rank 1 has not joined the world of 2" in str(error)


def test_a_lost_store_is_told_as_such() -> None:
    class Lost(md.Store):
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            raise md.DistNetworkError("connection reset by peer")

    with pytest.raises(md.RendezvousError, match="the store was lost while the ranks were joining"):
        RendezvousRound(TimeoutStore(Lost(), LONG), 0, 2, LONG, "a test").join()


def test_a_missing_rank_of_a_large_world_is_told_in_time() -> None:
    begin = time.monotonic()
    (error,) = join_all(md.HashStore(), [as_rank(1 << 19, 1 << 20, SHORT)])
    assert "ranks 0-524287, 524289-1048575 have not joined the world of 1048576" in str(error)
    assert time.monotonic() - begin < 20


# -- what a process that crashed has left -------------------------------------------------------


def leave_claim(store: md.Store, rank: int, **changes: Any) -> None:
    """Write what a process that died before its world was complete has written."""
    process_info = dataclasses.replace(my_process_info(), **changes)
    md.PrefixStore("meshdist", store).compare_set("open", "", "[0, 2]")
    keys = md.PrefixStore("meshdist/0", store)
    keys.set(f"card/{rank}", json.dumps({**process_info.to_json(), "local_rank": None}))
    keys.add("joined/0.0", 1 << rank)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "the last ranks joined the world of 2 after the timeout of 2 s"),
        (
            {"start": "1"},
            "rank 1 joined the world of 2 and then stopped responding",
        ),  # it has ended
    ],
)
def test_a_rank_that_comes_when_others_give_up(changes: dict[str, Any], told: str) -> None:
    def come_late(store: md.Store) -> None:
        while not md.PrefixStore("meshdist/0", store).check(["joined/0.0"]):
            time.sleep(0.01)
        leave_claim(store, 1, **changes)  # and does not say that all are there

    calls = [as_rank(0, 2, timedelta(seconds=2)), come_late]
    error, _ = join_all(md.HashStore(), calls)
    assert str(error).startswith(told)


def test_the_claim_of_a_dead_process_is_passed_over() -> None:
    store = md.HashStore()
    leave_claim(store, 0, start="1")
    found = join_all(store, [as_rank(0, 2), as_rank(1, 2)])
    assert [one.round_number for one in found] == [1, 1]


def test_a_dead_process_does_not_complete_a_world() -> None:
    store = md.HashStore()
    leave_claim(store, 0, start="1")
    # Rank 1 is the last of generation 0, sees that rank 0 is dead, and goes on.
    found = join_all(store, [as_rank(1, 2), as_rank(0, 2)])
    assert [one.round_number for one in found] == [1, 1]


def test_a_claim_from_another_host_is_believed_unless_a_launcher_vouches() -> None:
    store = md.HashStore()
    leave_claim(store, 0, host="other", hostname="elsewhere")
    (outcome,) = join_all(store, [as_rank(0, 2)])
    assert "rank 0 was claimed by two processes" in str(outcome)
    assert "on elsewhere" in str(outcome)
    store = md.HashStore()
    leave_claim(store, 0, host="other", hostname="elsewhere")
    found = join_all(store, [as_rank(0, 2, is_unique=True), as_rank(1, 2, is_unique=True)])
    assert [one.round_number for one in found] == [1, 1]


def test_a_dead_process_of_another_host_does_not_complete_a_world() -> None:
    store = md.HashStore()
    leave_claim(store, 0, host="other", hostname="elsewhere")
    (outcome,) = join_all(store, [as_rank(1, 2, SHORT)])
    assert "rank 0 joined the world of 2 and then stopped responding" in str(outcome)
    assert f"rank 0: process {my_process_info().pid} on elsewhere" in str(outcome)


def test_who_may_have_ended_as_the_last_that_confirms_is_named() -> None:
    """Rank 1, on another host, has confirmed after rank 0, and has ended before it told so."""

    def confirm_and_end(store: md.Store) -> None:
        keys = md.PrefixStore("meshdist/0", store)
        while not keys.check(["confirmed/0.0"]):
            time.sleep(0.01)
        keys.add("confirmed/0.0", 1 << 1)

    store = md.HashStore()
    leave_claim(store, 1, host="other", hostname="elsewhere")
    error, _ = join_all(store, [as_rank(0, 2, SHORT), confirm_and_end])
    assert str(error).startswith("rank 1 joined the world of 2 and then stopped responding")
    assert f"rank 1: process {my_process_info().pid} on elsewhere" in str(error)


def test_an_interrupted_rank_frees_the_others() -> None:
    store = md.HashStore()

    class InterruptedStore(TimeoutStore):
        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            raise KeyboardInterrupt

    def interrupted(store: md.Store) -> Rendezvous:
        try:
            return RendezvousRound(InterruptedStore(store, LONG), 0, 2, LONG, "a test").join()
        except KeyboardInterrupt:
            raise md.WorldError("interrupted") from None

    join_all(store, [interrupted])
    state = json.loads(md.PrefixStore("meshdist/0", store).get("state"))
    assert (state["kind"], state["summary"]) == ("failed", "rank 0 was interrupted")


# -- hosts --------------------------------------------------------------------------------------


def layout_of(hosts: Sequence[str], told: Sequence[int | None]) -> list[Rendezvous]:
    """Join ranks that say they run on the given hosts."""
    calls = []
    for rank, (host, local) in enumerate(zip(hosts, told, strict=True)):

        def call(
            store: md.Store, rank: int = rank, host: str = host, local: int | None = local
        ) -> Rendezvous:
            rendezvous_round = RendezvousRound(
                TimeoutStore(store, LONG), rank, len(hosts), LONG, "a test", (), local
            )
            rendezvous_round.process_info = dataclasses.replace(
                my_process_info(), host=host, hostname=host
            )
            joined = rendezvous_round.try_round(0)
            assert joined is not None
            return joined

        calls.append(call)
    return [one for one in join_all(md.HashStore(), calls) if isinstance(one, Rendezvous)]


def test_ranks_on_two_hosts() -> None:
    found = layout_of(["a", "b", "a", "b", "a"], [None] * 5)
    assert {one.hosts for one in found} == {(0, 1, 0, 1, 0)}
    assert [(one.local_rank, one.local_size) for one in found] == [
        (0, 3),
        (0, 2),
        (1, 3),
        (1, 2),
        (2, 3),
    ]


def test_local_ranks_as_the_launcher_tells_them() -> None:
    found = layout_of(["a", "a", "b", "b"], [1, 0, 0, 1])
    assert [one.local_rank for one in found] == [1, 0, 0, 1]
    assert [one.local_size for one in found] == [2] * 4


def test_local_ranks_that_cannot_be_are_counted_anew() -> None:
    # Two launchers on one host, each of which counts from 0.
    found = layout_of(["a", "a", "a", "a"], [0, 1, 0, 1])
    assert [one.local_rank for one in found] == [0, 1, 2, 3]
    assert found[0].hosts == (0, 0, 0, 0)
