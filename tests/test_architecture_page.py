"""docs/contributing: paths exist, all modules are listed, and terms are few."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.test_layering import FLOORS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "packaging"))

import reference_tables  # noqa: E402

PAGE = (ROOT / "docs" / "contributing" / "architecture.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs" / "contributing" / "glossary.md").read_text(encoding="utf-8")
MOST_WORDS = 2_000  # without the generated table
MOST_TERMS = 12  # a module explains the terms that only it uses
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


def test_it_has_every_module_in_the_order_of_the_floors() -> None:
    assert reference_tables.floors() == FLOORS
    modules = [
        (f"{folder}/" if folder not in ("", *names) else "") + name.replace(".", "/")
        for folders in FLOORS
        for folder, names in folders.items()
        for name in names
    ]
    table = reference_tables.modules()
    assert re.findall(r"^\| \d \| `([\w/]+)` \| \S.* \|$", table, re.M) == modules
    assert "| 6 | **`ddp/comm_hooks/`** | Provide communication hooks" in table


def test_it_is_short() -> None:
    assert len(reference_tables.without_tables(PAGE).split()) <= MOST_WORDS


def test_there_are_few_internal_terms() -> None:
    assert "(glossary.md#internal-terms)" in PAGE
    section = GLOSSARY.partition("## Internal terms\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    assert 0 < len(rows) - 1 <= MOST_TERMS
