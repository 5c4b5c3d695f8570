"""What is learned of arrivals, against plain rules; a whole history against a naive oracle."""

from __future__ import annotations

from hypothesis import given, strategies as st

from meshdist.ddp.expected_gradients import ExpectedGradients

TO_RETURN = 16


def learned(num: int, counts: list[int], order: list[int] | None = None) -> ExpectedGradients:
    """Arrivals after a first backward that brought each gradient so often."""
    arrivals = ExpectedGradients(num)
    seen = [0] * num
    for index in order or [i for i in range(num) for _ in range(counts[i])]:
        seen[index] += 1
        arrivals.order.append(index)
    arrivals.backward_ends(counts, [count > 0 for count in counts])
    return arrivals


def test_one_arrival_of_each_is_expected_before_anything_is_learned() -> None:
    arrivals = ExpectedGradients(3)
    assert arrivals.expected == [1, 1, 1] and not arrivals.is_learned
    assert arrivals.deferred == frozenset() and arrivals.order == []
    assert arrivals.laid_order([2, 1, 0]) == [2, 1, 0]


def test_as_many_arrivals_are_expected_as_the_backward_before_had_at_least_one() -> None:
    arrivals = learned(3, [1, 3, 0])
    assert arrivals.expected == [1, 3, 1]
    arrivals.update_deferred([2], may_move=False)
    arrivals.backward_ends([2, 1, 0], [True, True, False])
    assert arrivals.expected == [2, 1, 1]


def test_the_laid_order_is_that_of_first_arrivals_and_then_of_the_rest() -> None:
    arrivals = learned(5, [1, 2, 0, 1, 0], order=[3, 1, 0, 1])
    assert arrivals.laid_order([4, 3, 2, 1, 0]) == [3, 1, 0, 4, 2]


def test_changes_are_told_against_the_first_backward_whatever_came_between() -> None:
    arrivals = learned(4, [1, 2, 0, 1])
    arrivals.update_deferred([2], may_move=False)
    for counts in ([1, 2, 0, 1], [2, 2, 0, 1]):
        arrivals.backward_ends(counts, [count > 0 for count in counts])
    assert arrivals.find_changes(counts, [True, True, False, True]) == {0: (2, 1)}
    counts = [0, 1, 1, 0]  # the hooked ones; the last one is seen by its .grad
    changes = arrivals.find_changes(counts, [False, True, True, True])
    assert changes == {0: (0, 1), 1: (1, 2), 2: (1, 0)}


def test_what_the_first_backward_lacked_trails_at_once() -> None:
    arrivals = learned(3, [1, 0, 1])
    arrivals.update_deferred([1], may_move=True)
    assert arrivals.is_learned and arrivals.deferred == {1}


def test_what_must_not_move_does_not() -> None:
    arrivals = learned(2, [1, 1])
    arrivals.update_deferred([0], may_move=False)
    assert arrivals.is_learned and arrivals.deferred == frozenset()


def test_one_returns_when_it_has_come_everywhere_often_enough_in_a_row() -> None:
    arrivals = learned(2, [1, 1])
    arrivals.update_deferred([0], may_move=True)
    for _ in range(TO_RETURN - 1):
        arrivals.update_deferred([], may_move=True)
        assert arrivals.deferred == {0}
    arrivals.update_deferred([0], may_move=True)  # once more: the row begins anew
    for _ in range(TO_RETURN - 1):
        arrivals.update_deferred([], may_move=True)
    assert arrivals.deferred == {0}
    arrivals.update_deferred([], may_move=True)
    assert arrivals.deferred == frozenset()


def test_all_is_forgotten_at_once() -> None:
    arrivals = learned(2, [2, 1])
    arrivals.update_deferred([1], may_move=True)
    arrivals.forget()
    fresh = ExpectedGradients(2)
    for name in ("expected", "learned", "order", "deferred", "is_learned"):
        assert getattr(arrivals, name) == getattr(fresh, name), name
    arrivals.update_deferred([], may_move=True)
    assert arrivals.deferred == frozenset()  # the row of the one that trailed is gone as well


@given(
    st.integers(1, 4).flatmap(
        lambda num: st.lists(
            st.tuples(st.sets(st.integers(0, num - 1)), st.booleans(), st.integers(1, 20)),
            min_size=1,
            max_size=12,
        ).map(lambda expected_gradients: (num, expected_gradients))
    )
)
def test_a_parameter_trails_while_some_rank_lacked_it_in_the_last_backwards(
    case: tuple[int, list[tuple[set[int], bool, int]]],
) -> None:
    num, expected_gradients = case
    arrivals = ExpectedGradients(num)
    seen: list[set[int]] = []  # of each backward after which parameters might move
    for missing, may_move, repeats in expected_gradients:
        for _ in range(repeats):
            arrivals.update_deferred(missing, may_move=may_move)
            if may_move:
                seen.append(missing)
            assert arrivals.deferred == set().union(*seen[-TO_RETURN:])
