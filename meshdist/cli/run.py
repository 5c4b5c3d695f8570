"""``meshdist run``: one program as several processes."""

from __future__ import annotations

from collections.abc import Sequence

from .arguments import Parser, add_launch_arguments, launch

__all__ = ["SUMMARY", "main"]

SUMMARY = "start a program as several processes, one rank each"

_PROGRAM = "meshdist run"
_USAGE = f"{_PROGRAM} [-n N] [options] script.py ...   (or: -m module ...)"
_EPILOG = """\
examples:
  meshdist run -n 4 train.py --steps 100
  meshdist run -n 4 --prefix -m package.train
  meshdist run -n 8 --nnodes 2 --node-rank 0 --master-addr host0 train.py    (on host0)
  meshdist run -n 8 --nnodes 2 --node-rank 1 --master-addr host0 train.py    (on the other)

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
    arguments = parser.parse_args(argv)
    return launch(_PROGRAM, arguments, prefix=arguments.prefix)
