"""The page about the collectives says what the code says: signatures, the capability table, an
error."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.operation_table import OPERATIONS
from tests.inner import table_page

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "docs" / "reference" / "collectives.md"


def page() -> str:
    return PATH.read_text(encoding="utf-8")


def load_writer() -> Any:
    spec = importlib.util.spec_from_file_location("signatures", ROOT / "packaging/signatures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_signatures_are_those_of_the_code() -> None:
    writer = load_writer()
    text = page()
    assert writer.with_signatures(text) == text, "run: python packaging/signatures.py"
    assert "pcast(x, axis_name, *, to, mesh=None)" in text
    spoilt = text.replace("op=SUM, group=None", "op, group").replace("*, mesh=None", "mesh=None")
    assert writer.with_signatures(spoilt) == text != spoilt


@pytest.mark.parametrize("name", [*OPERATIONS, "P2POp", "breakpoint", *md.lax.__all__])
def test_every_collective_has_its_signature_on_the_page(name: str) -> None:
    first, functional = page().split("\n## Functional collectives\n")
    part = functional.partition("\n## ")[0] if name in md.lax.__all__ else first + functional
    assert re.search(rf"`(meshdist\.)?{name}\([^`]*\)`", part)


def test_the_capability_table_is_that_of_the_code() -> None:
    assert table_page(page()) == page(), (
        "run: python -m meshdist.backends.capabilities docs/reference/collectives.md"
    )


def test_a_page_is_written_between_its_marks_alone() -> None:
    begin, end = "<!-- capabilities: begin -->", "<!-- capabilities: end -->"
    written = table_page(f"before\n{begin}\nold\n{end}\nafter\n")
    assert written.startswith(f"before\n{begin}\n| operation | gloo: cpu |")
    assert written.endswith(f"|\n{end}\nafter\n") and "old" not in written
    assert table_page(written) == written


def test_the_error_that_the_page_shows() -> None:
    def program() -> None:
        md.all_reduce(torch.ones(6 if md.get_rank() == 0 else 4))

    (told,) = re.findall(r"```text\n(collective mismatch: .*?)```", page(), re.DOTALL)
    with pytest.raises(md.MismatchError) as caught:
        md.simulate(program, 2)
    assert without_places(str(caught.value)) == without_places(told.rstrip("\n"))


def without_places(text: str) -> str:
    return re.sub(r" at \S+\.py:\d+", " at HERE", text)
