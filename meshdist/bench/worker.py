"""Run one rank of a side: execute the measuring process's orders."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sides import Library

ADDRESS = "MESHDIST_BENCH_SOCKET"
"""The environment variable with the measuring process's socket path and a secret."""


def main(argv: list[str]) -> int:
    """Open the side ``argv[0]``, and serve measurements under the label ``argv[1]``."""
    from .sides import SIDES

    serve(SIDES[argv[0]](), argv[1])
    return 0


def serve(side: Library, label: str) -> None:
    """Connect to the measuring process as ``label``, and execute its orders until "end"."""
    with socket.socket(socket.AF_UNIX) as connection:
        path, secret = os.environ[ADDRESS].rsplit(" ", 1)
        connection.connect(path)
        talk = connection.makefile("rw")
        say(talk, {"secret": secret, "side": label, "rank": side.rank, "size": side.size})
        for line in talk:
            order = json.loads(line)
            if order["operation"] == "end":
                break
            say(talk, {"seconds": _measure(side, order)})
    side.close()


def _measure(side: Library, order: dict[str, Any]) -> float | None:
    """Return the seconds per call of ``order``; None if the side has no such collective."""
    call = side.call(order["operation"], order["bytes"], order["dtype"])
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
    return took / 2 if order["operation"] == "send_recv" else took


def say(talk: Any, message: dict[str, Any]) -> None:
    talk.write(json.dumps(message) + "\n")
    talk.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
