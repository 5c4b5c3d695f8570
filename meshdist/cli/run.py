"""``meshdist run``: one program as several processes."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence

from ..launching.rank_environment import LaunchError, find_mpiexec, mpiexec_environment
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
  meshdist run -n 8 --nnodes 2 --node-rank 1 --master-addr host0 train.py    (on the other)
  meshdist run --launcher mpi -n 4 train.py                      (ranks of MPI, by mpiexec)
  meshdist run --launcher mpi -n 8 --mpi-args="--host a:4,b:4" train.py

When a rank fails, the others are stopped. Of the rank that failed first, the end of its stderr is
shown last, and its exit code is the command's (128 + N when signal N ended it). Whatever the ranks
have started ends with them.
"""


def main(argv: Sequence[str]) -> int:
    """Run the sub-command with the arguments after its name; return the exit code."""
    parser = Parser(_PROGRAM, _USAGE, SUMMARY.capitalize() + ".", _EPILOG)
    add_launch_arguments(parser, short=True)
    parser.add_argument(
        "--prefix", action="store_true", help="begin every line of output with [rank N]"
    )
    parser.add_argument(
        "--ranks", metavar="RANKS", help="show the output of these ranks alone, as in 0,3"
    )
    parser.add_argument(
        "--terminal",
        metavar="RANK",
        help="the rank for which a terminal stays a terminal, so that progress bars live; none: "
        "for no rank (default: the first whose output is shown)",
    )
    parser.add_argument(
        "--launcher",
        choices=("meshdist", "mpi"),
        default="meshdist",
        help="who starts the processes: this command, or MPI's mpiexec (default: meshdist)",
    )
    parser.add_argument(
        "--mpi-args",
        metavar="ARGUMENTS",
        help="with --launcher mpi: what mpiexec is given besides, as in --mpi-args='--host a,b'",
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.launcher == "mpi":
            defaults = vars(parser.parse_args([]))
            given = {name for name, value in vars(arguments).items() if value != defaults[name]}
            return _become_mpiexec(arguments, given)
        if arguments.mpi_args is not None:
            raise LaunchError(
                "--mpi-args are for mpiexec, which this command does not start",
                fix="add --launcher mpi, or leave --mpi-args out",
            )
        ranks = _ranks(arguments)
        terminal = _terminal(arguments, ranks)
    except LaunchError as error:
        return report_usage_error(_PROGRAM, str(error))
    if sys.platform.startswith("linux") and not arguments.no_python and not has_core():
        print(
            "meshdist: the native core is not installed: CPU tensors go over Gloo, not shared "
            "memory (meshdist doctor tells how to mend it)",
            file=sys.stderr,
            flush=True,
        )
    return launch(_PROGRAM, arguments, prefix=arguments.prefix, ranks=ranks, terminal=terminal)


def _ranks(arguments: argparse.Namespace) -> frozenset[int] | None:
    if arguments.ranks is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", arguments.ranks, re.ASCII):
        raise LaunchError(
            f"{arguments.ranks!r} names no ranks",
            where="--ranks",
            expected="numbers with commas between, as in 0,3",
        )
    return frozenset(map(int, arguments.ranks.split(",")))


def _terminal(arguments: argparse.Namespace, ranks: frozenset[int] | None) -> int | None:
    if arguments.terminal is None:
        return None if ranks is None else min(ranks)
    if arguments.terminal == "none":
        return -1
    if not re.fullmatch(r"\d+", arguments.terminal, re.ASCII):
        raise LaunchError(
            f"{arguments.terminal!r} is no rank",
            where="--terminal",
            expected="the number of a rank, or none",
        )
    return int(arguments.terminal)


_OF_MPIEXEC_TOO = {"nproc_per_node", "module", "no_python", "command", "launcher"}


def _become_mpiexec(arguments: argparse.Namespace, given: set[str]) -> int:
    """Replace this process by mpiexec; raise LaunchError for options in ``given`` it lacks."""
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
            "mpiexec places its ranks, finds their hosts and shows their output by itself",
            expected="of this command's options -n, -m and --no-python alone",
            fix='tell mpiexec, for example --mpi-args="--host a:4,b:4"',
        )
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise LaunchError(
            "there is no mpiexec",
            where=f"beside {sys.executable}, and on the PATH",
            expected="that of Open MPI or of MPICH",
            fix='pip install "meshdist[mpi]", which brings Open MPI',
        )
    try:
        options = shlex.split(arguments.mpi_args or "")
    except ValueError as error:
        raise LaunchError(
            f"--mpi-args cannot be read: {error}",
            expected="arguments as a shell takes them",
            found=arguments.mpi_args,
            fix="close every quotation mark, or put a backslash before one that is meant",
        ) from None
    command = [mpiexec, "-n", str(nprocs), *options, *start, *rest]
    sys.stdout.flush()
    os.execve(mpiexec, command, mpiexec_environment(os.environ))
