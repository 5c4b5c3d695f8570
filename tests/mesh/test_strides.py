"""The oracle is the list of places that nested loops over the modes visit."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings, strategies as st

from meshdist.mesh.strides import (
    coalesced,
    common_origin,
    displacement,
    is_nested,
    positions_of,
    size_of,
    split,
    strided_modes,
)

quick = settings(max_examples=80)
some_modes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12)), max_size=3).map(tuple)


def visited(modes, start=0):
    """Places in the order of nested loops, the first mode outermost."""
    if not modes:
        return [start]
    (size, stride), *inner = modes
    return [place for i in range(size) for place in visited(inner, start + i * stride)]


@st.composite
def nested_axes(draw):
    """Modes cut from a row-major grid, dealt out to up to three axes in any order."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    modes = draw(st.permutations(list(zip(sizes, strides, strict=True))))
    owner = [draw(st.integers(0, 2)) for _ in modes]
    return [
        coalesced(mode for mode, axis in zip(modes, owner, strict=True) if axis == index)
        for index in range(3)
    ]


@quick
@given(some_modes)
def test_an_axis_visits_the_places_of_its_nested_loops(modes):
    places = visited(modes)
    assert size_of(modes) == len(places)
    assert [displacement(modes, index) for index in range(len(places))] == places
    short = coalesced(modes)
    assert visited(short) == places
    assert coalesced(short) == short
    assert len(short) <= len(modes)
    assert all(size > 1 for size, _ in short)


@quick
@given(some_modes)
def test_nested_strides_never_visit_a_place_twice(modes):
    places = visited(modes)
    if is_nested(modes):
        assert len(set(places)) == len(places)
    if len(set(places)) < len(places):
        assert not is_nested(modes)


def test_interleaved_strides_are_not_nested():
    assert is_nested([(2, 4), (4, 1)])
    assert not is_nested([(2, 3), (3, 2)])  # 0 2 4 3 5 7: distinct, yet no digits of one number
    assert not is_nested([(2, 1), (2, 1)])


@quick
@given(nested_axes(), st.integers(0, 5))
def test_strided_modes_is_the_inverse_of_places_of(axes, offset):
    places = positions_of(offset, axes)
    assert places.shape == tuple(map(size_of, axes))
    assert places.ravel().tolist() == [
        offset + a + b + c for a in visited(axes[0]) for b in visited(axes[1])
        for c in visited(axes[2])
    ]  # fmt: skip
    assert strided_modes(places) == tuple(axes)


def test_arrays_that_no_strides_describe():
    assert strided_modes(np.array([1, 0])) is None
    assert strided_modes(np.array([0, 1, 3])) is None
    assert strided_modes(np.array([0, 1, 2, 3, 5, 6])) is None
    assert strided_modes(np.array([[0, 1], [2, 4]])) is None
    assert strided_modes(np.array([[0, 2, 4], [3, 5, 7]])) is None
    assert strided_modes(np.array([0, 1, 4, 5])) == (((2, 4), (2, 1)),)


@quick
@given(nested_axes(), st.data())
def test_split_reads_the_same_places_in_rows(axes, data):
    axis = axes[0]
    size = size_of(axis)
    major = data.draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
    parts = split(axis, (major, size // major))
    if parts is not None:
        rows = positions_of(0, parts)
        assert rows.shape == (major, size // major)
        assert rows.ravel().tolist() == visited(axis)
    else:  # then indeed no strides give these rows
        assert strided_modes(np.array(visited(axis)).reshape(major, -1)) is None


@quick
@given(nested_axes(), st.integers(0, 40), st.integers(0, 40))
def test_common_origin_is_where_two_parts_meet(axes, offset, other):
    ours, theirs = axes[:2], axes[2:]
    a = set(positions_of(offset, ours).ravel().tolist())
    b = set(positions_of(other, theirs).ravel().tolist())
    origin = common_origin(offset, ours, other, theirs)
    if origin is None:
        assert not a & b
        return
    (meeting,) = a & b
    joint = positions_of(origin, [*ours, *theirs])
    assert meeting in joint
    assert a <= set(joint.ravel().tolist())
    assert b <= set(joint.ravel().tolist())
