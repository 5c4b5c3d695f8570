"""Implement ``meshdist run``: start a program as several processes."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence

from ..launching.rank_environment import (
    LaunchError,
    check_environment,
    find_mpiexec,
    mpiexec_environment,
)
from .diagnostics import has_core
from .flags import (
    Parser,
    add_launch_arguments,
    command_of,
    launch,
    report_usage_error,
)
from .torchrun_flags import number_of_processes

SUMMARY = "start a program as several processes, one rank each"

_PROGRAM = "meshdist run"
_USAGE = f"{_PROGRAM} [-n N] [options] script.py ...   (or: -m module ...)"
_EPILOG = """\
examples:
  meshdist run -n 4 train.py --steps 100
  meshdist run -n 4 --prefix -m package.train
  meshdist run -n 4 --ranks 0 --log-dir logs train.py
  meshdist run -n 8 --nnodes 2 --node-rank 0 --master-addr host0 train.py    (on host0)
  meshdist run -n 8 --nnodes 2 --node-rank 1 --master-addr host0 train.py    (on host1)
  meshdist run --launcher mpi -n 4 train.py                      (MPI ranks, with mpiexec)
  meshdist run --launcher mpi -n 8 --mpi-args="--host a:4,b:4" train.py

If a rank fails, the launcher stops the others. It then prints the end of stderr of the rank that
failed first, and exits with that rank's exit code (128 + N for signal N). Processes that the ranks
started are stopped, too.
"""


def main(argv: Sequence[str]) -> int:
    """Run the sub-command with its arguments; return the exit code."""
    parser = Parser(_PROGRAM, _USAGE, SUMMARY.capitalize() + ".", _EPILOG)
    add_launch_arguments(parser, short=True)
    parser.add_argument(
        "--prefix", action="store_true", help="begin every line of output with [rank N]"
    )
    parser.add_argument(
        "--ranks", metavar="RANKS", help="show only the output of these ranks, for example 0,3"
    )
    parser.add_argument(
        "--terminal",
        metavar="RANK",
        help="rank that writes to a terminal, so that its progress bars work, or none "
        "(default: the first rank whose output is shown)",
    )
    parser.add_argument(
        "--launcher",
        choices=("meshdist", "mpi"),
        default="meshdist",
        help="start the processes with this command or with MPI's mpiexec (default: meshdist)",
    )
    parser.add_argument(
        "--mpi-args",
        metavar="ARGUMENTS",
        help="with --launcher mpi: further mpiexec arguments, for example --mpi-args='--host a,b'",
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.launcher == "mpi":
            defaults = vars(parser.parse_args([]))
            given = {name for name, value in vars(arguments).items() if value != defaults[name]}
            return _become_mpiexec(arguments, given)
        if arguments.mpi_args is not None:
            raise LaunchError(
                "--mpi-args requires --launcher mpi",
                fix="add --launcher mpi, or remove --mpi-args",
            )
        ranks = _ranks(arguments)
        terminal = _terminal(arguments, ranks)
    except LaunchError as error:
        return report_usage_error(_PROGRAM, str(error))
    if sys.platform.startswith("linux") and not arguments.no_python and not has_core():
        print(
            "meshdist: the native core is not installed: CPU tensors use Gloo instead of shared "
            "memory (run `meshdist doctor` for the fix)",
            file=sys.stderr,
            flush=True,
        )
    return launch(_PROGRAM, arguments, prefix=arguments.prefix, ranks=ranks, terminal=terminal)


def _ranks(arguments: argparse.Namespace) -> frozenset[int] | None:
    if arguments.ranks is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", arguments.ranks, re.ASCII):
        raise LaunchError(
            f"{arguments.ranks!r} is not a list of ranks",
            where="--ranks",
            expected="comma-separated ranks",
            fix="meshdist run -n 4 --ranks 0,3 script.py",
        )
    return frozenset(map(int, arguments.ranks.split(",")))


def _terminal(arguments: argparse.Namespace, ranks: frozenset[int] | None) -> int | None:
    if arguments.terminal is None:
        return None if ranks is None else min(ranks)
    if arguments.terminal == "none":
        return -1
    if not re.fullmatch(r"\d+", arguments.terminal, re.ASCII):
        raise LaunchError(
            f"{arguments.terminal!r} is not a rank",
            where="--terminal",
            expected="the number of a rank, or none",
            fix="meshdist run -n 4 --terminal 0 script.py",
        )
    return int(arguments.terminal)


_OF_MPIEXEC_TOO = {"nproc_per_node", "module", "no_python", "command", "launcher"}


def _become_mpiexec(arguments: argparse.Namespace, given: set[str]) -> int:
    """Replace this process by mpiexec; raise LaunchError for unsupported options in ``given``."""
    start, rest = command_of(_PROGRAM, arguments)
    nprocs = number_of_processes(arguments.nproc_per_node)
    if nprocs < 1:
        raise LaunchError(
            f"cannot start {nprocs} processes",
            where="-n",
            expected="at least 1",
            fix="meshdist run --launcher mpi -n 4 script.py",
        )
    if given - _OF_MPIEXEC_TOO - {"mpi_args"}:
        raise LaunchError(
            "with --launcher mpi, mpiexec controls the placement, hosts and output of ranks",
            expected="only the options -n, -m and --no-python",
            fix='pass options of mpiexec instead, for example --mpi-args="--host a:4,b:4"',
        )
    check_environment(os.environ)
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise LaunchError(
            "mpiexec was not found",
            where=f"next to {sys.executable}, and on the PATH",
            expected="mpiexec of Open MPI or MPICH",
            fix='pip install "meshdist[mpi]", which installs Open MPI',
        )
    try:
        options = shlex.split(arguments.mpi_args or "")
    except ValueError as error:
        raise LaunchError(
            f"cannot parse --mpi-args: {error}",
            expected="arguments in shell syntax",
            found=arguments.mpi_args,
            fix="close every quotation mark, or escape it with a backslash",
        ) from None
    command = [mpiexec, "-n", str(nprocs), *options, *start, *rest]
    sys.stdout.flush()
    os.execve(mpiexec, command, mpiexec_environment(os.environ))
