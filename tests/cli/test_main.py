"""The command meshdist: finds the sub-command, or says what there is."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from meshdist.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("word", ["-h", "--help", "help"])
def test_help_lists_every_command(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    shown = capsys.readouterr().out
    for name in COMMANDS:
        assert f"  {name} " in shown
        assert importlib.import_module(f"meshdist.cli.{name}").SUMMARY in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_a_module_with_a_summary_and_a_main(name: str) -> None:
    module = importlib.import_module(f"meshdist.cli.{name}")
    assert 0 < len(module.SUMMARY) < 70
    assert list(inspect.signature(module.main).parameters) == ["argv"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("meshdist ")


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "meshdist: no command is given",
        f"  expected: one of: {', '.join(COMMANDS)}",
        "  fix:      meshdist run -n 4 script.py, or meshdist --help",
    ]


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fly", "-n", "2"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "meshdist: unknown command 'fly'",
        f"  expected: one of: {', '.join(COMMANDS)}",
        "  fix:      run `meshdist --help` for the commands",
    ]


@pytest.mark.parametrize(
    "words",
    ["--help", "run --help", pytest.param("doctor --no-check --json", marks=pytest.mark.soak)],
)
def test_a_reader_that_goes_away_is_no_error(words: str) -> None:
    job = subprocess.Popen(
        [sys.executable, "-m", "meshdist", *words.split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert job.stdout is not None
    assert job.stderr is not None
    job.stdout.close()
    with job.stderr:
        assert job.stderr.read() == b""
    assert job.wait(60) == 141
