"""What steps say of themselves, against NumPy and against counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

import meshdist as md
from meshdist.sharding.executor import PlanExecutor
from meshdist.sharding.steps import Arrangement, CollectiveStep, Exchange, Pad, Price, Step, Take
from tests.sharding.interpreter import arranged
from tests.sharding.reshard_cases import mesh_of


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
    prices = [
        CollectiveStep((10,), (0,), 4, place, "all_reduce", (10,)).price for place in range(4)
    ]
    assert [price.received for price in prices] == [3 * n + 10 - n for n in (3, 3, 2, 2)]
    total = sum(price.received for price in prices)
    assert total == sum(price.sent for price in prices) == 2 * 3 * 10
    assert prices[0].num_peers == 6


def test_even_collectives_count_the_parts_of_others() -> None:
    swap = Arrangement((4, 3), (None, None), (0, 1), (4, 3))
    turned = Arrangement((4, 3), (None, None), (1, 0), (3, 4))
    gather = CollectiveStep((12,), (0,), 4, 1, "all_gather_into_tensor", (3,), None, swap)
    scatter = CollectiveStep((3,), (0,), 4, 1, "reduce_scatter_tensor", (3,), swap)
    spread = CollectiveStep((3, 4), (0,), 4, 1, "all_to_all_single", (3,), turned, turned)
    assert gather.price == scatter.price == Price(9, 9, 3, 0)
    assert spread.price == Price(9, 9, 3, 24)  # both are copies
    names = [step.name for step in (gather, scatter, spread)]
    assert names == ["all-gather", "reduce-scatter", "all-to-all"]


def test_free_steps_cost_nothing() -> None:
    for step in (Take((2, 5), ((1, 3), (0, 5))), Pad((4, 4), None)):
        assert step.price == Price(0, 0, 0, 0)


def test_an_exchange_counts_its_boxes_and_lists_its_sums() -> None:
    low, high = ((0, 2),), ((2, 4),)
    received = ((0, low), (1, high), (3, high))
    step = Exchange((4,), (0,), 4, 2, ((0, low),), received, (high, high), is_summed=True)
    assert step.price == Price(6, 2, 3, 8)
    assert step.sums == ((low, (0,)), (high, (1, 2, 3)))
    assert step.is_covered
    alone = Exchange((0,), (0,), 2, 0, (), (), None, is_covered=False)
    assert (alone.price, alone.is_covered) == (Price(), False)


def test_a_kind_without_a_price_cannot_be_made() -> None:
    """It would count 0 bytes in every plan."""

    class Unpriced(Step):
        words = "move by hand"

    with pytest.raises(TypeError, match="price"):
        Unpriced((2,))


def test_a_kind_that_nothing_carries_is_rejected_before_anything_is_sent() -> None:
    class Uncarried(Step):
        words, price = "move by hand", Price(1, 1, 1)

    def program() -> None:
        with pytest.raises(AssertionError, match="Uncarried"):
            PlanExecutor((Uncarried((2,)),), (2,), mesh_of((2,)), "a plan")

    md.simulate(program, 2)
