"""meshdist doctor as a user types it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshdist.cli import doctor
from meshdist.cli.diagnostics import find_backends, find_device_types
from tests.inner import capabilities, find_backend

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshdist", "doctor", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


NO_MPI = {"reason": "mpi4py is not installed", "fix": "pip install mpi4py"}


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ranks are started in these tests."""

    def start_nothing(backend: str, timeout_s: float) -> dict[str, Any]:
        raise AssertionError(f"started ranks over {backend}")

    monkeypatch.setattr(doctor, "check_backend", start_nothing)
    monkeypatch.setattr(doctor, "find_mpi", lambda: NO_MPI)  # asking it starts a process


TITLES = [
    "versions",
    "machine",
    "backends",
    "MPI",
    "install",
    "variables",
    "two ranks on this host",
]


def check_all_is_well(shown: str, backend: str) -> None:
    lines = [line.rstrip() for line in shown.splitlines()]
    assert [line for line in lines if line and line[0] != " "][: len(TITLES)] == TITLES
    (checked,) = [line for line in lines if line.startswith(f"  {backend}") and "us" in line]
    assert "ok: all_reduce of 8 bytes in" in checked
    assert "support by backend" in lines
    assert "\x1b" not in shown and max(map(len, lines)) <= 80
    assert "…" not in shown  # no name is cut


@pytest.mark.soak  # it starts two processes for every backend
def test_a_machine_where_all_is_well() -> None:
    done = run(GLOO_SOCKET_IFNAME="")
    assert (done.returncode, done.stderr) == (0, "")
    for backend in ("gloo", "shm", "simulated"):
        check_all_is_well(done.stdout, backend)


def test_backends_that_are_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "find_mpi", lambda: NO_MPI)
    backends = [backend for backend in find_backends() if backend["name"] in ("shm", "simulated")]
    monkeypatch.setattr(doctor, "find_backends", lambda: backends)
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    for backend in ("shm", "simulated"):
        check_all_is_well(shown, backend)


def test_a_backend_that_fails_its_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "find_mpi", lambda: NO_MPI)
    backends = [backend for backend in find_backends() if backend["name"] in ("gloo", "simulated")]
    monkeypatch.setattr(doctor, "find_backends", lambda: backends)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert doctor.main(["--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["variables"]["GLOO_SOCKET_IFNAME"] == "nowhere0"
    checks = {check["backend"]: check for check in report["checks"]}
    assert "GLOO_SOCKET_IFNAME=nowhere0 names an interface" in checks["gloo"]["error"]
    assert checks["simulated"]["error"] == ""


def test_a_failed_check_in_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "find_mpi", lambda: NO_MPI)

    def fail(backend: str, timeout_s: float) -> dict[str, Any]:
        assert timeout_s == 7.5
        error = "nobody answers\n  fix:      call again"
        return {"backend": backend, "latency_s": None, "seconds": 1.25, "error": error}

    monkeypatch.setattr(doctor, "check_backend", fail)
    assert doctor.main(["--timeout", "7.5"]) == 1
    shown = capsys.readouterr().out
    assert "FAILED after 1.2 s: nobody answers" in shown
    assert "fix:      call again" in shown


def test_without_checks(untouched: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--no-check"]) == 0
    shown = capsys.readouterr().out
    assert "two ranks" not in shown
    assert "simulated for cpu" in " ".join(shown.split())
    assert "gloo on cpu" in " ".join(shown.split())


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cuda"]])
def test_what_backends_do_in_a_users_words(
    untouched: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    devices: list[str],
) -> None:
    names = ("gloo", "mpi", "shm", "simulated", "nccl", "ucc")
    backends = [backend for name in names if (backend := find_backend(name)) is not None]
    monkeypatch.setattr(capabilities, "available_backends", lambda: backends)
    monkeypatch.setattr(doctor, "find_device_types", lambda: devices)
    assert doctor.main(["--no-check"]) == 0
    shown = capsys.readouterr().out.partition("support by backend\n")[2].rstrip().splitlines()
    assert len(shown) + 1 <= 25 and max(map(len, shown)) <= 80
    text = " ".join(" ".join(shown).split())
    assert "gloo on cpu partly: all_reduce, reduce, all_reduce_coalesced steps: " in text
    assert "built" not in text and "native" not in text
    assert "Run `meshdist doctor --all` for" in text


def test_only_device_types_that_are_here_are_shown(
    untouched: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )
    assert doctor.main(["--no-check", "--all"]) == 0
    shown = capsys.readouterr().out
    assert ["gloo", "for", "cpu"] in [line.split() for line in shown.splitlines()]
    assert "simulated on cpu:" in shown
    assert "cpu, cuda" not in shown


def test_a_terminal_gets_tables(
    untouched: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(["--no-check", "--all"]) == 0
    assert "│" not in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert doctor.main(["--no-check", "--all"]) == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "│" in shown and "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("state", "setting", "lines"),
    [
        (None, None, ["not reported by this system"]),
        ("always", "0", ["always: large tensors use 2 MiB pages"]),
        (
            "madvise",
            None,
            ["madvise: used for large tensors of launched ranks, by THP_MEM_ALLOC_ENABLE=1"],
        ),
        ("madvise", "1", ["madvise: used for large tensors, by THP_MEM_ALLOC_ENABLE=1"]),
        (
            "madvise",
            "0",
            [
                "madvise: not used for tensors, by THP_MEM_ALLOC_ENABLE=0",
                "fix: unset THP_MEM_ALLOC_ENABLE",
            ],
        ),
        (
            "never",
            "1",
            [
                "never: tensors use 4 KiB pages, and large collectives take longer",
                "fix: echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
            ],
        ),
    ],
)
def test_huge_pages(
    untouched: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str | None,
    setting: str | None,
    lines: list[str],
) -> None:
    machine = {"host": "h", "cores": 2, "huge_pages": state}
    monkeypatch.setattr(doctor, "find_machine", lambda: machine)
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    if setting is not None:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", setting)
    assert doctor.main(["--no-check"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"huge pages {' '.join(lines)} gpu" in shown


def test_the_whole_table(
    untouched: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "WIDTH", 120)  # no row is wrapped then
    assert doctor.main(["--no-check", "--all"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    operations = "all_reduce, all_reduce_coalesced, reduce op native built"
    devices = [kind for kind in find_device_types() if kind in ("cpu", "cuda")]
    assert f"gloo on {', '.join(devices)}: {operations}" in shown
    assert "BAND, BOR, BXOR integers, unsigned, bool - floating, complex, float8" in shown


@pytest.mark.parametrize("is_whole", [True, False])
def test_rows_of_mpi_say_what_the_library_does(is_whole: bool) -> None:
    found = {"library": "Some MPI 1.0", "standard": "4.0", "mpiexec": "/bin/mpiexec"}
    facts = {"threads": "MULTIPLE", "cuda_aware": is_whole, "large_counts": is_whole}
    assert doctor.mpi_rows({**found, **facts}) == [
        ("library", "Some MPI 1.0, MPI 4.0"),
        ("mpiexec", "/bin/mpiexec"),
        ("threads", "MULTIPLE"),
        ("CUDA memory", "passed directly" if is_whole else "copied through host memory"),
        (
            "counts above 2^31",
            "in native calls" if is_whole else "with derived datatypes",
        ),
    ]
    poor = dict(doctor.mpi_rows({**found, **facts, "mpiexec": None, "threads": "SINGLE"}))
    assert poor["mpiexec"].startswith("none\nfix: pip install")
    assert poor["threads"] == "SINGLE, but meshdist needs MULTIPLE"


def test_everything_as_json(untouched: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--no-check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == [
        *("versions", "machine", "gpus", "backends", "mpi", "variables", "install"),
        "shared_headers",
        *("checks", "capabilities"),
    ]
    assert report["checks"] == []
    assert "float32" in report["capabilities"]["gloo"]["cpu"]["all_reduce"]["SUM"]["native"]


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_torch_that_does_not_load(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('no libcudart.so')\n")
    (tmp_path / "meshdist").symlink_to(ROOT / "meshdist")
    done = subprocess.run(
        [sys.executable, "-m", "meshdist", "doctor", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "cannot import torch: OSError: no libcudart.so" in done.stdout
    assert ("fix" in done.stdout and "pip install torch" in done.stdout) == (not words)
