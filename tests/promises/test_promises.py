"""Every promise on every wire: the programs of the table, and the page that is made of it."""

from __future__ import annotations

import pytest

from tests.pool import Pool
from tests.promises.table import COLUMNS, PAGE, PROMISES, Promise, function_of, page, wires_of
from tests.verbs.cases import WIRES

ALL = [promise for promises in PROMISES.values() for promise in promises]
RUNS = [
    pytest.param(
        wire,
        promise,
        id=f"{wire}-{promise.name}",
        marks=[pytest.mark.soak] if wire in promise.soak else [],
    )
    for promise in ALL
    for wire in WIRES
    if any(f"test_it_is_kept[{wire}-" in way for way in promise.ways(wire))
]


@pytest.mark.parametrize(("wire", "promise"), RUNS)
def test_it_is_kept(wire: str, promise: Promise, pool: Pool) -> None:
    assert promise.program is not None
    found = WIRES[wire](pool, promise.program, promise.size)
    assert promise.judge(found), found


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.promises.table"


def test_every_cell_has_a_test_or_says_what_differs() -> None:
    empty = [(one.text, wire) for one in ALL for wire in COLUMNS if not one.cell(wire)]
    assert empty == []
    for promise in ALL:
        assert "](" in promise.text
        assert all("](" in text or wire == "" for wire, text in promise.differs.items())


def test_every_named_test_exists_and_runs_there() -> None:
    for promise in ALL:
        for test in promise.tests:
            assert wires_of(test), test
        for test in promise.others.values():
            assert callable(function_of(test))


def test_a_test_that_does_not_exist_is_found() -> None:
    with pytest.raises(AttributeError):
        function_of("tests/verbs/test_table.py::test_nothing")
    assert wires_of("tests/verbs/test_table.py::test_all_cases")["gloo"]  # in soak alone
    assert not wires_of("tests/verbs/test_table.py::test_sample")["gloo"]
