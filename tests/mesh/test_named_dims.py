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
from meshdist.mesh.placement import index_of
from meshdist.mesh.spec import NamedSharding, shardings_of_sides

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
    source, target = shardings_of_sides(text, MESH, shape, PART_SIZES)
    array = np.arange(60).reshape(shape)
    result = einops.rearrange(array, " -> ".join(ungrouped), **PART_SIZES)
    assert source.parts.shape == shape
    assert target.parts.shape == result.shape
    parts = array.reshape(source.parts.sizes)
    order = tuple(source.parts.names.index(name) for name in target.parts.names)
    for rank in range(6):
        at = MESH.coordinate_of(rank) or ()
        local = array[source.indices_map(shape)[rank]]
        here = parts[index_of(source.parts.placement.box(at))]
        assert np.array_equal(local.reshape(here.shape), here)
        # The parts of the target's shard, grouped, are its shard.
        there = parts.transpose(order)[index_of(target.parts.placement.box(at))]
        expected = result[target.indices_map(result.shape)[rank]]
        assert np.array_equal(there.reshape(expected.shape), expected)


def test_the_rest_and_the_kinds() -> None:
    text, here = "... d@tp {U:dp} -> d ... {R:dp}", {"local_shape": (3, 4, 5), "rank": 0}
    source, target = (side.parts for side in shardings_of_sides(text, MESH, None, {}, **here))
    assert source.shape == (3, 4, 15)
    assert target.shape == (15, 3, 4)
    assert target.names == ("d", "...0", "...1")
    assert source.placement.unreduced == target.placement.reduced == (0,)
    _, target = (side.parts for side in shardings_of_sides("... -> ...", MESH, (), {}))
    assert target.shape == ()
    _, right = shardings_of_sides("b s -> s b", MESH, None, {"b": 2, "s": 3})
    assert right.parts.shape == (3, 2)


@pytest.mark.parametrize(
    ("kind", "wrong", "words"),
    [
        (
            PatternError,
            lambda: shardings_of_sides("b@dp s -> s c", MESH, (3, 4), {}),
            "the sides of this pattern name different dims: column 1 of 'b@dp s -> s c'\n"
            "  where:    b@dp s -> s c\n            ^\n"
            "  expected: the same dims on both sides: s c\n"
            "  found:    'b', which the right side does not name",
        ),
        (
            PatternError,
            lambda: shardings_of_sides("b -> b ...", MESH, (3,), {}),
            "'...', which the left side does not name",
        ),
        (
            PatternError,
            lambda: shardings_of_sides("b s", MESH, (3, 4), {}),
            "this pattern has one side: column 4 of 'b s'",
        ),
        (
            PatternError,
            lambda: NamedSharding.from_pattern("b -> b", MESH, (3,)),
            "this pattern has two sides: column 3 of 'b -> b'",
        ),
        (
            PatternError,
            lambda: NamedSharding.from_pattern("b@dp,tp s", MESH, (3, 4)),
            "write b@(dp,tp)",
        ),
        (
            PatternError,
            lambda: NamedSharding.from_pattern("batch s", MESH, (3, 4), {"batsh": 3}),
            "a size is given for 'batsh', which the pattern does not name\n"
            "  where:    pattern 'batch s'\n  expected: sizes of 'batch', 's'\n"
            "  found:    batsh=3\n  fix:      did you mean 'batch'?",
        ),
        (
            KindError,
            lambda: NamedSharding.from_pattern("b", MESH, (3,), {"b": True}),
            "the size of dim 'b' must be an integer\n"
            "  where:    pattern 'b'\n  found:    True, a bool",
        ),
        (
            ShapeError,
            lambda: NamedSharding.from_pattern("b", MESH, None, {"b": -3}),
            "cannot have size -3",
        ),
        (
            ShapeError,
            lambda: shardings_of_sides("(h k) s -> h k s", MESH, (12, 4), {}),
            "the sizes of 'h', 'k' are unknown",
        ),
    ],
)
def test_refusals(kind: type[MeshdistError], wrong: Any, words: str) -> None:
    with pytest.raises(kind) as caught:
        wrong()
    assert type(caught.value) is kind
    assert words in str(caught.value)
