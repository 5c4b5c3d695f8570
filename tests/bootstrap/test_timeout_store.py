"""A store whose requests end in time; what is read from it is checked."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

import meshdist as md
from meshdist.bootstrap import timeout_store
from meshdist.bootstrap.store_liveness import AlarmLost, KeyAlarm, find_readable
from meshdist.bootstrap.stores import connect_store
from meshdist.bootstrap.timeout_store import (
    TimeoutStore,
    await_key,
    read_json,
    read_number,
    within,
)
from tests.inner import Deadline, my_process_info, process_start
from tests.load import is_within
from tests.pool import Pool, RunningProgram
from tests.stopping import resume_other, stop_other

LONG = timedelta(seconds=30)
_SERVER = """
import sys
from datetime import timedelta
from meshdist.bootstrap.stores import bind_listener, serve_store

store = serve_store(bind_listener("127.0.0.1", 0), "127.0.0.1", 0, timedelta(seconds=60))
print(store.port, flush=True)
sys.stdin.readline()
"""


Served = Callable[[], AbstractContextManager[tuple[RunningProgram, TimeoutStore]]]


@pytest.fixture
def served(pool: Pool) -> Served:
    """Start a server in a process of its own; give it, and a client."""

    @contextmanager
    def start() -> Iterator[tuple[RunningProgram, TimeoutStore]]:
        with pool.running(_SERVER) as server:
            port = int(server.stdout.readline())
            client = TimeoutStore(connect_store("127.0.0.1", port, LONG), LONG)
            try:
                yield server, client
            finally:
                client.close()

    return start


@pytest.fixture(params=["hash", "file", "served", "served here"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "served":
        with request.getfixturevalue("served")() as (_, client):
            yield PrefixStore("below", client)
        return
    if request.param == "file":
        bounded = TimeoutStore(FileStore(str(tmp_path / "store"), -1), LONG)
    elif request.param == "hash":
        bounded = TimeoutStore(HashStore(), LONG)
    else:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        bounded = TimeoutStore(server, LONG, is_hosted_here=True)
    yield PrefixStore("below", bounded)
    bounded.close()


def test_it_does_what_the_store_below_it_does(store: Store) -> None:
    assert not store.check(["a"])
    store.set("a", "one")
    assert store.get("a") == b"one"
    assert (store.add("n", 2), store.add("n", 3), read_number(store, "n")) == (2, 5, 5)
    assert read_number(store, "absent") == 0
    assert not store.check(["absent"])  # to read it writes nothing
    assert store.compare_set("b", "", "first") == b"first"
    assert store.compare_set("b", "", "second") == b"first"
    assert store.multi_get(["b", "a"]) == [b"first", b"one"]


def test_a_thread_that_waits_keeps_no_other_waiting(store: Store) -> None:
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(store.get("late")))
    thread.start()
    time.sleep(0.05)
    store.set("late", "here")
    thread.join(20)
    assert got == [b"here"]


def test_a_wait_ends_at_its_timeout(store: Store) -> None:
    start = time.monotonic()
    with pytest.raises(md.StoreError, match="wait timeout"):
        store.wait(["absent"], timedelta(seconds=0.2))
    with within(Deadline(0.2)), pytest.raises(md.StoreError, match="wait timeout"):
        store.get("absent")
    with within(Deadline(0.2)), pytest.raises(md.StoreError, match="wait timeout"):
        store.wait(["absent"], timedelta(seconds=30))
    assert is_within(time.monotonic() - start, 5.0)


def test_a_stopped_server_is_named_in_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeout_store, "ANSWER_S", 0.5)
    with served() as (server, client):
        client.server = "rank 0, which hosts the store,"
        client.set("a", "1")
        stop_other(server.pid)
        start = time.monotonic()
        with pytest.raises(md.StoreError) as caught:
            client.check(["a"])
        assert caught.value.summary == "rank 0, which hosts the store, does not answer"
        assert is_within(time.monotonic() - start, 5.0)
        start = time.monotonic()
        with pytest.raises(md.StoreError, match="does not answer"):
            client.add("n", 1)  # not asked any more
        assert is_within(time.monotonic() - start, 2.0)
        server.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        assert client.get("a") == b"1"
        assert client.add("n", 1) == 1  # what was given up is not done later


@pytest.mark.soak
def test_a_server_that_has_left_one_client_without_an_answer_is_not_waited_for_by_others(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeout_store, "ANSWER_S", 3.0)
    with served() as (server, client):
        raw = client.raw_clone()
        stop_other(server.pid)
        with pytest.raises(md.StoreError, match="does not answer"):
            client.check(["a"])
        start = time.monotonic()
        with pytest.raises(md.StoreError, match="does not answer"):
            TimeoutStore(raw, LONG)
        assert is_within(time.monotonic() - start, 2.0)
        server.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        other = TimeoutStore(raw, LONG)
        assert not other.check(["a"])
        other.close()


def test_a_longer_deadline_waits_for_a_stopped_server(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served() as (server, client):
        monkeypatch.setattr(timeout_store, "ANSWER_S", 0.1)
        stop_other(server.pid)
        threading.Timer(0.6, server.send_signal, [signal.SIGCONT]).start()
        with within(Deadline(30.0)):
            assert not client.check(["a"])


def test_a_server_that_was_silent_before_a_call_gets_no_time_of_the_call_once_more(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits for one cause do not add up: each counts from when the server stopped responding."""
    monkeypatch.setattr(timeout_store, "ANSWER_S", 2.0)
    with served() as (server, client):
        stop_other(server.pid)
        with pytest.raises(md.StoreError, match="does not answer"):
            client.check(["a"])
        start = time.monotonic()
        with within(Deadline(2.0)), pytest.raises(md.StoreError, match="does not answer"):
            client.add("n", 1)
        assert is_within(time.monotonic() - start, 1.0)
        server.send_signal(signal.SIGCONT)
        with within(Deadline(60.0)):
            assert client.add("m", 1) == 1


def test_a_wait_sees_that_the_server_of_this_host_is_stopped_and_since_when(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks nothing while it waits: what it asks at its end has no more time than is left."""
    monkeypatch.setattr(timeout_store, "ANSWER_S", 2.0)
    with served() as (server, client):
        start = process_start(server.pid)
        assert start is not None
        client.watch(dataclasses.replace(my_process_info(), pid=server.pid, start=start))
        stop_other(server.pid)
        looks: list[float] = []
        with pytest.raises(md.StoreError, match="does not answer"):
            await_key(client, "absent", Deadline(2.0), lambda: looks.append(time.monotonic()))
        assert is_within(time.monotonic() - looks[-1], 1.0)
        resume_other(server.pid)
        with within(Deadline(60.0)):
            assert not client.check(["absent"])


def test_a_wait_asks_now_and_then_whether_the_server_still_answers(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a server on another host nothing is seen."""
    monkeypatch.setattr(timeout_store, "CHECK_S", 0.0)
    with served() as (_, client):
        asked: list[list[str]] = []
        check = client.check

        def counted(keys: list[str]) -> bool:
            asked.append(keys)
            if len(asked) == 3:
                client.set("late", "here")
            return check(keys)

        monkeypatch.setattr(client, "check", counted)
        assert await_key(client, "late", Deadline(60.0))
        assert asked == [["late"]] * 3


def test_a_server_that_has_ended_is_told_at_once(served: Served) -> None:
    with served() as (server, client):
        server.kill()
        server.wait()
        with pytest.raises(md.StoreError, match="the process that hosts the store has ended"):
            client.check(["a"])
        assert not client.is_hosted


def test_a_key_that_a_stranger_has_filled_with_junk_costs_one_request(served: Served) -> None:
    with served() as (_, client):
        client.set("n", "junk")
        with pytest.raises(md.StoreError, match="has closed this process's connection") as caught:
            client.add("n", 1)
        assert "a counter key may hold a value that is not a number" in str(caught.value)
        assert client.add("m", 1) == 1


def test_a_file_that_stays_locked_is_told_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeout_store, "ANSWER_S", 0.2)
    path = tmp_path / "store"
    client = TimeoutStore(FileStore(str(path), -1), LONG)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(md.StoreError, match=f"process {os.getpid()} keeps its file"):
            client.check(["a"])
        threading.Timer(0.5, fcntl.flock, [file, fcntl.LOCK_UN]).start()
        with within(Deadline(30.0)):
            assert not client.check(["a"])
    client.close()


def test_a_closed_store_keeps_no_file_open(tmp_path: Path) -> None:
    path = tmp_path / "store"

    def num_open() -> int:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum(os.path.realpath(link) == str(path) for link in links)

    client = TimeoutStore(FileStore(str(path), -1), LONG)
    client.set("a", "1")
    assert num_open() == 1
    client.close()
    client.close()
    assert num_open() == 0


def test_a_closed_store_rejects_and_a_forked_child_too() -> None:
    before = set(threading.enumerate())
    client = TimeoutStore(HashStore(), LONG)
    child = os.fork()
    if child == 0:
        try:
            client.check(["a"])
        except md.StoreError:
            client.close()  # does nothing there
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not client.check(["a"])
    client.close()
    client.close()
    with pytest.raises(md.StoreError, match="the store of this world is closed in this process"):
        client.check(["a"])
    assert {t for t in threading.enumerate() if t.name == "meshdist-store"} <= before


@pytest.mark.parametrize("value", [b"", b"\xff", b"{", b"[1]", b'{"b": 1}', b"null"])
def test_junk_is_named_with_its_key(value: bytes) -> None:
    store = HashStore()
    store.set("key", value)
    with pytest.raises(md.StoreError) as caught:
        read_json(store, "key", lambda found: found["a"])
    assert caught.value.summary == (
        "the store holds a value under 'key' that no rank of this job wrote"
    )
    assert caught.value.found == repr(value)
    with pytest.raises(md.StoreError, match="under 'key'"):
        read_number(store, "key")
    store.set("key", json.dumps({"a": 1}))
    assert read_json(store, "key", lambda found: found["a"]) == 1


def test_an_alarm_rings_when_its_key_is_set_and_fails_where_the_server_ends(served: Served) -> None:
    with served() as (server, store):
        below = TimeoutStore(PrefixStore("prefix", store.raw_clone()), LONG)
        address = store.set_bare("known")
        assert address is not None
        assert store.check(["known"])
        alarm = KeyAlarm(address)
        alarm.reset("known")
        assert find_readable([alarm.connection], 10.0)
        assert not alarm.has_rung("next")
        assert alarm.has_rung("known")
        assert not alarm.has_rung("known")
        alarm.reset("next")
        below.set("next", "")  # which is another key
        store.check(["next"])
        assert not alarm.has_rung("next")
        assert below.set_bare("next") == address
        assert await_ring(alarm, "next")
        assert not alarm.has_rung("next")
        alarm.reset("never")
        below.close()
        store.close()
        server.kill()
        with pytest.raises(AlarmLost):
            await_ring(alarm, "never")
        assert alarm.is_lost
        alarm.connection.close()


def await_ring(alarm: KeyAlarm, key: str) -> bool:
    """Whether it rings within some seconds."""
    deadline = Deadline(10.0)
    while not (has_rung := alarm.has_rung(key)) and not deadline.is_over:
        find_readable([alarm.connection], 0.2)
    return has_rung


def test_what_an_alarm_waited_for_before_rings_no_more(served: Served) -> None:
    with served() as (_, store):
        address = store.set_bare("set already")
        assert address is not None
        alarm = KeyAlarm(address)
        for key in ("a", "b", "set already", "c"):  # each is called off by the next one
            alarm.reset(key)
        for key in ("a", "b"):
            store.set_bare(key)
        assert not alarm.has_rung("c")
        store.set_bare("c")
        assert await_ring(alarm, "c")
        alarm.reset("d")
        alarm.reset("")
        store.set_bare("d")
        assert store.check(["d"])
        assert not alarm.has_rung("d")
        with alarm.turn:  # of a wait
            assert alarm.poll("e") is None
        assert alarm.poll("e") is False
        store.set_bare("e")
        assert find_readable([alarm.connection], 10.0)
        while not (rings := alarm.poll("e")):
            find_readable([alarm.connection], 0.2)
        assert rings
        alarm.connection.close()


def test_a_store_without_a_server_has_no_alarm() -> None:
    store = TimeoutStore(HashStore(), LONG)
    assert store.set_bare("known") is None
    assert not store.check(["known"])
    store.close()
