"""One rank of one side: does what the measuring process asks for, and sleeps in between."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

from .sides import Side, open_side

__all__ = ["ADDRESS", "main"]

ADDRESS = "MESHDIST_BENCH_SOCKET"
"""The environment variable that names the measuring process's socket."""


def main(argv: list[str]) -> int:
    """Open the side that is named, report its rank, and measure until told to end."""
    side = open_side(argv[0])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[ADDRESS])
        talk = connection.makefile("rw")
        _say(talk, {"side": argv[1], "rank": side.rank, "size": side.size})
        for line in talk:
            order = json.loads(line)
            if order["verb"] == "end":
                break
            _say(talk, {"seconds": _measure(side, order)})
    side.close()
    return 0


def _measure(side: Side, order: dict[str, Any]) -> float | None:
    """Seconds per call; None where the side has no such verb."""
    call = side.call(order["verb"], order["bytes"], order["dtype"])
    if call is None:
        return None
    for _ in range(order["warm_up"]):
        call()
    side.barrier()
    start = time.perf_counter()
    for _ in range(order["calls"]):
        call()
    took = (time.perf_counter() - start) / int(order["calls"])
    side.barrier()
    return took / 2 if order["verb"] == "send_recv" else took


def _say(talk: Any, what: dict[str, Any]) -> None:
    talk.write(json.dumps(what) + "\n")
    talk.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
