"""The page about the verbs says what the code says: signatures, the capability table, an error."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import meshdist as md
from meshdist.verb_table import VERBS
from meshdist.wires.capabilities import table_page

PATH = Path(__file__).resolve().parents[1] / "docs" / "verbs.md"


def page() -> str:
    return PATH.read_text(encoding="utf-8")


def shown(default: object) -> str:
    return "SUM" if default is md.ReduceOp.SUM else repr(default)


@pytest.mark.parametrize("name", [*VERBS, "P2POp", "breakpoint"])
def test_signatures_are_those_of_the_code(name: str) -> None:
    parameters = [
        parameter.name
        if parameter.default is parameter.empty
        else f"{parameter.name}={shown(parameter.default)}"
        for parameter in inspect.signature(getattr(md, name)).parameters.values()
    ]
    assert f"{name}({', '.join(parameters)})`" in page()


@pytest.mark.parametrize("name", md.lax.__all__)
def test_signatures_of_functional_verbs_are_those_of_the_code(name: str) -> None:
    parameters = [
        parameter.name
        if parameter.default is parameter.empty
        else f"{parameter.name}={parameter.default!r}"
        for parameter in inspect.signature(getattr(md.lax, name)).parameters.values()
    ]
    assert f"`{name}({', '.join(parameters)})`" in page()


def test_the_capability_table_is_that_of_the_code() -> None:
    assert table_page(page()) == page(), "run: python -m meshdist.wires.capabilities docs/verbs.md"


def test_a_page_is_written_between_its_marks_alone() -> None:
    begin, end = "<!-- capabilities: begin -->", "<!-- capabilities: end -->"
    written = table_page(f"before\n{begin}\nold\n{end}\nafter\n")
    assert written.startswith(f"before\n{begin}\n| verb | gloo: cpu |")
    assert written.endswith(f"|\n{end}\nafter\n") and "old" not in written
    assert table_page(written) == written


def test_the_error_that_the_page_shows() -> None:
    def program() -> None:
        md.all_reduce(torch.ones(6 if md.get_rank() == 0 else 4))

    (told,) = re.findall(r"```text\n(the members of a group.*?)```", page(), re.DOTALL)
    with pytest.raises(md.AgreementError) as caught:
        md.simulate(program, 2)
    assert without_places(str(caught.value)) == without_places(told.rstrip("\n"))


def without_places(text: str) -> str:
    return re.sub(r" at \S+\.py:\d+", " at HERE", text)
