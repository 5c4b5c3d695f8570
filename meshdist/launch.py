"""``python -m meshdist.launch``: starts a program with the flags of torch.distributed.launch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .cli.flags import Parser, add_launch_arguments, launch, report_usage_error
from .error_text import explain

_PROGRAM = "python -m meshdist.launch"
_USAGE = f"{_PROGRAM} [--nproc-per-node N] [options] script.py ...   (or: -m module ...)"
_EPILOG = """\
The script is handed --local-rank=N before its own arguments, unless --use-env is given; LOCAL_RANK
stands in the environment either way. `meshdist run` does the same as --use-env.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with argv (default: the process's arguments); return the exit code."""
    parser = Parser(_PROGRAM, _USAGE, "Start a program as several processes.", _EPILOG)
    add_launch_arguments(parser, short=False)
    parser.add_argument(
        "--use-env",
        "--use_env",
        action="store_true",
        help="tell the local rank by LOCAL_RANK alone, not by an argument",
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
                expected="a program that reads LOCAL_RANK: it is not handed --local-rank",
                fix="add --use-env",
            ),
        )
    return launch(_PROGRAM, arguments, hands_local_rank=not arguments.use_env)


if __name__ == "__main__":
    sys.exit(main())
