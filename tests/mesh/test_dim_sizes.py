"""Sizes of the dims of one side: einops's way of counting, on shards."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from meshdist.errors import AxisError, KindError, MeshdistError, NotInGroupError, ShapeError
from meshdist.mesh.layout import Layout
from meshdist.mesh.partition_spec import P
from meshdist.mesh.pattern import parse
from meshdist.mesh.pattern_sizes import spec_of
from meshdist.mesh.spec import NamedSharding

MESH = Layout.from_shape((2, 4), ("dp", "tp"))


def sized(text: str, *shape: int, **sizes: int) -> NamedSharding:
    return NamedSharding.from_pattern(text, MESH, shape, sizes)


def local(text: str, rank: int, *shape: int, **sizes: int) -> NamedSharding:
    return NamedSharding.from_pattern(text, MESH, sizes=sizes, local_shape=shape, rank=rank)


def by_names(text: str, **sizes: int) -> NamedSharding:
    return NamedSharding.from_pattern(text, MESH, sizes=sizes)


def test_specs() -> None:
    def spec(text: str, ndim: int) -> P:
        pattern = parse(text)
        return spec_of(pattern, pattern.get_operand(), MESH, ndim)

    assert spec("b@(dp,tp) s", 2) == P(("dp", "tp"), None)
    assert spec("... d@tp {U:dp}", 3) == P(None, None, "tp", unreduced={"dp"})
    assert spec("b ... d@tp {R:dp}", 2) == P(None, "tp", reduced={"dp"})
    assert spec("(h k)@tp 1", 2) == P("tp", None)
    assert spec("", 0) == P()


def test_sizes_that_are_not_given_are_local_size_times_shards() -> None:
    found = local("b@dp s d@tp", 5, 3, 7, 2)
    assert found.parts.shape == (6, 7, 8)
    assert found.parts.names == ("b", "s", "d")
    assert found.spec == P("dp", None, "tp")
    assert local("... d@tp", 5, 3, 7, 2).parts.names == ("...0", "...1", "d")
    assert local("b@dp", 0, 3, b=5).parts.shape == (5,)
    assert local("b@dp", 4, 2, b=5).parts.shape == (5,)
    assert local("b@dp 1", 4, 2, 1, b=5).parts.counts == (1, 0)
    assert local("", 3).parts.shape == ()
    assert by_names("b s", b=3, s=0).parts.shape == (3, 0)
    assert NamedSharding(MESH, P("dp")).parts.names == ()


def test_groups() -> None:
    heads = sized("(h k)@tp d", 20, 5, k=2)
    assert heads.parts.shape == (20, 5)
    assert heads.parts.counts == (2, 1)
    assert heads.parts.sizes == (10, 2, 5)
    assert heads.shard_sizes == {0: (6, 6, 4, 4)}
    assert heads.parts.placement.box((0, 2)) == ((6, 8), (0, 2), (0, 5))
    assert heads.box(2, (20, 5)) == ((12, 16), (0, 5))
    for same in (
        local("(h k)@tp d", 2, 4, 5, h=10),  # two heads of ten here
        local("(h k)@tp d", 0, 6, 5, h=10, k=2),
        pickle.loads(pickle.dumps(heads)),
    ):
        assert (same, same.parts) == (heads, heads.parts)
    even = local("(h k)@tp", 0, 6, k=3)
    assert (even.parts.shape, even.parts.sizes, even.shard_sizes) == ((24,), (8, 3), {})
    whole = local("(h k)@tp", 0, 6).parts  # nothing asks for the sizes inside
    assert (whole.shape, whole.names, whole.counts) == ((24,), ("h k",), (1,))
    assert sized("(a b c)", 24, a=2, c=3).parts.sizes == (2, 4, 3)


@given(st.data())
def test_a_shard_tells_its_whole(data: st.DataObject) -> None:
    h, k, s = (data.draw(st.integers(1, 9)) for _ in range(3))
    text = data.draw(st.sampled_from(("(h k)@tp s@dp", "(h@(dp,tp) k) s", "s (h k)@(tp,dp)")))
    shape = (s, h * k) if text.startswith("s") else (h * k, s)
    whole = sized(text, *shape, h=h)
    rank = data.draw(st.integers(0, 7))
    given_sizes = {"h": h, "s": s} | data.draw(st.sampled_from(({}, {"k": k})))
    part = whole.shard_shape(shape, rank)
    assume("k" in given_sizes or 0 not in part)
    found = local(text, rank, *part, **given_sizes)
    assert (found, found.parts) == (whole, whole.parts)
    array = np.arange(h * k * s).reshape(shape)
    parts = array.reshape(whole.parts.sizes)
    box = whole.parts.placement.box(MESH.coordinate_of(rank) or ())
    taken = parts[tuple(slice(*one) for one in box)]
    assert np.array_equal(array[whole.indices_map(shape)[rank]], taken.reshape(part))


@pytest.mark.parametrize(
    ("kind", "wrong", "words"),
    [
        (
            AxisError,
            lambda: sized("b@dp s -> b@DP s".partition(" -> ")[2], 4, 4),
            "no axis 'DP' in the mesh\n  where:    mesh (dp=2, tp=4); column 3 of 'b@DP s'\n"
            "  expected: one of 'dp', 'tp'\n  fix:      did you mean 'dp'?",
        ),
        (AxisError, lambda: sized("b s {U:ep}", 4, 4), "column 8 of 'b s {U:ep}'"),
        (AxisError, lambda: sized("(ep k)@(dp,ep)", 4), "column 12 of '(ep k)@(dp,ep)'"),
        (
            ShapeError,
            lambda: sized("b@dp s", 4, 4, 4),
            "the pattern names 2 dims, the array has 3\n  where:    pattern 'b@dp s'\n"
            "  expected: 2 dims: b@dp s\n  found:    3 dims\n"
            '  fix:      name each dim, or write "..." for dims that are not cut',
        ),
        (ShapeError, lambda: sized("b ... s d", 4), "the pattern names at least 3 dims"),
        (
            ShapeError,
            lambda: local("b@dp s", 5, 6, 4, b=8),
            "rank 5 holds no shard of the global array: dim 0 has size 6\n"
            "  where:    rank 5 (dp=1, tp=1); pattern 'b@dp s' on mesh (dp=2, tp=4)\n"
            "  expected: a shard of shape (4, 4) of a global array of shape (8, 4), whose dim 0 "
            "is cut "
            "into 4, 4, larger parts first\n"
            "  found:    a shard of shape (6, 4)\n"
            "  fix:      pass the global size of the dim on every rank: sizes={'b': ...}, the sum "
            "of all parts; for other parts, pass a sharding instead of the pattern: "
            "md.NamedSharding(mesh, P('dp', None), shard_sizes={0: sizes})",
        ),
        (
            ShapeError,  # 7 is right, and the larger part comes first
            lambda: local("b@dp s", 5, 4, 4, b=7),
            "rank 5 holds no shard of the global array: dim 0 has size 4\n"
            "  where:    rank 5 (dp=1, tp=1); pattern 'b@dp s' on mesh (dp=2, tp=4)\n"
            "  expected: a shard of shape (3, 4) of a global array of shape (7, 4), whose dim 0 "
            "is cut "
            "into 4, 3, larger parts first\n",
        ),
        (
            ShapeError,  # of a dim that is not cut
            lambda: local("b@dp s", 5, 4, 4, b=8, s=5),
            "  found:    a shard of shape (4, 4)\n"
            "  fix:      pass the global size of the dim on every rank: sizes={'b': 8, 's': ...}",
        ),
        (
            ShapeError,  # another size would contradict the shape
            lambda: NamedSharding.from_pattern("b@dp", MESH, (8,), local_shape=(5,), rank=0),
            "  found:    a shard of shape (5,)\n  fix:      pass this rank's shard of the global "
            "array",
        ),
        (
            ShapeError,
            lambda: NamedSharding.from_pattern("(h k)@tp", MESH, (8,), local_shape=(5,), rank=0),
            "fix:      pass this rank's shard of the global array",
        ),
        (
            ShapeError,
            lambda: NamedSharding.from_pattern("b", MESH, (8,), local_shape=(5, 1), rank=0),
            "the shard has 2 dims, the global array 1",
        ),
        (
            ShapeError,
            lambda: sized("(h k)@tp", 10),
            "the sizes of 'h', 'k' are unknown\n  where:    pattern '(h k)@tp' on mesh "
            "(dp=2, tp=4)\n  expected: sizes for all but one of the dims of (h k)@tp\n"
            "  found:    dim 0 of size 10\n  fix:      pass sizes={'h': ..., 'k': ...}",
        ),
        (
            ShapeError,
            lambda: by_names("b s", b=1),
            "expected: the global size of s\n  fix:      pass sizes={'b': 1, 's': ...}",
        ),
        (ShapeError, lambda: by_names("... s"), "pass the global shape: shape=(...)"),
        (
            ShapeError,
            lambda: sized("(h k) s", 12, 4, h=5),
            "dim 0 of size 12 cannot be split into (h k)",
        ),
        (
            ShapeError,
            lambda: sized("b s", 4, 4, b=5),
            "but the pattern and the given sizes make it 5",
        ),
        (ShapeError, lambda: sized("1", 4), "expected: a dim of size 1, as it has no name"),
        (ShapeError, lambda: local("1", 4, 3), "dim 0 has size 3"),
        (
            KindError,
            lambda: NamedSharding.from_pattern("b", MESH, 8),  # type: ignore[arg-type]
            "NamedSharding.from_pattern: shape must be the global shape",
        ),
        (
            KindError,
            lambda: NamedSharding.from_pattern("b", "dp", (8,)),
            "NamedSharding takes a mesh\n  expected: a DeviceMesh or a Layout\n  found:    a str",
        ),
        (NotInGroupError, lambda: local("b", 8, 3), "the mesh does not contain rank 8"),
    ],
)
def test_refusals(kind: type[MeshdistError], wrong: Any, words: str) -> None:
    with pytest.raises(kind) as caught:
        wrong()
    assert type(caught.value) is kind
    assert words in str(caught.value)
