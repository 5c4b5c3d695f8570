"""A mesh as an SVG document."""

from __future__ import annotations

from xml.sax.saxutils import escape

from .view import Grid, Hosts, Marks, View, corner, indices_shown, tables_abreast

__all__ = ["draw_svg"]

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
        layout: the mesh.
        highlight_rank: a rank to frame, and to keep in view.
        hosts: the host of each rank, by rank; shown by the colour of its cell and a legend.
        title: of the document; None says which mesh it is.
        width: pixels to fill at most; three ranks a row are always shown.

    Raises:
        NotInGroupError: the mesh does not hold ``highlight_rank``.
        MeshError: ``hosts`` lacks a rank of the mesh.
    """
    title = f"mesh ({layout.axis_text()})" if title is None else title
    return _Svg(layout, Marks.of(layout, highlight_rank, hosts), title, width).text()


class _Svg:
    """One drawing in the making; measures are pixels."""

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
        room = width - 2 * self.margin
        max_columns = (room - self.label_width) // self.cell_width
        max_rows = 16 if layout.ndim <= 2 else 8
        num_columns = min(max(max_columns, 3), layout.sizes[-1])
        table_width = self.label_width + num_columns * self.cell_width
        self.abreast = tables_abreast(layout, (room + self.margin) // (table_width + self.margin))
        self.view = View.of(layout, marks, 4 * self.abreast, max_rows, max_columns)
        self.parts: list[str] = []

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
        """Draw the hosts' colours below ``y``; return the width that this took."""
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
        place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
        self.parts.append(f'<rect {place} fill="{fill}" stroke={stroke}/>')

    def _write(
        self,
        text: str,
        x: int,
        y: int,
        *,
        anchor: str = "middle",
        bold: bool = False,
        fill: str = "#777777",  # readable on white and on black pages
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" dominant-baseline="central" '
            f'fill="{fill}"{weight}>{escape(text)}</text>'
        )
