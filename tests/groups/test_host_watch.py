"""One process of a host looks at the store for signals, and the next takes over where it cannot."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

import meshdist as md
from meshdist.groups.communicators import get_registry
from meshdist.groups.control_messages import ask
from tests.inner import TimeoutStore, get_world, read_process
from tests.load import is_within
from tests.pool import Failure, Pool, places

BACKENDS = [("shm", ""), ("gloo", "aabb")]
ENDS = [
    ("shm", "", "killed"),
    ("gloo", "aabb", "killed"),
    ("shm", "", "stopped"),
    pytest.param("gloo", "aabb", "stopped", marks=pytest.mark.soak),
    ("shm", "", "left"),
    pytest.param("gloo", "aabb", "left", marks=pytest.mark.soak),
]


def until(is_so: Any, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end, "it has not come to that"
        time.sleep(0.01)


@contextmanager
def counting() -> Iterator[list[str]]:
    """Give the names of the threads that ask the store, one for each request."""
    asked: list[str] = []
    ask_store = TimeoutStore.ask

    def count(self: TimeoutStore, request: Any) -> Any:
        asked.append(threading.current_thread().name)
        return ask_store(self, request)

    with mock.patch.object(TimeoutStore, "ask", count):
        yield asked


def until_settled() -> None:
    """Return when no rank asks the store for anything: an alarm or another rank tells it."""
    with counting() as asked:

        def is_idle() -> bool:
            before = len(asked)
            time.sleep(0.5)  # four looks of each signal thread
            return len(asked) == before

        until(is_idle)
        md.barrier()


@pytest.mark.parametrize(("backend", "hosts"), BACKENDS)
def test_an_idle_world_asks_the_store_for_nothing(pool: Pool, backend: str, hosts: str) -> None:
    def program() -> tuple[int, int]:
        until_settled()
        with counting() as asked:
            md.barrier()
            answers = ask(get_world(), (0, 1, 2, 3)) if md.get_rank() == 3 else {}
            md.barrier()
        if md.get_rank() == 3:
            assert sorted(answers) == [0, 1, 2, 3]
        return len(asked), asked.count("meshdist-signals")

    found = pool.run(program, 4, backend=backend, hosts=hosts)
    assert all(num < 30 for num, _ in found[:3]), found
    for rank in (1, 3) if hosts else (1, 2, 3):  # a lower rank of the host tells it of the signal
        assert found[rank][1] < found[rank - 1 if hosts else 0][1], found


@pytest.mark.parametrize(("backend", "hosts", "end"), ENDS)
def test_signals_arrive_though_the_watcher_has_gone(
    pool: Pool, backend: str, hosts: str, end: str
) -> None:
    def program() -> Any:
        rank, world = md.get_rank(), get_world()
        pids: list[Any] = [None] * 4
        md.all_gather_object(pids, os.getpid())
        mesh = md.DeviceMesh("cpu", [1, 3], mesh_dim_names=("x",))
        alone = md.new_group([rank], use_local_synchronization=True)
        until_settled()
        if rank == 0:
            if end != "left":
                os.kill(os.getpid(), signal.SIGSTOP if end == "stopped" else signal.SIGKILL)
            md.destroy_process_group()
            return None
        if rank == 1:
            with pytest.raises(md.AbortedError) as caught:
                md.recv(torch.ones(1), 3, group=mesh.get_group())
            return str(caught.value)
        if rank == 3:
            if end == "left":
                until(lambda: bool(get_registry(world).endings.find(0)))
            else:
                until(lambda: (read_process(pids[0]) or ("", "Z"))[1][0] in "TtZ")
            until(lambda: "recv" in str(ask(world, (1,)).get(1)))
            begin = time.monotonic()
            assert sorted(ask(world, (1, 2), patience_s=10.0)) == [1, 2]
            mesh.abort("enough")
            world.store.set("done", "")
            if end == "stopped":
                os.kill(pids[0], signal.SIGKILL)
            return time.monotonic() - begin
        world.store.wait(["done"], timedelta(seconds=30))
        alone.close()
        return None

    found = pool.outcomes(program, 4, backend=backend, hosts=hosts)
    assert isinstance(found[0], Failure) == (end != "left")
    assert not isinstance(found[1], Failure), found[1].exception
    assert not isinstance(found[3], Failure), found[3].exception
    assert "rank 3" in found[1] and "enough" in found[1]
    assert is_within(found[3], 5.0)


def test_a_forked_child_leaves_the_watch_to_its_parent(pool: Pool) -> None:
    def program() -> list[int]:
        until_settled()
        child = os.fork() if md.get_rank() == 0 else None
        if child == 0:
            time.sleep(30)
            os._exit(0)
        md.barrier()
        answers = ask(get_world(), (0, 1)) if md.get_rank() == 1 else {}
        md.barrier()
        md.destroy_process_group()
        if child is not None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return sorted(answers)

    assert pool.run(program, 2, backend="shm") == [[], [0, 1]]


WORLDS = """
import sys
from datetime import timedelta
import torch
import meshdist as md
from meshdist.bootstrap.world import get_world
from meshdist.groups import host_comparison
from meshdist.groups.control_messages import ask

for turn in range(4):
    if turn == 3:  # as where the system has no shared words
        host_comparison.make_shared_words = lambda: None
    md.init_process_group(sys.argv[1])
    world, rank = get_world(), md.get_rank()
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    if rank == turn % 2:
        assert sorted(ask(world, (0, 1), patience_s=10.0)) == [0, 1]
        mesh.abort(f"in turn {turn}")
        world.store.set("aborted", "")
    try:
        md.recv(torch.ones(1), 1 - rank, group=mesh.get_group())
    except md.AbortedError as error:
        assert f"in turn {turn}" in str(error)
    else:
        raise SystemExit("no abort has come")
    world.store.add("done", 1)
    while int(world.store.add("done", 0)) < 2:
        pass
    md.destroy_process_group()
print("passed")
"""


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.soak)])
def test_each_of_several_worlds_has_a_watcher_of_its_own(pool: Pool, backend: str) -> None:
    for done in pool.start(WORLDS, places(2), backend, has_teardown=False):
        assert done.stdout == "passed\n", done.stderr
        assert (
            "Traceback" not in done.stderr
        )  # on a busy machine torch reports a store that has ended
