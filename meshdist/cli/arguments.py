"""What the commands share: the parser, and the arguments that start a program."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..error_text import explain
from ..launching.launcher import LaunchError, run_processes

__all__ = [
    "Parser",
    "add_launch_arguments",
    "command_of",
    "launch",
    "report_usage_error",
]


def report_usage_error(program: str, text: str) -> int:
    """Print text as the error of program; return the exit code for it, argparse's."""
    print(f"{program}: {text}", file=sys.stderr)
    return 2


class Parser(argparse.ArgumentParser):
    """argparse's parser, which accepts no abbreviations and explains a wrong argument."""

    def __init__(self, prog: str, usage: str, description: str, epilog: str) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, usage, description, epilog, formatter_class=form, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is; exit."""
        usage = self.format_usage().strip().removeprefix("usage: ")
        text = explain(message, expected=usage, fix=f"{self.prog} --help tells more")
        self.exit(report_usage_error(self.prog, text))


_PLACE = (
    ("nproc-per-node", int, 1, "N", "processes to start on this host (default: 1)"),
    ("nnodes", int, 1, "M", "hosts in the job, each with its own launcher (default: 1)"),
    ("node-rank", int, 0, "K", "number of this host, from 0 (default: 0)"),
    (
        "master-addr",
        str,
        None,
        "ADDRESS",
        "name or address of host 0, where rank 0 serves the store; needed with several hosts",
    ),
    (
        "master-port",
        int,
        None,
        "PORT",
        "port of that store (default: a free one on a single host, else 29500)",
    ),
)
"""Name, type, default, placeholder and help of the arguments that place the processes."""


def add_launch_arguments(parser: argparse.ArgumentParser, *, short: bool) -> None:
    """Add the arguments that start a program; with short, -n for the number of processes."""
    for name, kind, default, metavar, text in _PLACE:
        names = ["-n"] if short and metavar == "N" else []
        names += dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        parser.add_argument(*names, type=kind, default=default, metavar=metavar, help=text)
    parser.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="start a module, found as `python -m` finds it, instead of a script",
    )
    parser.add_argument(
        "--no-python",
        "--no_python",
        action="store_true",
        help="start a program that is not Python",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="script.py ...", help="script and arguments"
    )


def command_of(program: str, arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """What to start, and its own arguments; raises LaunchError where nothing can be."""
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not words:
        raise LaunchError(
            "there is nothing to start",
            expected="a script, or -m and a module, after the launcher's own arguments",
            fix=f"{program} {'-m package.module' if arguments.module else 'script.py'}",
        )
    if arguments.module and arguments.no_python:
        raise LaunchError(
            "-m and --no-python exclude each other",
            expected="a Python module (-m), or a program that is not Python (--no-python)",
            fix="leave one out",
        )
    target, *rest = words
    if arguments.no_python:
        start = [target]
    elif arguments.module:
        start = [sys.executable, "-u", "-m", target]
    else:
        # A directory or zip file with a __main__.py is a script to Python, too.
        if not os.path.exists(target):
            raise LaunchError(
                f"there is no script {target!r}",
                where=f"directory {os.getcwd()}",
                expected="the path of a Python script",
                found=f"no file at {os.path.abspath(target)}",
                fix="check the path; `-m` starts a module, `--no-python` another program",
            )
        start = [sys.executable, "-u", target]
    return start, rest


def launch(
    program: str,
    arguments: argparse.Namespace,
    *,
    prefix: bool = False,
    hands_local_rank: bool = False,
) -> int:
    """Start what arguments ask for; return the exit code of the job, 2 if it cannot be started."""
    try:
        start, rest = command_of(program, arguments)

        def command(local_rank: int) -> Sequence[str]:
            handed = [f"--local-rank={local_rank}"] if hands_local_rank else []
            return [*start, *handed, *rest]

        return run_processes(
            command,
            arguments.nproc_per_node,
            nnodes=arguments.nnodes,
            node_rank=arguments.node_rank,
            master_addr=arguments.master_addr,
            master_port=arguments.master_port,
            prefix=prefix,
        )
    except LaunchError as error:
        return report_usage_error(program, str(error))
