"""The metadata of a sharded array for a checkpoint, as JSON: written without communication.

Every rank writes the same. A program with another mesh reads it, asks which shards meet the box of
its own that it fills, and reads these alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dtypes import dtype_name
from ..errors import ArgumentError, MeshdistError
from ..mesh.layout import Layout
from ..mesh.spec import NamedSharding, PartitionSpec
from ..mesh.splits import Box, place_along

__all__ = ["ArrayMetadata", "SavedShard", "describe_array"]

_FORMAT = "meshdist.ShardedArray"
_VERSION = 1


@dataclass(frozen=True)
class SavedShard:
    """One part of an array that was sharded.

    Args:
        box: (start, stop) per dim, in the whole array.
        ranks: those that held it, the one that saves it first.
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
                    tuple((int(start), int(stop)) for start, stop in one["box"]),
                    tuple(map(int, one["ranks"])),
                    int(one["summand"]),
                )
                for one in found["shards"]
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
    """The metadata of an array, as dicts, lists, texts and whole numbers alone."""
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
