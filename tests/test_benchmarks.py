"""The benchmarks start both ways: as scripts, and by ``python -m``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
AS_SCRIPTS = """
import runpy, sys
sys.path[0] = "benchmarks"
for name in {}: runpy.run_path(f"benchmarks/{{name}}.py")
"""
AS_MODULES = """
from importlib import import_module
for name in {}: import_module(f"benchmarks.{{name}}")
"""


@pytest.mark.parametrize("way", [AS_SCRIPTS, AS_MODULES], ids=["scripts", "modules"])
def test_benchmarks_find_what_they_import(way: str) -> None:
    command = [sys.executable, "-c", way.format(NAMES)]
    done = subprocess.run(
        command, cwd=ROOT, env={}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
