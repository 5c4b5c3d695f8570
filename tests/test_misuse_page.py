"""The page of misuse: every name that takes part in training has a row, and its test exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import meshdist as md

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "misuse.md").read_text(encoding="utf-8")
HEAD = ["name", "what one may forget or mistake", "what happens", "test"]
SECTIONS = [
    "Meshes, groups, collectives, arrays",
    "Data parallelism, typed contexts, optimizers",
    "Harmless",
]


def rows_of(section: str) -> list[list[str]]:
    """Return the cells of a section's rows, its head first."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert all(set(cell) <= {"-"} for cell in rows.pop(1))
    return rows


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def public_names() -> set[str]:
    """Return the names of all doors, with ``lax.psum`` and its like, and DeviceMesh's methods."""
    found = {*dir(md), *dir(md.distributed), *md.errors.__all__, "PartitionSpec"}
    found -= {"__version__", "checkpoint", "distributed", "experts", "lax"}
    for kind in (md.DeviceMesh,):
        public = (name for name in vars(kind) if not name.startswith("_"))
        found |= {f"{kind.__name__}.{name}" for name in public if callable(getattr(kind, name))}
    found |= {f"checkpoint.{name}" for name in dir(md.checkpoint)}
    found |= {f"experts.{name}" for name in md.experts.__all__}
    return found | {f"lax.{name}" for name in md.lax.__all__}


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


MISTAKES = [(section, row) for section in SECTIONS[:2] for row in rows_of(section)[1:]]
HARMLESS = rows_of("Harmless")[1:]


def test_the_sections_and_their_heads() -> None:
    assert re.findall(r"^## (.*)$", PAGE, re.MULTILINE) == SECTIONS
    assert [rows_of(section)[0] for section in SECTIONS] == [HEAD, HEAD, ["names", "why"]]


def test_no_cell_is_empty() -> None:
    assert [row for _, row in MISTAKES if len(row) != len(HEAD) or "" in row] == []
    assert [row for row in HARMLESS if len(row) != 2 or "" in row] == []


def test_every_name_has_a_row_or_is_harmless() -> None:
    with_rows = {name for _, row in MISTAKES for name in names_in(row[0])}
    harmless = [name for row in HARMLESS for name in names_in(row[0])]
    assert len(harmless) == len(set(harmless))
    assert with_rows & set(harmless) == set()
    assert with_rows | set(harmless) == public_names()


def test_every_named_test_exists() -> None:
    missing = []
    for _, row in MISTAKES:
        named = names_in(row[3])
        assert named, row
        for test in named:
            path, _, name = test.partition("::")
            if not (ROOT / path).is_file() or name not in functions_of(path):
                missing.append((row[0], test))
    assert missing == []
