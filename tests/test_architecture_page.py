"""docs/contributing: paths exist, all folders are listed, and terms are few."""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_layering import FLOORS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "contributing" / "architecture.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs" / "contributing" / "glossary.md").read_text(encoding="utf-8")
MOST_LINES = 220
MOST_WORDS = 12  # a module explains the terms that only it uses
SUFFIXES = ("", ".py", ".pyi", ".h", ".cpp")


def missing_places(page: str) -> list[str]:
    """Return every path in backticks that is no file or folder of the package or the checkout.

    The last part of a path may be a name that the file before it defines: ``mesh/layout.Layout``.
    """
    missing = []
    for place in re.findall(r"`([\w/.]+/[\w/.]*)`", page):
        path = place.removesuffix("/")
        file, _, name = path.partition(".")
        for root in (ROOT / "meshdist", ROOT):
            if any((root / f"{path}{suffix}").exists() for suffix in SUFFIXES):
                break
            source = root / f"{file}.py"
            if name and source.exists() and re.search(rf"(def|class) {name}\b", source.read_text()):
                break
        else:
            missing.append(place)
    return missing


def test_paths_exist() -> None:
    assert missing_places(PAGE) == []
    assert missing_places(GLOSSARY) == []


def test_missing_places_are_found() -> None:
    page = (
        "`mesh/layout`, `mesh/layout.Layout`, `native/codes.h`, `mesh/cellar`, `mesh/layout.Attic`"
    )
    assert missing_places(page) == ["mesh/cellar", "mesh/layout.Attic"]


def test_it_has_every_folder_on_its_floor() -> None:
    for floor, rooms in enumerate(FLOORS):
        for room, modules in rooms.items():
            folders = {f"{room}/{module.partition('.')[0]}/" for module in modules if "." in module}
            if room not in ("", *modules):
                folders.add(f"{room}/")
            for folder in folders:
                assert f"`{folder}`" in PAGE, f"{folder}, on floor {floor}"


def test_it_is_short() -> None:
    assert len(PAGE.splitlines()) <= MOST_LINES


def test_there_are_few_internal_terms() -> None:
    assert "(glossary.md#internal-terms)" in PAGE
    section = GLOSSARY.partition("## Internal terms\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    assert 0 < len(rows) - 1 <= MOST_WORDS
