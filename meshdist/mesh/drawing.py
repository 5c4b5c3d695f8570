"""A mesh as text tables for the terminal.

A mesh of one axis is a row, of two a table, of more a table for each coordinate of the outer axes.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from .view import Grid, Hosts, Marks, View, corner, tables_abreast

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

__all__ = ["draw"]

_DEFAULT_WIDTH = 80
_MAX_LINES = 48  # of all tables together, where a mesh has more than two axes
_MAX_ROWS = 12
_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")


def draw(
    layout: Grid,
    *,
    highlight_rank: int | None = None,
    hosts: Hosts | None = None,
    legend: str = "hosts",
    width: int | None = None,
    color: bool | None = False,
    ascii_only: bool | None = None,
) -> str:
    """Return the mesh as text, one table per coordinate of all axes but the last two.

    Args:
        layout: the mesh.
        highlight_rank: a rank to put in brackets, and to keep in view.
        hosts: the host of each rank, by rank; marked by a letter, explained below the tables.
        legend: what the letters stand for, where it is something else that ranks share.
        width: columns of text to fill at most, 80 by default; three ranks a row are always shown.
        color: True for terminal colours, None where the terminal has them, False for plain text.
        ascii_only: draw with + - |; by default where stdout's encoding has no other lines.

    Raises:
        NotInGroupError: the mesh does not hold ``highlight_rank``.
        MeshError: ``hosts`` lacks a rank of the mesh.

    Example:
        >>> from meshdist.mesh.layout import Layout
        >>> print(draw(Layout.from_shape((2, 4), ("dp", "tp")), ascii_only=True, highlight_rank=6))
        +---------+---+---+-----+---+
        | dp \\ tp | 0 | 1 |   2 | 3 |
        +---------+---+---+-----+---+
        |       0 | 0 | 1 |   2 | 3 |
        |       1 | 4 | 5 | [6] | 7 |
        +---------+---+---+-----+---+
    """
    from rich.console import Console

    marks = Marks.of(layout, highlight_rank, hosts)
    if ascii_only is None:
        ascii_only = not _can_print("┌─│…⋮", sys.stdout)
    if color is None:
        console = Console(stderr=False)
        color = console.is_terminal and console.color_system is not None and not console.no_color
    width = _DEFAULT_WIDTH if width is None else width
    return _Drawing(layout, marks, legend, width, color, ascii_only).text()


class _Drawing:
    """One drawing in the making; measures are characters."""

    def __init__(
        self,
        layout: Grid,
        marks: Marks,
        legend: str,
        width: int,
        color: bool,
        ascii_only: bool,
    ) -> None:
        self.marks = marks
        self.legend = legend
        self.width = width
        self.color = color
        self.ascii_only = ascii_only
        self.dots, self.vertical_dots = ("...", ":") if ascii_only else ("…", "⋮")
        cell_width = len(str(layout.largest_rank))
        if marks.host_names:
            cell_width += 1 + len(_letters(len(marks.host_names) - 1))
        cell_width = max(cell_width, len(str(layout.sizes[-1] - 1)))
        rows_label = str(layout.sizes[-2] - 1) if layout.ndim > 1 else "rank"
        label_width = max(len(corner(layout)), len(rows_label))
        brackets = 2  # of the highlighted rank; they widen one column
        max_columns = (width - label_width - 4 - brackets) // (cell_width + 3)
        max_rows = _MAX_ROWS if layout.ndim <= 2 else _MAX_ROWS - 4
        num_rows = min(max_rows, layout.sizes[-2]) if layout.ndim > 1 else 1
        num_columns = min(max(max_columns, 3), layout.sizes[-1])
        self.table_width = label_width + 4 + brackets + num_columns * (cell_width + 3)
        self.abreast = tables_abreast(layout, (width + 2) // (self.table_width + 2))
        max_blocks = self.abreast * (_MAX_LINES // (num_rows + 6))
        self.view = View.of(layout, marks, max_blocks, max_rows, max_columns)

    def text(self) -> str:
        from rich.console import Console
        from rich.table import Table

        console = Console(
            file=io.StringIO(),
            # The tables fit: nothing is to be folded.
            width=max(self.width, 4 * self.table_width * self.abreast),
            height=_MAX_LINES,
            color_system="standard" if self.color else None,
            force_terminal=self.color,
            force_jupyter=False,
            legacy_windows=False,
            highlight=False,
            emoji=False,
            markup=False,
        )
        tiles = [self._tile(block) for block in self.view.blocks]
        with console.capture() as capture:
            for first in range(0, len(tiles), self.abreast):
                line = Table.grid(padding=(0, 2, 0, 0))
                line.add_row(*tiles[first : first + self.abreast])
                console.print(line)
            if self.marks.host_names:
                console.print(_legend(self.legend, self.marks.host_names, self.dots, self.width))
        return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n"))

    def _tile(self, block: tuple[int, ...] | None) -> Table | Text:
        """One table, below its label where there are several."""
        from rich.table import Table
        from rich.text import Text

        if block is None:
            return Text(self.dots)
        if not block:
            return self._table(block)
        tile = Table.grid()
        tile.add_row(Text(self.view.block_label(block), style="bold"))
        tile.add_row(self._table(block))
        return tile

    def _table(self, block: tuple[int, ...]) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        view = self.view
        table = Table(box=box.ASCII2 if self.ascii_only else box.SQUARE, header_style="bold")
        table.add_column(Text(corner(view.layout)), justify="right", style="bold", no_wrap=True)
        for column in view.columns:
            head = self.dots if column is None else str(column)
            table.add_column(Text(head), justify="right", no_wrap=True)
        for row in view.rows:
            if row is None:
                table.add_row(*[self.vertical_dots] * (1 + len(view.columns)))
                continue
            cells = (
                Text(self.dots)
                if column is None
                else Text(*self._cell(view.rank_at(block, row, column)))
                for column in view.columns
            )
            table.add_row(view.row_label(row), *cells)
        return table

    def _cell(self, rank: int) -> tuple[str, str]:
        """The text and the style of a rank."""
        host = self.marks.host_index(rank)
        is_highlighted = rank == self.marks.highlight_rank
        text = f"[{rank}]" if is_highlighted else str(rank)
        styles = []
        if host is not None:
            text = f"{text} {_letters(host)}"
            styles.append(_COLORS[host % len(_COLORS)])
        if is_highlighted:
            styles.append("bold reverse")
        return text, " ".join(styles)


def _legend(title: str, names: tuple[str, ...], dots: str, width: int) -> str:
    entries = [f"{_letters(index)} = {name}" for index, name in enumerate(names)]
    text = f"{title}: {', '.join(entries)}"
    while len(text) > width and len(entries) > 2:
        del entries[-2]
        text = f"{title}: {', '.join([*entries[:-1], dots, entries[-1]])}"
    return text


def _can_print(characters: str, stream: object) -> bool:
    try:
        characters.encode(getattr(stream, "encoding", None) or "utf-8")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _letters(index: int) -> str:
    """Return a, b, ... z, aa, ab, ..."""
    text = ""
    index += 1
    while index:
        index, digit = divmod(index - 1, 26)
        text = chr(ord("a") + digit) + text
    return text
