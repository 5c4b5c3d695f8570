"""Sentinels: signals that arrive while a rank does something else."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time

import pytest
from torch.distributed import HashStore, TCPStore

from meshdist.mesh.holds import add_hold, remove_hold
from meshdist.mesh.signals import Sentinel, ask, clocks_stopped, post
from meshdist.runtime.clock import clock
from meshdist.runtime.world import World


def until(is_so) -> bool:
    deadline = time.monotonic() + 5
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so()


def test_an_abort_reaches_every_sentinel_and_questions_are_answered() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    aborted: list[tuple[int, str]] = []
    sentinels = [
        Sentinel(
            server.clone(),
            rank,
            lambda about, rank=rank: {"calls": [{"verb": f"verb of {rank}"}], "about": about},
            lambda message, rank=rank: aborted.append((rank, message["reason"])),
        )
        for rank in (0, 1)
    ]
    try:
        world = World(0, 2, server, {})
        calls = {rank: [{"verb": f"verb of {rank}"}] for rank in (0, 1)}
        assert ask(world, (0, 1)) == {rank: {"calls": calls[rank], "about": {}} for rank in (0, 1)}
        about = {"label": "group/1", "sequence": 7}
        assert ask(world, (1,), about) == {1: {"calls": calls[1], "about": about}}
        assert post(server, {"kind": "abort", "reason": "enough"}) == 3
        assert until(lambda: len(aborted) == 2)
        assert sorted(aborted) == [(0, "enough"), (1, "enough")]
        assert all(sentinel.is_store_served() for sentinel in sentinels)
    finally:
        for sentinel in sentinels:
            sentinel.stop()
            sentinel.stop()
    assert not [t for t in threading.enumerate() if t.name == "meshdist-sentinel"]


def test_signals_of_before_are_not_acted_on() -> None:
    store = HashStore()
    post(store, {"kind": "abort", "reason": "old"})
    aborted: list[dict] = []
    sentinel = Sentinel(store, 0, list, aborted.append)
    post(store, {"kind": "abort", "reason": "new"})
    try:
        assert until(lambda: bool(aborted))
        assert [message["reason"] for message in aborted] == ["new"]
    finally:
        sentinel.stop()


def test_clocks_are_stopped_and_let_go_by_messages() -> None:
    store = HashStore()
    sentinel = Sentinel(store, 1, list, lambda message: None)
    try:
        hold = add_hold(store, 0, 60.0)
        post(store, {"kind": "clock"})
        assert until(clock.stands)
        time.sleep(0.6)
        assert clock.stands()
        remove_hold(store, hold)
        post(store, {"kind": "clock"})
        assert until(lambda: not clock.stands())
        add_hold(store, 0, 60.0)
        late = Sentinel(store, 2, list, lambda message: None)
        assert clock.stands()
        late.stop()
        assert not clock.stands()
    finally:
        sentinel.stop()


def test_the_clocks_of_a_world_stand_within_a_context() -> None:
    store = HashStore()
    world = World(0, 2, store, {})
    sentinel = Sentinel(store, 1, list, lambda message: None)
    here = clock.now()
    try:
        with clocks_stopped(world, 60.0):
            assert clock.now() - here < 0.5
            assert clock.stands()
            assert json.loads(store.get("signal/1")) == {"kind": "clock"}
            assert [list(hold) for hold in json.loads(store.get("clock/holds")).values()] == [
                [0, 60.0]
            ]
        assert json.loads(store.get("clock/holds")) == {}
        assert until(lambda: not clock.stands())
    finally:
        sentinel.stop()
    world.origin = "simulated"
    with clocks_stopped(world, 60.0):
        assert not clock.stands()


def test_where_the_store_is_lost_the_clock_of_this_process_stands_alone() -> None:
    world = World(0, 2, HashStore(), {}, rooms={"store probe": lambda: False})
    with clocks_stopped(world, 60.0):
        assert clock.stands()
    assert not clock.stands()


def test_a_message_of_no_known_kind_is_left_alone() -> None:
    store = HashStore()
    aborted: list[dict] = []
    sentinel = Sentinel(store, 0, list, aborted.append)
    post(store, {"kind": "greeting"})
    post(store, {"kind": "abort", "reason": "enough"})
    try:
        assert until(lambda: bool(aborted))
        assert [message["reason"] for message in aborted] == ["enough"]
    finally:
        sentinel.stop()


def test_a_rank_that_gives_no_answer_is_left_out() -> None:
    start = time.monotonic()
    assert ask(World(0, 4, HashStore(), {}), (3,)) == {}
    assert 1.5 < time.monotonic() - start < 10


def test_a_sentinel_stops_at_once_though_a_forked_child_lives() -> None:
    # A child holds copies of all ends of its parent's pipes, those of data loaders for example.
    sentinel = Sentinel(HashStore(), 0, list, lambda message: None)
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    try:
        start = time.monotonic()
        sentinel.stop()
        assert time.monotonic() - start < 1
        assert not [t for t in threading.enumerate() if t.name == "meshdist-sentinel"]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_sentinel_hears_of_the_store_by_descriptors_of_any_number() -> None:
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
        sentinel = Sentinel(server, 0, list, lambda message: None)
        assert sentinel.is_store_served()
        sentinel.stop()
        assert not sentinel.is_store_served()
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Interrupted(Exception):
    pass


class Interrupting:
    """A store under whose ``add`` a signal comes."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.set, self.get = self.store.set, self.store.get

    def add(self, key: str, amount: int) -> int:
        found = self.store.add(key, amount)
        signal.raise_signal(signal.SIGALRM)
        return found


def test_a_message_that_is_counted_comes() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    store = Interrupting()
    try:
        with pytest.raises(Interrupted):
            post(store, {"kind": "clock"})
    finally:
        signal.signal(signal.SIGALRM, before)
    assert json.loads(store.get("signal/1")) == {"kind": "clock"}
