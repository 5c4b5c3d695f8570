"""The sanitizers' stress program, which `make sanitize` alone builds, still fits the core."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("stress.cpp")
CORE = SOURCE.parents[2] / "native"


def test_it_compiles() -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-fsyntax-only", f"-I{CORE}"]
    done = subprocess.run(
        [*command, str(SOURCE)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
