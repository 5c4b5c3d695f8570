"""A mesh as text tables for the terminal.

A mesh of one axis is a row, of two a table, of more a table for each coordinate of the outer axes.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from .layout import Layout
from .view import Hosts, Marks, View, tables_abreast

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["draw"]

_DEFAULT_WIDTH = 80
_MAX_LINES = 48  # of all tables together, where a mesh has more than two axes
_MAX_ROWS = 12
_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")


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
    marks = Marks.of(layout, highlight_rank, hosts)
    if ascii_only is None:
        ascii_only = not _can_print("┌─│…⋮", sys.stdout)
    if color is None:
        color = _terminal_has_colors()
    return _text_of(layout, marks, _DEFAULT_WIDTH if width is None else width, color, ascii_only)


def _text_of(layout: Layout, marks: Marks, width: int, color: bool, ascii_only: bool) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    num_hosts = len(marks.host_names)
    cell_width = len(str(layout.largest_rank))
    if num_hosts:
        cell_width += 1 + len(_letters(num_hosts - 1))
    cell_width = max(cell_width, len(str(layout.sizes[-1] - 1)))
    probe = View(layout, (), (), ())
    rows_label = str(layout.sizes[-2] - 1) if layout.ndim > 1 else "rank"
    label_width = max(len(probe.corner()), len(rows_label))
    brackets = 2  # of the highlighted rank; they widen one column
    max_columns = (width - label_width - 4 - brackets) // (cell_width + 3)
    max_rows = _MAX_ROWS if layout.ndim <= 2 else _MAX_ROWS - 4
    num_rows = min(max_rows, layout.sizes[-2]) if layout.ndim > 1 else 1
    num_columns = min(max(max_columns, 3), layout.sizes[-1])
    table_width = label_width + 4 + brackets + num_columns * (cell_width + 3)
    abreast = tables_abreast(layout, (width + 2) // (table_width + 2))
    view = View.of(layout, marks, abreast * (_MAX_LINES // (num_rows + 6)), max_rows, max_columns)
    dots, vertical_dots = ("...", ":") if ascii_only else ("…", "⋮")

    def cell_of(rank: int) -> Text:
        host = marks.host_index(rank)
        text = f"[{rank}]" if rank == marks.highlight_rank else str(rank)
        styles = []
        if host is not None:
            text = f"{text} {_letters(host)}"
            styles.append(_COLORS[host % len(_COLORS)])
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


def _letters(index: int) -> str:
    """Return a, b, ... z, aa, ab, ..."""
    text = ""
    index += 1
    while index:
        index, digit = divmod(index - 1, 26)
        text = chr(ord("a") + digit) + text
    return text
