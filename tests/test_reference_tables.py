"""The generated tables of pages: each is what packaging/reference_tables.py writes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packaging"))

import benchmark_tables
import raised_errors
import reference_tables
from raised_errors import RaisedError, all_errors


@pytest.mark.parametrize("name", reference_tables.PAGES)
def test_the_page_has_the_tables_as_they_are_now(name: str) -> None:
    page = reference_tables.PAGES[name].read_text(encoding="utf-8")
    message = "run `python packaging/reference_tables.py`"
    assert reference_tables.with_tables(page) == page, message
    assert "begin -->" in page


def test_every_table_is_on_a_page() -> None:
    pages = reference_tables.PAGES.values()
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for name in reference_tables.TABLES:
        assert text.count(f"<!-- {name}: begin -->") == text.count(f"<!-- {name}: end -->") == 1


def test_every_variable_in_the_code_has_a_row() -> None:
    names = reference_tables.names_in_code()
    assert {name for name in names if not reference_tables.has_row(name)} == set()
    found = {"MESHDIST_HOST_ID", "MESHDIST_STALL_WARNING_S", "TORCH_DISTRIBUTED_DEBUG", "RANK"}
    assert found | {"MESHDIST_TORCH_LAYOUT", "GLOO_SOCKET_IFNAME", "SLURM_STEP_ID"} <= names


def test_every_row_of_meshdist_s_variables_is_in_the_code() -> None:
    rows = (*reference_tables.OWN, *reference_tables.READ, *reference_tables.SET)
    own = {name for row in rows for name in row.names.split(", ") if name.startswith("MESHDIST_")}
    assert own | {"MESHDIST_BENCH_SOCKET"} == {
        name for name in reference_tables.names_in_code() if name.startswith("MESHDIST_")
    }


def test_every_number_of_a_benchmark_is_in_a_generated_table() -> None:
    page = reference_tables.PAGES["explanation/benchmarks.md"].read_text(encoding="utf-8")
    numbers = re.findall(r"\d\.\d+", reference_tables.without_tables(page))
    assert numbers == ["2.13"], "only the version of torch"
    files = re.findall(r"`(\w+\.json)`", page)
    assert [name for name in files if not (benchmark_tables.REPORTS / name).exists()] == []


# -- errors -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def errors() -> dict[str, RaisedError]:
    return {error.first_line: error for error in all_errors()}


@pytest.mark.parametrize(
    ("first_line", "kind", "raised_by"),
    [
        ("there is no process group to destroy", "NotInitializedError", "`destroy_process_group`"),
        ("rank … was claimed by two processes", "RendezvousError", "initialization"),
        ("spawn needs a function", "KindError", "`spawn`"),
        ("no program to start", "LaunchError", "`meshdist run`"),
    ],
)
def test_an_error_has_its_class_and_the_calls_that_raise_it(
    errors: dict[str, RaisedError], first_line: str, kind: str, raised_by: str
) -> None:
    found = errors[first_line]
    assert (found.kind, found.fix != "") == (kind, True)
    assert found.raised_by in (raised_by, "initialization")


def test_the_fix_of_a_variable_is_found(errors: dict[str, RaisedError]) -> None:
    fix = errors["the process group has not been initialized"].fix
    assert "call init_process_group() again before the next collective" in fix
    assert "start the program with" in fix


def test_the_site_has_all_errors(errors: dict[str, RaisedError]) -> None:
    page = reference_tables.PAGES["reference/errors.md"].read_text(encoding="utf-8")
    site = reference_tables.with_all_errors(page)
    assert len(errors) > 600
    assert site.count("\n| `") == len(errors)
    assert {error.folder for error in errors.values()} >= {"ddp", "sharding", "bootstrap"}
    assert raised_errors.table(errors.values()).count("\n") == len(errors) + 2


def test_a_cell_keeps_code_and_escapes_the_rest() -> None:
    assert raised_errors.cell("a_b\n  `c_d` | <x>") == r"a\_b `c_d` \| &lt;x>"
