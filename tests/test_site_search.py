"""The queries of the site's search: their pages exist, and `make docs` finds failures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packaging"))

import site_search

ROOT = Path(__file__).resolve().parents[1]
QUERIES = json.loads(site_search.QUERIES.read_text(encoding="utf-8"))
WORDS = json.loads((ROOT / "packaging" / "search_words.json").read_text(encoding="utf-8"))


def test_every_query_wants_a_page_that_exists() -> None:
    assert len(QUERIES) >= 40
    assert [page for page in QUERIES.values() if not (ROOT / "docs" / page).is_file()] == []


def test_search_words_are_of_pages_that_exist() -> None:
    paths = [path for path in (*WORDS["tags"], *WORDS["boost"]) if path != "api/"]
    assert [path for path in paths if not (ROOT / "docs" / path).exists()] == []


def test_lists_rank_last() -> None:
    lists = ("api/", "reference/errors.md", "reference/names.md")
    assert all(WORDS["boost"][path] < 0.1 for path in lists)


def test_a_query_fails_unless_its_page_is_first() -> None:
    wanted = {"mesh": "reference/mesh.md", "hang": "how-to/debug.md", "seed": "a.md"}
    found = {"mesh": ["reference/mesh.md", "a.md"], "hang": ["a.md", "how-to/debug.md"], "seed": []}
    assert site_search.failures(wanted, found) == [
        "'hang' finds a.md, how-to/debug.md instead of how-to/debug.md first",
        "'seed' finds nothing instead of a.md first",
    ]


def test_locations_are_paths_of_pages() -> None:
    locations = ["", "api/", "install/", "how-to/debug/"]
    pages = ["index.md", "api/index.md", "install.md", "how-to/debug.md"]
    assert [site_search.source_of(location) for location in locations] == pages


def test_the_search_is_the_last_step_of_make_docs() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^docs:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert "mkdocs build\n" in recipe  # --quiet would also hide warnings from --strict
    assert "packaging/site_search.py" in recipe
