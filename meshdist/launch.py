"""Start a program with the flags of torch.distributed.launch: ``python -m meshdist.launch``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .cli.flags import Parser, add_launch_arguments, launch, report_usage_error
from .error_text import explain

_PROGRAM = "python -m meshdist.launch"
_USAGE = f"{_PROGRAM} [--nproc-per-node N] [options] script.py ...   (or: -m module ...)"
_EPILOG = """\
The script gets --local-rank=N as its first argument, unless you pass --use-env. LOCAL_RANK is set
in the environment in both cases. `meshdist run` behaves as with --use-env.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with argv (default: the process's arguments); return the exit code."""
    parser = Parser(_PROGRAM, _USAGE, "Start a program as several processes.", _EPILOG)
    add_launch_arguments(parser, short=False)
    parser.add_argument(
        "--use-env",
        "--use_env",
        action="store_true",
        help="pass the local rank only as LOCAL_RANK, not as an argument",
    )
    for value in (True, False):
        spellings = (
            f"--{name}={text}" for name in ("use-env", "use_env") for text in (value, int(value))
        )
        action = "store_true" if value else "store_false"
        parser.add_argument(*spellings, dest="use_env", action=action, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.no_python and not arguments.use_env:
        return report_usage_error(
            _PROGRAM,
            explain(
                "--no-python needs --use-env",
                expected="a program that reads LOCAL_RANK, since it gets no --local-rank",
                fix="add --use-env",
            ),
        )
    return launch(_PROGRAM, arguments, hands_local_rank=not arguments.use_env)


if __name__ == "__main__":
    sys.exit(main())
