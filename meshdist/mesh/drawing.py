"""A mesh as a picture: text tables for the terminal, SVG for documents.

A mesh of one axis is a row, of two a table, of more a table for each coordinate of the outer axes.
Only what is shown is computed, so a mesh of any size draws at once; what does not fit is left out
behind an ellipsis, but never the rank to highlight.
"""

from __future__ import annotations

import io
import math
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshdist.errors import MeshError, NotInGroupError

from .layout import Layout

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Hosts", "draw", "draw_svg"]

Hosts = Mapping[int, object] | Sequence[object]

_DEFAULT_WIDTH = 80
_MAX_LINES = 48  # of all tables together, where a mesh has more than two axes
_MAX_ROWS = 12
_TERMINAL_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")
_SVG_COLORS = ("#cfe8fc", "#fde2c8", "#d5f0d3", "#f3d6ee", "#fff3bf", "#e2e2f5")


def draw(
    layout: Layout,
    *,
    highlight_rank: int | None = None,
    hosts: Hosts | None = None,
    width: int | None = None,
    color: bool | None = False,
    ascii_only: bool | None = None,
) -> str:
    """Return the mesh as text, one table per coordinate of all axes but the last two.

    Args:
        layout: the mesh.
        highlight_rank: a rank to put in brackets, and to keep in view.
        hosts: the host of each rank, by rank; marked by a letter, explained below the tables.
        width: columns of text to fill at most, 80 by default; three ranks a row are always shown.
        color: True for terminal colours, None where the terminal has them, False for plain text.
        ascii_only: draw with + - |; by default where stdout's encoding has no other lines.

    Raises:
        NotInGroupError: the mesh does not hold ``highlight_rank``.
        MeshError: ``hosts`` lacks a rank of the mesh.

    Example:
        >>> print(draw(Layout.from_shape((2, 4), ("dp", "tp")), ascii_only=True, highlight_rank=6))
        +---------+---+---+-----+---+
        | dp \\ tp | 0 | 1 |   2 | 3 |
        +---------+---+---+-----+---+
        |       0 | 0 | 1 |   2 | 3 |
        |       1 | 4 | 5 | [6] | 7 |
        +---------+---+---+-----+---+
    """
    marks = _Marks.of(layout, highlight_rank, hosts)
    if ascii_only is None:
        ascii_only = not _can_print("┌─│…⋮", sys.stdout)
    if color is None:
        color = _terminal_has_colors()
    return _text_of(layout, marks, _DEFAULT_WIDTH if width is None else width, color, ascii_only)


def draw_svg(
    layout: Layout,
    *,
    highlight_rank: int | None = None,
    hosts: Hosts | None = None,
    width: int = 900,
) -> str:
    """Return the mesh as a self-contained SVG document.

    Args:
        layout: the mesh.
        highlight_rank: a rank to frame, and to keep in view.
        hosts: the host of each rank, by rank; shown by the colour of its cell and a legend.
        width: pixels to fill at most; three ranks a row are always shown.

    Raises:
        NotInGroupError: the mesh does not hold ``highlight_rank``.
        MeshError: ``hosts`` lacks a rank of the mesh.
    """
    return _Svg(layout, _Marks.of(layout, highlight_rank, hosts), width).text()


# -------------------------------------------------------------------- what is shown


@dataclass(frozen=True)
class _Marks:
    """What a picture says about a rank besides its place."""

    highlight_rank: int | None
    highlight_at: tuple[int, ...] | None
    hosts: Hosts | None
    host_names: tuple[str, ...]  # in order of first appearance

    @staticmethod
    def of(layout: Layout, highlight_rank: int | None, hosts: Hosts | None) -> _Marks:
        at = None
        if highlight_rank is not None:
            at = layout.coordinate_of(highlight_rank)
            if at is None:
                raise NotInGroupError(
                    f"the mesh does not hold rank {highlight_rank}, which is to be highlighted",
                    where=f"mesh ({layout.axis_text()})",
                )
        names: dict[str, None] = {}
        if hosts is not None:
            for rank in layout.ranks().ravel().tolist():
                try:
                    names[str(hosts[rank])] = None
                except LookupError as error:
                    raise MeshError(
                        f"hosts names no host for rank {rank}",
                        where=f"mesh ({layout.axis_text()})",
                        expected="a host for every rank of the mesh, by rank",
                        found=f"{len(hosts)} hosts",
                    ) from error
        return _Marks(highlight_rank, at, hosts, tuple(names))

    def host_index(self, rank: int) -> int | None:
        return None if self.hosts is None else self.host_names.index(str(self.hosts[rank]))


@dataclass(frozen=True)
class _View:
    """The coordinates to show of a mesh; None stands for those left out."""

    layout: Layout
    blocks: tuple[tuple[int, ...] | None, ...]  # coordinates of all axes but the last two
    rows: tuple[int | None, ...]
    columns: tuple[int | None, ...]

    @staticmethod
    def of(
        layout: Layout, marks: _Marks, max_blocks: int, max_rows: int, max_columns: int
    ) -> _View:
        at = marks.highlight_at
        outer = layout.sizes[:-2]
        columns = _shown(layout.sizes[-1], max_columns, None if at is None else at[-1])
        rows: tuple[int | None, ...] = (0,)
        if layout.ndim > 1:
            rows = _shown(layout.sizes[-2], max_rows, None if at is None else at[-2])
        kept = None if at is None else _flat_index(at[:-2], outer)
        blocks = tuple(
            None if block is None else _coordinate(block, outer)
            for block in _shown(math.prod(outer), max_blocks, kept)
        )
        return _View(layout, blocks, rows, columns)

    def corner(self) -> str:
        if self.layout.ndim == 1:
            return self.axis_label(0)
        return f"{self.axis_label(-2)} \\ {self.axis_label(-1)}"

    def axis_label(self, index: int) -> str:
        names = self.layout.names
        return f"axis {index % self.layout.ndim}" if names is None else names[index]

    def block_label(self, block: tuple[int, ...]) -> str:
        """Return ``"pp=1"`` or, without names, ``"[1, :, :]"``; nothing where there is one."""
        if self.layout.names is None:
            return f"[{', '.join(map(str, block))}, :, :]" if block else ""
        return ", ".join(map("{}={}".format, self.layout.names, block))

    def row_label(self, row: int) -> str:
        return "rank" if self.layout.ndim == 1 else str(row)

    def rank_at(self, block: tuple[int, ...], row: int, column: int) -> int:
        return self.layout.rank_at((column,) if self.layout.ndim == 1 else (*block, row, column))


def _shown(size: int, limit: int, kept: int | None) -> tuple[int | None, ...]:
    """Return the indices to show of ``size``: the first ones, the last, and ``kept``."""
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
            shown.append(index - 1)  # as short as the ellipsis
        elif before is not None and index - before > 2:
            shown.append(None)
        shown.append(index)
    return tuple(shown)


def _flat_index(coordinate: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    flat = 0
    for index, size in zip(coordinate, sizes, strict=True):
        flat = flat * size + index
    return flat


def _coordinate(flat: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    coordinate = []
    for size in reversed(sizes):
        flat, index = divmod(flat, size)
        coordinate.append(index)
    return tuple(reversed(coordinate))


def _abreast(layout: Layout, room: int) -> int:
    """Return how many tables to put on a line: whole turns of the axis that changes fastest."""
    turn = layout.sizes[-3] if layout.ndim > 2 else 1
    return room // turn * turn if room > turn else max(room, 1)


def _letters(index: int) -> str:
    """Return a, b, ... z, aa, ab, ..."""
    text = ""
    index += 1
    while index:
        index, digit = divmod(index - 1, 26)
        text = chr(ord("a") + digit) + text
    return text


# -------------------------------------------------------------------- text


def _text_of(layout: Layout, marks: _Marks, width: int, color: bool, ascii_only: bool) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    num_hosts = len(marks.host_names)
    cell_width = len(str(layout.largest_rank))
    if num_hosts:
        cell_width += 1 + len(_letters(num_hosts - 1))
    cell_width = max(cell_width, len(str(layout.sizes[-1] - 1)))
    probe = _View(layout, (), (), ())
    rows_label = str(layout.sizes[-2] - 1) if layout.ndim > 1 else "rank"
    label_width = max(len(probe.corner()), len(rows_label))
    brackets = 2  # of the highlighted rank; they widen one column
    max_columns = (width - label_width - 4 - brackets) // (cell_width + 3)
    max_rows = _MAX_ROWS if layout.ndim <= 2 else _MAX_ROWS - 4
    num_rows = min(max_rows, layout.sizes[-2]) if layout.ndim > 1 else 1
    num_columns = min(max(max_columns, 3), layout.sizes[-1])
    table_width = label_width + 4 + brackets + num_columns * (cell_width + 3)
    abreast = _abreast(layout, (width + 2) // (table_width + 2))
    view = _View.of(layout, marks, abreast * (_MAX_LINES // (num_rows + 6)), max_rows, max_columns)
    dots, vertical_dots = ("...", ":") if ascii_only else ("…", "⋮")

    def cell_of(rank: int) -> Text:
        host = marks.host_index(rank)
        text = f"[{rank}]" if rank == marks.highlight_rank else str(rank)
        styles = []
        if host is not None:
            text = f"{text} {_letters(host)}"
            styles.append(_TERMINAL_COLORS[host % len(_TERMINAL_COLORS)])
        if rank == marks.highlight_rank:
            styles.append("bold reverse")
        return Text(text, style=" ".join(styles))

    def table_of(block: tuple[int, ...]) -> Table:
        table = Table(box=box.ASCII2 if ascii_only else box.SQUARE, header_style="bold")
        table.add_column(Text(view.corner()), justify="right", style="bold", no_wrap=True)
        for column in view.columns:
            head = dots if column is None else str(column)
            table.add_column(Text(head), justify="right", no_wrap=True)
        for row in view.rows:
            if row is None:
                table.add_row(*[vertical_dots] * (1 + len(view.columns)))
                continue
            cells = (
                Text(dots) if column is None else cell_of(view.rank_at(block, row, column))
                for column in view.columns
            )
            table.add_row(view.row_label(row), *cells)
        return table

    tiles: list[Table | Text] = []
    for block in view.blocks:
        if block is None:
            tiles.append(Text(dots))
        elif block:
            tile = Table.grid()
            tile.add_row(Text(view.block_label(block), style="bold"))
            tile.add_row(table_of(block))
            tiles.append(tile)
        else:
            tiles.append(table_of(block))
    console = Console(
        file=io.StringIO(),
        width=max(width, 4 * table_width * abreast),  # the tables fit: nothing is to be folded
        height=_MAX_LINES,
        color_system="standard" if color else None,
        force_terminal=color,
        force_jupyter=False,
        legacy_windows=False,
        highlight=False,
        emoji=False,
        markup=False,
    )
    with console.capture() as capture:
        for first in range(0, len(tiles), abreast):
            line = Table.grid(padding=(0, 2, 0, 0))
            line.add_row(*tiles[first : first + abreast])
            console.print(line)
        if num_hosts:
            console.print(_legend(marks.host_names, dots, width))
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n"))


def _legend(names: tuple[str, ...], dots: str, width: int) -> str:
    entries = [f"{_letters(index)} = {name}" for index, name in enumerate(names)]
    text = "hosts: " + ", ".join(entries)
    while len(text) > width and len(entries) > 2:
        del entries[-2]
        text = "hosts: " + ", ".join([*entries[:-1], dots, entries[-1]])
    return text


def _can_print(characters: str, stream: object) -> bool:
    try:
        characters.encode(getattr(stream, "encoding", None) or "utf-8")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _terminal_has_colors() -> bool:
    from rich.console import Console

    console = Console(stderr=False)
    return console.is_terminal and console.color_system is not None and not console.no_color


# -------------------------------------------------------------------- SVG


class _Svg:
    """One drawing in the making; measures are pixels."""

    margin = 12
    cell_height = 28
    line_height = 20
    character_width = 8

    def __init__(self, layout: Layout, marks: _Marks, width: int) -> None:
        self.marks = marks
        digits = max(len(str(layout.largest_rank)), len(str(layout.sizes[-1] - 1)), 3)
        self.cell_width = 16 + digits * self.character_width
        probe = _View(layout, (), (), ())
        self.label_width = 12 + self.character_width * max(len(probe.corner()), 4)
        room = width - 2 * self.margin
        max_columns = (room - self.label_width) // self.cell_width
        max_rows = 16 if layout.ndim <= 2 else 8
        num_columns = min(max(max_columns, 3), layout.sizes[-1])
        table_width = self.label_width + num_columns * self.cell_width
        self.abreast = _abreast(layout, (room + self.margin) // (table_width + self.margin))
        self.view = _View.of(layout, marks, 4 * self.abreast, max_rows, max_columns)
        self.root = ElementTree.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "font-family": "ui-monospace, Menlo, Consolas, monospace",
                "font-size": "13",
            },
        )
        ElementTree.SubElement(self.root, "title").text = f"mesh ({layout.axis_text()})"

    def text(self) -> str:
        view = self.view
        table_width = self.label_width + len(view.columns) * self.cell_width
        has_labels = view.layout.ndim > 2
        tile_height = (1 + len(view.rows)) * self.cell_height + has_labels * self.line_height
        abreast = min(self.abreast, len(view.blocks))
        height = self.margin
        for first in range(0, len(view.blocks), abreast):
            line = view.blocks[first : first + abreast]
            line_height = self.line_height if line == (None,) else tile_height
            for across, block in enumerate(line):
                x = self.margin + across * (table_width + self.margin)
                y = height
                if block is None:
                    self._write("…", x + table_width // 2, y + line_height // 2)
                    continue
                if has_labels:
                    label = view.block_label(block)
                    self._write(label, x, y + self.line_height // 2, anchor="start", bold=True)
                    y += self.line_height
                self._table(block, x, y)
            height += line_height + self.margin
        width = self.margin + abreast * (table_width + self.margin)
        if self.marks.host_names:
            width = max(width, self._legend(height))
            height += self.line_height + self.margin
        self.root.set("viewBox", f"0 0 {width} {height}")
        self.root.set("width", str(width))
        self.root.set("height", str(height))
        ElementTree.indent(self.root)
        return ElementTree.tostring(self.root, encoding="unicode")

    def _table(self, block: tuple[int, ...], x: int, y: int) -> None:
        view = self.view
        middle = self.cell_height // 2
        self._write(view.corner(), x + self.label_width - 8, y + middle, anchor="end", bold=True)
        for across, column in enumerate(view.columns):
            at = x + self.label_width + across * self.cell_width + self.cell_width // 2
            self._write("…" if column is None else str(column), at, y + middle)
        for down, row in enumerate(view.rows, start=1):
            top = y + down * self.cell_height
            label = "⋮" if row is None else view.row_label(row)
            self._write(label, x + self.label_width - 8, top + middle, anchor="end")
            for across, column in enumerate(view.columns):
                left = x + self.label_width + across * self.cell_width
                if row is None or column is None:
                    dots = "⋮" if row is None else "…"
                    self._write(dots, left + self.cell_width // 2, top + middle)
                else:
                    self._cell(view.rank_at(block, row, column), left, top)

    def _cell(self, rank: int, x: int, y: int) -> None:
        host = self.marks.host_index(rank)
        is_highlighted = rank == self.marks.highlight_rank
        group = ElementTree.SubElement(self.root, "g")
        hover = f"rank {rank} ({self.view.layout.coordinate_text(rank)})"
        if host is not None:
            hover += f" on {self.marks.host_names[host]}"
        ElementTree.SubElement(group, "title").text = hover
        inset = 1 if is_highlighted else 0
        self._box(
            group,
            x + inset,
            y + inset,
            self.cell_width - 2 * inset,
            self.cell_height - 2 * inset,
            fill="#f4f4f4" if host is None else _SVG_COLORS[host % len(_SVG_COLORS)],
            stroke="#d6336c" if is_highlighted else "#999999",
            stroke_width=3 if is_highlighted else 1,
        )
        self._write(
            str(rank),
            x + self.cell_width // 2,
            y + self.cell_height // 2,
            bold=is_highlighted,
            fill="#222222",
            parent=group,
        )

    def _legend(self, y: int) -> int:
        """Draw the hosts' colours below ``y``; return the width that this took."""
        x = self.margin
        names = self.marks.host_names
        for index in _shown(len(names), 8, None):
            if index is None:
                self._write("…", x, y + 8, anchor="start")
                x += 3 * self.character_width
                continue
            color = _SVG_COLORS[index % len(_SVG_COLORS)]
            self._box(self.root, x, y, 16, 16, fill=color, stroke="#999999", stroke_width=1)
            self._write(names[index], x + 22, y + 8, anchor="start")
            x += 22 + (2 + len(names[index])) * self.character_width
        return x + self.margin

    def _box(
        self,
        parent: ElementTree.Element,
        x: int,
        y: int,
        width: int,
        height: int,
        *,
        fill: str,
        stroke: str,
        stroke_width: int,
    ) -> None:
        sides = {"x": x, "y": y, "width": width, "height": height, "stroke-width": stroke_width}
        attributes = {name: str(value) for name, value in sides.items()}
        ElementTree.SubElement(parent, "rect", attributes | {"fill": fill, "stroke": stroke})

    def _write(
        self,
        text: str,
        x: int,
        y: int,
        *,
        anchor: str = "middle",
        bold: bool = False,
        fill: str = "#777777",  # readable on white and on black pages
        parent: ElementTree.Element | None = None,
    ) -> None:
        attributes = {
            "x": str(x),
            "y": str(y),
            "text-anchor": anchor,
            "dominant-baseline": "central",
            "fill": fill,
        }
        if bold:
            attributes["font-weight"] = "bold"
        host = self.root if parent is None else parent
        ElementTree.SubElement(host, "text", attributes).text = text
