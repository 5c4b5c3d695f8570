"""Implement the command ``meshdist``: run a sub-command's module."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from ..error_text import explain
from ..launching.child_processes import open_closed_streams
from ..runtime.hosts import find_version
from .flags import report_usage_error

COMMANDS: tuple[str, ...] = ("run", "bench", "doctor")
"""Sub-commands; each is a module here with ``SUMMARY`` and ``main(argv) -> int``."""


def _help() -> str:
    lines = ["usage: meshdist COMMAND ...", "", "commands:"]
    for name in COMMANDS:
        module = importlib.import_module(f"meshdist.cli.{name}")
        lines.append(f"  {name:<10}{module.SUMMARY}")
    lines += [
        "",
        "Run `meshdist COMMAND --help` for options, `meshdist --version` for the version.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with argv or ``sys.argv[1:]``; return the exit code."""
    open_closed_streams()
    try:
        try:
            return _run(argv)
        finally:  # also after argparse has printed its help and exited
            sys.stdout.flush()
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:  # receives the remaining output at exit
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 128 + 13


def _run(argv: Sequence[str] | None) -> int:
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"meshdist {find_version('meshdist') or 'of a checkout that is not installed'}")
        return 0
    if name not in COMMANDS:
        problem, fix = "no command is given", "meshdist run -n 4 script.py, or meshdist --help"
        if name:
            problem, fix = f"unknown command {name!r}", "run `meshdist --help` for the commands"
        text = explain(problem, expected="one of: " + ", ".join(COMMANDS), fix=fix)
        return report_usage_error("meshdist", text)
    code: int = importlib.import_module(f"meshdist.cli.{name}").main(rest)
    return code
