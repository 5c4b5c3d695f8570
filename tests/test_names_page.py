"""docs/reference/names.md: its script makes it from the stubs, and its rows hold."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import meshdist as md

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packaging"))

from public_names import HEAD, PAGE, ROOT, homes, with_table

TEXT = PAGE.read_text(encoding="utf-8")
UNLISTED = {"PartitionSpec", "world"}
"""Names that resolve and that ``dir`` does not show, where few should stand."""
ROWS = [row.strip("|\n ").split(" | ") for row in TEXT.partition(HEAD)[2].splitlines()]


def test_the_page_is_what_the_script_makes() -> None:
    assert with_table(TEXT) == TEXT
    assert [row[0].strip("`") for row in ROWS] == sorted(homes(), key=lambda n: (n.lower(), n))


def test_each_name_is_where_the_page_says() -> None:
    doors = {"md": md, "dist": md.distributed}
    for name, places, file in ROWS:
        found = re.findall(r"`(\w+)((?:\.\w+)+)`", places)
        assert found
        for listener, path in found:
            value: object = doors[listener]
            for part in path[1:].split("."):
                value = getattr(value, part)
            assert path.endswith(f".{name.strip('`')}")
        assert (ROOT / "meshdist" / file.strip("`")).exists()
        assert ("not listed" in places) == (name.strip("`") in UNLISTED)


def test_every_name_is_on_the_page() -> None:
    named = {row[0].strip("`") for row in ROWS}
    listed = {*dir(md), *dir(md.distributed), *md.errors.__all__}
    assert named == (listed | UNLISTED) - {"__version__"}
