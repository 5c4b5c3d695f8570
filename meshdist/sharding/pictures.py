"""Pictures of a sharded array: its mesh, each rank marked with the part that it holds."""

from __future__ import annotations

from collections.abc import Sequence

from ..mesh.drawing import draw, draw_svg
from ..mesh.spec import NamedSharding
from ..mesh.splits import box_text
from .shardings import array_type

__all__ = ["Drawing", "SvgDrawing", "draw_sharding", "draw_sharding_svg"]


class Drawing(str):
    """A text that consoles and notebooks show as it is, without quotes."""

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
    """The type of an array, its mesh with a letter for each part, and which part each letter is.

    Args:
        shape, dtype, sharding: of the array.
        rank: one to put in brackets.
        width: columns of text to fill at most, 80 by default.
        ascii_only: draw with + - |; by default where stdout's encoding has no other lines.

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
        hosts=_parts(shape, sharding),
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
    """Draw as ``draw_sharding`` does, but an SVG document at most ``width`` pixels wide."""
    return draw_svg(
        sharding.layout,
        highlight_rank=rank,
        hosts=_parts(shape, sharding),
        title=array_type(dtype, shape, sharding),
        width=width,
    )


def _parts(shape: Sequence[int], sharding: NamedSharding) -> dict[int, str]:
    """The part of each rank, as it is sliced; ranks with equal parts have equal texts."""
    placement = sharding.placement(shape)
    layout = sharding.layout
    return {
        rank: box_text(placement.box(layout.coordinate_of(rank) or ()))
        for rank in layout.ranks().ravel().tolist()
    }
