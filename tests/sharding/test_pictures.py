"""Pictures of shardings, compared or read back."""

from __future__ import annotations

import textwrap
import xml.etree.ElementTree as ElementTree

from meshdist.mesh.layout import Layout
from meshdist.mesh.partition_spec import P
from meshdist.mesh.spec import NamedSharding
from meshdist.sharding.descriptions import draw_sharding, draw_sharding_svg

SVG = "{http://www.w3.org/2000/svg}"
MESH = Layout.from_shape((2, 2), ("dp", "tp"))


def test_the_text_marks_each_rank_with_its_part() -> None:
    found = draw_sharding(
        (5, 4), "float32", NamedSharding(MESH, P("tp", unreduced={"dp"})), rank=3, ascii_only=False
    )
    assert found == textwrap.dedent(
        """\
        float32[5@tp, 4]{U:dp}
        ┌─────────┬─────┬───────┐
        │ dp \\ tp │   0 │     1 │
        ├─────────┼─────┼───────┤
        │       0 │ 0 a │   1 b │
        │       1 │ 2 a │ [3] b │
        └─────────┴─────┴───────┘
        shards: a = [0:3, 0:4], b = [3:5, 0:4]"""
    )


def test_the_svg_says_the_part_of_each_rank() -> None:
    svg = draw_sharding_svg((5, 4), "float32", NamedSharding(MESH, P("tp")), rank=0)
    root = ElementTree.fromstring(svg)
    title = root.find(f"{SVG}title")
    assert title is not None and title.text == "float32[5@tp, 4]"
    cells = [group.find(f"{SVG}title") for group in root.iter(f"{SVG}g")]
    assert [cell.text for cell in cells if cell is not None] == [
        "rank 0 (dp=0, tp=0) on [0:3, 0:4]",
        "rank 1 (dp=0, tp=1) on [3:5, 0:4]",
        "rank 2 (dp=1, tp=0) on [0:3, 0:4]",
        "rank 3 (dp=1, tp=1) on [3:5, 0:4]",
    ]
    colors = [rect.get("fill") for rect in root.iter(f"{SVG}rect")][:4]
    assert colors[0] == colors[2] != colors[1] == colors[3]


def test_a_large_mesh_has_a_short_picture() -> None:
    mesh = Layout.from_shape((64, 64), ("dp", "tp"))
    found = draw_sharding((4096, 8), "float32", NamedSharding(mesh, P(("dp", "tp"))))
    assert len(found.splitlines()) < 30 and max(map(len, found.splitlines())) <= 80
