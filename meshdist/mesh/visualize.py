"""Draw a mesh as text tables and as SVG.

One axis is a row, two axes are a table; more axes are a table per coordinate of the outer axes.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from .view import Grid, Hosts, Marks, View, corner, indices_shown, tables_per_line

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_PAGE = (
    'xmlns="http://www.w3.org/2000/svg" font-size="13" '
    'font-family="ui-monospace, Menlo, Consolas, monospace"'
)
_COLORS = ("#cfe8fc", "#fde2c8", "#d5f0d3", "#f3d6ee", "#fff3bf", "#e2e2f5")


def draw_svg(
    layout: Grid,
    *,
    highlight_rank: int | None = None,
    hosts: Hosts | None = None,
    title: str | None = None,
    width: int = 900,
) -> str:
    """Return the mesh as a self-contained SVG document.

    Args:
        highlight_rank: a rank to frame, and to keep in view.
        hosts: the host of each rank, shown by the colour of its cell and a legend.
        width: maximum in pixels; three ranks per row always fit.
    """
    title = f"mesh ({layout.axis_text()})" if title is None else title
    return _Svg(layout, Marks.of(layout, highlight_rank, hosts), title, width).text()


class _Svg:
    """Builder of an SVG drawing; lengths are in pixels."""

    margin = 12
    cell_height = 28
    line_height = 20
    character_width = 8

    def __init__(self, layout: Grid, marks: Marks, title: str, width: int) -> None:
        self.marks = marks
        self.title = title
        digits = max(len(str(layout.largest_rank)), len(str(layout.sizes[-1] - 1)), 3)
        self.cell_width = 16 + digits * self.character_width
        self.label_width = 12 + self.character_width * max(len(corner(layout)), 4)
        available = width - 2 * self.margin
        max_columns = (available - self.label_width) // self.cell_width
        max_rows = 16 if layout.ndim <= 2 else 8
        num_columns = min(max(max_columns, 3), layout.sizes[-1])
        table_width = self.label_width + num_columns * self.cell_width
        self.per_line = tables_per_line(
            layout, (available + self.margin) // (table_width + self.margin)
        )
        self.view = View.of(layout, marks, 4 * self.per_line, max_rows, max_columns)
        self.parts: list[str] = []

    def text(self) -> str:
        view = self.view
        table_width = self.label_width + len(view.columns) * self.cell_width
        has_labels = view.layout.ndim > 2
        tile_height = (1 + len(view.rows)) * self.cell_height + has_labels * self.line_height
        per_line = min(self.per_line, len(view.blocks))
        height = self.margin
        for first in range(0, len(view.blocks), per_line):
            line = view.blocks[first : first + per_line]
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
        width = self.margin + per_line * (table_width + self.margin)
        if self.marks.host_names:
            width = max(width, self._legend(height))
            height += self.line_height + self.margin
        box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join([f"<svg {_PAGE} {box}>", title, *self.parts, "</svg>"])

    def _table(self, block: tuple[int, ...], x: int, y: int) -> None:
        view = self.view
        middle = self.cell_height // 2
        self._write(
            corner(view.layout), x + self.label_width - 8, y + middle, anchor="end", bold=True
        )
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
        hover = f"rank {rank} ({self.view.layout.coordinate_text(rank)})"
        if host is not None:
            hover += f" on {self.marks.host_names[host]}"
        inset = 1 if is_highlighted else 0
        size = self.cell_width - 2 * inset, self.cell_height - 2 * inset
        fill = "#f4f4f4" if host is None else _COLORS[host % len(_COLORS)]
        self.parts.append(f"<g><title>{escape(hover)}</title>")
        self._box(x + inset, y + inset, *size, fill, is_highlighted)
        middle = x + self.cell_width // 2, y + self.cell_height // 2
        self._write(str(rank), *middle, bold=is_highlighted, fill="#222222")
        self.parts.append("</g>")

    def _legend(self, y: int) -> int:
        """Draw the hosts' names and colours at height ``y``; return their right edge."""
        x = self.margin
        names = self.marks.host_names
        for index in indices_shown(len(names), 8, None):
            if index is None:
                self._write("…", x, y + 8, anchor="start")
                x += 3 * self.character_width
                continue
            self._box(x, y, 16, 16, _COLORS[index % len(_COLORS)])
            self._write(names[index], x + 22, y + 8, anchor="start")
            x += 22 + (2 + len(names[index])) * self.character_width
        return x + self.margin

    def _box(
        self, x: int, y: int, width: int, height: int, fill: str, is_framed: bool = False
    ) -> None:
        stroke = '"#d6336c" stroke-width="3"' if is_framed else '"#999999" stroke-width="1"'
        bounds = f'x="{x}" y="{y}" width="{width}" height="{height}"'
        self.parts.append(f'<rect {bounds} fill="{fill}" stroke={stroke}/>')

    def _write(
        self,
        text: str,
        x: int,
        y: int,
        *,
        anchor: str = "middle",
        bold: bool = False,
        fill: str = "#777777",  # Readable on white and on black pages.
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" dominant-baseline="central" '
            f'fill="{fill}"{weight}>{escape(text)}</text>'
        )


_DEFAULT_WIDTH = 80
_MAX_LINES = 48  # For all tables together, if a mesh has more than two axes.
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
        highlight_rank: a rank to put in brackets, and to keep in view.
        hosts: the host of each rank, marked by a letter that is explained below the tables.
        legend: the meaning of the letters, if ``hosts`` holds other groups of ranks.
        width: maximum in characters, 80 by default; three ranks per row always fit.
        color: True for terminal colours, None if the terminal has them, False for plain text.
        ascii_only: draw with + - |; by default if stdout's encoding has no other lines.

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
    return _GridDrawing(layout, marks, legend, width, color, ascii_only).text()


class _GridDrawing:
    """Builder of a text drawing; lengths are in characters."""

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
        brackets = 2  # The highlighted rank's brackets widen its column.
        max_columns = (width - label_width - 4 - brackets) // (cell_width + 3)
        max_rows = _MAX_ROWS if layout.ndim <= 2 else _MAX_ROWS - 4
        num_rows = min(max_rows, layout.sizes[-2]) if layout.ndim > 1 else 1
        num_columns = min(max(max_columns, 3), layout.sizes[-1])
        self.table_width = label_width + 4 + brackets + num_columns * (cell_width + 3)
        self.per_line = tables_per_line(layout, (width + 2) // (self.table_width + 2))
        max_blocks = self.per_line * (_MAX_LINES // (num_rows + 6))
        self.view = View.of(layout, marks, max_blocks, max_rows, max_columns)

    def text(self) -> str:
        from rich.console import Console
        from rich.table import Table

        console = Console(
            file=io.StringIO(),
            width=max(self.width, 4 * self.table_width * self.per_line),
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
            for first in range(0, len(tiles), self.per_line):
                line = Table.grid(padding=(0, 2, 0, 0))
                line.add_row(*tiles[first : first + self.per_line])
                console.print(line)
            if self.marks.host_names:
                console.print(_legend(self.legend, self.marks.host_names, self.dots, self.width))
        return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n"))

    def _tile(self, block: tuple[int, ...] | None) -> Table | Text:
        """Return a block's table, with a label if there are several; dots for None."""
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
    """Return ``index`` in letters: a, b, ... z, aa, ab, ..."""
    text = ""
    index += 1
    while index:
        index, digit = divmod(index - 1, 26)
        text = chr(ord("a") + digit) + text
    return text
