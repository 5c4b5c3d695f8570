"""The pictures of the README and the guides.

    python packaging/pictures.py           (all drawings)
    python packaging/pictures.py --run     (also the losses of a real run: two minutes on two cores)

Pages show pictures as images, so the theme's style does not reach them: their text is gray, and
readable on white and on black; text on a light box is dark.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from meshdist import Layout  # noqa: E402
from meshdist.mesh.visualize import draw_svg  # noqa: E402

IMAGES = ROOT / "docs" / "images"

_GRAY, _DARK, _LINE = "#808080", "#222222", "#999999"
_PLAIN, _BLUE, _ORANGE, _GREEN, _PINK = "#f4f4f4", "#cfe8fc", "#fde2c8", "#d5f0d3", "#f3d6ee"


class Drawing:
    """An SVG picture that grows element by element; lengths are in pixels."""

    def __init__(self, width: int, height: int, title: str, font: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-size="13" font-family="{font}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{_GRAY}"/></marker></defs>',
        ]

    def box(
        self, x: int, y: int, width: int, height: int, fill: str, *, bold: bool = False
    ) -> None:
        stroke = '"#d6336c" stroke-width="3"' if bold else f'"{_LINE}" stroke-width="1"'
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="2" fill="{fill}" '
            f"stroke={stroke}/>"
        )

    def text(
        self,
        x: int,
        y: int,
        text: str,
        *,
        fill: str = _GRAY,
        anchor: str = "middle",
        style: str = "",
    ) -> None:
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" dominant-baseline="central" '
            f'fill="{fill}"{style}>{escape(text)}</text>'
        )

    def arrow(self, x1: int, y1: int, x2: int, y2: int) -> None:
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{_GRAY}" stroke-width="1.5" '
            'marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


_SANS = "system-ui, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_BOLD = ' font-weight="bold"'
_SMALL = ' font-size="12"'


def mesh_axes() -> str:
    """Draw a mesh (dp=2, tp=4), and the two groups of rank 6."""
    mesh, rank = Layout.from_shape((2, 4), ("dp", "tp")), 6
    across, down = (mesh.ranks_of_axis(axis, rank) for axis in ("tp", "dp"))
    picture = Drawing(600, 176, "mesh (dp=2, tp=4) and the groups of rank 6", _SANS)
    picture.text(200, 16, "axis tp", style=_BOLD)
    picture.arrow(232, 16, 336, 16)
    picture.text(34, 60, "axis dp", style=_BOLD)
    picture.arrow(34, 74, 34, 160)
    for column in range(4):
        picture.text(124 + 60 * column, 42, str(column))
    for row in range(2):
        picture.text(78, 84 + 56 * row, str(row))
        for column in range(4):
            here = mesh.rank_at((row, column))
            fill = _BLUE if here in across else _ORANGE if here in down else _PLAIN
            if here == rank:
                continue
            picture.box(96 + 60 * column, 60 + 56 * row, 56, 48, fill)
            picture.text(124 + 60 * column, 84 + 56 * row, str(here), fill=_DARK)
    row, column = mesh.coordinate_of(rank) or ()
    picture.box(96 + 60 * column, 60 + 56 * row, 28, 48, _BLUE)
    picture.box(124 + 60 * column, 60 + 56 * row, 28, 48, _ORANGE)
    picture.box(96 + 60 * column, 60 + 56 * row, 56, 48, "none", bold=True)
    picture.text(124 + 60 * column, 84 + 56 * row, str(rank), fill=_DARK, style=_BOLD)
    lines = [
        (_PLAIN, f"rank {rank}: dp={row}, tp={column}"),
        (_BLUE, f'its group mesh["tp"]: {", ".join(map(str, across))}'),
        (_ORANGE, f'its group mesh["dp"]: {", ".join(map(str, down))}'),
    ]
    for index, (fill, line) in enumerate(lines):
        picture.box(360, 76 + 28 * index, 16, 16, fill, bold=index == 0)
        picture.text(386, 84 + 28 * index, line, anchor="start")
    return picture.svg()


def block_communication() -> str:
    """Draw what data, tensor and sequence parallelism send in one block."""
    picture = Drawing(760, 436, "collectives of one block under three kinds of parallelism", _SANS)
    rows = [
        ("data parallel", "over dp", ("all", "all", "all"), None, None, None, None),
        (
            "tensor parallel",
            "over tp",
            ("all", "column", "row"),
            "",
            "all-reduce",
            "all-reduce",
            "",
        ),
        (
            "sequence parallel",
            "over tp",
            ("all", "column", "row"),
            "all-gather",
            "reduce-scatter",
            "reduce-scatter",
            "all-gather",
        ),
    ]
    modules, starts, width = ("norm", "up", "down"), (176, 376, 516), 90
    before, after = 321, 676  # the middle of the gap before up, and of that after down
    for index, (name, axis, weights, *collectives) in enumerate(rows):
        y = 70 + 140 * index
        picture.text(12, y, name, anchor="start", style=_BOLD)
        picture.text(12, y + 20, axis, anchor="start")
        for module, start, part in zip(modules, starts, weights, strict=True):
            fill = _PLAIN if part == "all" else _BLUE
            picture.box(start, y - 26, width, 52, fill)
            picture.text(start + width // 2, y - 8, module, fill=_DARK, style=_BOLD)
            label = "all weights" if part == "all" else f"split: {part}"
            picture.text(start + width // 2, y + 11, label, fill=_DARK, style=_SMALL)
        for left, right in ((152, 174), (266, 374), (466, 514), (606, 746)):
            picture.arrow(left, y - 14, right, y - 14)
            picture.arrow(right, y + 14, left + 2, y + 14)
        if collectives[0] is None:
            _badge(picture, 391, y + 46, "all-reduce of all gradients, during the backward", 430)
            continue
        places = ((before, y - 32), (after, y - 32), (before, y + 32), (after, y + 32))
        for (x, level), collective in zip(places, collectives, strict=True):
            if collective:
                _badge(picture, x, level, collective, 108)
        if name.startswith("sequence"):
            _badge(picture, 221, y + 64, "all-reduce of norm's gradients", 210)
    picture.text(176, 16, "upper arrows: forward; lower: backward", anchor="start")
    for x, fill, label in ((484, _BLUE, "split over tp"), (622, _ORANGE, "collective")):
        picture.box(x, 8, 16, 16, fill)
        picture.text(x + 26, 16, label, anchor="start")
    return picture.svg()


def _badge(picture: Drawing, x: int, y: int, text: str, width: int) -> None:
    picture.box(x - width // 2, y - 11, width, 22, _ORANGE)
    picture.text(x, y, text, fill=_DARK, style=_SMALL)


def checkpoint_pieces() -> str:
    """Draw twelve rows that four ranks save and three ranks load."""
    colors, height = (_BLUE, _ORANGE, _GREEN, _PINK), 16
    picture = Drawing(700, 348, "a checkpoint: saved by 4 ranks, loaded by 3 ranks", _SANS)
    for x, head in ((75, "4 ranks save"), (345, "files"), (615, "3 ranks load")):
        picture.text(x, 16, head, style=_BOLD)
    sources = []
    for rank in range(4):
        y = 44 + 66 * rank
        picture.text(8, y + 24, f"rank {rank}", anchor="start")
        for line in range(3):
            row = 3 * rank + line
            picture.box(64, y + height * line, 84, height, colors[rank])
            picture.text(106, y + height * line + 8, f"row {row}", fill=_DARK, style=_SMALL)
            sources.append(y + 24)
        picture.arrow(154, y + 24, 256, y + 24)
        picture.box(262, y + 6, 166, 36, colors[rank])
        picture.text(345, y + 24, f"rank-{rank}.safetensors", fill=_DARK)
    picture.box(262, 308, 166, 30, _PLAIN)
    picture.text(345, 323, "manifest.json", fill=_DARK)
    for rank in range(3):
        y = 52 + 84 * rank
        for source in sorted({sources[4 * rank + line] for line in range(4)}):
            picture.arrow(434, source, 540, y + 32)
        for line in range(4):
            row = 4 * rank + line
            picture.box(546, y + height * line, 84, height, colors[row // 3])
            picture.text(588, y + height * line + 8, f"row {row}", fill=_DARK, style=_SMALL)
        picture.text(642, y + 32, f"rank {rank}", anchor="start")
    return picture.svg()


def drawings() -> dict[str, str]:
    """Return the text of each picture that needs no run, by its name in docs/images."""
    readme = Layout.from_shape((2, 2), ("dp", "tp"))
    return {
        "mesh.svg": draw_svg(readme, highlight_rank=0),
        "mesh_axes.svg": mesh_axes(),
        "block_communication.svg": block_communication(),
        "checkpoint_pieces.svg": checkpoint_pieces(),
    }


def main() -> int:
    """Write the pictures; return the exit code of the run, if there is one."""
    IMAGES.mkdir(exist_ok=True)
    for name, text in drawings().items():
        (IMAGES / name).write_text(text, encoding="utf-8")
    if "--run" not in sys.argv[1:]:
        return 0
    run = [sys.executable, "-m", "meshdist", "run", "-n", "4", "examples/train_lm.py"]
    options = ["--mesh", "dp=2,tp=2", "--check", "--plot", str(IMAGES / "loss.svg")]
    return subprocess.run([*run, *options], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
