"""Objects on both backends: in the world and in a subgroup, of any size, roots by either name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from tests.operations.cases import BACKENDS
from tests.pool import Pool

MEMBERS = [3, 0, 2]
"""A subgroup, in an order of its own."""


def thing(rank: int) -> Any:
    """A different kind and size on every rank."""
    return [None, {"rank": 1, "text": "x" * 5000}, ("two", 2.0), [3] * 300][rank]


def subgroup() -> md.ProcessGroup | None:
    return md.new_group(MEMBERS, sort_ranks=False) if md.get_rank() in MEMBERS else None


def gathered_everywhere() -> list[Any]:
    world: list[Any] = ["?"] * 4
    md.all_gather_object(world, thing(md.get_rank()))
    group = subgroup()
    part: list[Any] = ["?"] * 3
    if group is not None:
        md.all_gather_object(part, thing(md.get_rank()), group=group)
    return [world, part]


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_gather_object(backend: str, pool: Pool) -> None:
    for rank, (world, part) in enumerate(BACKENDS[backend](pool, gathered_everywhere, 4)):
        assert world == [thing(r) for r in range(4)]
        assert part == ([thing(r) for r in MEMBERS] if rank in MEMBERS else ["?"] * 3)


def gathered_at_one() -> list[Any]:
    rank = md.get_rank()
    found: list[Any] = []
    for root in ({}, {"dst": 2}, {"group_dst": 3}):
        target = next(iter(root.values()), 0)
        slots: list[Any] | None = ["?"] * 4 if rank == target else None
        md.gather_object(thing(rank), slots, **root)
        found.append(slots)
    group = subgroup()
    if group is not None:
        slots = ["?"] * 3 if rank == 3 else None
        md.gather_object(thing(rank), slots, group=group, group_dst=0)
        found.append(slots)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_gather_object(backend: str, pool: Pool) -> None:
    found = BACKENDS[backend](pool, gathered_at_one, 4)
    everything = [thing(r) for r in range(4)]
    assert [one[:3] for one in found] == [
        [everything, None, None],
        [None, None, None],
        [None, everything, None],
        [None, None, everything],
    ]
    assert found[3][3] == [thing(r) for r in MEMBERS]
    assert found[0][3] is None


def broadcasted() -> list[Any]:
    rank = md.get_rank()
    found = []
    for root in ({"src": 1}, {"group_src": 3}, {}):
        source = next(iter(root.values()), 0)
        objects = [thing(1), thing(2), rank] if rank == source else ["?"] * 3
        md.broadcast_object_list(objects, **root)
        found.append(objects)
    group = subgroup()
    if group is not None:
        objects = [rank]
        md.broadcast_object_list(objects, src=2, group=group)
        found.append(objects)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_broadcast_object_list(backend: str, pool: Pool) -> None:
    for rank, found in enumerate(BACKENDS[backend](pool, broadcasted, 4)):
        assert found[:3] == [[thing(1), thing(2), source] for source in (1, 3, 0)]
        assert found[3:] == ([[2]] if rank in MEMBERS else [])


def scattered() -> list[Any]:
    rank = md.get_rank()
    found = []
    for root in ({}, {"src": 2}, {"group_src": 1}):
        source = next(iter(root.values()), 0)
        out: list[Any] = ["?", "kept"]
        md.scatter_object_list(
            out, [thing(r) for r in range(4)] if rank == source else None, **root
        )
        found.append(out)
    group = subgroup()
    if group is not None:
        out = ["?"]
        md.scatter_object_list(out, [r * 2 for r in MEMBERS], src=3, group=group)
        found.append(out)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_scatter_object_list(backend: str, pool: Pool) -> None:
    for rank, found in enumerate(BACKENDS[backend](pool, scattered, 4)):
        assert found[:3] == [[thing(rank), "kept"]] * 3
        assert found[3:] == ([[rank * 2]] if rank in MEMBERS else [])


def sent() -> list[Any]:
    rank = md.get_rank()
    if rank == 0:
        md.send_object_list([thing(1), thing(3)], dst=1)
        md.send_object_list(["any"], group_dst=1)
        return []
    if rank == 1:
        objects: list[Any] = ["?", "?"]
        sources = [md.recv_object_list(objects, src=0)]
        more: list[Any] = ["?"]
        sources.append(md.recv_object_list(more))  # from anyone
        return [objects, more, sources]
    return []


@pytest.mark.parametrize("backend", BACKENDS)
def test_send_and_recv_object_list(backend: str, pool: Pool) -> None:
    assert BACKENDS[backend](pool, sent, 3)[1] == [[thing(1), thing(3)], ["any"], [0, 0]]


def arrays_as_objects() -> list[Any]:
    rank = md.get_rank()
    found: list[Any] = [None, None]
    md.all_gather_object(found, (torch.full((2,), rank), np.full(3, rank)))
    return [[tensor.tolist(), array.tolist()] for tensor, array in found]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_and_arrays_are_objects_too(backend: str, pool: Pool) -> None:
    wanted = [[[0, 0], [0, 0, 0]], [[1, 1], [1, 1, 1]]]
    assert BACKENDS[backend](pool, arrays_as_objects, 2) == [wanted, wanted]
