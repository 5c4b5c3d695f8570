"""Control threads: control messages that arrive while a rank does something else."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store, TCPStore

from meshdist.groups import control_messages
from meshdist.groups.control_messages import (
    ControlThread,
    Endings,
    ask,
    post,
    receipts_key,
)
from tests.inner import Heartbeats, Regions, TimeoutStore, World
from tests.load import is_within

LONG = timedelta(seconds=30)


def alone() -> Heartbeats:
    """What a process sees that has no shared words, or is the lowest of its host."""
    return Heartbeats(None, Regions(lambda member: None), 0)


def thread_of(store, rank, answer, abort, look=lambda: None) -> ControlThread:
    """A signal thread of ``rank``."""
    world, handle = World(rank, 2, store, {}), TimeoutStore(store, LONG)
    return ControlThread(world, handle, answer, abort, look, alone())


def call_of(rank: int) -> dict[str, object]:
    return {"label": "group/1", "sequence": rank, "text": f"collective of {rank}"}


def until(is_so) -> bool:
    deadline = time.monotonic() + 5
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so()


def test_an_abort_reaches_every_rank_and_questions_are_answered() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    aborted: list[tuple[int, str]] = []
    threads = [
        thread_of(
            server.clone(),
            rank,
            lambda about, rank=rank: {"calls": [call_of(rank)], "about": str(about), "now": ""},
            lambda message, rank=rank: aborted.append((rank, message["reason"])),
        )
        for rank in (0, 1)
    ]
    try:
        world = World(0, 2, server, {})
        assert ask(world, (0, 1)) == {
            rank: {"calls": [call_of(rank)], "about": "{}", "now": ""} for rank in (0, 1)
        }
        about = {"label": "group/1", "sequence": 7}
        assert ask(world, (1,), about) == {
            1: {"calls": [call_of(1)], "about": str(about), "now": ""}
        }
        assert post(world, {"kind": "abort", "reason": "enough"}) == 3
        assert until(lambda: len(aborted) == 2)
        assert sorted(aborted) == [(0, "enough"), (1, "enough")]
    finally:
        for thread in threads:
            thread.stop()
            thread.stop()
    assert not [t for t in threading.enumerate() if t.name == "meshdist-signals"]


def test_signals_of_before_are_acted_on() -> None:
    # A rank that opens its first group late must see that another one was aborted meanwhile.
    store, aborted = HashStore(), list[dict]()
    post(World(1, 2, store, {}), {"kind": "abort", "reason": "old"})
    thread = thread_of(store, 0, list, aborted.append)
    post(World(1, 2, store, {}), {"kind": "abort", "reason": "new"})
    try:
        assert until(lambda: len(aborted) == 2)
        assert [message["reason"] for message in aborted] == ["old", "new"]
    finally:
        thread.stop()


@pytest.mark.parametrize(
    "junk",
    [
        *(b"\xff", b"{}", b"[]", b"7", b'{"kind": "abort"}', b'{"kind": "ask"}', b"{" * 9999),
        b'{"kind": "ask", "about": {}, "ranks": 7}',
    ],
)
def test_a_signal_that_no_rank_has_posted_is_told_and_passed_over(
    junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store, aborted = HashStore(), list[str]()
    store.set("signal/1", junk)
    thread = thread_of(store, 0, list, lambda message: aborted.append(message["reason"]))
    post(World(1, 2, store, {}), {"kind": "abort", "reason": "enough"})
    try:
        assert until(lambda: aborted == ["enough"])
        assert "rank 0 ignores control message 1" in caplog.text
    finally:
        thread.stop()


def test_a_message_of_no_known_kind_is_left_alone() -> None:
    store = HashStore()
    aborted: list[dict] = []
    thread = thread_of(store, 0, list, aborted.append)
    post(World(1, 2, store, {}), {"kind": "greeting"})
    post(World(1, 2, store, {}), {"kind": "abort", "reason": "enough"})
    try:
        assert until(lambda: bool(aborted))
        assert [message["reason"] for message in aborted] == ["enough"]
    finally:
        thread.stop()


def test_a_thread_that_is_stopped_acts_on_what_came_before() -> None:
    store = HashStore()
    aborted: list[dict] = []
    thread = thread_of(store, 0, list, aborted.append)
    number = post(World(1, 2, store, {}), {"kind": "abort", "reason": "enough"})
    thread.stop()
    assert [message["reason"] for message in aborted] == ["enough"]
    assert store.add(receipts_key(number), 0) == 1  # else rank 0 waits for it when it ends


def test_a_rank_that_gives_no_answer_is_left_out() -> None:
    start = time.monotonic()
    assert ask(World(0, 4, HashStore(), {}), (3,)) == {}
    took = time.monotonic() - start
    assert took > 1.5
    assert is_within(took, 10)


def test_a_signal_thread_stops_at_once_though_a_forked_child_lives() -> None:
    # A child pauses copies of all ends of its parent's pipes, those of data loaders for example.
    thread = thread_of(HashStore(), 0, list, lambda message: None)
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    try:
        start = time.monotonic()
        thread.stop()
        assert is_within(time.monotonic() - start, 1)
        assert not [t for t in threading.enumerate() if t.name == "meshdist-signals"]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_signal_thread_watches_the_store_by_descriptors_of_any_number() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= most < 2000:
        pytest.skip("this process may not have so many files open")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, most))
    opened: list[int] = []
    try:
        while not opened or opened[-1] < 1100:
            opened.append(os.dup(0))
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        handle = TimeoutStore(server, LONG)
        thread = ControlThread(
            World(0, 2, server, {}), handle, list, lambda message: None, lambda: None, alone()
        )
        assert handle.is_hosted
        thread.stop()
        handle.close()
        assert not handle.is_hosted
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Counting(Store):
    """A store in this process that counts the requests to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = HashStore()
        self.num_requests = 0

    def __getattribute__(self, name: str):
        if name in ("set", "add", "check", "multi_get", "get", "compare_set"):
            self.num_requests += 1
            return getattr(self.inner, name)
        return super().__getattribute__(name)


def test_a_question_takes_as_many_requests_whatever_the_number_of_ranks() -> None:
    found = []
    for size in (4, 400):
        store = Counting()
        for rank in range(size):
            answer = {"calls": [call_of(rank)], "about": None, "now": ""}
            store.set(f"signal/1/answer/{rank}", json.dumps(answer))
        store.add(receipts_key(1), size)
        before = store.num_requests
        answers = ask(World(0, size, store, {}), tuple(range(size)))
        assert [answers[rank]["calls"] for rank in range(size)] == [[call_of(r)] for r in answers]
        assert ("ranks" in json.loads(store.get("signal/1"))) == (size == 4)
        found.append(store.num_requests - before)
        endings = Endings(World(0, size, store, {}, hosts=tuple(range(size))))
        before = store.num_requests
        assert endings.find_all(range(1, size)) == {}
        assert store.num_requests - before == 1
        for rank, how in ((1, "has ended"), (2, "ended by ValueError: no data")):
            Endings(World(rank, size, store, {})).leave(how, {})
            before = store.num_requests
            assert endings.find_all((2, 3)) == ({} if rank == 1 else {2: how})
            assert store.num_requests - before <= 4
            before = store.num_requests
            endings.find_all((2, 3))
            assert store.num_requests - before == 1
    assert found[0] == found[1] < 10


def test_ranks_that_are_not_asked_do_not_answer() -> None:
    store = HashStore()
    threads = [thread_of(store, rank, lambda about: 1 / 0, list) for rank in (0, 1)]
    try:
        assert ask(World(0, 2, store, {}), ()) == {}
        post(World(0, 2, store, {}), {"kind": "ask", "about": {}, "ranks": [7]})
    finally:
        for thread in threads:
            thread.stop()
    assert not store.check([receipts_key(1)])


def test_a_signal_whose_sender_could_not_ring_is_found_a_little_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_messages, "SURE_S", 0.5)
    monkeypatch.setattr(control_messages, "ALARM_DELAY_S", 0.0)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    aborted: list[str] = []
    alarms: list[str] = []
    set_bare = TimeoutStore.set_bare

    def noted(store: TimeoutStore, key: str) -> tuple[str, int] | None:
        if threading.current_thread().name == "meshdist-signals":  # about to make an alarm
            alarms.append(key)
        return set_bare(store, key)

    def has_alarms(number: int) -> bool:
        return until(lambda: len(alarms) == number) and not time.sleep(0.3)  # which has rung

    monkeypatch.setattr(TimeoutStore, "set_bare", noted)
    thread = thread_of(server.clone(), 0, list, lambda message: aborted.append(message["reason"]))
    try:
        assert has_alarms(1)
        post(World(1, 2, server, {}), {"kind": "abort", "reason": "no ring"})
        assert until(lambda: aborted == ["no ring"])
        assert has_alarms(2)
        handle = TimeoutStore(server.clone(), LONG)
        post(World(1, 2, server, {}, handle=handle), {"kind": "abort", "reason": "rung"})
        assert until(lambda: aborted == ["no ring", "rung"])
        handle.close()
    finally:
        thread.stop()
