"""``NamedSharding``: slicing a whole array in a loop over ranks is the oracle."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import meshdist as md
from meshdist.errors import (
    AxisError,
    KindError,
    LengthError,
    MeshdistError,
    NotInGroupError,
    ShapeError,
)
from meshdist.mesh.layout import Layout
from meshdist.mesh.partition_spec import P, axes_of
from meshdist.mesh.spec import NamedSharding

MESH = Layout.from_shape((2, 4), ("dp", "tp"))


def test_shards_are_slices_of_the_whole() -> None:
    whole = np.arange(70).reshape(10, 7)
    spread = NamedSharding(MESH, P("tp", "dp"))
    for dp, tp in itertools.product(range(2), range(4)):
        rank = dp * 4 + tp
        shard = np.array_split(np.array_split(whole, 4)[tp], 2, axis=1)[dp]
        index = spread.indices_map((10, 7))[rank]
        assert np.array_equal(whole[index], shard)
        assert spread.box(rank, (10, 7)) == tuple((one.start, one.stop) for one in index)
        assert spread.shard_shape((10, 7), rank) == shard.shape
        assert spread.replica(rank) == 0
    both = NamedSharding(MESH, P(None, ("tp", "dp")))
    for dp, tp in itertools.product(range(2), range(4)):
        shard = np.array_split(np.array_split(whole, 4, axis=1)[tp], 2, axis=1)[dp]
        assert np.array_equal(whole[both.indices_map((10, 7))[dp * 4 + tp]], shard)


def test_ranks_in_any_order() -> None:
    mesh = Layout.from_ranks([[7, 2], [0, 5]], ("dp", "tp"))
    rows = NamedSharding(mesh, P("dp"))
    assert [rows.box(rank, (4,)) for rank in (7, 2, 0, 5)] == [((0, 2),)] * 2 + [((2, 4),)] * 2
    assert [rows.replica(rank) for rank in (7, 2, 0, 5)] == [0, 1, 0, 1]
    assert list(rows.indices_map((4,))) == [7, 2, 0, 5]


def test_given_sizes() -> None:
    rows = NamedSharding(MESH, P("dp", "tp"), shard_sizes={1: [0, 5, 1, 1], 0: (7, 3)})
    assert rows.box(5, (10, 7)) == ((7, 10), (0, 5))
    assert rows.shard_sizes == {0: (7, 3), 1: (0, 5, 1, 1)}
    assert rows == NamedSharding(MESH, P("dp", "tp"), shard_sizes=rows.shard_sizes)
    assert rows != NamedSharding(MESH, P("dp", "tp"))
    even = NamedSharding(MESH, P("dp"), shard_sizes={0: (5, 5)})
    assert even.placement((10, 2)) == NamedSharding(MESH, P("dp")).placement((10, 2))


def test_what_a_sharding_is() -> None:
    rows = NamedSharding(MESH, P("dp", unreduced={"tp"}))
    same = NamedSharding(Layout.from_shape((2, 4), ("dp", "tp")), P("dp", unreduced={"tp"}))
    assert rows == same
    assert hash(rows) == hash(same)
    assert rows != NamedSharding(MESH, P("dp"))
    assert rows != NamedSharding(Layout.from_shape((2, 4), ("dp", "ep")), P("dp"))
    assert rows != "rows"
    assert rows.placement([8]) is rows.placement((8,))
    assert pickle.loads(pickle.dumps(rows)) == rows
    assert eval(repr(rows), {"NamedSharding": NamedSharding, "Layout": Layout, "P": P}) == rows
    sized = NamedSharding(MESH, P("dp"), shard_sizes={0: (7, 3)})
    assert repr(sized).endswith(", P('dp',), shard_sizes={0: (7, 3)})")
    with pytest.raises(AttributeError, match="'spec' cannot be set or deleted"):
        rows.spec = P()
    for number in range(600):  # kept placements do not grow without end
        assert rows.placement((number,)).shape == (number,)


def test_axes_of_each_kind() -> None:
    mesh = Layout.from_shape((2, 2, 2, 2), ("a", "b", "c", "d"))
    one = NamedSharding(mesh, P("a", unreduced={"b"}, reduced={"c"}))
    assert one.replicated_axes == {"d"}
    assert [one.replica(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    placement = one.placement((4,))
    assert (placement.unreduced, placement.reduced, placement.free_axes) == ((1,), (2,), (2, 3))


def test_the_shape_of_a_shard_without_a_rank() -> None:
    rows = NamedSharding(MESH, P("tp"))
    assert rows.shard_shape((8, 3)) == (2, 3)
    with pytest.raises(ShapeError) as caught:
        rows.shard_shape((10, 3))
    assert "shards of an array of shape (10, 3) differ in shape" in str(caught.value)
    assert "shard_shape(shape, rank=0)" in str(caught.value)

    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        here = md.NamedSharding(mesh, md.P("tp"))
        assert here == md.NamedSharding(mesh, md.P("tp"))
        assert here.layout == mesh.layout
        return here.shard_shape((10, 3))

    assert md.simulate(program, 4) == [(3, 3), (3, 3), (2, 3), (2, 3)]


def lies_equally(one: NamedSharding, other: NamedSharding, ndim: int) -> bool:
    """Whether ranks hold the same parts, equal values and equal cotangents: in a loop."""
    shape = (4 * 9 * 25,) * ndim
    ranks = [*map(int, one.layout.ranks().ravel())]
    if sorted(ranks) != sorted(map(int, other.layout.ranks().ravel())):
        return False
    found = []
    for sharding in (one, other):
        placement = sharding.placement(shape)
        at = {rank: sharding.layout.coordinate_of(rank) or () for rank in ranks}
        boxes = {rank: placement.box(at[rank]) for rank in ranks}
        alike = [
            {
                (a, b)
                for a, b in itertools.product(ranks, repeat=2)
                if boxes[a] == boxes[b] and all(at[a][axis] == at[b][axis] for axis in kinds)
            }
            for kinds in (placement.unreduced, placement.reduced)
        ]
        found.append((boxes, alike))
    return found[0] == found[1]


MESHES = [
    Layout.from_shape((2, 2), ("a", "b")),
    Layout.from_shape((2, 2), ("c", "d")),
    Layout.from_shape((4,), ("a",)),
    Layout.from_shape((2, 1, 2), ("a", "e", "b")),
    Layout.from_shape((2, 2), ("b", "a")).transpose(("a", "b")),
    Layout.from_ranks([0, 1, 3, 2], ("a",)),
]


@st.composite
def shardings(draw: st.DrawFn) -> NamedSharding:
    mesh = draw(st.sampled_from(MESHES))
    dims: list[list[str]] = [[], []]
    kinds: list[set[str]] = [set(), set(), set()]
    for axis in draw(st.permutations(mesh.names or ())):
        place = draw(st.integers(0, 4))
        if place < 2:
            dims[place].append(axis)
        else:
            kinds[place - 2].add(axis)
    return NamedSharding(mesh, P(*map(tuple, dims), unreduced=kinds[0], reduced=kinds[1]))


@given(shardings(), shardings())
def test_equivalence(one: NamedSharding, other: NamedSharding) -> None:
    # (2, 2) and (4,) cut dims that do not divide differently: only equal axes are equivalent.
    cuts = []
    for each in (one, other):
        sizes = each.layout.axis_sizes
        by_dim = [[sizes[axis] for axis in axes_of(entry)] for entry in each.spec.partitions]
        cuts.append([[size for size in dim if size > 1] for dim in by_dim])
    expected = lies_equally(one, other, 2) and cuts[0] == cuts[1]
    assert one.is_equivalent_to(other, 2) == expected


def test_equivalence_by_example() -> None:
    def on(mesh: Layout, *entries: Any, **kinds: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*entries, **kinds))

    assert on(MESH, "dp").is_equivalent_to(on(MESH, "dp", None), 2)
    assert not on(MESH, "dp").is_equivalent_to(on(MESH, None, "dp"), 2)
    assert on(MESHES[0], "a", unreduced={"b"}).is_equivalent_to(
        on(MESHES[1], "c", unreduced={"d"}), 1
    )
    assert on(MESHES[0], unreduced={"a", "b"}).is_equivalent_to(on(MESHES[2], unreduced={"a"}), 0)
    assert not on(MESHES[2], "a").is_equivalent_to(on(MESHES[5], "a"), 1)
    assert not on(MESHES[2], "a").is_equivalent_to(on(MESHES[0], ("a", "b")), 1)
    sized = NamedSharding(MESH, P("dp"), shard_sizes={0: (7, 3)})
    assert not sized.is_equivalent_to(on(MESH, "dp"), 1)
    with pytest.raises(ShapeError):
        on(MESH, "dp", None).is_equivalent_to(on(MESH, "dp"), 1)


@pytest.mark.parametrize(
    ("kind", "wrong", "words"),
    [
        (KindError, lambda: NamedSharding("mesh", P()), "expected: a DeviceMesh or a Layout"),  # type: ignore[arg-type]
        (KindError, lambda: NamedSharding(MESH, ("dp", None)), "fix:      write P('dp', None)"),  # type: ignore[arg-type]
        (KindError, lambda: NamedSharding(MESH, "dp"), "found:    'dp', a str"),  # type: ignore[arg-type]
        (AxisError, lambda: NamedSharding(MESH, P("DP")), "fix:      did you mean 'dp'?"),
        (AxisError, lambda: NamedSharding(MESH, P(reduced={"x"})), "no axis 'x' in the mesh"),
        (
            AxisError,
            lambda: NamedSharding(MESH, P("dp", ("tp", "dp"))),
            "axis 'dp' is named twice\n  where:    P('dp', ('tp', 'dp')) on mesh (dp=2, tp=4)\n"
            "  expected: each axis at most once",
        ),
        (
            KindError,
            lambda: NamedSharding(MESH, P("dp"), shard_sizes={0: 3}),  # type: ignore[dict-item]
            "expected: such as {0: (7, 3)}\n  found:    {0: 3}",
        ),
        (
            ShapeError,
            lambda: NamedSharding(MESH, P("dp"), shard_sizes={1: (3, 3)}),
            "shard_sizes names dim 1, which no axis cuts\n  expected: one of dims [0]",
        ),
        (
            LengthError,
            lambda: NamedSharding(MESH, P("tp"), shard_sizes={0: (3, 3)}),
            "shard_sizes has 2 sizes for dim 0, cut into 4 parts",
        ),
        (
            ShapeError,
            lambda: NamedSharding(MESH, P("dp"), shard_sizes={0: (3, -1)}),
            "a part of dim 0 cannot have size -1",
        ),
        (
            ShapeError,
            lambda: NamedSharding(MESH, P("dp"), shard_sizes={0: (7, 3)}).box(0, (11,)),
            "expected: 7 + 3 = 10\n  found:    11 in shape (11,)",
        ),
        (
            ShapeError,
            lambda: NamedSharding(MESH, P("dp", "tp")).shard_shape((4,)),
            "found:    shape (4,)\n  fix:      write at most 1 entry; or add a dimension: x[None]",
        ),
        (
            ShapeError,
            lambda: NamedSharding(MESH, P("dp")).indices_map(()),
            "found:    shape ()\n  fix:      write P() for a scalar",
        ),
        (ShapeError, lambda: NamedSharding(MESH, P()).box(0, (-1,)), "cannot have size -1"),
        (
            NotInGroupError,
            lambda: NamedSharding(MESH, P("dp")).box(8, (4,)),
            "the mesh does not contain rank 8",
        ),
        (
            NotInGroupError,
            lambda: NamedSharding(MESH, P("dp")).replica(-1),
            "its ranks: 0, 1",
        ),
        (
            KindError,
            lambda: NamedSharding(MESH, P("dp")).box(0, 4),  # type: ignore[arg-type]
            "expected: for example (8, 16)\n  found:    4",
        ),
        (
            KindError,
            lambda: NamedSharding(MESH, P("dp")).is_equivalent_to(P("dp"), 1),  # type: ignore[arg-type]
            "found:    a PartitionSpec\n  fix:      NamedSharding(mesh, spec)",
        ),
    ],
)
def test_refusals(kind: type[MeshdistError], wrong: Any, words: str) -> None:
    with pytest.raises(kind) as caught:
        wrong()
    assert type(caught.value) is kind
    assert words in str(caught.value)
