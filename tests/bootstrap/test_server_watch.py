"""Clients see the end of a server by its watch, and an orderly server waits for its clients."""

from __future__ import annotations

import dataclasses
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from meshdist.bootstrap import server_watch
from meshdist.bootstrap.server_watch import ServerWatch, accept_clients, find_offer
from meshdist.bootstrap.stores import bind_listener, connect_store, serve_store
from meshdist.runtime.hosts import my_card
from tests.load import is_within

_SERVER = """
import sys
from datetime import timedelta
from meshdist.bootstrap import server_watch
from meshdist.bootstrap.stores import bind_listener, serve_store

server_watch._CLOSING_S = {patience_s}
listener = {listener}
store = serve_store(listener, "127.0.0.1", 0, timedelta(seconds=60))
print(store.port, flush=True)
if sys.stdin.readline().strip():
    raise ValueError("no data")
"""


@contextmanager
def served(
    listener: str, patience_s: float = 1.0
) -> Iterator[tuple[subprocess.Popen[str], TCPStore]]:
    """A server that ends when it is told to, and a client."""
    code = _SERVER.format(listener=listener, patience_s=patience_s)
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            yield server, connect_store("127.0.0.1", port, timedelta(seconds=60))
        finally:
            server.kill()


def tell_to_end(server: subprocess.Popen[str], how: str = "") -> None:
    assert server.stdin is not None
    server.stdin.write(f"{how}\n")
    server.stdin.flush()


def is_up(store: Store) -> bool:
    return int(store.add("asked", 1)) > 0


def test_only_a_store_that_a_process_serves_is_watched() -> None:
    assert ServerWatch(HashStore()).connections == []
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watch = ServerWatch(PrefixStore("deep", PrefixStore("down", server)))
    assert len(watch.connections) == 1
    assert watch.is_served()
    watch.close()
    assert not watch.is_served()


@pytest.mark.parametrize(
    "listener",
    [pytest.param("None", marks=pytest.mark.soak), 'bind_listener("127.0.0.1", 0)'],
)
def test_a_server_that_ends_waits_until_its_clients_have_closed_their_watch(listener: str) -> None:
    with served(listener) as (server, store):
        watch, late = ServerWatch(store), ServerWatch(store)
        assert len(watch.connections) == 2
        tell_to_end(server)
        assert select.select(watch.connections, [], [], 1.0)[0] == []
        assert watch.is_served()
        watch.close()
        assert is_up(store)
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(0.5)
        late.close()
        assert server.wait(10) == 0


def test_a_server_that_fails_waits_shortly_and_says_that_it_ends() -> None:
    with served("None", patience_s=30.0) as (server, store):
        watch = ServerWatch(store)
        start = time.monotonic()
        tell_to_end(server, "fail")
        assert is_up(store)  # the others may still read what it has left for them
        assert select.select(watch.connections, [], [], 20.0)[0] == [watch.connections[1]]
        assert not watch.is_served()
        assert is_up(store)  # a request that comes just then is answered
        watch.close()
        assert server.wait(10) == 1
        assert is_within(time.monotonic() - start, 10)


def test_an_interrupt_ends_a_server_that_waits_for_its_clients() -> None:
    with served("None") as (server, store):
        watch = ServerWatch(store)
        tell_to_end(server)
        time.sleep(0.3)
        server.send_signal(signal.SIGINT)
        server.wait(10)
        watch.close()


def test_watches_that_were_closed_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_watch, "_BACKLOG", 4)
    store = serve_store(bind_listener("127.0.0.1", 0), "127.0.0.1", 0, timedelta(seconds=60))
    start = time.monotonic()
    for _ in range(40):
        watch = ServerWatch(store)
        accept_clients()
        assert len(watch.connections) == 2
        watch.close()
    assert is_within(time.monotonic() - start, 10.0)


def test_a_killed_server_ends_all_connections() -> None:
    with served("None") as (server, store):
        watch = ServerWatch(store)
        server.kill()
        server.wait(10)
        assert select.select(watch.connections, [], [], 10.0)[0] == watch.connections
        watch.close()


@pytest.mark.parametrize(
    "said",
    [
        b"junk",
        *(pytest.param(said, marks=pytest.mark.soak) for said in (b"", bytes(16), bytes(100))),
    ],
)
def test_strangers_keep_no_server_from_ending(said: bytes) -> None:
    with served("None") as (server, store):
        offer = find_offer(store.get("meshdist/server watch"))
        assert offer is not None
        strangers = [socket.create_connection(("127.0.0.1", offer.port)) for _ in range(100)]
        for stranger in strangers:
            stranger.sendall(said)
        watch = ServerWatch(store)
        tell_to_end(server)
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(0.5)  # it waits for its client, and for no one else
        watch.close()
        assert server.wait(10) == 0
        for stranger in strangers:
            stranger.close()


def test_a_process_that_is_ending_is_known_by_its_card() -> None:
    with served("None") as (server, store):
        watch = ServerWatch(store)
        assert watch.is_served()
        watch._next_look = 0.0
        watch._server = dataclasses.replace(my_card(), start="1")
        assert not watch.is_served()
        watch.close()
        server.kill()
