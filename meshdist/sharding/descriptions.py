"""Describe sharded arrays and meshes as text and pictures."""

from __future__ import annotations

from collections.abc import Sequence

from ..annotations.axis_types import type_text
from ..annotations.tensor_specs import dims_text
from ..mesh.device_mesh import DeviceMesh
from ..mesh.placement import box_text
from ..mesh.spec import NamedSharding
from ..mesh.visualize import draw, draw_svg
from ..typed_mode.type_errors import type_as_text


def array_type(dtype: object, shape: Sequence[int], sharding: NamedSharding) -> str:
    """Return an array's type as text, with the axes of each dim: ``float32[8@dp, 4]{U:tp}``.

    Example:
        >>> from meshdist import Layout, P
        >>> mesh = Layout.from_shape((2, 2, 2), ("dp", "tp", "cp"))
        >>> array_type("float32", (8, 4), NamedSharding(mesh, P(("dp", "cp"), reduced={"tp"})))
        'float32[8@(dp,cp), 4]{R:tp}'
    """
    spec = sharding.spec
    kinds = {**dict.fromkeys(spec.unreduced, "U"), **dict.fromkeys(spec.reduced, "R")}
    return type_as_text(dtype, dims_text(tuple(shape), spec), type_text(kinds))


def mesh_text(mesh: DeviceMesh) -> str:
    """Return this rank and its mesh as "rank 1 (dp=0, tp=1) of mesh (...)"."""
    rank = mesh.get_rank()
    return f"rank {rank} ({mesh.layout.coordinate_text(rank)}) of mesh ({mesh.layout.axis_text()})"


class Drawing(str):
    """Text that consoles and notebooks show without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class SvgDrawing(str):
    """An SVG document that notebooks draw."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


def draw_sharding(
    shape: Sequence[int],
    dtype: object,
    sharding: NamedSharding,
    *,
    rank: int | None = None,
    width: int | None = None,
    ascii_only: bool | None = None,
) -> str:
    """Return an array's type and its mesh as text, with a letter for each rank's part.

    Args:
        rank: a rank to put in brackets.
        width, ascii_only: as for ``draw``.

    Example:
        >>> from meshdist import Layout, P
        >>> rows = NamedSharding(Layout.from_shape((2, 2), ("dp", "tp")), P("dp"))
        >>> print(draw_sharding((8, 4), "float32", rows, ascii_only=True))
        float32[8@dp, 4]
        +---------+-----+-----+
        | dp \\ tp |   0 |   1 |
        +---------+-----+-----+
        |       0 | 0 a | 1 a |
        |       1 | 2 b | 3 b |
        +---------+-----+-----+
        shards: a = [0:4, 0:4], b = [4:8, 0:4]
    """
    picture = draw(
        sharding.layout,
        highlight_rank=rank,
        hosts=_part_texts(shape, sharding),
        legend="shards",
        width=width,
        ascii_only=ascii_only,
    )
    return f"{array_type(dtype, shape, sharding)}\n{picture}"


def draw_sharding_svg(
    shape: Sequence[int],
    dtype: object,
    sharding: NamedSharding,
    *,
    rank: int | None = None,
    width: int = 900,
) -> str:
    """Return ``draw_sharding``'s drawing as SVG, at most ``width`` pixels wide."""
    return draw_svg(
        sharding.layout,
        highlight_rank=rank,
        hosts=_part_texts(shape, sharding),
        title=array_type(dtype, shape, sharding),
        width=width,
    )


def _part_texts(shape: Sequence[int], sharding: NamedSharding) -> dict[int, str]:
    """Return, by rank, the block of the global array that it holds, as "[4:8, 0:4]"."""
    placement = sharding.placement(shape)
    layout = sharding.layout
    return {
        rank: box_text(placement.box(layout.coordinate_of(rank) or ()))
        for rank in layout.ranks().ravel().tolist()
    }
