"""The benchmarks start both ways: as scripts, and by ``python -m``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
AS_SCRIPT = "import runpy, sys; sys.path[0] = 'benchmarks'; runpy.run_path('benchmarks/{}.py')"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", [AS_SCRIPT, "import benchmarks.{}"], ids=["script", "module"])
def test_a_benchmark_finds_what_it_imports(way: str, name: str) -> None:
    command = [sys.executable, "-c", way.format(name)]
    done = subprocess.run(
        command, cwd=ROOT, env={}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
