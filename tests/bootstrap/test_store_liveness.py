"""Clients see the end of a server by its watch, and an orderly server waits for its clients."""

from __future__ import annotations

import dataclasses
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from meshdist.bootstrap.store_liveness import StoreLiveness
from meshdist.bootstrap.stores import connect_store
from tests.inner import my_process_info
from tests.load import is_within
from tests.pool import Pool, RunningProgram, free_port, places

_SERVER = """
import sys
from datetime import timedelta
from meshdist.bootstrap import store_liveness
from meshdist.bootstrap.stores import bind_listener, serve_store

store_liveness._CLOSING_S = {patience_s}
listener = {listener}
store = serve_store(listener, "127.0.0.1", 0, timedelta(seconds=60))
print(store.port, flush=True)
if sys.stdin.readline().strip():
    raise ValueError("no data")
"""


_COUNTING = """
import os, re, sys
from pathlib import Path
import meshdist as md
from meshdist.bootstrap.world import get_world
from meshdist.groups.communicators import get_registry
from meshdist.runtime.deadlines import Deadline, wait_until

def count(port):  # of the connections of this process: all, and those to the store
    own = [re.fullmatch(r"socket:.([0-9]+).", os.readlink(f"/proc/self/fd/{one}")) for one in fds()]
    inodes = {found[1] for found in own if found}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).open()]
    peers = [line[2] for line in lines if line[9] in inodes]
    connected = [peer for peer in peers if not peer.endswith(":0000")]
    to_store = sum(peer.endswith(f":{port:04X}") for peer in connected)
    return to_store if rank == 0 else len(connected)  # and rank 0 has those of all to its server

def fds():
    return [one for one in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{one}")]

url, port = sys.argv[1] or None, int(sys.argv[2] or os.environ["MASTER_PORT"])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
md.init_process_group("shm", url, rank=rank if url else -1, world_size=size if url else -1)
for number in range(3):
    md.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)).close()
signals = get_registry(get_world())._signals
if rank == 0:  # which waits for signals of the host, in a second
    assert wait_until(lambda: signals._is_proven, Deadline(30))
md.barrier()
sys.stdout.write(f"connections {rank} {count(port)}\\n")
sys.stdout.flush()
md.barrier()
md.destroy_process_group()
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="there is no /proc")
@pytest.mark.parametrize(
    "launcher", ["tcp", "env", pytest.param("torchrun", marks=pytest.mark.soak)]
)
def test_a_rank_has_two_connections_to_the_store(launcher: str, pool: Pool, tmp_path: Path) -> None:
    port = str(free_port())
    if launcher == "torchrun":
        program = tmp_path / "program.py"
        program.write_text(_COUNTING)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--master-port", port, str(program), "", ""]
        ended = [subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)]
    else:
        url = [f"tcp://127.0.0.1:{port}", port] if launcher == "tcp" else ["", ""]
        at = [{**place, "MASTER_PORT": port} for place in places(2)]
        ended = pool.start(_COUNTING, at, *url, timeout_s=300.0, has_teardown=False)
    assert {done.returncode for done in ended} == {0}, ended
    said = "".join(done.stdout for done in ended)
    assert sorted(re.findall(r"connections (\d) (\d+)", said)) == [("0", "2"), ("1", "2")], ended


Served = Callable[..., AbstractContextManager[tuple[RunningProgram, TCPStore]]]


@pytest.fixture
def served(pool: Pool) -> Served:
    """Start a server that ends when it is told to; give it, and a client."""

    @contextmanager
    def start(listener: str, patience_s: float = 1.0) -> Iterator[tuple[RunningProgram, TCPStore]]:
        code = _SERVER.format(listener=listener, patience_s=patience_s)
        with pool.running(code) as server:
            port = int(server.stdout.readline())
            yield server, connect_store("127.0.0.1", port, timedelta(seconds=60))

    return start


def tell_to_end(server: RunningProgram, how: str = "") -> None:
    server.stdin.write(f"{how}\n")
    server.stdin.flush()


def ends(watch: StoreLiveness) -> list[socket.socket]:
    return [] if watch.connection is None else [watch.connection]


def is_up(store: Store) -> bool:
    return int(store.add("asked", 1)) > 0


def test_only_a_store_that_a_process_serves_is_watched() -> None:
    assert StoreLiveness(HashStore()).connection is None
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watch = StoreLiveness(PrefixStore("deep", PrefixStore("down", server)))
    assert watch.connection is not None
    assert not watch.has_ended() and watch.is_hosted()
    watch.close()
    assert watch.has_ended() or not watch.is_hosted()


@pytest.mark.parametrize(
    "listener",
    [pytest.param("None", marks=pytest.mark.soak), 'bind_listener("127.0.0.1", 0)'],
)
def test_a_server_that_ends_waits_until_its_clients_have_closed_their_watch(
    served: Served, listener: str
) -> None:
    with served(listener) as (server, store):
        watch, late = StoreLiveness(store), StoreLiveness(store)
        tell_to_end(server)
        assert select.select(ends(watch), [], [], 1.0)[0] == []
        assert not watch.has_ended() and watch.is_hosted()
        watch.close()
        assert is_up(store)
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(0.5)
        late.close()
        assert server.wait(10) == 0


def test_a_server_that_fails_waits_shortly_and_says_that_it_ends(served: Served) -> None:
    with served("None", patience_s=30.0) as (server, store):
        watch = StoreLiveness(store)
        start = time.monotonic()
        tell_to_end(server, "fail")
        assert is_up(store)  # the others may still read what it has left for them
        assert select.select(ends(watch), [], [], 20.0)[0] == ends(watch)
        assert watch.has_ended() or not watch.is_hosted()
        assert is_up(store)  # a request that comes just then is answered
        watch.close()
        assert server.wait(10) == 1
        assert is_within(time.monotonic() - start, 10)


def test_an_interrupt_ends_a_server_that_waits_for_its_clients(served: Served) -> None:
    with served("None") as (server, store):
        watch = StoreLiveness(store)
        tell_to_end(server)
        time.sleep(0.3)
        server.send_signal(signal.SIGINT)
        server.wait(10)
        watch.close()


def test_a_killed_server_ends_all_connections(served: Served) -> None:
    with served("None") as (server, store):
        watch = StoreLiveness(store)
        server.kill()
        server.wait(10)
        assert select.select(ends(watch), [], [], 10.0)[0] == ends(watch)
        watch.close()


@pytest.mark.parametrize("junk", [b"", b"\xff\n\n127.0.0.1\n", b"127.0.0.1 1\n" * 100])
def test_strangers_keep_no_server_from_ending(served: Served, junk: bytes) -> None:
    with served("None") as (server, store):
        strangers = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(100)]
        store.set("meshdist/clients", junk)
        watch = StoreLiveness(store)
        tell_to_end(server)
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(0.5)  # it waits for its client, and for no one else
        watch.close()
        assert server.wait(10) == 0
        for stranger in strangers:
            stranger.close()


def test_a_process_that_is_ending_is_known_by_its_card(served: Served) -> None:
    with served("None") as (server, store):
        watch = StoreLiveness(store)
        assert not watch.has_ended() and watch.is_hosted()
        time.sleep(0.02)  # a look is kept so long
        watch.server = dataclasses.replace(my_process_info(), start="1")
        assert watch.has_ended() or not watch.is_hosted()
        watch.close()
        server.kill()
