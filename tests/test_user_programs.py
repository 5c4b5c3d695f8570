"""What type checkers say of programs that use meshdist: nothing of right lines, each wrong one."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = sorted((ROOT / "tests" / "user_programs").glob("*.py"))


def wrong_lines() -> list[str]:
    """``file:line`` of every line that is marked as wrong."""
    return [
        f"{program.name}:{number}"
        for program in PROGRAMS
        for number, line in enumerate(program.read_text().splitlines(), start=1)
        if "# wrong: " in line
    ]


def test_both_kinds_of_programs_are_there() -> None:
    assert [program.name for program in PROGRAMS] == ["well_typed.py", "wrongly_typed.py"]
    lines = wrong_lines()
    assert len(lines) > 20 and all(line.startswith("wrongly") for line in lines)


def test_mypy() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", *map(str, PROGRAMS)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.stderr == ""
    found = re.findall(r"^[\w/]*?(\w+\.py:\d+): error: ", run.stdout, re.MULTILINE)
    assert found == wrong_lines(), run.stdout


def test_pyright(tmp_path: Path) -> None:
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("basedpyright is not installed")
    settings = {
        "include": [str(PROGRAMS[0].parent)],
        "extraPaths": [str(ROOT)],  # an editable install is found by running code
        "typeCheckingMode": "standard",  # as in pyright itself
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--project", str(tmp_path / "settings.json")]
    command += ["--pythonpath", sys.executable, "--outputjson"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.stdout, run.stderr
    said = json.loads(run.stdout)["generalDiagnostics"]
    found = [
        f"{Path(one['file']).name}:{one['range']['start']['line'] + 1}"
        for one in said
        if one["severity"] == "error"
    ]
    assert found == wrong_lines(), run.stdout
