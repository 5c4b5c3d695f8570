"""Who saves what: pieces tile each array, each byte once, and writers share the bytes evenly."""

from __future__ import annotations

import math
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from meshdist.checkpoint import pieces
from meshdist.checkpoint.pieces import (
    Holding,
    find_fault,
    holding_of,
    intersect,
    own_parts,
    parts_of,
    whole_box,
    within,
)
from meshdist.mesh.placement import Box, volume

from .states import Case, Lying, cases, layout_of


def parts_by_rank(case: Case) -> dict[int, dict[str, Box]]:
    layout = layout_of(case.saves)
    found = {}
    for rank in range(math.prod(case.saves)):
        found[rank] = parts_of(
            {
                name: holding_of(lying.sharding(layout), shape, 4, rank)
                for name, (shape, _, lying, _) in case.arrays.items()
            }
        )
    return found


@given(cases())
def test_pieces_make_each_array_and_lie_in_what_their_rank_holds(case: Case) -> None:
    layout = layout_of(case.saves)
    parts = parts_by_rank(case)
    for name, (shape, _, lying, _) in case.arrays.items():
        sharding = lying.sharding(layout)
        pieces = []
        for rank, of_rank in parts.items():
            if name in of_rank:
                held = sharding.box(rank, shape)
                inside = within(of_rank[name], held)
                assert all(0 <= a <= b for a, b in inside)
                assert volume(of_rank[name]) <= volume(held)
                pieces.append(of_rank[name])
        assert find_fault(shape, pieces) == ""


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 3000)), min_size=1, max_size=30),
)
def test_replicas_write_the_mean_but_for_a_row_or_a_small_array(
    replicas: int, shapes: list[tuple[int, int]]
) -> None:
    boxes = [(whole_box(shape), 4) for shape in shapes]
    written = []
    for replica in range(replicas):
        parts = own_parts(boxes, replica, replicas)
        written.append(sum(4 * volume(part) for part in parts if part is not None))
    mean = sum(written) / replicas
    row = max(4 * min(shape) for shape in shapes)
    assert max(written) <= mean + max(row, 64 << 10)
    assert max(written) <= 1.05 * mean + (1 << 20)


def test_states_of_other_replicas_are_shared_by_themselves() -> None:
    layout = layout_of((2, 2))
    case = Case(
        (2, 2),
        (1,),
        {
            f"x{n}": ((400, 1000), "float32", Lying(dims), Lying(((), ())))
            for n, dims in enumerate([((), ()), ((0,), ()), ((), (1,)), ((0,), (1,)), ((1, 0), ())])
        },
    )
    written = [
        sum(4 * volume(box) for box in parts.values()) for parts in parts_by_rank(case).values()
    ]
    assert sum(written) == 5 * 1_600_000
    assert max(written) <= 1.05 * sum(written) / 4
    assert layout.sizes == (2, 2)


def test_thousands_of_small_arrays_are_shared_too() -> None:
    counts = []
    for replica in range(7):
        holdings = {f"x{n}": Holding(whole_box((512,)), 4, "all", replica, 7) for n in range(2000)}
        counts.append(len(parts_of(holdings)))
    assert sum(counts) == 2000 and max(counts) - min(counts) <= 1


boxes_of_three = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda p: tuple(sorted(p))),
    min_size=2,
    max_size=2,
).map(tuple)


@given(boxes_of_three, boxes_of_three)
def test_an_intersection_has_what_both_have(first: Box, second: Box) -> None:
    def cells(box: Box) -> set[tuple[int, int]]:
        return {(i, j) for i in range(*box[0]) for j in range(*box[1])}

    common = intersect(first, second)
    assert (set() if common is None else cells(common)) == cells(first) & cells(second)


@given(st.lists(boxes_of_three, max_size=5))
def test_a_fault_is_found_just_where_cells_are_missing_or_met_twice(boxes: list[Box]) -> None:
    met = [(i, j) for box in boxes for i in range(*box[0]) for j in range(*box[1])]
    is_whole = sorted(met) == [(i, j) for i in range(6) for j in range(6)]
    assert (find_fault((6, 6), boxes) == "") == is_whole


@pytest.mark.parametrize(
    ("boxes", "text"),
    [
        ([((0, 7),)], "piece [0:7] is outside (6,)"),
        ([((0, 4),), ((2, 6),)], "pieces [0:4] and [2:6] overlap"),
        ([((0, 4),)], "pieces have 4 of 6 elements"),
        ([], "pieces have 0 of 6 elements"),
    ],
)
def test_faults_are_told(boxes: list[Box], text: str) -> None:
    assert find_fault((6,), boxes) == text


def test_columns_of_a_thousand_ranks_are_compared_with_their_neighbours_alone() -> None:
    columns = [((0, 8), (column, column + 2)) for column in range(0, 2000, 2)]
    with mock.patch.object(pieces, "intersect", side_effect=intersect) as compared:
        assert find_fault((8, 2000), columns[::-1]) == ""
        assert compared.call_count == 0
        assert find_fault((8, 2000), [*columns, ((2, 4), (6, 7))]) == (
            "pieces [2:4, 6:7] and [0:8, 6:8] overlap"
        )
