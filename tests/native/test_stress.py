"""The sanitizers' stress program, which `make sanitize` alone builds, still fits the core."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_it_compiles() -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-fsyntax-only"]
    source = ROOT / "native" / "stress.cpp"
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
