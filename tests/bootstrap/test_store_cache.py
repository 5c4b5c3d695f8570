"""Stores of addresses and of worlds that have ended: what stays open, and what does not."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import meshdist as md
import meshdist.distributed as dist
from meshdist.bootstrap.store_cache import keep_store, release_store
from meshdist.bootstrap.store_liveness import has_clients
from meshdist.bootstrap.stores import bind_listener, connect_store, serve_store
from tests.inner import Deadline, wait_until
from tests.pool import Pool

LIMIT = timedelta(seconds=30)
NUM_WORLDS, NUM_WARM = 50, 10
WAYS = ("new address", "new variables", "same address", "new file", "same file", "given store")


def test_stores_are_kept_per_address_until_they_are_let_go() -> None:
    made = []

    def make() -> md.HashStore:
        made.append(md.HashStore())
        return made[-1]

    address = ("test", object())
    assert keep_store(address, make) is keep_store(address, make)
    assert keep_store(("test", object()), make) is made[1]
    assert len(made) == 2
    release_store(address)
    assert keep_store(address, make) is made[0]  # a second user is left
    release_store(address)
    release_store(address)
    assert keep_store(address, make) is made[2]


def test_a_store_without_clients_is_closed_at_once_and_its_port_is_free() -> None:
    listener = bind_listener("127.0.0.1", 0)
    assert listener is not None
    port = listener.getsockname()[1]
    before = threading.active_count()
    store = keep_store("alone", lambda: serve_store(listener, "127.0.0.1", port, LIMIT))
    own = connect_store("127.0.0.1", port, LIMIT)  # both ends are here
    assert isinstance(store, md.TCPStore)
    assert not has_clients(store)
    del store
    release_store("alone")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5.0)
    del own
    socket.create_server(("127.0.0.1", port)).close()
    assert threading.active_count() == before


def test_a_forked_child_has_stores_of_its_own(pool: Pool) -> None:
    def program(_: int) -> int:
        store = keep_store("before the fork", md.HashStore)
        child = os.fork()
        if child == 0:
            is_own = keep_store("before the fork", md.HashStore) is not store
            release_store("before the fork")
            os._exit(0 if is_own else 1)
        release_store("before the fork")
        return os.waitpid(child, 0)[1]

    assert pool.call(program, 1) == [0]


def arguments_of(way: str, rank: int, number: int, folder: str, meeting: Any) -> dict[str, Any]:
    """What this rank passes to ``init_process_group`` for its world of this number."""
    if "file" in way:
        return {"init_method": f"file://{folder}/{way} {number if 'new' in way else 0}"}
    name = f"{way} {0 if 'same' in way else number}"
    if way == "given store" and rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        meeting.set(name, str(store.port))
        return {"store": store}
    if rank == 0 and not meeting.check([name]):
        with socket.create_server(("127.0.0.1", 0)) as free:
            meeting.set(name, str(free.getsockname()[1]))
    port = int(meeting.get(name))
    if way == "given store":
        return {"store": dist.TCPStore("127.0.0.1", port, 2, False, wait_for_workers=False)}
    if way == "new variables":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        return {}
    return {"init_method": f"tcp://127.0.0.1:{port}"}


def counted() -> dict[str, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared maps": maps.count("memfd:meshdist"),
        "MiB": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        >> 20,
    }


def worlds(rank: int, way: str, folder: str) -> tuple[dict[str, int], dict[str, int]]:
    """Make worlds and end them; return the counts after the first few, and at the end."""
    meeting = dist.FileStore(f"{folder}/meeting {way}", 2)
    for number in range(NUM_WORLDS):
        if number == NUM_WARM:
            early = counted()
        arguments = arguments_of(way, rank, number, folder, meeting)
        md.init_process_group(rank=rank, world_size=2, timeout=LIMIT, **arguments)
        del arguments
        x = torch.ones(4)
        md.all_reduce(x)
        assert x.tolist() == [2.0] * 4
        md.destroy_process_group()
    early["MiB"] += 8
    wait_until(lambda: is_level(early), Deadline(10.0))
    return early, counted()


def is_level(early: dict[str, int]) -> bool:
    return all(count <= early[what] for what, count in counted().items())


@pytest.mark.parametrize("way", WAYS)
def test_worlds_that_have_ended_leave_nothing_open(way: str, pool: Pool, tmp_path: Path) -> None:
    for early, late in pool.call(worlds, 2, way, str(tmp_path)):
        assert all(late[what] <= early[what] for what in late), (early, late)


def rank_0_leaves_first(rank: int, folder: str) -> list[float]:
    """Rank 0 leaves, and comes back to the same address before rank 1 has left."""
    url = f"tcp://127.0.0.1:{Path(folder, 'port').read_text()}"
    seen = []
    for number in range(3):
        md.init_process_group("gloo", url, LIMIT, 2, rank)
        x = torch.ones(2)
        md.all_reduce(x)
        if rank == 1:
            time.sleep(0.3 * number)  # the store must still be there
            md.new_group([1])
        seen.append(x[0].item())
        md.destroy_process_group()
    return seen


def test_a_store_stays_as_long_as_another_rank_is_in_its_world(pool: Pool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    assert pool.call(rank_0_leaves_first, 2, str(tmp_path)) == [[2.0] * 3] * 2


def come_and_go(rank: int, folder: str) -> int:
    """Many short worlds at one address, so that ranks connect while the store is being closed."""
    url = f"tcp://127.0.0.1:{Path(folder, 'port').read_text()}"
    for number in range(40):
        time.sleep(0.002 * ((number * (rank + 3)) % 7))
        md.init_process_group("gloo", url, LIMIT, 3, rank)
        md.barrier()
        time.sleep(0.002 * ((number * (rank + 2)) % 5))
        md.destroy_process_group()
    return 40


def test_ranks_that_connect_while_a_store_closes_find_the_next(pool: Pool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    assert pool.call(come_and_go, 3, str(tmp_path)) == [40] * 3
