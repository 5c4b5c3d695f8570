"""Select the coordinates, labels and marks that a drawing of a mesh shows.

An ellipsis replaces coordinates that do not fit, but never the highlighted rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import MeshError, NotInGroupError

Hosts = Mapping[int, object] | Sequence[object]


class Grid(Protocol):
    """The protocol of ``Layout`` for drawing."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the axes, or None."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each axis."""

    @property
    def ndim(self) -> int:
        """The number of axes."""

    @property
    def largest_rank(self) -> int:
        """The largest rank of the mesh."""

    def axis_text(self) -> str:
        """Return the axes as ``dp=2, tp=4``."""

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of a rank, or None outside the mesh."""

    def coordinate_text(self, rank: int) -> str:
        """Return the coordinate of a rank as ``dp=1, tp=0``."""

    def rank_at(self, coordinate: tuple[int, ...]) -> int:
        """Return the rank at a coordinate."""

    def ranks(self) -> np.ndarray[Any, Any]:
        """Return all ranks, in the shape of the mesh."""


@dataclass(frozen=True)
class Marks:
    """A drawing's highlighted rank and hosts."""

    highlight_rank: int | None
    highlight_at: tuple[int, ...] | None
    hosts: Hosts | None
    host_names: tuple[str, ...]  # In order of first appearance.

    @staticmethod
    def of(layout: Grid, highlight_rank: int | None, hosts: Hosts | None) -> Marks:
        """Return the marks; raise if the mesh lacks the rank, or ``hosts`` has none for a rank."""
        at = None
        if highlight_rank is not None:
            at = layout.coordinate_of(highlight_rank)
            if at is None:
                raise NotInGroupError(
                    f"the mesh does not contain rank {highlight_rank}, which highlight_rank names",
                    where=f"mesh ({layout.axis_text()})",
                )
        names: dict[str, None] = {}
        if hosts is not None:
            for rank in layout.ranks().ravel().tolist():
                try:
                    names[str(hosts[rank])] = None
                except LookupError as error:
                    raise MeshError(
                        f"hosts has no entry for rank {rank}",
                        where=f"mesh ({layout.axis_text()})",
                        expected="a host for every rank of the mesh, by rank",
                        found=f"{len(hosts)} hosts",
                    ) from error
        return Marks(highlight_rank, at, hosts, tuple(names))

    def host_index(self, rank: int) -> int | None:
        """Return the index in ``host_names`` of the rank's host; None without hosts."""
        return None if self.hosts is None else self.host_names.index(str(self.hosts[rank]))


@dataclass(frozen=True)
class View:
    """The blocks, rows and columns that a drawing shows; None is an ellipsis."""

    layout: Grid
    blocks: tuple[tuple[int, ...] | None, ...]  # Coordinates of all axes but the last two.
    rows: tuple[int | None, ...]
    columns: tuple[int | None, ...]

    @staticmethod
    def of(layout: Grid, marks: Marks, max_blocks: int, max_rows: int, max_columns: int) -> View:
        """Return the coordinates that fit within the maxima, with the highlighted rank's."""
        at = marks.highlight_at
        outer = layout.sizes[:-2]
        columns = indices_shown(layout.sizes[-1], max_columns, None if at is None else at[-1])
        rows: tuple[int | None, ...] = (0,)
        if layout.ndim > 1:
            rows = indices_shown(layout.sizes[-2], max_rows, None if at is None else at[-2])
        kept = None if at is None else int(np.ravel_multi_index(at[:-2], outer))
        blocks = tuple(
            None if block is None else tuple(map(int, np.unravel_index(block, outer)))
            for block in indices_shown(math.prod(outer), max_blocks, kept)
        )
        return View(layout, blocks, rows, columns)

    def block_label(self, block: tuple[int, ...]) -> str:
        """Return a block's label, "pp=1" or, without names, "[1, :, :]"; "" for up to two axes."""
        if self.layout.names is None:
            return f"[{', '.join(map(str, block))}, :, :]" if block else ""
        return ", ".join(map("{}={}".format, self.layout.names, block))

    def row_label(self, row: int) -> str:
        """Return a row's index, or "rank" in a mesh of one axis."""
        return "rank" if self.layout.ndim == 1 else str(row)

    def rank_at(self, block: tuple[int, ...], row: int, column: int) -> int:
        return self.layout.rank_at((column,) if self.layout.ndim == 1 else (*block, row, column))


def corner(layout: Grid) -> str:
    """Return a table's corner: the axes of the rows and of the columns."""
    names = layout.names or tuple(f"axis {index}" for index in range(layout.ndim))
    return " \\ ".join(names[-2:])


def indices_shown(size: int, limit: int, kept: int | None) -> tuple[int | None, ...]:
    """Return at most ``limit`` (or 3) indices below ``size``, ``kept`` too; None is an ellipsis."""
    if size <= limit:
        return tuple(range(size))
    limit = max(limit, 3)
    chosen = {*range(limit - 2), size - 1}
    if kept is not None and kept not in chosen:
        chosen = {*range(max(limit - 4, 1)), kept, size - 1}
    shown: list[int | None] = []
    for index in sorted(chosen):
        before = shown[-1] if shown else -1
        if before is not None and index - before == 2:
            shown.append(index - 1)  # An ellipsis would not be shorter.
        elif before is not None and index - before > 2:
            shown.append(None)
        shown.append(index)
    return tuple(shown)


def tables_per_line(layout: Grid, available: int) -> int:
    """Return the tables per line, at most ``available``: a multiple of axis -3's size, if any."""
    turn = layout.sizes[-3] if layout.ndim > 2 else 1
    return available // turn * turn if available > turn else max(available, 1)
