"""Define the argument parser and launch arguments of all commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..error_text import explain
from ..launching.launcher import run_processes
from ..launching.rank_environment import LaunchError
from .torchrun_flags import add_torchrun_flags, launch_settings


def report_usage_error(program: str, text: str) -> int:
    """Print an error of ``program``; return 2, argparse's exit code."""
    print(f"{program}: {text}", file=sys.stderr)
    return 2


class Parser(argparse.ArgumentParser):
    """ArgumentParser without abbreviations, and with explained errors."""

    def __init__(self, prog: str, usage: str, description: str, epilog: str) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(
            prog, usage, description, epilog, formatter_class=formatter, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        """Print the error with the usage and a fix, and exit."""
        usage = self.format_usage().strip().removeprefix("usage: ")
        text = explain(message, expected=usage, fix=f"run `{self.prog} --help` for all options")
        self.exit(report_usage_error(self.prog, text))


def add_launch_arguments(parser: argparse.ArgumentParser, *, short: bool) -> None:
    """Add torchrun's flags, ``-n`` if ``short``, and the program with its arguments."""
    add_torchrun_flags(parser, short=short)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="script.py ...", help="script and arguments"
    )


def command_of(program: str, arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the command that starts the program, and the program's arguments."""
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not words:
        raise LaunchError(
            "no program to start",
            expected="a script, or -m and a module, after the launcher's own arguments",
            fix=f"{program} {'-m package.module' if arguments.module else 'script.py'}",
        )
    is_python = not arguments.no_python
    if arguments.module and not is_python:
        raise LaunchError(
            "-m and --no-python cannot be combined",
            expected="a Python module (-m), or a program that is not Python (--no-python)",
            fix="remove one of them",
        )
    target, *rest = words
    if not is_python:
        start = [target]
    elif arguments.module:
        start = [sys.executable, "-u", "-m", target]
    else:
        # A directory or zip file with a __main__.py is a script to Python, too.
        if not os.path.exists(target):
            raise LaunchError(
                f"script {target!r} does not exist",
                where=f"directory {os.getcwd()}",
                expected="the path of a Python script",
                found=f"no file at {os.path.abspath(target)}",
                fix="correct the path, or pass -m for a module or --no-python for another program",
            )
        start = [sys.executable, "-u", target]
    return start, rest


def launch(
    program: str,
    arguments: argparse.Namespace,
    *,
    hands_local_rank: bool = False,
    **output: Any,
) -> int:
    """Start the job of ``arguments``; return its exit code, or 2 if it cannot start.

    Args:
        hands_local_rank: whether to pass the program ``--local-rank=N`` as its first argument.
        output: further fields of ``Output``.
    """
    try:
        settings = launch_settings(arguments, **output)
        start, rest = command_of(program, arguments)

        def command(local_rank: int) -> Sequence[str]:
            handed = [f"--local-rank={local_rank}"] if hands_local_rank else []
            return [*start, *handed, *rest]

        return run_processes(command, **settings)
    except LaunchError as error:
        return report_usage_error(program, str(error))
