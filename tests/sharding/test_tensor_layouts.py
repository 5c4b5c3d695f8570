"""Changes as collectives: one strided copy in, one collective, one strided copy out."""

from __future__ import annotations

import pytest

from meshdist.sharding.lowering import operation_steps
from meshdist.sharding.placement_diff import change_between
from meshdist.sharding.steps import Arrangement, CollectiveStep, Pad
from tests.sharding.cases import assert_lies, placed, shards, whole_array
from tests.sharding.interpreter import coordinates, kinds_of, run

MESH = (2, 3, 2)
SHAPE = (24, 12, 36)
NONE = (None, None, None)


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        (((0,), (), ()), ((), (), ()), ["all-gather"]),
        (((2, 0), (), ()), ((), (), ()), ["all-gather"]),
        (((2,), (), (0,)), ((), (), ()), ["all-gather"]),
        (((2, 0), (1,), ()), ((2,), (), ()), ["all-gather"]),
        (((0,), (), ()), ((), (0,), ()), ["all-to-all"]),
        (((0, 1), (), ()), ((), (1, 0), ()), ["all-to-all"]),
        (((0,), (1,), ()), ((), (), (1, 0)), ["all-to-all"]),
        (((0,), (1,), ()), ((), (), (0, 1)), ["all-to-all"]),
        (((0,), (), ()), ((), (0, 2), ()), ["all-to-all"]),
        (((0,), (), ()), ((), (2, 0), ()), ["all-to-all"]),
        (((0,), (), ()), ((), (0,), (2,)), ["take", "all-to-all"]),
        (((0, 2), (), ()), ((), (0,), ()), ["all-to-all", "all-gather"]),
        (((2, 0), (), ()), ((), (0,), ()), ["all-to-all", "all-gather"]),
        (((0, 1, 2), (), ()), ((), (1,), ()), ["all-to-all", "all-gather"]),
        (((0,), (), ()), ((), (), (1,)), ["take", "all-gather"]),
    ],
)
def test_moves(source, target, kinds):
    here, there = placed(MESH, SHAPE, *source), placed(MESH, SHAPE, *target)
    change, whole = change_between(here, there), whole_array(SHAPE)
    assert change.has_product_form
    steps = {rank: operation_steps(change, rank) for rank in coordinates(MESH)}
    assert {kinds_of(found) for found in steps.values()} >= {tuple(kinds)}
    assert sum(s.price.received for found in steps.values() for s in found) == (change.num_received)
    assert_lies(there, whole, run(steps, shards(here, whole), MESH))


@pytest.mark.parametrize(
    ("target", "kinds"),
    [
        (((0,), (), ()), ["reduce-scatter"]),
        (((0, 1), (), ()), ["reduce-scatter"]),
        (((1, 0), (), ()), ["reduce-scatter"]),
        (((), (0,), (1,)), ["take", "reduce-scatter"]),
    ],
)
def test_sums(target, kinds):
    here = placed(MESH, SHAPE, (), (), (), unreduced=(0,))
    there = placed(MESH, SHAPE, *target)
    change, whole = change_between(here, there), whole_array(SHAPE)
    steps = {rank: operation_steps(change, rank) for rank in coordinates(MESH)}
    assert tuple(kinds) in {kinds_of(found) for found in steps.values()}
    assert_lies(there, whole, run(steps, shards(here, whole), MESH))


def test_padding_comes_last() -> None:
    here = placed(MESH, SHAPE, (0,), (2,), ())
    there = placed(MESH, SHAPE, (), (), (), unreduced=(0,))
    change = change_between(here, there)
    gather, pad = operation_steps(change, (1, 0, 1))
    assert gather.name == "all-gather"
    assert pad == Pad(SHAPE, ((12, 24), (0, 12), (0, 36)))


def test_contiguous_packings_are_plain() -> None:
    """Gathers of rows, and scatters of rows, need no copies of their own."""
    mesh = (4,)
    gather = operation_steps(
        change_between(placed(mesh, (8, 6), (0,), ()), placed(mesh, (8, 6), (), ())), (1,)
    )
    unpack = Arrangement((4, 2, 6), NONE, (0, 1, 2), (8, 6))
    assert gather == (
        CollectiveStep((8, 6), (0,), 4, 1, "all_gather_into_tensor", (2, 6), unpack=unpack),
    )
    assert gather[0].unpack.is_plain
    (scatter,) = operation_steps(
        change_between(
            placed(mesh, (8, 6), (), (), unreduced=(0,)), placed(mesh, (8, 6), (0,), ())
        ),
        (1,),
    )
    assert scatter.pack == Arrangement((4, 2, 6), NONE, (0, 1, 2), (4, 2, 6))
    assert scatter.pack.is_plain
    (swap,) = operation_steps(
        change_between(placed(mesh, (8, 4), (0,), ()), placed(mesh, (8, 4), (), (0,))), (1,)
    )
    assert swap.pack == Arrangement((2, 4, 1), NONE, (1, 0, 2), (4, 2, 1))
    assert (swap.pack.is_plain, swap.unpack.is_plain) == (False, True)
