"""Members compare definitions in the store; here members are threads over one store server."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore

import meshdist as md
from meshdist.groups.agreement import Agreements
from meshdist.groups.control_messages import Endings
from tests.few_files import room_for
from tests.inner import TimeoutStore, World, digest_of_ranks
from tests.pool import Pool

LONG = timedelta(seconds=30)


def agreements(world: World) -> Agreements:
    return Agreements(world, Endings(world))


def together(size: int, body: Callable[[World], Any]) -> list[Any]:
    """Call ``body`` with a world of its own in ``size`` threads; results or errors by rank."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        store = TCPStore("127.0.0.1", server.port, is_master=False)
        try:
            found[rank] = body(World(rank, max(size, 2), store, {"cpu": "gloo"}))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_equal_definitions_agree_again_and_again() -> None:
    def body(world: World) -> str:
        for number in range(3):
            agreements(world).agree((2, 0, 1), "mesh", {"text": f"number {number}"}, LONG)
        return "agreed"

    assert together(3, body) == ["agreed"] * 3


def test_one_rank_agrees_with_itself() -> None:
    agreements(World(0, 1, HashStore(), {})).agree((0,), "mesh", {"text": "alone"}, LONG)


def test_every_member_raises_and_shows_what_differs() -> None:
    def body(world: World) -> None:
        sizes = [2, 2] if world.rank else [4]
        agreements(world).agree(
            (0, 1, 2), "mesh", {"text": "a mesh", "sizes": sizes, "same": 1}, LONG
        )

    for rank, error in enumerate(together(3, body)):
        assert isinstance(error, md.MismatchError) and isinstance(error, ValueError)
        assert str(error) == (
            "the ranks do not define the same mesh\n"
            f"  where:    rank {rank}, among ranks 0-2\n"
            "  expected: the same mesh on every rank\n"
            "  found:    rank 0: a mesh (sizes [4])\n"
            "            ranks 1-2: a mesh (sizes [2, 2])\n"
            "  fix:      create the mesh with the same arguments on all of its ranks, in the same "
            "order"
        )


def test_a_member_that_does_not_come_is_named() -> None:
    def body(world: World) -> None:
        if world.rank != 1:
            agreements(world).agree((0, 1, 2), "group", {"text": "a group"}, timedelta(seconds=0.5))

    for rank, error in enumerate(together(3, body)):
        if rank == 1:
            continue
        assert isinstance(error, md.CollectiveTimeoutError) and isinstance(error, TimeoutError)
        assert "rank 1 did not arrive within 0.5 s to create a group" in str(error)
        assert "rank 1: does not respond" in str(error)


def test_a_rank_that_is_late_is_waited_for_though_it_makes_another_mesh_first() -> None:
    def body(world: World) -> str:
        if world.rank:
            time.sleep(0.2 if world.rank == 1 else 2.5)
            agreements(world).agree((1, 2), "mesh", {"text": "the pair"}, LONG)
        agreements(world).agree((0, 1, 2), "mesh", {"text": "everyone"}, LONG)
        return "agreed"

    assert together(3, body) == ["agreed"] * 3


def test_whoever_comes_after_the_others_gave_up_is_told_at_once() -> None:
    def body(world: World) -> None:
        if world.rank == 1:
            time.sleep(2.5)
        agreements(world).agree((0, 1), "mesh", {"text": "a mesh"}, timedelta(seconds=1))

    early, late = together(2, body)
    assert isinstance(early, md.CollectiveTimeoutError)
    assert "rank 1 did not arrive within 1 s to create a mesh" in str(early)
    assert isinstance(late, md.CollectiveTimeoutError)
    assert "the other ranks timed out before rank 1 started to create a mesh" in str(late)
    assert "found:    rank 0 waited 1 s for a mesh" in str(late)
    assert "fix:      check what delayed rank 1, or pass a longer timeout" in str(late)


class Interrupting(Endings):
    """Raises while its rank waits for the others, as the handler of a signal may."""

    def find_all(self, *_: Any) -> Any:
        raise InterruptedError("stop")


def test_an_interrupted_rank_is_not_agreed_with() -> None:
    """The others are told at once, whenever they come, and all can make it again."""
    has_left = threading.Event()

    def body(world: World) -> list[Any]:
        if world.rank != 1:
            has_left.wait(30)
        endings = Interrupting(world) if world.rank == 1 else Endings(world)
        found: list[Any] = []
        try:
            Agreements(world, endings).agree((0, 1, 2), "mesh", {"text": "a mesh"}, LONG)
        except (md.BackendError, InterruptedError) as error:
            found.append(error)
        has_left.set()
        agreements(world).agree((0, 1, 2), "mesh", {"text": "a mesh"}, LONG)
        return found

    began = time.monotonic()
    for rank, found in enumerate(together(3, body)):
        (error,) = found
        if rank == 1:
            assert isinstance(error, InterruptedError)
            continue
        assert str(error) == (
            "rank 1 was interrupted while creating a mesh\n"
            f"  where:    rank {rank}, a mesh, for ranks 0-2\n"
            "  expected: the same call on ranks 0-2\n"
            "  found:    rank 1 was interrupted by InterruptedError: stop\n"
            "  fix:      check what interrupted rank 1, and create it again on all ranks"
        )
    assert time.monotonic() - began < LONG.total_seconds() / 2


def test_a_communicator_is_shared_only_where_all_members_of_its_group_have_it_still() -> None:
    def body(world: World) -> list[str]:
        pair = (0, 1) if world.rank < 2 else (2, 3)
        offers = {
            "a": ("group/1", pair),
            "b": ("group/2" if world.rank else "", pair),
            "c": (f"group/{world.rank}", pair),
            "d": ("group/4", (0, 1, 2, 3)),
        }
        agreement = agreements(world).agree(
            range(4), "mesh", {"text": "a mesh"}, LONG, offers=offers
        )
        return [agreement.label_for(ranks, slot) for slot, (_, ranks) in offers.items()]

    first, second, third, fourth = together(4, body)
    assert first[0] == second[0] == third[0] == fourth[0] == "group/1"
    assert first[1] == second[1] != "group/2" == third[1] == fourth[1]
    assert first[2] == second[2] != third[2] == fourth[2]
    assert {labels[3] for labels in (first, second, third, fourth)} == {"group/4"}
    new = {first[1], first[2], third[2]}
    assert len(new) == 3
    assert all(label.startswith("group/") and "/agree/mesh/" in label for label in new)


def test_a_lost_store_is_reported_as_such() -> None:
    def body(world: World) -> None:
        world.store = TimeoutStore(world.store, LONG)
        world.store.close()
        agreements(world).agree((0, 1), "mesh", {"text": "a mesh"}, LONG)

    (error,) = together(1, body)
    assert isinstance(error, md.StoreError)


@pytest.mark.parametrize("junk", [b"-", b"\xff", b"{}", b"[1, 2]", b'{"how": "late"}', b"null"])
def test_an_outcome_that_no_rank_has_written_is_named(junk: bytes) -> None:
    def body(world: World) -> None:
        key = f"agree/mesh/{digest_of_ranks((0, 1))}/1/outcome"
        world.store.set(key, junk)
        agreements(world).agree((0, 1), "mesh", {"text": "a mesh"}, LONG)

    (error,) = together(1, body)
    assert isinstance(error, md.StoreError)
    assert "the store holds a value under 'agree/mesh/" in str(error)
    assert "that no rank of this job wrote" in str(error)


def test_names_of_rank_lists() -> None:
    assert digest_of_ranks([0, 1]) == digest_of_ranks((0, 1)) != digest_of_ranks((1, 0))


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_all_members_are_told_which_one_can_open_too_few_files(pool: Pool, backend: str) -> None:
    def program() -> list[str]:
        few = room_for(9) if md.get_rank() == 1 else nullcontext()
        with few, pytest.raises(md.BackendError) as caught:
            md.new_group()
        x = torch.ones(1)
        md.all_reduce(x, group=md.new_group())
        assert x.item() == 3
        return str(caught.value).splitlines()

    for rank, lines in enumerate(pool.run(program, 3, backend=backend)):
        assert "cannot be opened because a rank has too few file descriptors" in lines[0]
        assert lines[1] == f"  where:    rank {rank}, among ranks 0-2"
        # Another thread may have a file open for a moment.
        assert re.match("  found:    rank 1: [89] more files can be opened of about 16 ", lines[2])
        assert lines[2].endswith(" (cpu tensors: 4)")
        assert lines[3].startswith("  fix:      raise the hard limit before the program starts: ul")


def files() -> list[str]:
    """Those that are open here, but for the words of others, which the signal thread opens."""
    found = []
    for number in os.listdir("/dev/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/dev/fd/{number}"))
    return [name for name in found if "meshdist-words" not in name]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_files_are_counted_axis_by_axis_before_anything_is_opened(pool: Pool, backend: str) -> None:
    def program() -> Any:
        before = len(files())
        few = room_for(8) if md.get_rank() == 4 else nullcontext()
        with few:
            with pytest.raises(md.BackendError) as caught:
                md.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
            # Three at least would be open; other threads have a file open for a moment.
            assert abs(len(files()) - before) < 3
            flat = md.init_device_mesh("cpu", (6,))  # has the world's communicator
        with room_for(8, num_hard=40):  # the limit is raised, and the mesh opened
            mesh = md.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        sums = []
        for group in (flat, mesh["dp"], mesh["tp"]):
            x = torch.ones(1)
            md.all_reduce(x, group=group)
            sums.append(x.item())
        return str(caught.value).splitlines(), sums

    # Gloo: a socket for each other member, and its file of words; shm: its handle, and a socket
    needed = 12 + 2 * 1 + 2 * 2
    for lines, sums in pool.run(program, 6, backend=backend):
        assert lines[0].startswith("DeviceMesh(dp=2, tp=3) cannot be opened because a rank")
        assert re.search(
            f"rank 4: [78] more files can be opened of about {needed} needed", lines[2]
        )
        assert lines[2].endswith(" (axis 'dp': 2, axis 'tp': 4)")
        assert sums == [6, 2, 3]
