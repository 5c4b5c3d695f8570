"""SVG of meshes, read back."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from hypothesis import given, strategies as st

from meshdist.mesh.layout import Layout
from meshdist.mesh.visualize import draw_svg

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ("a", "b", "c", "d")


def ranks_in(svg):
    """The titles of the cells: every rank with its coordinate."""
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return [group.find(f"{SVG}title").text for group in root.iter(f"{SVG}g")]


@given(st.sampled_from([(1,), (4,), (1, 3), (2, 3), (2, 1, 3), (2, 2, 2, 2)]), st.randoms())
def test_svg_shows_the_ranks_of_a_small_mesh_in_order(shape, random):
    ranks = np.arange(math.prod(shape)).reshape(shape)
    random.shuffle(ranks.reshape(-1))
    layout = Layout.from_ranks(ranks, random.choice([None, NAMES[: len(shape)]]))
    assert ranks_in(draw_svg(layout)) == [
        f"rank {rank} ({layout.coordinate_text(rank)})" for rank in ranks.ravel().tolist()
    ]


@pytest.mark.parametrize("shape", [(5000,), (64, 256), (128, 16, 8), (8, 8, 8, 8)])
def test_svg_of_a_large_mesh_stays_small_and_inside_its_box(shape):
    layout = Layout.from_shape(shape, NAMES[: len(shape)])
    rank = layout.num_ranks * 2 // 3
    svg = draw_svg(layout, highlight_rank=rank, hosts=[f"h{r // 8}" for r in range(10000 * 2)])
    titles = ranks_in(svg)
    assert len(titles) < 1000
    expected = f"rank {rank} ({layout.coordinate_text(rank)}) on h{rank // 8}"
    assert expected in titles
    root = ElementTree.fromstring(svg)
    width, height = (float(root.get(name)) for name in ("width", "height"))
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    assert width <= 924
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x")) + float(box.get("width")) <= width
        assert float(box.get("y")) + float(box.get("height")) <= height


@pytest.mark.parametrize("shape", [(2, 2, 2, 2), (8, 8, 8, 8)])
def test_no_cell_of_an_svg_lies_on_another(shape):
    root = ElementTree.fromstring(draw_svg(Layout.from_shape(shape, NAMES[: len(shape)])))
    boxes = [group.find(f"{SVG}rect") for group in root.iter(f"{SVG}g")]
    places = [(box.get("x"), box.get("y")) for box in boxes]
    assert len(places) == len({*places}) >= 16


def test_svg_escapes_what_hosts_are_called():
    svg = draw_svg(Layout.from_shape((2,)), hosts=["<a&b>", '"c"'])
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "<a&b>" in texts
    assert '"c"' in texts


def test_cells_of_one_host_share_a_color():
    layout = Layout.from_shape((2, 2))
    root = ElementTree.fromstring(draw_svg(layout, hosts=["a", "a", "b", "b"], highlight_rank=3))
    boxes = [group.find(f"{SVG}rect") for group in root.iter(f"{SVG}g")]
    fills = [box.get("fill") for box in boxes]
    assert fills[0] == fills[1] != fills[2] == fills[3]
    assert [box.get("stroke-width") for box in boxes] == ["1", "1", "1", "3"]
