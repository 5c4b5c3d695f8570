"""Changes as verbs: one strided copy in, one verb, one strided copy out."""

from __future__ import annotations

import pytest

from meshdist.sharding.change_steps import verb_steps
from meshdist.sharding.changes import change_between
from meshdist.sharding.steps import AllGather, AllToAll, Arrangement, Pad, ReduceScatter, Take
from tests.sharding.cases import assert_lies, placed, shards, whole_array
from tests.sharding.interpreter import coordinates, run

MESH = (2, 3, 2)
SHAPE = (24, 12, 36)
NONE = (None, None, None)


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        (((0,), (), ()), ((), (), ()), [AllGather]),
        (((2, 0), (), ()), ((), (), ()), [AllGather]),
        (((2,), (), (0,)), ((), (), ()), [AllGather]),
        (((2, 0), (1,), ()), ((2,), (), ()), [AllGather]),
        (((0,), (), ()), ((), (0,), ()), [AllToAll]),
        (((0, 1), (), ()), ((), (1, 0), ()), [AllToAll]),
        (((0,), (1,), ()), ((), (), (1, 0)), [AllToAll]),
        (((0,), (1,), ()), ((), (), (0, 1)), [AllToAll]),
        (((0,), (), ()), ((), (0, 2), ()), [AllToAll]),
        (((0,), (), ()), ((), (2, 0), ()), [AllToAll]),
        (((0,), (), ()), ((), (0,), (2,)), [Take, AllToAll]),
        (((0, 2), (), ()), ((), (0,), ()), [AllToAll, AllGather]),
        (((2, 0), (), ()), ((), (0,), ()), [AllToAll, AllGather]),
        (((0, 1, 2), (), ()), ((), (1,), ()), [AllToAll, AllGather]),
        (((0,), (), ()), ((), (), (1,)), [Take, AllGather]),
    ],
)
def test_moves(source, target, kinds):
    here, there = placed(MESH, SHAPE, *source), placed(MESH, SHAPE, *target)
    change, whole = change_between(here, there), whole_array(SHAPE)
    assert change.has_product_form
    steps = {rank: verb_steps(change, rank) for rank in coordinates(MESH)}
    assert {tuple(map(type, found)) for found in steps.values()} >= {tuple(kinds)}
    assert sum(s.received for found in steps.values() for s in found if hasattr(s, "axes")) == (
        change.num_received
    )
    assert_lies(there, whole, run(steps, shards(here, whole), MESH))


@pytest.mark.parametrize(
    ("target", "kinds"),
    [
        (((0,), (), ()), [ReduceScatter]),
        (((0, 1), (), ()), [ReduceScatter]),
        (((1, 0), (), ()), [ReduceScatter]),
        (((), (0,), (1,)), [Take, ReduceScatter]),
    ],
)
def test_sums(target, kinds):
    here = placed(MESH, SHAPE, (), (), (), unreduced=(0,))
    there = placed(MESH, SHAPE, *target)
    change, whole = change_between(here, there), whole_array(SHAPE)
    steps = {rank: verb_steps(change, rank) for rank in coordinates(MESH)}
    assert tuple(kinds) in {tuple(map(type, found)) for found in steps.values()}
    assert_lies(there, whole, run(steps, shards(here, whole), MESH))


def test_padding_comes_last() -> None:
    here = placed(MESH, SHAPE, (0,), (2,), ())
    there = placed(MESH, SHAPE, (), (), (), unreduced=(0,))
    change = change_between(here, there)
    gather, pad = verb_steps(change, (1, 0, 1))
    assert isinstance(gather, AllGather)
    assert pad == Pad(SHAPE, ((12, 24), (0, 12), (0, 36)))


def test_contiguous_packings_are_plain() -> None:
    """Gathers of rows, and scatters of rows, need no copies of their own."""
    mesh = (4,)
    gather = verb_steps(
        change_between(placed(mesh, (8, 6), (0,), ()), placed(mesh, (8, 6), (), ())), (1,)
    )
    assert gather == (
        AllGather((0,), 4, 1, (2, 6), Arrangement((4, 2, 6), NONE, (0, 1, 2), (8, 6))),
    )
    assert gather[0].unpack.is_plain
    (scatter,) = verb_steps(
        change_between(
            placed(mesh, (8, 6), (), (), unreduced=(0,)), placed(mesh, (8, 6), (0,), ())
        ),
        (1,),
    )
    assert scatter.pack == Arrangement((4, 2, 6), NONE, (0, 1, 2), (4, 2, 6))
    assert scatter.pack.is_plain
    (swap,) = verb_steps(
        change_between(placed(mesh, (8, 4), (0,), ()), placed(mesh, (8, 4), (), (0,))), (1,)
    )
    assert swap.pack == Arrangement((2, 4, 1), NONE, (1, 0, 2), (4, 2, 1))
    assert (swap.pack.is_plain, swap.unpack.is_plain) == (False, True)
