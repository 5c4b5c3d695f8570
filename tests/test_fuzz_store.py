"""Junk under the keys of the store, where each reader looks: errors of ours, in time, or nothing.

The values are what ranks write there, with some characters or fields changed (``test_fuzz``).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import Store

from meshdist.errors import MeshdistError
from tests.inner import (
    Agreements,
    ControlThread,
    Deadline,
    Endings,
    Heartbeats,
    MonitoredBarrier,
    ProcessInfo,
    Regions,
    Registry,
    RendezvousRound,
    World,
    collect,
    digest_of_ranks,
    last_call_text,
    my_process_info,
    parse_answer,
    parse_member,
    read_json,
)
from tests.test_fuzz import LONGEST_S, SHOWN, records, texts

SHORT = timedelta(seconds=0.02)


class Memory(Store):
    """A store in this process, which can be handed junk, and has what a handle to a store has."""

    is_hosted_here = False
    server = client = ""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.junk: dict[str, bytes] = {}

    def watch(self, server: ProcessInfo) -> None:
        """There is no server."""

    def set(self, key: str, value: Any) -> None:
        text = value if isinstance(value, bytes) else str(value).encode()
        self.values[key] = self.junk.get(key, text)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        total = int(self.values.get(key, b"0")) + amount
        self.set(key, total)
        return total

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if not self.check(keys):
            raise RuntimeError("wait timeout")

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        old, new = ("" if one is None else one for one in (expected, desired))
        old = old if isinstance(old, bytes) else old.encode()
        if self.values.get(key, b"") == old:
            self.set(key, new)
        return self.values.get(key, old)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def has_extended_api(self) -> bool:
        return False


def joining(key: str) -> Callable[[bytes], object]:
    def read(junk: bytes) -> None:
        store = Memory()
        store.junk[f"meshdist/{key}"] = junk
        RendezvousRound(store, 0, 1, SHORT, "a test").join()  # type: ignore[arg-type]

    return read


def found_by(store: Memory) -> World:
    return World(0, 2, store, {"cpu": "gloo"})


def agreeing(junk: bytes) -> None:
    store = Memory()
    name = f"agree/mesh/{digest_of_ranks((0, 1))}/1"
    store.values[f"{name}/outcome"] = junk
    world = found_by(store)
    Agreements(world, Endings(world)).agree((0, 1), "mesh", {"text": "a mesh"}, SHORT)


def outcome_of_barrier(junk: bytes) -> None:
    store = Memory()
    store.values["barrier/outcome"] = junk
    store.values["barrier/arrived/1"] = b"1"
    MonitoredBarrier(store, "barrier", (0, 1), 0, 1, SHORT, True).wait()


def abort(junk: bytes) -> None:
    store = Memory()
    store.values["group/abort"] = junk
    found = Registry(found_by(store)).find_abort("group")
    assert found is not None
    assert f"rank {found['rank']}: {found['reason']}"
    if found.get("disagreement"):
        assert set(map(type, found["disagreement"].values())) == {str}


def signals(junk: bytes) -> None:
    store = Memory()
    store.values["signal/1"] = junk
    world = found_by(store)
    handle: Any = SimpleNamespace(ends=[], alarm=None)
    handle.set_bare, handle.has_ended = lambda key: None, lambda: False
    signs = Heartbeats(None, Regions(lambda member: None), 0)
    answer = Registry(world).answer
    thread = ControlThread(world, handle, answer, lambda _: None, lambda: None, signs)
    thread.stop()
    assert world.latest_control_message == 1


def answers(junk: bytes) -> None:
    store = Memory()
    store.values["answer"] = junk
    found = collect(store, {1: "answer"}, Deadline(1.0), parse_answer)
    assert isinstance(last_call_text(found[1]), str)
    assert all(isinstance(one["label"], str) for one in found[1]["calls"])
    assert all(isinstance(one["sequence"], int) for one in found[1]["calls"])


def member_over_mpi(junk: bytes) -> None:
    store = Memory()
    store.values["mpi/1"] = junk
    read_json(store, "mpi/1", parse_member)


def as_bytes(text: str) -> bytes:
    return text.encode(errors="replace")


CARD = my_process_info().to_json()
ABORT = {"kind": "abort", "rank": 1, "labels": ["group"], "reason": "enough", "group": "the world"}
DISAGREEMENT = dict.fromkeys(("summary", "where", "expected", "found", "fix"), "text")
ANSWER = {
    "calls": [{"label": "group", "sequence": 3, "text": "barrier()"}],
    "about": None,
    "now": "train.py:8 in step",
}
MEMBER = {
    "process_info": CARD,
    "rank": 1,
    "size": 2,
    "tag": 7,
    "words": {"key": 5, "address": [1, 2, 3]},
}
Readers = dict[str, tuple[Callable[[random.Random], Any], Callable[[Any], object]]]
READERS: Readers = {
    "the size of a world": (texts("[0, 1]"), lambda text: joining("open")(as_bytes(text))),
    "the card of a rank": (
        records(
            {**CARD, "local_rank": 0, "backends": ["gloo"], "serves": False, "is_server": False}
        ),
        joining("0/process_info/0"),
    ),
    "how a generation was closed": (
        records(
            {
                "kind": "complete",
                "hosts": [[0, 1, 1]],
                "is_numbered": False,
                "backends": ["gloo"],
                "server": 0,
                "served_by": CARD,
            },
            {"kind": "failed", "summary": "failed", "fields": {"where": "here"}},
            {"kind": "stale"},
        ),
        joining("0/state"),
    ),
    "the outcome of an agreement": (
        records(
            {"how": "agreed", "by": 1, "found": ""},
            {"how": "late", "by": 1, "found": "rank 0: sleeps", "missing": [0]},
        ),
        agreeing,
    ),
    "the outcome of a barrier": (
        records({"number": 1, "passed": 1, "by": 0, "failure": "", "absent": []}),
        outcome_of_barrier,
    ),
    "an abort": (records(ABORT, {**ABORT, "disagreement": DISAGREEMENT}), abort),
    "a signal": (
        records(
            {"kind": "ask", "about": {"label": "group"}, "ranks": [0, 1]},
            {"kind": "abort", **ABORT},
        ),
        signals,
    ),
    "an answer": (records(ANSWER, {**ANSWER, "about": "barrier()"}), answers),
    "a member over MPI": (
        records(
            MEMBER, {"process_info": CARD, "problem": {"summary": "none", "fix": "install it"}}
        ),
        member_over_mpi,
    ),
}
"""How the values of a key are drawn, and what reads them."""


def check(name: str, count: int, readers: Readers = READERS) -> None:
    draw, read = readers[name]
    rng = random.Random(name)
    for _ in range(count):
        given = draw(rng)
        begin = time.monotonic()
        try:
            with suppress(MeshdistError):
                read(given)
        except Exception as error:
            shown = repr(given)[:SHOWN]
            raise AssertionError(f"{name}: {type(error).__name__}: {error}, {shown}") from error
        assert time.monotonic() - begin < LONGEST_S, repr(given)[:SHOWN]


@pytest.mark.parametrize("name", READERS)
def test_junk_in_the_store_ends_in_an_error_of_ours(name: str) -> None:
    check(name, 200)


@pytest.mark.soak
@pytest.mark.parametrize("name", READERS)
def test_much_junk_in_the_store_ends_in_errors_of_ours(name: str) -> None:
    check(name, 100_000)
