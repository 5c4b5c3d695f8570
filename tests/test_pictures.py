"""The pictures of the documentation are those that their script draws, and pages describe them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packaging"))

import pictures

DRAWINGS = pictures.drawings()
PAGES = {
    "mesh_axes.svg": "reference/mesh.md",
    "block_communication.svg": "tutorials/train_on_a_mesh.md",
    "checkpoint_pieces.svg": "how-to/checkpoint_and_restart.md",
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_committed_picture_is_drawn_by_the_script(name: str) -> None:
    committed = (pictures.IMAGES / name).read_text(encoding="utf-8")
    assert committed == DRAWINGS[name], "run: python packaging/pictures.py"


@pytest.mark.parametrize("name", DRAWINGS)
def test_everything_in_a_picture_is_within_it(name: str) -> None:
    picture = ElementTree.fromstring(DRAWINGS[name])
    width, height = (float(picture.attrib[side]) for side in ("width", "height"))
    for box in picture.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, across, down = (float(box.attrib[side]) for side in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + across <= width and y + down <= height


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_the_picture_and_describes_it(name: str) -> None:
    page = (pictures.ROOT / "docs" / PAGES[name]).read_text(encoding="utf-8")
    (description,) = re.findall(rf"!\[([^\]]*)\]\(\.\./images/{re.escape(name)}\)", page)
    assert len(description.split()) >= 8
