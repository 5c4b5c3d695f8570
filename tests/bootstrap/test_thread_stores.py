"""One store handle per thread."""

from __future__ import annotations

import threading
from datetime import timedelta

from torch.distributed import HashStore, TCPStore

from meshdist.bootstrap.thread_stores import store_of_thread
from meshdist.bootstrap.world import World


def test_the_making_thread_uses_the_worlds_own_handle() -> None:
    world = World(0, 1, HashStore(), {})
    assert store_of_thread(world) is world.store


def test_a_thread_that_waits_does_not_block_another() -> None:
    store = TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=30))
    world = World(0, 1, store, {})
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(store_of_thread(world).get("late")))
    thread.start()
    store_of_thread(world).set("late", "here")  # would block for ever on the one handle
    thread.join(20)
    assert got == [b"here"]


def test_a_thread_keeps_its_clone() -> None:
    world = World(0, 1, TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=30)), {})
    seen = []

    def twice() -> None:
        seen.append((store_of_thread(world), store_of_thread(world)))

    thread = threading.Thread(target=twice)
    thread.start()
    thread.join()
    ((one, two),) = seen
    assert one is two and one is not world.store
