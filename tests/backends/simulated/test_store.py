"""The store of simulated ranks, against torch's HashStore."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, QueueEmptyError

from meshdist import simulate
from meshdist.backends.simulated.store import SimulatedStore
from meshdist.errors import ArgumentError, WorldError
from tests.inner import get_world


def both_stores() -> list[Any]:
    return [HashStore(), SimulatedStore()]


def test_store_methods_mean_what_hash_store_means() -> None:
    seen = []
    for store in both_stores():
        out: list[Any] = []
        store.set("a", "1")
        out.append(store.get("a"))
        out += [store.add("n", 1), store.add("n", 6), store.get("n"), store.add("a", 2)]
        store.append("t", "x")
        store.append("t", "y")
        out += [store.get("t"), store.check(["a", "t"]), store.check(["a", "zz"])]
        store.multi_set(["k", "l"], ["v", "w"])
        out.append(store.multi_get(["k", "l"]))
        out.append(store.compare_set("k", "v", "new"))  # equal
        out.append(store.compare_set("k", "v", "other"))  # different
        out.append(store.compare_set("k", "", "other"))
        out.append(store.compare_set("c", "", "made"))  # absent, nothing expected
        out.append(store.compare_set("d", "some", "made"))  # absent, something expected
        out.append(store.check(["d"]))
        out += [store.num_keys(), store.delete_key("a"), store.delete_key("a"), store.num_keys()]
        out.append(sorted(store.list_keys()))
        store.queue_push("q", "1")
        store.queue_push("q", "2")
        out += [store.queue_len("q"), store.queue_pop("q"), store.queue_pop("q", False)]
        out += [store.queue_len("q"), store.has_extended_api()]
        with pytest.raises(QueueEmptyError):
            store.queue_pop("q", False)
        store.wait(["k"])
        store.wait(["k", "l"], timedelta(seconds=1))
        store.set_timeout(timedelta(seconds=3))
        out.append(store.timeout)
        store.barrier("b", 1)
        clone = store.clone()
        clone.set("by clone", b"1")
        out.append(store.get("by clone"))
        with pytest.raises(ValueError):  # noqa: PT011 - torch's text differs
            store.add("t", 1)
        seen.append(out)
    assert seen[0] == seen[1]


def test_store_below_a_prefix() -> None:
    seen = []
    for inner in both_stores():
        store = PrefixStore("p", inner)
        out: list[Any] = []
        store.set("a", "1")
        out += [store.get("a"), inner.get("p/a"), store.add("n", 2), store.check(["a", "n"])]
        store.append("a", "2")
        store.multi_set(["b"], ["3"])
        out += [store.multi_get(["a", "b"]), store.compare_set("b", "3", "4"), store.num_keys()]
        out += [store.delete_key("a"), store.delete_key("a"), store.has_extended_api()]
        store.wait(["b"])
        store.wait(["b"], timedelta(seconds=1))
        store.barrier("c", 1)
        inner_again = PrefixStore("q", store)
        inner_again.set("x", "y")
        out += [inner.get("p/q/x"), store.clone().get("q/x")]
        seen.append(out)
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "wait",
    [
        lambda store: store.get("k"),
        lambda store: store.wait(["k"]),
        lambda store: store.wait(["k"], timedelta(seconds=1)),
        lambda store: store.multi_get(["k"])[0],
        lambda store: store.barrier("b", 2),
    ],
    ids=["get", "wait", "wait for a time", "multi_get", "barrier"],
)
def test_waiting_on_the_store_hands_the_turn_on(wait: Callable[[Any], Any]) -> None:
    trace: list[str] = []

    def program() -> Any:
        store = PrefixStore("p", get_world().store)
        rank = get_world().rank
        trace.append(f"{rank} begins")
        if rank == 1:
            store.set("k", "v")
            store.add("b/num_members", 1)  # what torch's Store.barrier counts, and its last key
            store.set("b/last_member", "1")
        else:
            wait(store)
        trace.append(f"{rank} ends")

    simulate(program, 2)
    assert trace == ["0 begins", "1 begins", "1 ends", "0 ends"]


def test_queues_and_polls_of_the_store_hand_the_turn_on() -> None:
    def program() -> bytes:
        store = get_world().store
        if get_world().rank == 0:
            while not store.check(["go"]):
                pass
            with pytest.raises(QueueEmptyError, match="queue 'empty' is empty"):
                store.queue_pop("empty", block=False)
            while store.compare_set("lock", "free", "mine") != b"mine":
                pass
            return bytes(store.queue_pop("q"))
        if get_world().rank == 1:
            store.set("lock", "taken")
            store.set("go", "1")
            store.wait(["2 has begun"])
            store.set("lock", "free")
        else:
            store.set("2 has begun", "1")
            while store.add("count", 0) < 3:
                store.add("count", 1)
            store.queue_push("q", "value")
        return b""

    assert simulate(program, 3)[0] == b"value"


def test_a_thread_that_is_no_rank_never_waits_on_the_store() -> None:
    with pytest.raises(WorldError) as caught:
        SimulatedStore().get("k")
    assert str(caught.value).startswith(
        "store.get('k') cannot wait because this thread is not a simulated rank\n"
        "  where:    called at "
    )


def test_bad_calls_of_the_store() -> None:
    store = SimulatedStore()
    store.set("text", "x")
    with pytest.raises(ArgumentError) as caught:
        store.add("text", 1)
    assert str(caught.value) == (
        "store.add cannot add to key 'text'\n"
        "  expected: a key that is absent or holds an integer\n"
        "  found:    b'x'\n"
        "  fix:      use different keys for texts and for counters"
    )
    with pytest.raises(ArgumentError, match="needs one value for each key"):
        store.multi_set(["a"], ["b", "c"])
