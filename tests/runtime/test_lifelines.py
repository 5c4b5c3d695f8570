"""Who holds a lifeline sees the end of a server, and an orderly server waits for its holders."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from meshdist.runtime import lifelines
from meshdist.runtime.lifelines import find_lifelines
from meshdist.runtime.stores import bind_listener, connect_store, serve_store

_SERVER = """
import sys
from datetime import timedelta
from meshdist.runtime import lifelines
from meshdist.runtime.stores import bind_listener, serve_store

lifelines._HANG_UP_S = {patience_s}
listener = {listener}
store = serve_store(listener, "127.0.0.1", 0, timedelta(seconds=60))
print(store.port, flush=True)
sys.stdin.readline()
"""


@contextmanager
def served(
    listener: str, patience_s: float = 1.0
) -> Iterator[tuple[subprocess.Popen[str], TCPStore]]:
    """A server that ends when it is told to, and a client."""
    code = _SERVER.format(listener=listener, patience_s=patience_s)
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            yield server, connect_store("127.0.0.1", port, timedelta(seconds=60))
        finally:
            server.kill()


def tell_to_end(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    server.stdin.write("\n")
    server.stdin.flush()


def is_up(store: Store) -> bool:
    return int(store.add("asked", 1)) > 0


def test_only_a_store_that_a_process_serves_has_lifelines() -> None:
    assert find_lifelines(HashStore()) == []
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (line,) = find_lifelines(PrefixStore("deep", PrefixStore("down", server)))
    assert not select.select([line], [], [], 0)[0]
    line.close()


@pytest.mark.parametrize("listener", ["None", 'bind_listener("127.0.0.1", 0)'])
def test_a_server_that_ends_waits_until_its_clients_have_hung_up(listener: str) -> None:
    with served(listener, patience_s=30.0) as (server, store):
        lines = find_lifelines(store)
        assert len(lines) == 2
        assert not select.select(lines, [], [], 0)[0]
        tell_to_end(server)
        assert select.select(lines, [], [], 10.0)[0] == [lines[1]]
        assert is_up(store)  # who asks just then is answered
        for line in lines:
            line.close()
        assert server.wait(10) == 0


def test_a_client_that_does_not_hang_up_is_not_waited_for_long() -> None:
    with served("None") as (server, store):
        lines = find_lifelines(store)
        start = time.monotonic()
        tell_to_end(server)
        assert server.wait(20) == 0
        assert 0.9 < time.monotonic() - start < 10
        for line in lines:
            line.close()


def test_lines_that_were_hung_up_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifelines, "_BACKLOG", 4)
    store = serve_store(bind_listener("127.0.0.1", 0), "127.0.0.1", 0, timedelta(seconds=60))
    start = time.monotonic()
    for _ in range(40):
        lines = find_lifelines(store)
        assert len(lines) == 2
        for line in lines:
            line.close()
    assert time.monotonic() - start < 10.0


def test_a_killed_server_ends_all_lifelines() -> None:
    with served("None") as (server, store):
        lines = find_lifelines(store)
        server.kill()
        server.wait(10)
        assert select.select(lines, [], [], 10.0)[0] == lines
        for line in lines:
            line.close()
