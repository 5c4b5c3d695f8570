"""Two meshes over the same ranks as one: every rank keeps its box on both."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from meshdist.errors import MeshError
from meshdist.mesh.layout import Layout
from meshdist.mesh.placement import DimSplit, Placement
from meshdist.sharding.refinement import refine
from tests.sharding.cases import placements, whole_array
from tests.sharding.interpreter import index_of


@st.composite
def two_meshes(draw):
    """Two groupings, in any order of axes, of one list of small axes."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=1, max_size=4))
    ranks = np.arange(math.prod(sizes)) + draw(st.integers(0, 3))
    if draw(st.booleans()):
        ranks = np.random.default_rng(draw(st.integers(0, 9))).permutation(ranks)
    meshes = []
    for letter in "ab":
        order = (
            sorted(range(len(sizes))) if letter == "a" else draw(st.permutations(range(len(sizes))))
        )
        cuts = sorted(draw(st.sets(st.integers(1, len(sizes)), max_size=3)) - {len(sizes)})
        bounds = [0, *cuts, len(sizes)]
        shape = [math.prod(sizes[i] for i in order[start:stop]) for start, stop in pairwise(bounds)]
        array = ranks.reshape(sizes).transpose(order).reshape(shape)
        meshes.append(Layout.from_ranks(array, [f"{letter}{i}" for i in range(len(shape))]))
    return meshes


@given(st.data())
def test_every_rank_keeps_its_box_and_its_copies(data):
    source, target = data.draw(two_meshes())
    try:
        both = refine(source, target)
    except MeshError:
        return  # transposed axes can interleave so that no axes describe both
    assert sorted(both.layout.ranks().ravel()) == sorted(source.ranks().ravel())
    shape = (7, 12)
    for mesh, refined in ((source, both.source_placement), (target, both.target_placement)):
        there = data.draw(placements(mesh.sizes, shape, kinds="UR", uneven=True))
        finer = refined(there)
        for rank in mesh.ranks().ravel().tolist():
            coordinate, fine = mesh.coordinate_of(rank), both.layout.coordinate_of(rank)
            assert finer.box(fine) == there.box(coordinate)
            axes = both.source_axes if mesh is source else both.target_axes
            assert set(finer.unreduced) == {p for a in there.unreduced for p in axes[a]}
            assert set(finer.reduced) == {p for a in there.reduced for p in axes[a]}
        for axis, parts in enumerate(both.source_axes if mesh is source else both.target_axes):
            for rank in mesh.ranks().ravel().tolist():
                index = 0
                for part in parts:
                    fine = both.layout.coordinate_of(rank)
                    index = index * both.layout.sizes[part] + fine[part]
                assert index == mesh.coordinate_of(rank)[axis]


def test_groupings_of_one_order_always_have_a_refinement() -> None:
    for sizes, others in [((2, 4), (4, 2)), ((8,), (2, 2, 2)), ((2, 6), (4, 3)), ((6, 2), (2, 6))]:
        both = refine(Layout.from_shape(sizes), Layout.from_shape(others))
        assert math.prod(both.layout.sizes) == math.prod(sizes)
        for axes, whole in ((both.source_axes, sizes), (both.target_axes, others)):
            found = [math.prod(both.layout.sizes[part] for part in parts) for parts in axes]
            assert found == list(whole)


def test_equal_meshes_are_their_own_refinement() -> None:
    mesh = Layout.from_shape((2, 4), ("dp", "tp"))
    assert refine(mesh, mesh).layout is mesh
    other = Layout.from_shape((2, 4), ("ep", "etp"))
    both = refine(mesh, other)
    assert both.layout.axis_text() == "dp=2, tp=4"
    assert both.source_axes == both.target_axes == ((0,), (1,))


def test_names_tell_where_an_axis_is_from() -> None:
    mesh, other = Layout.from_shape((4, 4), ("dp", "tp")), Layout.from_shape((2, 8), ("ep", "etp"))
    assert refine(mesh, other).layout.axis_text() == "ep=2, dp_etp=2, tp=4"
    assert refine(mesh, Layout.from_shape((16,))).layout.names is None
    one = Layout.from_shape((1,), ("a",)), Layout.from_shape((1, 1), ("b", "c"))
    assert refine(*one).layout.sizes == (1,)


def test_a_transposed_mesh_has_the_same_axes() -> None:
    mesh = Layout.from_shape((2, 4), ("dp", "tp"))
    both = refine(mesh, mesh.transpose(("tp", "dp")))
    assert (both.layout.sizes, both.target_axes) == ((2, 4), ((1,), (0,)))


def test_meshes_without_a_refinement_are_rejected_with_the_reason() -> None:
    with pytest.raises(MeshError) as caught:
        refine(Layout.from_shape((2, 3), ("dp", "tp")), Layout.from_shape((3, 2), ("ep", "etp")))
    assert str(caught.value) == (
        "two meshes have no common refinement\n"
        "  where:    from mesh (dp=2, tp=3) to mesh (ep=3, etp=2)\n"
        "  expected: sizes whose products, from the last axis on, divide one another\n"
        "  found:    axes that end after 2 ranks and after 3\n"
        "  fix:      reshard in two steps: first replicate the array on a mesh with one axis "
        "over all ranks"
    )


def test_meshes_over_other_ranks_are_rejected() -> None:
    with pytest.raises(MeshError) as caught:
        refine(Layout.from_shape((4,), ("dp",)), Layout.from_shape((2, 4), ("ep", "etp")))
    assert str(caught.value) == (
        "cannot move an array between meshes over different ranks\n"
        "  where:    from mesh (dp=4) to mesh (ep=2, etp=4)\n"
        "  expected: ranks 0-3\n"
        "  found:    ranks 0-7"
    )


def test_ranks_in_no_common_order_are_rejected() -> None:
    mesh = Layout.from_shape((4,), ("dp",))
    with pytest.raises(MeshError) as caught:
        refine(mesh, Layout.from_ranks([0, 2, 3, 1], ("ep",)))
    assert str(caught.value) == (
        "two meshes order their ranks so differently that no common axes describe both\n"
        "  where:    from mesh (dp=4) to mesh (ep=4)\n"
        "  expected: each axis of the target to have fixed strides in the order of the source's "
        "ranks\n"
        "  found:    ranks 0-3; and ranks 0, 2-3, 1\n"
        "  fix:      derive one mesh from the other with unflatten, flatten and transpose"
    )


def test_a_long_order_is_cut_short() -> None:
    ranks = np.random.default_rng(0).permutation(64)
    with pytest.raises(MeshError, match=r"ranks 0-15, \.\.\.; and ranks"):
        refine(Layout.from_shape((64,), ("dp",)), Layout.from_ranks(ranks, ("ep",)))


def test_uneven_cells_stay_where_they_are() -> None:
    source, target = Layout.from_shape((4,), ("a",)), Layout.from_shape((2, 2), ("b", "c"))
    there = Placement((4,), (6,), (DimSplit(6, (0,), (4,)),))
    finer = refine(source, target).source_placement(there)
    assert finer.dims[0].boundaries == (0, 2, 4, 5, 6)
    whole = whole_array((6,))
    assert np.array_equal(whole[index_of(finer.box((1, 0)))], whole[4:5])
