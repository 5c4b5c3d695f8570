"""The world in force: one slot a process, overridden in a context."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref

import pytest
from torch.distributed import HashStore

import meshdist as md
from meshdist.bootstrap.world import (
    Caches,
    World,
    find_world,
    get_usable_world,
    get_world,
    install_world,
    remove_world,
    world_here,
)


def make(rank: int = 0, size: int = 2) -> World:
    return World(rank, size, HashStore(), {"cpu": "gloo"})


@pytest.fixture
def installed():
    world = make()
    install_world(world)
    yield world
    remove_world(world)


def test_every_thread_of_the_process_sees_its_world(installed: World) -> None:
    seen = []
    thread = threading.Thread(target=lambda: seen.append(find_world()))
    thread.start()
    thread.join()
    assert seen == [installed]


def test_a_context_overrides_it_for_this_thread_alone(installed: World) -> None:
    other = make(1)
    seen = []
    with world_here(other):
        thread = threading.Thread(target=lambda: seen.append(find_world()))
        thread.start()
        thread.join()
        assert get_world() is other
    assert get_world() is installed
    assert seen == [installed]


def test_a_second_world_is_rejected(installed: World) -> None:
    with pytest.raises(md.WorldError, match="already initialized") as caught:
        install_world(make(1))
    assert "rank 0 of 2" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_closing_runs_the_closers_last_first_and_once() -> None:
    world = make()
    ran: list[int] = []
    world.closers += [lambda: ran.append(1), lambda: ran.append(2)]
    with world:
        pass
    world.close()
    assert ran == [2, 1]
    with pytest.raises(md.GroupClosedError, match="the world was closed"):
        world.check_usable()


def test_every_closer_runs_and_the_first_failure_is_told() -> None:
    world = make()
    ran: list[int] = []

    def fail() -> None:
        raise OSError("disk")

    world.closers += [lambda: ran.append(1), fail]
    with pytest.raises(OSError, match="disk"):
        world.close()
    assert ran == [1]


def test_a_failure_of_closing_holds_nothing_once_it_was_handled() -> None:
    class Held:
        pass

    def use() -> weakref.ref[Held]:
        held, world = Held(), make()

        def fail() -> None:
            raise OSError("disk")

        world.closers.append(fail)
        with contextlib.suppress(OSError):
            world.close()
        return weakref.ref(held)

    gc.disable()  # what the callers' frames hold goes at once, not with the next search for cycles
    try:
        assert use()() is None
    finally:
        gc.enable()


def test_a_forked_child_may_ask_and_not_communicate(installed: World) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            get_usable_world()
        except md.WorldError as error:
            os.write(write, f"{get_world().rank}: {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    text = os.read(read, 10_000).decode()
    os.close(read)
    assert text.startswith("0: a forked child cannot communicate in its parent's world")
    assert "start method 'spawn'" in text


def test_calls_are_numbered_each_kind_from_one() -> None:
    world = make()
    calls = ["mesh", "group", "mesh", ("mesh", 1), "mesh"]
    assert [world.next_number(call) for call in calls] == [1, 1, 2, 1, 3]
    assert make().next_number("mesh") == 1


def test_a_mesh_forgets_what_it_keeps_of_a_type_where_that_has_grown_large() -> None:
    caches = Caches()
    first = caches.keep(dict, 0, {})
    assert caches.of(list) is caches.of(list)
    for key in range(1, 4096):
        caches.keep(dict, key, {})
    assert caches.find(dict, 0) is first
    caches.keep(dict, 4096, {})
    assert caches.find(dict, 0) is None and caches.find(dict, 4096) == {}
    assert caches.find(list, None) == [] and caches.find(dict, []) is None
