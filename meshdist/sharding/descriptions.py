"""A sharded array described: as JSON for a checkpoint, and as a picture; without communication.

Every rank writes the same metadata. A program with another mesh reads them, asks which shards meet
the box of its own that it fills, and reads these alone. A picture shows the mesh, each rank marked
with the part that it holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dtypes import dtype_name
from ..errors import ArgumentError, MeshdistError
from ..mesh.drawing import draw, draw_svg
from ..mesh.layout import Layout
from ..mesh.partition_spec import PartitionSpec
from ..mesh.placement import Box, box_text, place_along
from ..mesh.spec import NamedSharding
from .shardings import array_type

__all__ = ["ArrayMetadata"]

_FORMAT = "meshdist.ShardedArray"
_VERSION = 1


@dataclass(frozen=True)
class SavedShard:
    """A part of an array that was saved.

    Args:
        ranks: those that held it, first the rank that saves it.
        summand: the number of this summand of an unreduced array: those of one box are added.
    """

    box: Box
    ranks: tuple[int, ...]
    summand: int = 0


@dataclass(frozen=True)
class ArrayMetadata:
    """The metadata of ``ShardedArray.metadata()``, read again, with or without its mesh.

    Args:
        shape: of the whole array.
        dtype: its name, such as ``"float32"``.
        sharding: how it lay, on a bare ``Layout``.
        shards: its parts, in the order of their boxes.

    Example:
        >>> from meshdist import P
        >>> rows = NamedSharding(Layout.from_shape((2, 2), ("dp", "tp")), P("dp"))
        >>> saved = ArrayMetadata.from_json(describe_array((5,), "float32", rows))
        >>> [(shard.box, shard.ranks) for shard in saved.shards]
        [(((0, 3),), (0, 1)), (((3, 5),), (2, 3))]
        >>> [shard.box for shard in saved.overlapping(((0, 2),))]
        [((0, 3),)]
    """

    shape: tuple[int, ...]
    dtype: str
    sharding: NamedSharding
    shards: tuple[SavedShard, ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | str) -> ArrayMetadata:
        """Read what ``metadata()`` gave, as it was or as text.

        Raises:
            ArgumentError: it is no such JSON, or of a later version.
        """
        try:
            found = json.loads(data) if isinstance(data, str) else data
            if found["format"] != _FORMAT or found["version"] > _VERSION:
                raise ArgumentError(
                    "this is no metadata of a sharded array that this version can read",
                    expected=f"format {_FORMAT!r}, version {_VERSION}",
                    found=f"format {found['format']!r}, version {found['version']!r}",
                )
            spec, mesh = found["spec"], found["mesh"]
            sharding = NamedSharding(
                Layout.from_ranks(mesh["ranks"], mesh["names"]),
                PartitionSpec(
                    *map(tuple, spec["dims"]),
                    unreduced=frozenset(spec["unreduced"]),
                    reduced=frozenset(spec["reduced"]),
                ),
                shard_sizes={int(dim): sizes for dim, sizes in spec["shard_sizes"].items()},
            )
            shape = tuple(map(int, found["shape"]))
            sharding.placement(shape)
            shards = tuple(
                SavedShard(
                    tuple((int(start), int(stop)) for start, stop in shard["box"]),
                    tuple(map(int, shard["ranks"])),
                    int(shard["summand"]),
                )
                for shard in found["shards"]
            )
            return cls(shape, str(found["dtype"]), sharding, shards)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ArgumentError) and error.summary.startswith("this is no"):
                raise
            reason = error.summary if isinstance(error, MeshdistError) else repr(error)
            raise ArgumentError(
                "this is no metadata of a sharded array",
                expected="what ShardedArray.metadata() returns, or its JSON text",
                found=reason,
            ) from error

    def overlapping(self, box: Box) -> Iterator[SavedShard]:
        """The shards that have an element of ``box`` in common with it, all their summands."""
        for shard in self.shards:
            if all(
                max(start, first) < min(stop, last)
                for (start, stop), (first, last) in zip(shard.box, box, strict=True)
            ):
                yield shard


def describe_array(shape: Sequence[int], dtype: object, sharding: NamedSharding) -> dict[str, Any]:
    """Return the metadata of an array as dicts, lists, texts and whole numbers alone."""
    layout, spec = sharding.layout, sharding.spec
    names = layout.names or ()
    placement = sharding.placement(shape)
    shards: dict[tuple[Box, int], list[int]] = {}
    for coordinate, rank in np.ndenumerate(layout.ranks()):
        summand = place_along(placement.unreduced, placement.mesh_sizes, coordinate)
        # In mesh order, so that replica 0 comes first.
        shards.setdefault((placement.box(coordinate), summand), []).append(int(rank))
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "shape": list(placement.shape),
        "dtype": dtype_name(dtype),
        "spec": {
            "dims": [[names[axis] for axis in split.axes] for split in placement.dims],
            "unreduced": sorted(spec.unreduced),
            "reduced": sorted(spec.reduced),
            "shard_sizes": {
                str(dim): list(sizes) for dim, sizes in sorted(sharding.shard_sizes.items())
            },
        },
        "mesh": {"names": list(names), "ranks": layout.ranks().tolist()},
        "shards": [
            {"box": [list(ends) for ends in box], "ranks": ranks, "summand": summand}
            for (box, summand), ranks in sorted(shards.items())
        ],
    }


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
    """Return an array's type and its mesh as text, with a letter for the part that each rank has.

    Args:
        rank: a rank to put in brackets.
        width, ascii_only: as ``draw`` takes them.

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
    """Return the drawing of ``draw_sharding`` as an SVG document, at most ``width`` pixels wide."""
    return draw_svg(
        sharding.layout,
        highlight_rank=rank,
        hosts=_part_texts(shape, sharding),
        title=array_type(dtype, shape, sharding),
        width=width,
    )


def _part_texts(shape: Sequence[int], sharding: NamedSharding) -> dict[int, str]:
    """Return the part of each rank as text, equal for ranks with equal parts."""
    placement = sharding.placement(shape)
    layout = sharding.layout
    return {
        rank: box_text(placement.box(layout.coordinate_of(rank) or ()))
        for rank in layout.ranks().ravel().tolist()
    }
