"""Plain forms are checked here; the texts of the errors where users meet them, in test_layout."""

from __future__ import annotations

import numpy as np
import pytest

from meshdist.errors import AxisError, KindError, MeshError
from meshdist.mesh.layout_arguments import (
    checked_modes,
    checked_names,
    checked_ranks,
    checked_sizes,
    inferred_sizes,
    num_ranks_text,
)


def test_names_become_a_tuple():
    assert checked_names(["dp", "tp"], 2) == ("dp", "tp")
    assert checked_names(None, 2) is None
    with pytest.raises(AxisError) as caught:
        checked_names(("8way",), 1, "make_mesh")
    assert str(caught.value) == (
        "'8way' is not a valid axis name\n"
        "  where:    make_mesh\n"
        "  expected: letters, digits and underscores, not beginning with a digit"
    )


def test_sizes_become_a_tuple_of_python_ints():
    sizes = checked_sizes(np.array([2, -1]), "mesh shape")
    assert sizes == (2, -1)
    assert all(type(size) is int for size in sizes)
    assert checked_sizes(4, "mesh shape") == (4,)
    with pytest.raises(KindError, match=r"mesh shape '24': sizes must be integers"):
        checked_sizes("24", "mesh shape")


@pytest.mark.parametrize(
    ("sizes", "whole", "expected"),
    [((2, -1), 8, (2, 4)), ((-1,), 5, (5,)), ((-1, 8), 8, (1, 8)), ((3, 3), 8, (3, 3))],
)
def test_one_size_is_inferred(sizes, whole, expected):
    assert inferred_sizes(sizes, whole, "mesh shape", "a world") == expected


def test_a_world_smaller_than_the_known_sizes_cannot_be_divided():
    with pytest.raises(MeshError) as caught:
        inferred_sizes((16, -1), 8, "mesh shape", "a world of 8 ranks")
    assert str(caught.value) == (
        "mesh shape (16, -1) does not divide a world of 8 ranks\n"
        "  expected: the known sizes' product, 16, to divide 8\n"
        "  found:    8 = 16 x 0 + 8"
    )


def test_ranks_become_an_integer_array():
    array = checked_ranks([[3, 1], [2, 0]], world_size=4)
    assert array.dtype == np.int64
    assert array.tolist() == [[3, 1], [2, 0]]
    assert checked_ranks(np.arange(3, dtype=np.uint8)).dtype == np.int64
    with pytest.raises(KindError, match="array of bool"):
        checked_ranks([True, False])


def test_modes_take_their_normal_form():
    assert checked_modes([(1, 7), (2, 2), (2, 1)]) == ((4, 1),)


def test_counts_of_ranks_read_well():
    assert (num_ranks_text(1), num_ranks_text(4)) == ("1 rank", "4 ranks")
