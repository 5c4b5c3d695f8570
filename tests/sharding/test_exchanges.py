"""Boxes of one rank; that all ranks' boxes fit together is tested with plans."""

from __future__ import annotations

from hypothesis import given

from meshdist.sharding.lowering import coordinates_along, exchange_steps, local_steps, relative
from meshdist.sharding.placement_diff import bare, change_between
from meshdist.sharding.steps import Exchange, Pad, Take
from tests.sharding.cases import assert_lies, pairs, placed, shards, whole_array
from tests.sharding.interpreter import coordinates, run


@given(pairs())
def test_boxes_serve_every_change_also_those_that_collectives_could(pair):
    source, target = map(bare, pair)
    if any(axis in source.free_axes for axis in target.unreduced):
        return
    change, whole = change_between(source, target), whole_array(source.shape)
    steps = {rank: exchange_steps(change, rank) for rank in coordinates(source.mesh_sizes)}
    assert_lies(target, whole, run(steps, shards(source, whole), source.mesh_sizes))


def test_boxes_of_one_rank() -> None:
    mesh = (2, 2)
    change = change_between(placed(mesh, (5, 4), (0,), (1,)), placed(mesh, (5, 4), (1,), (0,)))
    (step,) = exchange_steps(change, (0, 1))
    # it holds rows 0:3 of columns 2:4, and wants rows 3:5 of columns 0:2
    assert step == Exchange(
        (2, 2), (0, 1), 4, 1, ((2, ((0, 3), (0, 2))),), ((2, ((0, 2), (0, 2))),), None
    )
    (step,) = exchange_steps(change, (0, 0))
    assert step == Exchange((3, 2), (0, 1), 4, 0, (), (), (((0, 3), (0, 2)), ((0, 3), (0, 2))))


def test_a_sum_has_one_box_of_each_partial_sum() -> None:
    mesh = (3,)
    change = change_between(placed(mesh, (4,), (), unreduced=(0,)), placed(mesh, (4,), (0,)))
    (step,) = exchange_steps(change, (1,))
    assert step == Exchange(
        (1,),
        (0,),
        3,
        1,
        ((0, ((0, 2),)), (2, ((3, 4),))),
        ((0, ((0, 1),)), (2, ((0, 1),))),
        (((2, 3),), ((0, 1),)),
        is_summed=True,
    )


def test_padded_results_are_not_covered() -> None:
    mesh = (2, 2)
    change = change_between(placed(mesh, (8,), (1, 0)), placed(mesh, (8,), (), unreduced=(0,)))
    (step,) = exchange_steps(change, (1, 0))
    assert step.axes == (1,)
    assert not step.is_covered
    assert step.own == (((0, 2),), ((2, 4),))
    assert step.receives == ((1, ((6, 8),)),)


def test_what_a_rank_holds_already_is_taken_and_padded() -> None:
    mesh = (2, 2)
    source, target = placed(mesh, (4, 4), (0,), ()), placed(mesh, (4, 4), (), (1,), unreduced=(0,))
    assert local_steps(change_between(source, target), (1, 1)) == (
        Take((2, 2), ((0, 2), (2, 4))),
        Pad((4, 2), ((2, 4), (0, 2))),
    )
    assert local_steps(change_between(source, source), (1, 1)) == ()
    empty = placed((4,), (2,), (0,)), placed((4,), (2,), (), unreduced=(0,))
    assert local_steps(change_between(*empty), (3,)) == (Pad((2,), None),)


def test_small_helpers() -> None:
    assert coordinates_along((0, 2), (2, 9, 3), {0: 10, 2: 1}) == [0, 1, 2, 10, 11, 12]
    assert coordinates_along((), (), {}) == [0]
    assert relative(((3, 5), (1, 2)), ((2, 9), (1, 4))) == ((1, 3), (0, 1))
