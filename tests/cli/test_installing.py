"""How this Python should install meshdist."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshdist.cli import diagnostics, run as run_command


def rows() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in diagnostics.find_install()}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> bool:
    monkeypatch.setattr(diagnostics, "has_nvidia_gpu", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("gpu", [False, True], indirect=True)
def test_torchs_wheel(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = "torch --index-url https://download.pytorch.org/whl/cpu"
    assert diagnostics.torch_wheel() == ("torch" if gpu else cpu)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    row = rows()["torch"]
    assert row["state"].startswith(f"{torch.__version__}, for CPUs")
    assert row["fix"].endswith("--force-reinstall torch" if gpu else "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    row = rows()["torch"]
    assert row["state"].startswith(f"{torch.__version__}, for GPUs and CPUs")
    assert ("a smaller build" in row["state"], row["fix"]) == (not gpu, "")
    assert ("[cupy]" in rows()) == gpu


def test_the_interpreter_is_named_as_a_shell_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: sys.executable if name == "python3" else None)
    assert diagnostics.python() == "python3"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert diagnostics.python() == sys.executable


def test_an_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "find_version", lambda package: None)
    row = rows()["[mpi]"]
    assert row["state"] == "not installed: backend mpi, and mpiexec"
    assert row["fix"].endswith("-m pip install 'meshdist[mpi]'")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no native core")
def test_without_the_native_core_run_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(diagnostics, "has_core", lambda: False)
    monkeypatch.setattr(run_command, "has_core", lambda: False)
    script = tmp_path / "script.py"
    script.write_text("print('here')")
    assert run_command.main(["-n", "1", str(script)]) == 0
    out, err = capfd.readouterr()
    (line,) = err.splitlines()
    assert out == "here\n"
    assert line.startswith("meshdist: the native core is not installed: CPU tensors use Gloo")
    assert rows()["native core"]["state"] == "not installed: Gloo is used instead, and is slower"
    assert "install a C++ compiler" in rows()["native core"]["fix"]


def test_looking_for_the_core_loads_neither_it_nor_torch() -> None:
    code = (
        "import sys; from meshdist.cli.diagnostics import has_core; has_core(); "
        "print('torch' in sys.modules, 'meshdist.backends.native' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False False\n"
