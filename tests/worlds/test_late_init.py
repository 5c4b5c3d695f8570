"""An init_process_group that comes after the first touch: taken as said, or rejected."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import meshdist as md
from tests.inner import World, find_world, install_world, remove_world


@pytest.fixture
def joined() -> Iterator[World]:
    """Rank 1 of 2, as if joined at a collective; none of these tests sends anything."""
    world = World(1, 2, HashStore(), {"cpu": "gloo"}, origin="env://, started by meshdist run")
    world.first_touch = "a collective at train.py:3"
    install_world(world)
    yield world
    remove_world(world)


AGREEING: list[dict[str, Any]] = [
    {},
    {"backend": "cpu:gloo"},
    {"init_method": "env://"},
    {"rank": 1, "world_size": 2},
    {"timeout": timedelta(minutes=30)},
]


@pytest.mark.parametrize("given", AGREEING, ids=repr)
def test_what_agrees_takes_the_world_over_once(joined: World, given: dict[str, Any]) -> None:
    md.init_process_group(**given)
    assert find_world() is joined
    with pytest.raises(md.WorldError, match="the process group is already initialized"):
        md.init_process_group(**given)


@pytest.mark.parametrize(
    ("given", "expected", "found"),
    [
        ({"backend": "cpu:shm"}, "backend=cpu:gloo", "backend=cpu:shm"),
        ({"backend": "cpu:gloo,cuda:gloo"}, "backend=cpu:gloo", "backend=cpu:gloo,cuda:gloo"),
        ({"rank": 0}, "rank=1", "rank=0"),
        ({"world_size": 3}, "world_size=2", "world_size=3"),
        (
            {"timeout": timedelta(seconds=9)},
            "timeout=the backend's default",
            "timeout=0:00:09",
        ),
        (
            {"init_method": "tcp://127.0.0.1:1"},
            "init_method=env://, started by meshdist run",
            "init_method='tcp://127.0.0.1:1'",
        ),
        ({"store": HashStore()}, "store=env://, started by meshdist run", "store=HashStore"),
        ({"group_name": "b"}, "group_name=no name", "group_name='b'"),
        ({"pg_options": "fast"}, "pg_options=None", "pg_options=fast"),
        ({"device_id": torch.device("cpu")}, "device_id=no device", "device_id=cpu"),
        ({"rank": 0, "world_size": 3}, "rank=1, world_size=2", "rank=0, world_size=3"),
    ],
)
def test_what_disagrees_is_rejected_and_both_are_shown(
    joined: World, given: dict[str, Any], expected: str, found: str
) -> None:
    with pytest.raises(md.WorldError) as caught:
        md.init_process_group(**given)
    assert str(caught.value) == (
        "init_process_group() was called after meshdist initialized itself, "
        "with different arguments\n"
        "  where:    rank 1 of 2, initialized by a collective at train.py:3\n"
        f"  expected: {expected}\n"
        f"  found:    {found}\n"
        "  fix:      call init_process_group before the first collective and the first mesh, "
        f"or leave out {' and '.join(given)}"
    )
    md.init_process_group()  # the world is as it was
    assert find_world() is joined


def test_the_timeout_of_a_mesh_is_its_worlds(joined: World) -> None:
    joined.timeout = timedelta(seconds=9)
    with pytest.raises(md.WorldError, match="timeout=0:00:09"):
        md.init_process_group(timeout=timedelta(minutes=30))
    md.init_process_group(timeout=timedelta(seconds=9))
