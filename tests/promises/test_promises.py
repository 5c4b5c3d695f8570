"""Every promise on every backend: the programs of the table, and the page that is made of it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from _pytest.mark import ParameterSet

from tests.operations.cases import BACKENDS
from tests.pool import Pool
from tests.promises.table import COLUMNS, PAGE, PROMISES, Promise, backends_of, function_of, page
from tests.two_hosts import two_hosts_of

ALL = [promise for promises in PROMISES.values() for promise in promises]


def on_two_hosts(pool: Pool, fn: Any, size: int, *args: Any) -> list[Any]:
    hosts = "ABBAABBA"[:size]
    return two_hosts_of(pool).run(fn, size, *args, timeout_s=120.0, backend="gloo", hosts=hosts)


ON = {**BACKENDS, "namespaces": on_two_hosts}
RUNS = [
    pytest.param(
        backend,
        promise,
        id=f"{backend}-{promise.name}",
        marks=[pytest.mark.soak] if backend in promise.soak else [],
    )
    for promise in ALL
    for backend in ON
    if any(f"test_it_is_kept[{backend}-" in way for way in promise.ways(backend))
]


@pytest.mark.parametrize(("backend", "promise"), RUNS)
def test_it_is_kept(backend: str, promise: Promise, pool: Pool) -> None:
    assert promise.program is not None
    found = ON[backend](pool, promise.program, promise.size)
    assert promise.judge(found), found


def arguments_of(test: str) -> list[dict[str, Any]]:
    """What a test of feigned hosts is called with, for each of its cases there."""
    cases: list[dict[str, Any]] = [{}]
    for mark in function_of(test).pytestmark:
        if mark.name != "parametrize":
            continue
        names = (
            [one.strip() for one in mark.args[0].split(",")]
            if isinstance(mark.args[0], str)
            else list(mark.args[0])
        )
        rows = []
        for value in mark.args[1]:
            given = value.values if isinstance(value, ParameterSet) else value
            row = dict(zip(names, given if len(names) > 1 else [given], strict=True))
            if isinstance(value, ParameterSet) and len(names) == 1:
                row = {names[0]: value.values[0]}
            if row.get("backend", "gloo across hosts") == "gloo across hosts":
                rows.append(row)
        cases = [{**case, **row} for case in cases for row in rows]
    return cases


@pytest.mark.soak
@pytest.mark.parametrize(
    "test", dict.fromkeys(test for one in ALL for test in one.on_feigned_hosts()), ids=str
)
def test_over_two_hosts(test: str, pool: Pool, tmp_path: Path) -> None:
    """What runs on feigned hosts elsewhere runs here on those of namespaces."""
    function = function_of(test)
    wanted = inspect.signature(function).parameters
    for number, case in enumerate(arguments_of(test)):
        folder = tmp_path / str(number)
        folder.mkdir()
        fixtures = {"pool": pool, "tmp_path": folder}
        more = {name: one for name, one in fixtures.items() if name in wanted}
        with mock.patch.dict(BACKENDS, **{"gloo across hosts": on_two_hosts}):
            function(**case, **more)


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.promises.table"


def test_every_cell_has_a_test_or_says_what_differs() -> None:
    empty = [
        (one.text, backend)
        for one in ALL
        for backend in COLUMNS
        if not one.mark(backend) and not one.differs_on(backend)
    ]
    assert empty == []
    for promise in ALL:
        assert "](" in promise.text
        assert all("](" in text or backend == "" for backend, text in promise.differs.items())


def test_every_named_test_exists_and_runs_there() -> None:
    for promise in ALL:
        for test in promise.tests:
            assert backends_of(test), test
        for test in promise.others.values():
            assert callable(function_of(test))


def test_a_test_that_does_not_exist_is_found() -> None:
    with pytest.raises(AttributeError):
        function_of("tests/operations/test_table.py::test_nothing")
    assert backends_of("tests/operations/test_table.py::test_all_cases")["gloo"]  # in soak alone
    assert not backends_of("tests/operations/test_table.py::test_sample")["gloo"]
