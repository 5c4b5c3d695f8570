"""The programs of docs/how-to/schedulers.md: each engine has a section and a program."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packaging"))

from engines import (
    ENGINES,
    FAILURES,
    PAGE,
    REPORT,
    SECTION,
    SIZE,
    Outcome,
    programs,
    run,
    told,
    with_failure,
)

from tests.inner import schedulers as known_engines

PROGRAMS = programs()


def test_every_engine_has_a_program_and_a_row_of_the_report() -> None:
    assert {engine.section for engine in ENGINES} == {*PROGRAMS}
    rows = [line for line in REPORT.read_text().splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == [it.name for it in ENGINES]
    assert not [row for row in rows if "FAILED" in row]


def test_every_engine_that_errors_name_has_a_section() -> None:
    sections = {title for title, _ in SECTION.findall(PAGE.read_text())}
    assert {engine.name for engine in known_engines.SCHEDULERS} <= sections


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("section", PROGRAMS)
def test_rank_1_can_fail_in_every_program(section: str, failure: str, tmp_path: Path) -> None:
    failing = with_failure(PROGRAMS[section], failure, tmp_path)
    ast.parse(failing)
    assert failing.count("if rank == 1:") == 1


@pytest.mark.parametrize(
    "failure",
    # Promises hold how a rank ends that raises; here a rank ends that can tell nobody.
    [None, *(pytest.param(it, marks=[pytest.mark.soak] * (it != "is killed")) for it in FAILURES)],
)
def test_the_ranks_of_kubeflow_s_variables(failure: str | None, tmp_path: Path) -> None:
    (engine,) = (it for it in ENGINES if it.name.startswith("Kubeflow"))
    program = PROGRAMS[engine.section]
    if failure is not None:
        program = with_failure(program, failure, tmp_path)
    found: Outcome = run(engine, Path(sys.executable).parents[1], program)
    assert found.left == []
    if failure is None:
        assert (found.code, found.text.count("6.0")) == (0, SIZE), found.text
        assert "cpu:shm" in found.text
    else:
        how = "has ended" if failure == "is killed" else "ended by ValueError: no data (train.py:"
        assert f"3 of 3: `rank 1 {how}" in told(tmp_path), found.text
