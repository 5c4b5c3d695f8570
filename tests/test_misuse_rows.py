"""The rows of mistakes: every public name has a row or is harmless, and each row's tests exist."""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

import meshdist as md

ROOT = Path(__file__).resolve().parents[1]
ROWS: dict[str, Any] = json.loads((ROOT / "tests/misuse_rows.json").read_text(encoding="utf-8"))
MISTAKES: list[dict[str, Any]] = ROWS["mistakes"]
HARMLESS: list[dict[str, Any]] = ROWS["harmless"]
HEAD = ["names", "mistake", "effect", "tests", "section"]


def public_names() -> set[str]:
    """Return the public names, with those of submodules and DeviceMesh's methods."""
    found = {*dir(md), *dir(md.distributed), *md.errors.__all__, "PartitionSpec"}
    found -= {"__version__", "attention", "checkpoint", "distributed", "experts", "lax"}
    for kind in (md.DeviceMesh,):
        public = (name for name in vars(kind) if not name.startswith("_"))
        found |= {f"{kind.__name__}.{name}" for name in public if callable(getattr(kind, name))}
    found |= {f"checkpoint.{name}" for name in dir(md.checkpoint)}
    found |= {f"attention.{name}" for name in md.attention.__all__}
    found |= {f"experts.{name}" for name in md.experts.__all__}
    return found | {f"lax.{name}" for name in md.lax.__all__}


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_keys_of_rows() -> None:
    assert list(ROWS) == ["mistakes", "harmless"]
    assert [row for row in HARMLESS if list(row) != ["names", "why"]] == []
    for row in MISTAKES:
        assert list(row) == (HEAD if "do" not in row else [*HEAD, "undetected", "do"]), row
        assert row.get("undetected", True) is True


def test_no_cell_is_empty() -> None:
    rows = [*MISTAKES, *HARMLESS]
    assert [row for row in rows if not all(row.values())] == []
    texts = [*(row["names"] for row in rows), *(row["tests"] for row in MISTAKES)]
    assert [cell for cell in texts if not isinstance(cell, list) or not all(cell)] == []


def test_rows_of_a_section_are_together_and_differ() -> None:
    sections = [row["section"] for row in MISTAKES]
    changes = [new for old, new in zip(["", *sections], sections, strict=False) if old != new]
    assert len(changes) == len(set(sections))
    keys = [(*row["names"], row["mistake"]) for row in MISTAKES]
    assert len(keys) == len(set(keys))


def test_every_name_has_a_row_or_is_harmless() -> None:
    with_rows = {name for row in MISTAKES for name in row["names"]}
    harmless = [name for row in HARMLESS for name in row["names"]]
    assert len(harmless) == len(set(harmless))
    assert with_rows & set(harmless) == set()
    assert with_rows | set(harmless) == public_names()


def test_every_named_test_exists() -> None:
    missing = []
    for row in MISTAKES:
        assert row["tests"], row
        for test in row["tests"]:
            path, _, name = test.partition("::")
            if not (ROOT / path).is_file() or name not in functions_of(path):
                missing.append((row["names"], test))
    assert missing == []
