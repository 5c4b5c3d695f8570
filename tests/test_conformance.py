"""The driver of torch's own suite: how it reads what that tells; and what its last report says."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "conformance"


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conformance_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ended(outcome: str, reason: str = "") -> dict[str, Any]:
    return {"outcome": outcome, "reason": reason, "seconds": 0.5}


def test_lines_come_whole_and_end_with_the_process(driver: ModuleType) -> None:
    read, write = os.pipe()
    os.write(write, b'{"test": "a"}\n{"te')
    found = driver.lines(read)
    assert next(found) == {"test": "a"}
    os.write(write, b'st": "b"}\n')
    assert next(found) == {"test": "b"}
    os.close(write)
    assert list(found) == []
    os.close(read)


def test_silence_ends_the_lines(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIMIT_S", 0.01)
    read, write = os.pipe()
    assert list(driver.lines(read)) == []
    os.close(read)
    os.close(write)


def test_what_counts_as_a_bug_of_ours(driver: ModuleType) -> None:
    traceback = "Process 0 exited\n  File x\nValueError: it is only implemented for GLOO backend.\n"
    ours = {
        "a": ended("passed"),
        "b": ended("skipped", "no GPU"),
        "c": ended("failed", "AssertionError: 1 != 2\n  more"),
        "d": ended("failed", traceback),
        "e": ended("failed", "E"),
    }
    told = driver.summary("shm", ours, {"c": ended("passed"), "e": ended("failed")})
    assert told["counts"] == {
        "passed": 1,
        "skipped": 1,
        "failed": 1,
        "rejected by torch's front end": 1,
        "failed on gloo too": 1,
    }
    assert told["failed"] == {"c": "AssertionError: 1 != 2"}
    assert told["rejected by torch's front end"]["d"].startswith("ValueError: it is only")
    assert told["skipped, by torch's reason"] == {"no GPU": 1}


def test_the_documentation_says_what_the_report_says() -> None:
    report = json.loads((FOLDER / "report.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "how-to" / "torch_backends.md").read_text(encoding="utf-8")
    rows = dict(
        re.findall(
            r"^\| (shm|mpi|simulated|Gloo) \| (\d+ \| \d+ \| \d+ \| \d+) \|$", page, re.MULTILINE
        )
    )
    kinds = ("passed", "failed", "rejected by torch's front end", "skipped")
    for one in report["backends"]:
        counts = [str(one["counts"].get(kind, 0)) for kind in kinds]
        assert rows[one["backend"].replace("gloo", "Gloo")] == " | ".join(counts)
        assert sum(map(int, counts)) == sum(one["counts"].values())
    assert len(rows) == len(report["backends"])
