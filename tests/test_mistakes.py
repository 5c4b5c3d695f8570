"""The page of mistakes shows what our side says today."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "reference" / "common_mistakes.md").read_text(encoding="utf-8")


def load() -> Any:
    spec = importlib.util.spec_from_file_location("mistakes", ROOT / "packaging" / "mistakes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mistakes"] = module
    spec.loader.exec_module(module)
    return module


mistakes = load()


def same_on_every_rank(text: str) -> list[str]:
    """The lines of a report that do not say which rank wrote it."""
    lines = [re.sub(r"\brank [01]\b(?=[ ,:;(]|$)", "rank", line) for line in text.splitlines()]
    return [line for line in lines if "raised on rank" not in line and "detected it" not in line]


@pytest.mark.soak  # two processes each
@pytest.mark.parametrize("mistake", mistakes.MISTAKES, ids=lambda mistake: mistake.title)
def test_our_side_of_the_page(mistake: Any, tmp_path: Path) -> None:
    part = PAGE.split(f". {mistake.title}\n")[1].split("**torch**")[0]
    shown = re.findall(r"```text\n(.*?)\n```", part, re.DOTALL)[1]
    found = mistakes.ours(mistake, tmp_path)
    assert same_on_every_rank(found)[0] == same_on_every_rank(shown)[0]
    fix = [line for line in shown.splitlines() if line.startswith("  fix: ")]
    assert [line for line in found.splitlines() if line.startswith("  fix: ")] == fix


def test_the_page_has_every_mistake_with_all_three() -> None:
    assert len(mistakes.MISTAKES) == 12
    for number, mistake in enumerate(mistakes.MISTAKES, start=1):
        part = PAGE.split(f"## {number}. {mistake.title}\n")[1].split("\n## ")[0]
        assert re.findall(r"^\*\*(\w+)\*\*$", part, re.MULTILINE) == ["meshdist", "torch", "JAX"]
        assert mistake.ours in part
        assert mistake.torchs in part
        assert mistake.jaxs in part
    assert PAGE.count("meshdist.errors.") >= 12
