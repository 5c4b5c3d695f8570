"""How often one reads on in another file, who follows one call through the package.

    python benchmarks/rooms.py [REPORT.json] [--list "reshard, the first"]

Two simulated ranks make each call; rank 0's functions are noted as they are entered, each at its
first time, since a reader reads it once. Counted are changes of file from one to the next, and the
different files: who follows ``pattern`` through a first ``reshard``, or a tensor through an
``all_reduce`` off the fast path, turns to another file that often. ``--list`` prints a call's
functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import parser_of, write_report

PACKAGE = f"{Path(__file__).resolve().parents[1] / 'meshdist'}/"

Entered = list[tuple[str, str]]


def functions_of(call: Callable[[], Any]) -> Entered:
    """Make a call; return the package's functions that it enters: file, line and name, in order."""
    entered: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            place = code.co_filename.removeprefix(PACKAGE)
            entered[place, f"{code.co_firstlineno} {code.co_name}"] = None

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(entered)


def follow() -> dict[str, Entered]:
    """On each of two ranks: what each call enters."""
    import torch

    import meshdist as md

    mesh = md.make_mesh((2,), ("tp",))
    x = torch.arange(8.0).reshape(4, 2)
    group: Any = md.group.WORLD
    md.all_reduce(torch.ones(2), group=mesh["tp"])
    md.reshard(torch.ones(6, 2), "x@tp y -> x y@tp", mesh=mesh)

    def reshard() -> None:
        md.reshard(x, "a@tp b -> a b@tp", mesh=mesh)

    def all_reduce() -> None:
        md.all_reduce(torch.ones(2), group=group)

    all_reduce()
    calls = {
        "reshard, the first": reshard,
        "reshard, the second": reshard,
        "all_reduce": all_reduce,
    }
    return {name: functions_of(call) for name, call in calls.items()}


def main() -> None:
    import meshdist as md

    parser = parser_of(__doc__)
    parser.add_argument("--list", default="", help="a call whose functions are printed")
    options = parser.parse_args()
    found = md.simulate(follow, 2)[0]
    for place, name in found.get(options.list, ()):
        print(f"{place} {name}")
    rows = [
        {
            "call": call,
            "functions": len(entered),
            "changes of file": sum(left[0] != right[0] for left, right in pairwise(entered)),
            "files": len({place for place, _ in entered}),
        }
        for call, entered in found.items()
    ]
    write_report("rooms", rows, (__doc__ or "").split("\n\n")[2], options.report)


if __name__ == "__main__":
    main()
