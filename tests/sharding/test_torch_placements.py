"""torch's placements and our shardings: torch's own arithmetic is the oracle."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

from meshdist.errors import (
    ArgumentError,
    AxisError,
    KindError,
    LengthError,
    MeshdistError,
    ShapeError,
)
from meshdist.mesh.layout import Layout
from meshdist.mesh.partition_spec import P
from meshdist.mesh.spec import NamedSharding
from meshdist.sharding.dtensors import as_torch_holds_it, from_placements, to_placements

MESH = Layout.from_shape((2, 4), ("dp", "tp"))


def boxes_of_torch(shape: tuple[int, ...], sizes: tuple[int, ...], placements: Any) -> list[Any]:
    """(shape, offset) at each coordinate, the offset of an empty shard left out."""
    found = []
    for at in itertools.product(*map(range, sizes)):
        local, offset = _compute_local_shape_and_global_offset(shape, sizes, list(at), placements)
        found.append((local, offset if math.prod(local) else None))
    return found


def boxes_of(sharding: NamedSharding, shape: tuple[int, ...]) -> list[Any]:
    placement = sharding.placement(shape)
    found = []
    for at in itertools.product(*map(range, sharding.layout.sizes)):
        local = placement.local_shape(at)
        offset = tuple(start for start, _ in placement.box(at))
        found.append((local, offset if math.prod(local) else None))
    return found


@st.composite
def shardings(draw: st.DrawFn) -> tuple[NamedSharding, int]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    names = ("a", "b", "c")[: len(sizes)]
    ndim = draw(st.integers(0, 3))
    dims: list[list[str]] = [[] for _ in range(ndim)]
    kinds: list[set[str]] = [set(), set()]
    for axis in draw(st.permutations(names)):
        place = draw(st.integers(0, ndim + 1))
        if place < ndim:
            dims[place].append(axis)
        else:
            kinds[place - ndim].add(axis)
    spec = P(*map(tuple, dims), unreduced=kinds[0])
    return NamedSharding(Layout.from_shape(sizes, names), spec), ndim


@given(shardings(), st.data())
def test_what_divides_goes_there_and_back(case: tuple[NamedSharding, int], data: Any) -> None:
    sharding, ndim = case
    sizes = sharding.layout.sizes
    shape = tuple(data.draw(st.integers(1, 2)) * math.prod(sizes) for _ in range(ndim))
    placements = to_placements(sharding)
    assert boxes_of(sharding, shape) == boxes_of_torch(shape, sizes, placements)
    again = from_placements(placements, sharding.layout, shape)
    assert again.is_equivalent_to(sharding, ndim)
    assert boxes_of(again, shape) == boxes_of(sharding, shape)
    assert to_placements(again) == placements
    held = as_torch_holds_it(sharding, shape)
    assert held.placement(shape) == sharding.placement(shape)


@given(shardings(), st.data())
def test_what_does_not_divide_keeps_the_sizes_of_torch(
    case: tuple[NamedSharding, int], data: Any
) -> None:
    sharding, ndim = case
    shape = tuple(data.draw(st.integers(0, 13)) for _ in range(ndim))
    held = as_torch_holds_it(sharding, shape)
    placements = to_placements(held)
    sizes = sharding.layout.sizes
    assert boxes_of(held, shape) == boxes_of_torch(shape, sizes, placements)
    assert from_placements(placements, sharding.layout, shape).is_equivalent_to(held, ndim)
    plain = [Shard(one.dim) if hasattr(one, "dim") else Replicate() for one in placements]
    from_the_end = [Shard(one.dim - ndim) if isinstance(one, Shard) else one for one in plain]
    found = from_placements(from_the_end, sharding.layout, shape)
    assert boxes_of(found, shape) == boxes_of_torch(shape, sizes, plain)


def test_kinds() -> None:
    shape = (8, 4)
    both = from_placements([Partial("avg"), Partial()], MESH, shape)
    assert both.spec == P(None, None, unreduced={"dp", "tp"})
    reduced = NamedSharding(MESH, P("tp", reduced={"dp"}))
    assert to_placements(reduced) == (Replicate(), Shard(0))
    assert as_torch_holds_it(reduced, shape).spec == P("tp", None, reduced={"dp"})
    assert from_placements([Replicate(), Shard(-1)], MESH, shape).spec == P(None, "tp")


@pytest.mark.parametrize(
    ("kind", "placements", "shape", "words"),
    [
        (
            ArgumentError,
            [Partial("max"), Replicate()],
            (4,),
            "Partial('max') is not supported: unreduced values are partial sums\n"
            "  where:    placements [Partial(max), Replicate()] of shape (4,) on mesh "
            "(dp=2, tp=4)\n"
            "  expected: Partial('sum') or Partial('avg')\n"
            "  fix:      redistribute the DTensor to Replicate or Shard first, which reduces it",
        ),
        (
            KindError,
            [Replicate(), _MaskPartial(offset_shape=None)],
            (4,),
            "is not a supported placement",
        ),
        (KindError, ["dp", Replicate()], (4,), "found:    a str"),
        (LengthError, [Replicate()], (4,), "expected: 2 placements\n  found:    1"),
        (ShapeError, [Shard(1), Replicate()], (4,), "expected: a dim from -1 to 0"),
        (ShapeError, [Shard(0), Replicate()], (), "expected: no Shard of a scalar"),
        (
            ShapeError,
            [_StridedShard(0, split_factor=4), Shard(0)],
            (12,),
            "_StridedShard of a dim that does not divide evenly: a rank's shard is not contiguous",
        ),
        (
            ShapeError,
            [_StridedShard(0, split_factor=2), Shard(0)],
            (16,),
            "_StridedShard over axis 'dp' does not match the placements after it",
        ),
        (
            ShapeError,
            [Replicate(), _StridedShard(0, split_factor=2)],
            (16,),
            "expected: a split factor of 1\n  found:    2",
        ),
    ],
)
def test_refusals(
    kind: type[MeshdistError], placements: Any, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(kind) as caught:
        from_placements(placements, MESH, shape)
    assert type(caught.value) is kind
    assert words in str(caught.value)


def test_a_mesh_without_names() -> None:
    with pytest.raises(AxisError) as caught:
        from_placements([Replicate()], Layout.from_shape((2,)), (4,))
    assert "a sharding needs a mesh with named axes" in str(caught.value)
