"""Patterns with two sides on a mesh; slicing whole arrays, and einops, are the oracle."""

from __future__ import annotations

from typing import Any

import einops
import numpy as np
import pytest
from hypothesis import given, strategies as st

from meshdist.errors import KindError, MeshdistError, PatternError, ShapeError
from meshdist.mesh.layout import Layout
from meshdist.mesh.pattern import Dim, Pattern, PatternSide
from meshdist.mesh.pattern_sizes import parse_side, regroup, size_side

MESH = Layout.from_shape((2, 3), ("dp", "tp"))
PART_SIZES = {"a": 4, "b": 5, "c": 3}


@st.composite
def grouped(draw: st.DrawFn) -> PatternSide:
    names = list(draw(st.permutations(list(PART_SIZES))))
    axes = list(draw(st.permutations(["dp", "tp"])))
    dims = []
    while names:
        size = draw(st.integers(1, len(names)))
        count = draw(st.integers(0, len(axes)))
        dims.append(Dim(tuple(names[:size]), tuple(axes[:count])))
        names, axes = names[size:], axes[count:]
        if draw(st.booleans()):
            dims.append(Dim(("1",)))
    return PatternSide(tuple(dims))


@given(grouped(), grouped())
def test_parts_lie_where_slices_of_the_whole_do(left: PatternSide, right: PatternSide) -> None:
    text = str(Pattern((left,), right))
    ungrouped = [" ".join(str(Dim(dim.names)) for dim in side.dims) for side in (left, right)]
    shape = tuple(
        int(np.prod([PART_SIZES.get(name, 1) for name in dim.names])) for dim in left.dims
    )
    found = regroup(text, MESH, shape=shape, sizes=PART_SIZES)
    array = np.arange(60).reshape(shape)
    result = einops.rearrange(array, " -> ".join(ungrouped), **PART_SIZES)
    assert found.source.shape == shape
    assert found.target.shape == result.shape
    parts = array.reshape(found.source.part_sizes)
    for rank in range(6):
        at = MESH.coordinate_of(rank) or ()
        local = array[found.source.sharding.indices_map(shape)[rank]]
        here = parts[tuple(slice(*one) for one in found.placement.box(at))]
        assert np.array_equal(local.reshape(here.shape), here)
        # What the move leaves here, put in the target's order and grouped anew, is its shard.
        there = parts[tuple(slice(*one) for one in found.target_placement.box(at))]
        moved = there.transpose(found.order)
        expected = result[found.target.sharding.indices_map(result.shape)[rank]]
        assert np.array_equal(moved.reshape(expected.shape), expected)
    assert found.is_reordered == (
        tuple(found.order) != (0, 1, 2) or found.source.counts != found.target.counts
    )


def test_the_rest_and_the_kinds() -> None:
    found = regroup("... d@tp {U:dp} -> d ... {R:dp}", MESH, rank=0, local_shape=(3, 4, 5))
    assert found.source.shape == (3, 4, 15)
    assert found.target.shape == (15, 3, 4)
    assert found.order == (2, 0, 1)
    assert found.is_reordered
    assert found.placement.unreduced == found.target_placement.reduced == (0,)
    assert found.target_placement.shape == found.placement.shape == (3, 4, 15)
    assert not regroup("b@dp s -> b s@tp", MESH, shape=(4, 4)).is_reordered
    assert regroup(" -> ", MESH, shape=()).target_placement.shape == ()
    assert regroup("b s -> s b", MESH, sizes={"b": 2, "s": 3}).target.shape == (3, 2)


def test_answers_are_kept() -> None:
    def ask() -> tuple[Any, Any]:
        mesh = Layout.from_shape((2, 3), ("dp", "tp"))
        return (
            regroup("b@dp s -> b s@tp", mesh, rank=1, local_shape=(2, 3), sizes={"b": 4}),
            size_side("b@dp s", mesh, rank=1, local_shape=(2, 3), sizes={"b": 4}),
        )

    assert all(one is other for one, other in zip(ask(), ask(), strict=True))


@pytest.mark.parametrize(
    ("kind", "wrong", "words"),
    [
        (
            PatternError,
            lambda: regroup("b@dp s -> s c", MESH, shape=(3, 4)),
            "the sides of this pattern name different dims: column 1 of 'b@dp s -> s c'\n"
            "  where:    b@dp s -> s c\n            ^\n"
            "  expected: the same dims on both sides: s c\n"
            "  found:    'b', which the right side does not name",
        ),
        (
            PatternError,
            lambda: regroup("b -> b ...", MESH, shape=(3,)),
            "'...', which the left side does not name",
        ),
        (
            PatternError,
            lambda: regroup("b s", MESH, shape=(3, 4)),
            "this pattern has one side: column 4 of 'b s'",
        ),
        (
            PatternError,
            lambda: size_side("b -> b", MESH, shape=(3,)),
            "this pattern has two sides: column 3 of 'b -> b'",
        ),
        (PatternError, lambda: parse_side("b@dp,tp s"), "write b@(dp,tp)"),
        (
            PatternError,
            lambda: size_side("batch s", MESH, shape=(3, 4), sizes={"batsh": 3}),
            "a size is given for 'batsh', which the pattern does not name\n"
            "  where:    pattern 'batch s'\n  expected: sizes of 'batch', 's'\n"
            "  found:    batsh=3\n  fix:      did you mean 'batch'?",
        ),
        (
            KindError,
            lambda: size_side("b", MESH, shape=(3,), sizes={"b": True}),
            "the size of dim 'b' must be a whole number\n"
            "  where:    pattern 'b'\n  found:    True, a bool",
        ),
        (ShapeError, lambda: size_side("b", MESH, sizes={"b": -3}), "cannot have size -3"),
        (
            ShapeError,
            lambda: regroup("(h k) s -> h k s", MESH, shape=(12, 4)),
            "the sizes of 'h', 'k' are not known",
        ),
    ],
)
def test_refusals(kind: type[MeshdistError], wrong: Any, words: str) -> None:
    with pytest.raises(kind) as caught:
        wrong()
    assert type(caught.value) is kind
    assert words in str(caught.value)
