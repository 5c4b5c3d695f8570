"""Changes: which axes do what, and prices against counting over all coordinates."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from meshdist.mesh.placement import DimSplit, Placement
from meshdist.sharding.placement_diff import bare, change_between, extended
from tests.sharding.cases import lacking, mask, pairs, placed, summed_axes
from tests.sharding.interpreter import coordinates

MESH = (2, 2, 2)


@given(pairs(most_dims=3))
def test_a_price_is_what_all_ranks_lack_together(pair):
    source, target = map(bare, pair)
    if any(axis in source.free_axes for axis in target.unreduced):
        target = replace(target, unreduced=())
    change = change_between(source, target)
    ranks = list(coordinates(source.mesh_sizes))
    if not summed_axes(source, target):
        assert change.num_received == sum(lacking(source, target, r).sum() for r in ranks)
    else:
        held = sum((mask(source, r) & mask(target, r)).sum() for r in ranks)
        assert change.num_held == held


def test_roles_of_axes() -> None:
    source = placed(MESH, (8, 8), (0, 1), ())
    change = change_between(source, placed(MESH, (8, 8), (0,), (1, 2)))
    assert [(dim.num_common, dim.removed, dim.new) for dim in change.dims] == [
        (1, (1,), ()),
        (0, (), (1, 2)),
    ]
    assert (change.moving, change.gathered, change.group) == ((1,), (), (1,))
    assert change.has_product_form
    change = change_between(source, placed(MESH, (8, 8), (2,), ()))
    assert (change.dividing, change.gathered, change.group) == ((2,), (0, 1), (0, 1, 2))
    assert not change.has_product_form
    change = change_between(source, placed(MESH, (8, 8), (0,), (), unreduced=(1,)))
    assert (change.padded, change.group, change.num_received) == ((1,), (), 0)


@pytest.mark.parametrize(
    ("shape", "source", "target", "is_even"),
    [
        ((8,), ((0, 1),), ((0,),), True),
        ((6,), ((0, 1),), ((0,),), False),  # 2, 1, 2, 1: cells differ
        ((5,), ((0,),), ((0, 1),), True),  # a slice need not be even
        ((5, 8), ((0,), (1,)), ((0,), ()), True),  # nor a dim that stays
        ((5, 8), ((0,), ()), ((), (0,)), False),
        ((8, 5), ((0,), ()), ((), (0,)), False),
        ((4, 8), ((), (0,)), ((), (0, 1)), True),
    ],
)
def test_collectives_need_equal_parts_only_where_data_move(shape, source, target, is_even):
    change = change_between(placed(MESH, shape, *source), placed(MESH, shape, *target))
    assert change.has_product_form == is_even


def test_an_uneven_prefix_leaves_the_rest_even() -> None:
    mesh = (2, 2)
    source = Placement(mesh, (6,), (DimSplit(6, (0, 1), (2, 2), (1, 1, 2, 2)),))
    target = Placement(mesh, (6,), (DimSplit(6, (0,), (2,), (2, 4)),))
    change = change_between(source, target)
    assert change.dims[0].num_common == 1
    assert change.has_product_form
    other = Placement(mesh, (6,), (DimSplit(6, (0,), (2,), (3, 3)),))
    assert change_between(source, other).dims[0].num_common == 0


def test_axes_of_size_one_and_reduced_axes_move_nothing() -> None:
    found = bare(placed((1, 2), (4, 4), (0, 1), (), reduced=()))
    assert found.dims[0] == DimSplit(4, (1,), (2,))
    assert bare(placed((1, 2), (4,), (), unreduced=(0,), reduced=(1,))) == placed((1, 2), (4,), ())


@given(
    st.lists(st.integers(0, 7), min_size=2, max_size=2),
    st.sampled_from([(), (2,), (3,), (2, 2)]),
)
def test_a_split_is_extended_cell_by_cell(cells, sizes):
    split = DimSplit(sum(cells), (0,), (2,), tuple(cells))
    axes = tuple(range(1, len(sizes) + 1))
    finer = extended(split, axes, sizes)
    found = [stop - start for start, stop in pairwise(finer.boundaries)]
    expected = []
    for size in cells:
        parts = DimSplit(size, axes, sizes).boundaries
        expected += [stop - start for start, stop in pairwise(parts)]
    assert found == expected
    assert finer.axes == (0, *axes)
