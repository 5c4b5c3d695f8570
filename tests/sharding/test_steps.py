"""What steps say of themselves, against NumPy and against counting."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from meshdist.sharding.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Arrangement,
    Exchange,
    Pad,
    ReduceScatter,
    SummedExchange,
    Take,
)
from tests.sharding.interpreter import arranged


@st.composite
def arrangements(draw):
    view = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    taken = tuple(draw(st.sampled_from([None, None, 0])) for _ in view)
    kept = [size for size, index in zip(view, taken, strict=True) if index is None]
    order = tuple(draw(st.permutations(range(len(kept)))))
    return Arrangement(view, taken, order, tuple(kept[dim] for dim in order))


@given(arrangements())
def test_an_arrangement_is_plain_where_a_reshape_gives_the_same(how):
    array = np.arange(np.prod(how.view))
    moved = arranged(array, how)
    is_reshape = moved.size == array.size and np.array_equal(moved.ravel(), array)
    assert how.is_plain <= is_reshape
    sizes = [size for size in how.view if size > 1]
    if len(set(sizes)) == len(sizes):  # else a swap of equal dims could look the same
        assert how.is_plain == is_reshape


def test_an_all_reduce_counts_both_halves() -> None:
    steps = [AllReduce((0,), 4, place, (10,)) for place in range(4)]
    assert [step.received for step in steps] == [3 * n + 10 - n for n in (3, 3, 2, 2)]
    assert sum(step.received for step in steps) == sum(step.sent for step in steps) == 2 * 3 * 10
    assert steps[0].num_peers == 6


def test_even_verbs_count_the_parts_of_others() -> None:
    swap = Arrangement((4, 3), (None, None), (0, 1), (4, 3))
    gather = AllGather((0,), 4, 1, (3,), Arrangement((4, 3), (None,) * 2, (0, 1), (12,)))
    scatter = ReduceScatter((0,), 4, 1, swap, (3,))
    spread = AllToAll((0,), 4, 1, swap, swap)
    for step in (gather, scatter, spread):
        assert (step.received, step.sent, step.num_peers) == (9, 9, 3)
    assert (gather.shape, scatter.shape, spread.shape) == ((12,), (3,), (4, 3))


def test_free_steps_tell_their_shape() -> None:
    assert Take(((1, 3), (0, 5))).shape == (2, 5)
    assert Pad((4, 4), None).shape == (4, 4)


def test_an_exchange_counts_its_boxes_and_lists_its_sums() -> None:
    low, high = ((0, 2),), ((2, 4),)
    step = SummedExchange(
        (0,), 4, 2, ((0, low),), ((0, low), (1, high), (3, high)), (high, high), (4,)
    )
    assert (step.received, step.sent, step.num_peers) == (6, 2, 3)
    assert step.sums == ((low, (0,)), (high, (1, 2, 3)))
    assert step.is_covered
    alone = Exchange((0,), 2, 0, (), (), None, (0,), is_covered=False)
    assert (alone.received, alone.sent, alone.is_covered) == (0, 0, False)
