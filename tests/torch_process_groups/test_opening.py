"""How groups of torch's over our backends are opened: on torch's store, by one connection of
ours."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshdist as md
from tests.pool import Pool, free_port

PAIRS = ([0, 1], [2, 3], [0, 2], [1, 3])


def sockets_to(port: int) -> int:
    """How many connections to a port of this host this process has."""
    mine = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor
            mine.add(os.readlink(f"/proc/self/fd/{name}"))
    found = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                is_to_port = int(fields[2].rpartition(":")[2], 16) == port
                found += is_to_port and f"socket:[{fields[9]}]" in mine
    return found


def kept_sockets_to(port: int, expected: float) -> int:
    """The connections that stay: a wait beside another has one of its own as long as it lasts."""
    deadline = time.monotonic() + 10
    while (found := sockets_to(port)) > expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def new_groups(rank: int) -> None:
    for ranks in PAIRS:
        group = dist.new_group(ranks)
        if rank in ranks:
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=group)
            assert total.item() == sum(ranks)


def torch_meshes(rank: int) -> None:
    mesh: Any = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).to_torch()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=mesh["tp"].get_group())
    assert total.item() == [1.0, 1.0, 5.0, 5.0][rank]


def open_in_rounds(rank: int, port: int, num_rounds: int, is_by_meshes: bool) -> list[float]:
    """In a world that torch began: how many connections to its store there are, round by round."""
    import meshdist.torch_backends  # noqa: F401 (offers shm to torch)

    url, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=60)
    dist.init_process_group("shm", url, rank=rank, world_size=4, timeout=limit)
    try:
        if is_by_meshes:
            md.init_process_group()
        counts = [math.inf]
        for _ in range(num_rounds):
            torch_meshes(rank) if is_by_meshes else new_groups(rank)
            counts.append(kept_sockets_to(port, min(counts)))
        return counts[1:]
    finally:
        if is_by_meshes:
            md.destroy_process_group()
        dist.destroy_process_group()
        assert sockets_to(port) <= 2  # torch's own, and that of the world which met on it


@pytest.mark.parametrize("is_by_meshes", [False, True], ids=["groups", "meshes"])
def test_groups_share_a_connection_to_torchs_store(pool: Pool, is_by_meshes: bool) -> None:
    # Each costs the server a question to the name server, of which some take 5 s.
    for counts in pool.call(open_in_rounds, 4, free_port(), 3, is_by_meshes):
        assert counts[-1] <= counts[0]


def worlds_in_turn(rank: int, port: int, num_worlds: int) -> list[int]:
    """How many connections to one store are left behind each world of torch's on it."""
    import meshdist.torch_backends  # noqa: F401

    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    counts = []
    for turn in range(num_worlds):
        keys = dist.PrefixStore(f"world {turn}", store)
        dist.init_process_group("shm", store=keys, rank=rank, world_size=2)
        dist.barrier()
        dist.destroy_process_group()
        counts.append(sockets_to(port))
    store.add("ended", 1)
    while rank == 0 and store.add("ended", 0) < 2:  # it serves the other
        pass
    return counts


def server_left(rank: int, port: int) -> bool:
    """Whether somebody listens at the address of a world that has ended."""
    import meshdist.torch_backends  # noqa: F401

    url = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("shm", url, rank=0, world_size=1)
    group = dist.new_group([0])
    dist.all_reduce(torch.ones(2), group=group)
    dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX, async_op=True).wait()
    dist.destroy_process_group()
    del group
    gc.collect()
    with socket.socket() as stranger:
        return stranger.connect_ex(("127.0.0.1", port)) == 0


def test_a_world_that_has_ended_keeps_no_server(pool: Pool) -> None:
    assert pool.call(server_left, 1, free_port()) == [False]


def test_a_world_that_has_ended_keeps_no_connection(pool: Pool) -> None:
    for counts in pool.call(worlds_in_turn, 2, free_port(), 4):
        assert counts[0] == counts[-1]


@pytest.mark.soak
@pytest.mark.parametrize("is_by_meshes", [False, True], ids=["groups", "meshes"])
def test_a_hundred_rounds_beside_two_busy_processes(pool: Pool, is_by_meshes: bool) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for counts in pool.call(open_in_rounds, 4, free_port(), 100, is_by_meshes):
            assert counts[0] == counts[-1]
    finally:
        for process in busy:
            process.kill()
            process.wait()
