"""How operands meet: every pair of small shardings, and the words where they do not."""

from __future__ import annotations

from itertools import product

import pytest

from meshdist.errors import AxisTypeError, MeshError, ShapeError
from meshdist.mesh.layout import Layout
from meshdist.mesh.partition_spec import P
from meshdist.mesh.spec import NamedSharding
from meshdist.sharding.elementwise import join_operands
from tests.sharding.array_cases import NAMES

MESH = Layout.from_shape((2, 2), NAMES[:2])
SPECS = [
    P(),
    P("dp"),
    P("tp"),
    P(None, "tp"),
    P("dp", "tp"),
    P("dp", reduced={"tp"}),
    P(reduced={"dp", "tp"}),
    P(None, "tp", reduced={"dp"}),
    P(unreduced={"tp"}),
    P("dp", unreduced={"tp"}),
]


class DeviceLess:
    """The rank that messages name, of a mesh without processes."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def get_rank(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceLess) and self.layout == other.layout

    def __hash__(self) -> int:
        return hash(self.layout)


def lying(spec: P, shape: tuple[int, ...], **sizes: dict[int, tuple[int, ...]]) -> NamedSharding:
    return NamedSharding(DeviceLess(MESH), spec.update(spec.partitions[: len(shape)]), **sizes)


def kinds(spec: P, axis: str) -> str:
    if axis in spec.unreduced:
        return "U"
    if axis in spec.reduced:
        return "R"
    return "V" if axis in str(spec.partitions) else "I"


PASSING = {"VV", "II", "RR", "RV", "VR"}
ALSO_PASSING = {"": set(), "add": {"UU"}, "multiply": {"UR", "RU"}, "first": {"UR"}}


def expected_kinds(x: P, y: P, linearity: str) -> list[str] | None:
    """The kind of the result along each axis, None where the operands must be rejected."""
    pairs = [kinds(x, axis) + kinds(y, axis) for axis in NAMES[:2]]
    if not {*pairs} <= PASSING | ALSO_PASSING[linearity]:
        return None
    is_scalar = y.partitions == () and x.partitions != ()
    if not is_scalar and lying(x, (4, 4)).placement((4, 4)).dims != (
        lying(y, (4, 4)).placement((4, 4)).dims
    ):
        return None
    return [next(kind for kind in "UVRI" if kind in pair) for pair in pairs]


def found_kinds(x: P, y: P, linearity: str) -> list[str] | None:
    """``expected_kinds`` as the code has it; the result lies as ``x`` does."""
    shapes = (4, 4), () if y.partitions == () and x.partitions != () else (4, 4)
    operands = [
        ("float32", shape, lying(spec, shape)) for shape, spec in zip(shapes, (x, y), strict=True)
    ]
    try:
        shape, found = join_operands(operands, linearity, "f")
    except AxisTypeError:
        return None
    assert shape == (4, 4)
    assert found.placement(shape).dims == lying(x, shape).placement(shape).dims
    return [kinds(found.spec, axis) for axis in NAMES[:2]]


@pytest.mark.parametrize("linearity", ALSO_PASSING)
def test_operands_join_where_shards_and_gradients_are_right_as_they_are(linearity: str) -> None:
    pairs = list(product(SPECS, SPECS))
    expected = {pair: expected_kinds(*pair, linearity) for pair in pairs}
    assert {pair: found_kinds(*pair, linearity) for pair in pairs} == expected
    assert None in expected.values() and len({*map(str, expected.values())}) > 4


def joined(*operands: tuple[tuple[int, ...], P]) -> tuple[tuple[int, ...], P]:
    shape, sharding = join_operands(
        [("float32", shape, lying(spec, shape)) for shape, spec in operands], "", "f"
    )
    return shape, sharding.spec


def test_dims_that_are_missing_or_of_size_1_are_stretched_where_they_are_whole() -> None:
    assert joined(((4, 6), P(None, "tp")), ((6,), P("tp"))) == ((4, 6), P(None, "tp"))
    assert joined(((4, 1), P("dp", reduced={"tp"})), ((6,), P("tp", reduced={"dp"}))) == (
        (4, 6),
        P("dp", "tp"),
    )
    assert joined(((), P(reduced={"dp"})), ((4,), P("dp"))) == ((4,), P("dp"))


@pytest.mark.parametrize(
    "operands",
    [
        (((4, 1), P("dp")), ((1, 4), P(None, "dp"))),  # only blocks of the diagonal would be there
        (((1, 4), P("dp")), ((4, 4), P("dp"))),
        (((4, 4), P("dp")), ((4, 4), P(None, "dp"))),
    ],
)
def test_dims_that_are_cut_otherwise_are_rejected(operands: tuple[object, ...]) -> None:
    with pytest.raises(AxisTypeError, match="cut differently along dim -"):
        joined(*operands)  # type: ignore[arg-type]


def test_sizes_of_shards_are_part_of_how_a_dim_is_cut() -> None:
    uneven = lying(P("dp"), (5,), shard_sizes={0: (1, 4)})
    with pytest.raises(AxisTypeError) as caught:
        join_operands([("int64", (5,), uneven), ("int64", (5,), lying(P("dp"), (5,)))], "", "add")
    assert "x: int64[5@dp], shard_sizes={0: (1, 4)}" in str(caught.value)
    assert "y.reshard(x.sharding)" in str(caught.value)
    shape, found = join_operands([("int64", (5,), uneven)] * 2, "", "add")
    assert (shape, found.shard_sizes) == ((5,), {0: (1, 4)})


def test_the_words() -> None:
    whole, rows = ("float32", (4,), lying(P(), (4,))), ("float32", (3, 4), lying(P("dp"), (3, 4)))
    with pytest.raises(AxisTypeError) as caught:
        join_operands([rows, whole], "add", "add")
    assert str(caught.value).splitlines() == [
        "add: operand y is equal on all ranks along 'dp', and another is not: the gradient of y "
        "would need an all-reduce over 'dp'",
        "  where:    rank 1 (dp=0, tp=1) of mesh (dp=2, tp=2)",
        "  expected: operands of equal shardings, or y reduced over 'dp'",
        "  found:    x: float32[3@dp, 4]",
        "            y: float32[4]",
        "  fix:      call y.reshard(P(reduced={'dp'})), which sends nothing and sums the gradient",
    ]
    partial_sum = ("float32", (4,), lying(P(unreduced={"tp"}), (4,)))
    with pytest.raises(AxisTypeError) as caught:
        join_operands([partial_sum], "", "exp")
    assert str(caught.value).splitlines() == [
        "exp is not linear in the operand that is unreduced over 'tp': each rank holds a "
        "partial sum",
        "  where:    rank 1 (dp=0, tp=1) of mesh (dp=2, tp=2)",
        "  expected: no unreduced operand",
        "  found:    x: float32[4]{U:tp}",
        "  fix:      reduce the operand first: x.reshard(P())",
    ]
    with pytest.raises(ShapeError) as shapes:
        join_operands([rows, ("float32", (5,), lying(P(), (5,)))], "", "add")
    assert "do not broadcast" in str(shapes.value) and "y: float32[5]" in str(shapes.value)
    other = NamedSharding(DeviceLess(Layout.from_shape((4,), ("ep",))), P())
    with pytest.raises(MeshError) as meshes:
        join_operands([rows, ("float32", (4,), other)], "", "add")
    assert "y: float32[4] on mesh (ep=4)" in str(meshes.value)
    assert "y.reshard(" in str(meshes.value)


def test_equal_shardings_join_without_further_ado() -> None:
    sharding = lying(P("dp"), (4,))
    assert join_operands([("float32", (4,), sharding)] * 2, "", "f")[1] is sharding
