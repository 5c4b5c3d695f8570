"""The oracle is NumPy: an array of ranks, and short loops over its coordinates."""

from __future__ import annotations

import itertools
import math
import pickle
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from meshdist.errors import AxisError, KindError, MeshError, NotInGroupError
from meshdist.mesh.layout import Layout

NAMES = ("dp", "tp", "pp", "cp")
quick = settings(max_examples=80)


@st.composite
def meshes(draw, min_axes=1, max_axes=4, max_size=4):
    """A layout with the array of ranks that it must equal."""
    shape = tuple(draw(st.lists(st.integers(1, max_size), min_size=min_axes, max_size=max_axes)))
    names = draw(st.sampled_from([None, NAMES[: len(shape)]]))
    count = math.prod(shape)
    kind = draw(st.sampled_from(["shape", "ranks", "transposed", "spread", "permuted"]))
    array = np.arange(count).reshape(shape)
    if kind == "shape":
        return Layout.from_shape(shape, names), array
    if kind == "transposed":
        order = draw(st.permutations(range(len(shape))))
        layout = Layout.from_shape(shape, names).transpose(order)
        return layout, array.transpose(order)
    if kind == "spread":
        array = array * draw(st.integers(1, 3)) + draw(st.integers(0, 5))
    if kind == "permuted":
        pool = draw(st.permutations(range(count + draw(st.integers(0, 3)))))
        array = np.array(pool[:count]).reshape(shape)
    return Layout.from_ranks(array, names), array


def axes_of(layout, indices):
    """The axes by name where there are names, else by index."""
    return tuple(indices) if layout.names is None else tuple(layout.names[i] for i in indices)


def line_through(array, coordinate, indices):
    """The ranks at all coordinates that differ from ``coordinate`` along ``indices`` only."""
    shape = tuple(array.shape[i] for i in indices)
    out = np.empty(shape, dtype=np.int64)
    for point in itertools.product(*map(range, shape)):
        at = list(coordinate)
        for index, value in zip(indices, point, strict=True):
            at[index] = value
        out[point] = array[tuple(at)]
    return out


def same(layout, array):
    return layout.sizes == array.shape and np.array_equal(layout.ranks(), array)


# ------------------------------------------------------------------ ranks, coordinates, groups


@quick
@given(meshes())
def test_ranks_and_coordinates_are_those_of_the_array(mesh):
    layout, array = mesh
    assert same(layout, array)
    assert layout.ndim == array.ndim
    assert layout.num_ranks == array.size
    assert layout.largest_rank == array.max()
    held = set()
    for coordinate in np.ndindex(array.shape):
        rank = int(array[coordinate])
        held.add(rank)
        assert layout.coordinate_of(rank) == coordinate
        assert layout.rank_at(coordinate) == rank
    for rank in set(range(-2, int(array.max()) + 3)) - held:
        assert layout.coordinate_of(rank) is None


@quick
@given(meshes(), st.data())
def test_coordinate_along_an_axis_is_the_place_in_its_group(mesh, data):
    layout, array = mesh
    rank = int(data.draw(st.sampled_from(array.ravel().tolist())))
    coordinate = layout.coordinate_of(rank)
    for index, axis in enumerate(axes_of(layout, range(array.ndim))):
        group = layout.ranks_of_axis(axis, rank)
        assert group == tuple(line_through(array, coordinate, (index,)).tolist())
        assert group.index(rank) == coordinate[index]
        assert layout.ranks_of_axis(index - array.ndim, rank) == group


@quick
@given(meshes(), st.data())
def test_groups_over_several_axes_are_row_major_in_the_order_given(mesh, data):
    layout, array = mesh
    indices = data.draw(st.permutations(range(array.ndim)))
    indices = indices[: data.draw(st.integers(1, array.ndim))]
    axes = axes_of(layout, indices)
    groups = set()
    for rank in array.ravel().tolist():
        group = layout.ranks_of_axes(axes, rank)
        expected = line_through(array, layout.coordinate_of(rank), indices)
        assert group == tuple(expected.ravel().tolist())
        groups.add(group)
    listed = layout.groups_of_axes(axes)
    assert set(listed) == groups
    assert sorted(itertools.chain(*listed)) == sorted(array.ravel().tolist())


def test_all_groups_of_the_documented_mesh():
    mesh = Layout.from_ranks([[0, 1, 2, 3], [4, 5, 6, 7]])
    assert mesh.groups_of_axis(0) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups_of_axis(1) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert [mesh.coordinate_of(rank)[0] for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [mesh.coordinate_of(rank)[1] for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


# ------------------------------------------------------------------ operations


@quick
@given(meshes(), st.data())
def test_slice_in_any_order_is_the_line_through_the_rank(mesh, data):
    layout, array = mesh
    rank = int(data.draw(st.sampled_from(array.ravel().tolist())))
    order = data.draw(st.permutations(range(array.ndim)))
    indices = order[: data.draw(st.integers(1, array.ndim))]
    part = layout.slice(axes_of(layout, indices), rank)
    assert same(part, line_through(array, layout.coordinate_of(rank), indices))
    assert part.names == (None if layout.names is None else axes_of(layout, indices))
    again = data.draw(st.permutations(range(len(indices))))
    again = again[: data.draw(st.integers(1, len(indices)))]
    chosen = [indices[i] for i in again]
    assert part.slice(axes_of(part, again), rank) == layout.slice(axes_of(layout, chosen), rank)


@quick
@given(meshes(), st.data())
def test_transpose_is_numpys_and_has_an_inverse(mesh, data):
    layout, array = mesh
    order = data.draw(st.permutations(range(array.ndim)))
    turned = layout.transpose(axes_of(layout, order))
    assert same(turned, array.transpose(order))
    assert turned.transpose(np.argsort(order).tolist()) == layout


@quick
@given(meshes(), st.data())
def test_flatten_joins_axes_row_major_at_the_place_of_the_first(mesh, data):
    layout, array = mesh
    order = data.draw(st.permutations(range(array.ndim)))
    indices = order[: data.draw(st.integers(1, array.ndim))]
    flat = layout.flatten(axes_of(layout, indices), None if layout.names is None else "all")
    others = [i for i in range(array.ndim) if i not in indices]
    place = sum(i < indices[0] for i in others)
    moved = array.transpose(others[:place] + indices + others[place:])
    sizes = [array.shape[i] for i in others]
    joined = math.prod(array.shape[i] for i in indices)
    assert same(flat, moved.reshape(*sizes[:place], joined, *sizes[place:]))
    names = [axes_of(layout, [i])[0] for i in others]
    if layout.names is not None:
        assert flat.names == (*names[:place], "all", *names[place:])
    rank = int(data.draw(st.sampled_from(array.ravel().tolist())))
    assert flat.ranks_of_axis(place, rank) == layout.ranks_of_axes(indices, rank)


@quick
@given(meshes(), st.data())
def test_unflatten_undoes_flatten(mesh, data):
    layout, array = mesh
    begin = data.draw(st.integers(0, array.ndim - 1))
    end = data.draw(st.integers(begin + 1, array.ndim))
    run = range(begin, end)
    flat = layout.flatten(axes_of(layout, run), None if layout.names is None else "all")
    names = None if layout.names is None else layout.names[begin:end]
    sizes = list(array.shape[begin:end])
    assert flat.unflatten(begin, sizes, names) == layout
    sizes[data.draw(st.integers(0, len(sizes) - 1))] = -1
    assert flat.unflatten(begin, sizes, names) == layout


@quick
@given(meshes(), st.data())
def test_unflatten_of_a_flattened_axis_into_other_sizes_is_reshape(mesh, data):
    layout, array = mesh
    order = data.draw(st.permutations(range(array.ndim)))
    flat = layout.flatten(axes_of(layout, order), None if layout.names is None else "all")
    divisors = [d for d in range(1, array.size + 1) if array.size % d == 0]
    major = data.draw(st.sampled_from(divisors))
    names = None if layout.names is None else ("a", "b")
    split = flat.unflatten(0, (major, -1), names)
    assert same(split, array.transpose(order).reshape(major, -1))
    for rank in array.ravel().tolist():
        assert split.rank_at(split.coordinate_of(rank)) == rank


def test_unflatten_where_no_strides_fit_places_the_ranks_one_by_one():
    mesh = Layout.from_shape((2, 4, 3)).flatten((0, 2))  # 0 1 2 | 12 13 14 along the joined axis
    split = mesh.unflatten(0, (3, 2))
    expected = mesh.ranks().reshape(3, 2, 4)
    assert same(split, expected)
    assert split.rank_map is not None
    assert split.flatten((0, 1)) == mesh
    assert hash(split.flatten((0, 1))) == hash(mesh)


@quick
@given(meshes(), st.data())
def test_concatenated_slices_are_the_slice_of_all(mesh, data):
    layout, array = mesh
    rank = int(data.draw(st.sampled_from(array.ravel().tolist())))
    order = data.draw(st.permutations(range(array.ndim)))
    indices = order[: data.draw(st.integers(1, array.ndim))]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(indices)))) - {len(indices)})
    runs = [indices[a:b] for a, b in itertools.pairwise([0, *cuts, len(indices)])]
    parts = [layout.slice(axes_of(layout, run), rank) for run in runs]
    assert Layout.concatenate(parts) == layout.slice(axes_of(layout, indices), rank)


@quick
@given(meshes(min_axes=2), st.data())
def test_slices_through_different_ranks_join_only_where_they_meet(mesh, data):
    layout, array = mesh
    one, two = (int(data.draw(st.sampled_from(array.ravel().tolist()))) for _ in range(2))
    parts = [layout.slice((0,), one), layout.slice((1,), two)]
    shared = set(layout.ranks_of_axis(0, one)) & set(layout.ranks_of_axis(1, two))
    if shared:
        assert Layout.concatenate(parts) == layout.slice((0, 1), shared.pop())
    else:
        with pytest.raises(MeshError, match="share no rank"):
            Layout.concatenate(parts)


def test_views_of_one_world_join_where_their_axes_do_not_overlap():
    world = Layout.from_shape((8,), ("world",))
    dense = world.unflatten("world", (2, 4), ("dp", "tp"))
    expert = world.unflatten("world", (4, 2), ("ep", "etp"))
    joined = Layout.concatenate([dense.slice("dp", 5), expert.slice("etp", 5)])
    assert joined.names == ("dp", "etp")
    assert joined.ranks().tolist() == [[0, 1], [4, 5]]
    with pytest.raises(MeshError, match="overlap"):
        Layout.concatenate([dense.slice("tp", 5), expert.slice("ep", 5)])


@quick
@given(meshes(), st.data())
def test_one_axis_flattened_only_takes_the_new_name(mesh, data):
    layout, array = mesh
    index = data.draw(st.integers(0, array.ndim - 1))
    same_ranks = layout.flatten((index,), None if layout.names is None else "new")
    assert same(same_ranks, array)
    if layout.names is not None:
        assert same_ranks.names == (*layout.names[:index], "new", *layout.names[index + 1 :])


# ------------------------------------------------------------------ equality, repr, pickling


@quick
@given(meshes(), st.data())
def test_equal_layouts_are_equal_however_they_were_made(mesh, data):
    layout, array = mesh
    placed = Layout.from_ranks(array.copy(), layout.names)
    root = Layout.from_ranks(np.concatenate([array[None], array[None] + array.max() + 1]))
    part = root.slice(range(1, array.ndim + 1), int(array.flat[0]))
    if layout.names is not None:
        part = Layout(part.modes, layout.names, part.offset, part.rank_map)
    for other in (placed, part, pickle.loads(pickle.dumps(layout)), eval(repr(layout))):
        assert other == layout
        assert hash(other) == hash(layout)
        assert other.coordinate_of(int(array.flat[-1])) == layout.coordinate_of(int(array.flat[-1]))
    order = data.draw(st.permutations(array.ravel().tolist()))
    assume(order != array.ravel().tolist())
    assert Layout.from_ranks(np.reshape(order, array.shape), layout.names) != layout


def test_names_sizes_and_ranks_all_count_for_equality():
    mesh = Layout.from_shape((2, 2), ("dp", "tp"))
    assert mesh != Layout.from_shape((2, 2), ("tp", "dp"))
    assert mesh != Layout.from_shape((2, 2))
    assert mesh != Layout.from_shape((2, 2, 1), ("dp", "tp", "pp"))
    assert mesh != Layout.from_ranks([[0, 2], [1, 3]], ("dp", "tp"))
    assert mesh != Layout.from_ranks([[1, 2], [3, 4]], ("dp", "tp"))
    assert mesh != "mesh"
    assert len({mesh, Layout.from_ranks([[0, 1], [2, 3]], ["dp", "tp"])}) == 1


def test_repr_can_be_retyped():
    small = Layout.from_shape((2, 4), ("dp", "tp"))
    assert repr(small) == "Layout.from_shape((2, 4), names=('dp', 'tp'))"
    assert repr(Layout.from_shape((3,))) == "Layout.from_shape((3,))"
    assert repr(small.slice("dp", 5)) == "Layout.from_ranks([1, 5], names=('dp',))"
    large = Layout.from_shape((128, 16, 8), ("pp", "dp", "tp"))
    part = large.slice(("pp",), 77)
    assert repr(part) == "Layout((((128, 128),),), names=('pp',), offset=77)"
    assert eval(repr(part)) == part
    shuffled = Layout.from_ranks([3, 1, 0])
    assert repr(shuffled) == "Layout.from_ranks([3, 1, 0])"


def test_modes_have_one_normal_form():
    mesh = Layout((((2, 4), (1, 9), (2, 2), (2, 1)), ((1, 5),)))
    assert mesh.modes == (((8, 1),), ())
    assert mesh == Layout.from_shape((8, 1))
    flat = Layout.from_shape((2, 3, 4)).flatten((0, 2))
    assert flat.modes == (((2, 12), (4, 1)), ((3, 4),))


def test_layouts_are_immutable():
    mesh = Layout.from_shape((2, 2))
    with pytest.raises(AttributeError, match="offset"):
        mesh.offset = 1
    mesh.ranks()[:] = -1
    assert mesh.ranks().tolist() == [[0, 1], [2, 3]]


def test_text_of_axes_and_coordinates():
    mesh = Layout.from_shape((2, 4), ("dp", "tp"))
    assert mesh.axis_text() == "dp=2, tp=4"
    assert mesh.coordinate_text(5) == "dp=1, tp=1"
    assert mesh.coordinate_text(8) == "outside the mesh"
    assert mesh.axis_sizes == {"dp": 2, "tp": 4}
    assert list(mesh.axis_sizes) == ["dp", "tp"]
    unnamed = Layout.from_shape((2, 4))
    assert unnamed.axis_text() == "2, 4"
    assert unnamed.coordinate_text(5) == "1, 1"


def test_sizes_of_one_are_ordinary_axes():
    mesh = Layout.from_shape((1, 2, 1), ("a", "b", "c"))
    assert mesh.coordinate_of(1) == (0, 1, 0)
    assert mesh.ranks_of_axis("a", 1) == (1,)
    assert mesh.slice("c", 1).ranks().tolist() == [1]
    assert mesh.flatten(("a", "c")).sizes == (1, 2)
    assert Layout.concatenate([mesh.slice("a", 1), mesh.slice("b", 1)]).sizes == (1, 2)
    with pytest.raises(MeshError, match="share no rank"):
        Layout.concatenate([mesh.slice("a", 0), mesh.slice("c", 1)])


def test_sizes_from_the_world():
    assert Layout.from_shape((2, -1), world_size=8).sizes == (2, 4)
    assert Layout.from_shape((-1,), world_size=8).sizes == (8,)
    assert Layout.from_shape((2, 2), world_size=8).num_ranks == 4
    assert Layout.from_shape(np.array([2, 4])).sizes == (2, 4)
    assert Layout.from_shape(4).sizes == (4,)


def test_ranks_of_sixteen_thousand_cost_less_than_half_a_millisecond():
    def once():
        start = time.perf_counter()
        mesh = Layout.from_shape((128, 16, 8), ("pp", "dp", "tp"))
        mesh.coordinate_of(9999)
        for axis in mesh.names:
            mesh.ranks_of_axis(axis, 9999)
        return time.perf_counter() - start

    assert min(once() for _ in range(50)) < 0.5e-3


def test_tensors_are_accepted():
    import torch

    ranks = torch.tensor([[3, 1], [0, 2]])
    assert Layout.from_ranks(ranks, ("a", "b")).ranks().tolist() == ranks.tolist()


# ------------------------------------------------------------------ errors

MESH = Layout.from_shape((2, 4), ("dp", "tp"))
PLAIN = Layout.from_shape((2, 4))


def text_of(kind, call):
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (
            lambda: Layout.from_shape((2, 0)),
            MeshError,
            """\
mesh shape (2, 0) has a size of 0
  expected: sizes of 1 or more, or one -1, which is inferred""",
        ),
        (
            lambda: Layout.from_shape((2, -3)),
            MeshError,
            """\
mesh shape (2, -3) has a size of -3
  expected: sizes of 1 or more, or one -1, which is inferred""",
        ),
        (
            lambda: Layout.from_shape((-1, -1), world_size=4),
            MeshError,
            """\
mesh shape (-1, -1) has -1 more than once
  expected: at most one -1, since only one size can be inferred""",
        ),
        (
            lambda: Layout.from_shape((3, -1), world_size=8),
            MeshError,
            """\
mesh shape (3, -1) does not divide a world of 8 ranks
  expected: the known sizes' product, 3, to divide 8
  found:    8 = 3 x 2 + 2""",
        ),
        (
            lambda: Layout.from_shape((2, -1)),
            MeshError,
            """\
mesh shape (2, -1) has a -1, and world_size is not given
  fix:      write the size out, or pass world_size=""",
        ),
        (
            lambda: Layout.from_shape((4, 4), world_size=8),
            MeshError,
            """\
mesh shape (4, 4) needs 16 ranks, more than the world has
  expected: at most 8 ranks
  found:    4 x 4 = 16
  fix:      start 16 ranks, or make an axis smaller (one may be -1)""",
        ),
        (
            lambda: Layout.from_shape(()),
            MeshError,
            """\
mesh shape () is empty
  expected: at least one size""",
        ),
        (
            lambda: Layout.from_shape((2, 1.5)),
            KindError,
            """\
mesh shape (2, 1.5): sizes must be integers
  expected: such as (2, 4)""",
        ),
        (
            lambda: Layout.from_ranks([[0, 1], [1, 2]]),
            MeshError,
            """\
rank 1 is in the mesh more than once
  expected: each rank at one coordinate
  found:    rank 1 at coordinates (0, 1), (1, 0)""",
        ),
        (
            lambda: Layout.from_ranks([[0, 1], [-2, 3]]),
            MeshError,
            """\
rank -2 cannot be in a mesh
  expected: global ranks of 0 or more
  found:    -2 at coordinate (1, 0)""",
        ),
        (
            lambda: Layout.from_ranks([0, 5], world_size=4),
            MeshError,
            """\
the mesh names rank 5, which does not exist in the world
  expected: ranks from 0 to 3
  found:    5 at coordinate (1,)
  fix:      start 6 ranks, or use fewer""",
        ),
        (
            lambda: Layout.from_ranks([0.0, 1.0]),
            KindError,
            """\
the ranks of a mesh must be integers
  expected: integers
  found:    an array of float64""",
        ),
        (
            lambda: Layout.from_ranks([[0, 1], [2]]),
            MeshError,
            """\
the ranks of a mesh do not form a grid
  expected: rows of equal length
  found:    [[0, 1], [2]]""",
        ),
        (
            lambda: Layout.from_ranks([]),
            MeshError,
            """\
a mesh must have at least one rank
  expected: sizes of 1 or more
  found:    an array of shape (0,)""",
        ),
        (
            lambda: Layout.from_ranks(3),
            MeshError,
            """\
the ranks of a mesh must have at least one dim
  expected: an array such as [0, 1, 2, 3] or [[0, 1], [2, 3]]
  found:    3""",
        ),
        (
            lambda: Layout.from_shape((2, 2), ("dp", "dp")),
            AxisError,
            """\
axis name 'dp' is used twice
  expected: a different name for each axis
  found:    axis names ('dp', 'dp')""",
        ),
        (
            lambda: Layout.from_shape((2, 2), ("dp",)),
            AxisError,
            """\
the number of axis names does not match the number of axes
  expected: one name per axis, 2 in all
  found:    names ('dp',)
  fix:      pass as many names as axes""",
        ),
        (
            lambda: Layout.from_shape((2, 2), ("dp", "")),
            AxisError,
            """\
'' is not a valid axis name
  where:    axis names ('dp', '')
  expected: letters, digits and underscores, not beginning with a digit""",
        ),
        (
            lambda: Layout.from_shape((2,), ("dp-shard",)),
            AxisError,
            """\
'dp-shard' is not a valid axis name
  where:    axis names ('dp-shard',)
  expected: letters, digits and underscores, not beginning with a digit
  fix:      rename it to 'dp_shard'""",
        ),
        (
            lambda: Layout.from_shape((2,), "dp"),
            AxisError,
            """\
axis names must be a tuple of strings, not the string 'dp'
  fix:      write ('dp',) for one axis""",
        ),
        (
            lambda: Layout.from_shape((2,), 7),
            AxisError,
            "axis names must be a tuple of strings, not 7",
        ),
        (
            lambda: MESH.slice("TP", 0),
            AxisError,
            """\
no axis 'TP' in the mesh
  where:    mesh (dp=2, tp=4)
  expected: one of 'dp', 'tp'
  fix:      did you mean 'tp'?""",
        ),
        (
            lambda: MESH.axis_index("ep"),
            AxisError,
            """\
no axis 'ep' in the mesh
  where:    mesh (dp=2, tp=4)
  expected: one of 'dp', 'tp'""",
        ),
        (
            lambda: MESH.axis_index("model"),
            AxisError,
            """\
no axis 'model' in the mesh
  where:    mesh (dp=2, tp=4)
  expected: one of 'dp', 'tp'""",
        ),
        (
            lambda: PLAIN.slice("tp", 0),
            AxisError,
            """\
no axis 'tp': the mesh has no axis names
  where:    mesh (2, 4)
  fix:      name the axes when you create the mesh, or pass an index""",
        ),
        (
            lambda: PLAIN.axis_sizes,
            AxisError,
            """\
the mesh has no axis names
  where:    mesh (2, 4)
  fix:      use .sizes, which is in axis order""",
        ),
        (
            lambda: MESH.axis_index(2),
            AxisError,
            """\
no axis 2 in the mesh
  where:    mesh (dp=2, tp=4)
  expected: an index from -2 to 1""",
        ),
        (
            lambda: MESH.axis_index(1.0),
            AxisError,
            """\
an axis must be a name or an index, not 1.0
  where:    mesh (dp=2, tp=4)
  found:    float""",
        ),
        (
            lambda: MESH.axis_indices(3.5),
            AxisError,
            """\
axes must be a sequence of names or indices, not 3.5
  where:    mesh (dp=2, tp=4)""",
        ),
        (
            lambda: MESH.slice((), 0),
            AxisError,
            """\
no axes given
  where:    mesh (dp=2, tp=4)
  expected: at least one axis""",
        ),
        (
            lambda: MESH.slice(("tp", -1), 0),
            AxisError,
            """\
an axis is given twice
  where:    mesh (dp=2, tp=4)
  expected: each axis at most once
  found:    axes ('tp', -1)""",
        ),
        (
            lambda: MESH.ranks_of_axis("tp", 9),
            NotInGroupError,
            """\
the mesh does not contain rank 9
  where:    mesh (dp=2, tp=4)
  expected: one of its ranks: 0, 1, 2, 3, 4, 5, 6, 7
  fix:      skip the call on ranks outside the mesh""",
        ),
        (
            lambda: Layout.from_shape((64, 256)).slice((0,), 16384),
            NotInGroupError,
            """\
the mesh does not contain rank 16384
  where:    mesh (64, 256)
  expected: one of its ranks: 0, 1, 2, 3, 4, 5, ..., 16383
  fix:      skip the call on ranks outside the mesh""",
        ),
        (
            lambda: MESH.rank_at((0, 4)),
            MeshError,
            """\
no coordinate (0, 4) in the mesh
  where:    mesh (dp=2, tp=4)
  expected: one index from 0 to size - 1 per axis""",
        ),
        (
            lambda: MESH.transpose(("tp",)),
            AxisError,
            """\
transpose leaves out an axis
  where:    mesh (dp=2, tp=4)
  expected: all 2 axes, each once
  found:    axes ('tp',)
  fix:      name every axis once; to choose some of the axes, call slice()""",
        ),
        (
            lambda: Layout.from_shape((2, 2, 2), ("a", "b", "c")).flatten(("a", "b"), "c"),
            AxisError,
            """\
axis name 'c' is used twice
  where:    flatten of mesh (a=2, b=2, c=2)
  expected: a different name for each axis
  found:    axis names ('c', 'c')""",
        ),
        (
            lambda: PLAIN.flatten((0, 1), "all"),
            AxisError,
            """\
an unnamed mesh cannot take a name for one axis
  where:    flatten of mesh (2, 4)
  found:    name 'all'
  fix:      name all axes when you create the mesh""",
        ),
        (
            lambda: MESH.unflatten("tp", (3, 2), ("a", "b")),
            MeshError,
            """\
unflatten of axis 'tp' into (3, 2) does not match its size
  where:    mesh (dp=2, tp=4)
  expected: sizes whose product is 4
  found:    3 x 2 = 6
  fix:      correct the sizes, or pass -1 as one of them""",
        ),
        (
            lambda: MESH.unflatten("tp", (3, -1), ("a", "b")),
            MeshError,
            """\
unflatten of axis 'tp' into (3, -1) does not divide an axis of size 4
  expected: the known sizes' product, 3, to divide 4
  found:    4 = 3 x 1 + 1""",
        ),
        (
            lambda: MESH.unflatten("tp", (2, 2)),
            AxisError,
            """\
the number of names does not match the number of new axes
  where:    unflatten of mesh (dp=2, tp=4)
  expected: 2 names, one per size
  found:    names ()""",
        ),
        (
            lambda: MESH.unflatten("tp", (2, 2), ("dp", "b")),
            AxisError,
            """\
axis name 'dp' is used twice
  where:    unflatten of mesh (dp=2, tp=4)
  expected: a different name for each axis
  found:    axis names ('dp', 'dp', 'b')""",
        ),
        (
            lambda: Layout.concatenate([]),
            MeshError,
            """\
concatenate needs at least one layout
  found:    none""",
        ),
        (
            lambda: Layout.concatenate([MESH, PLAIN]),
            AxisError,
            """\
concatenate cannot join named axes and unnamed axes
  where:    mesh (dp=2, tp=4) and mesh (2, 4)
  fix:      name all of the parts, or none""",
        ),
        (
            lambda: Layout.concatenate([MESH.slice("tp", 0), Layout.from_ranks([3, 0], ("a",))]),
            MeshError,
            """\
concatenate cannot join parts of different meshes
  where:    mesh (tp=4) and mesh (a=2)
  expected: slices of one mesh
  fix:      slice all parts from one mesh, or arrange the ranks with Layout.from_ranks""",
        ),
        (
            lambda: Layout.concatenate([MESH.slice("tp", 0), MESH.slice("tp", 0)]),
            AxisError,
            """\
axis name 'tp' is used twice
  where:    concatenate of mesh (tp=4) and mesh (tp=4)
  expected: a different name for each axis
  found:    axis names ('tp', 'tp')""",
        ),
        (
            lambda: Layout.concatenate([MESH.slice("tp", 0), MESH.flatten(("dp", "tp"), "all")]),
            MeshError,
            """\
concatenate cannot join axes that overlap
  where:    mesh (tp=4) and mesh (all=8)
  expected: axes that share exactly one rank
  fix:      slice the parts so that each axis of the mesh is in only one of them""",
        ),
        (
            lambda: Layout.concatenate(
                [
                    Layout.from_shape((2, 2, 2), ("a", "b", "c")).slice("a", 0),
                    Layout.from_shape((2, 2, 2), ("a", "b", "c")).slice("b", 1),
                ]
            ),
            MeshError,
            """\
concatenate cannot join parts that share no rank
  where:    mesh (a=2) and mesh (b=2)
  expected: parts through one rank
  found:    0, 4; 1, 3
  fix:      slice all parts with the same rank""",
        ),
        (
            lambda: Layout((((2, 1),), ((2, 1),))),
            MeshError,
            """\
the axes of a layout overlap or interleave
  expected: each stride to be larger than the reach of all smaller strides
  found:    modes (((2, 1),), ((2, 1),))
  fix:      build it from the array of ranks: Layout.from_ranks(ranks)""",
        ),
        (
            lambda: Layout((((4, 1),),), rank_map=(5, 6)),
            MeshError,
            """\
a layout reaches beyond its rank map
  expected: positions below 2
  found:    position 3""",
        ),
        (
            lambda: Layout((((4, 0),),)),
            MeshError,
            """\
sizes and strides of a layout must be 1 or more
  found:    modes ((4, 0),)""",
        ),
        (
            lambda: Layout((4, 1)),
            KindError,
            """\
the modes of an axis must be pairs of integers (size, stride)
  found:    4""",
        ),
        (
            lambda: Layout((((4, 1),),), offset=-1),
            MeshError,
            "the offset of a layout cannot be negative: -1",
        ),
        (
            lambda: Layout(()),
            MeshError,
            """\
a mesh must have at least one axis
  found:    no axes""",
        ),
    ],
)
def test_errors_say_what_is_wrong_and_how_to_mend_it(call, kind, text):
    assert text_of(kind, call) == text


def test_ranks_on_an_accelerator_are_rejected_with_a_reason():
    class Remote:
        def __array__(self, dtype=None, copy=None):
            raise TypeError("cannot convert a device tensor")

    assert text_of(KindError, lambda: Layout.from_ranks(Remote())) == (
        "the ranks of a mesh must be an array of integers on the CPU\n"
        "  found:    Remote: cannot convert a device tensor"
    )
