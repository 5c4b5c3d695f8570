"""Stop one rank in the debugger while the other ranks wait in a barrier."""

from __future__ import annotations

import os
import pdb  # noqa: T100 - this is the debugger that users ask for
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from ..arguments import check_timeout, get_integer, get_number
from ..bootstrap.world import get_usable_world
from ..checking.call_sites import call_site
from ..errors import WorldError
from ..groups.peer_status import stall_warning
from .objects import broadcast_object_list
from .tensor_collectives import barrier

__all__: list[str] = []  # the name breakpoint would shadow the builtin

_STDIN = 0


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = 3600) -> None:
    """Stop one rank in the debugger (pdb) at the caller's line; the other ranks wait in a barrier.

    Call it on every rank of the world. All ranks continue after the first ``continue`` or step.
    After ``quit`` the rank raises ``bdb.BdbQuit``, and the others raise ``BackendError`` when its
    process ends.

    Timeouts of other calls keep running. If ranks may wait elsewhere, pass a longer ``timeout=`` to
    ``init_process_group`` and ``new_group``.

    Args:
        rank: the global rank to stop.
        skip: how many passes of this line to skip.
        timeout_s: seconds that the other ranks wait; None uses the world's timeout.

    The debugger reads standard input. Simulated ranks have no timeouts.

    Raises:
        KindError, ArgumentError: a wrong ``rank``, ``skip`` or ``timeout_s``.
        CollectiveTimeoutError: another rank did not make this call or leave the debugger within
            ``timeout_s``.
        BackendError: another rank's process ended.
        WorldError: ``rank`` has no standard input; on every rank.
    """
    world = get_usable_world()
    rank = get_integer(rank, "breakpoint: rank", 0, world.size - 1)
    skip = get_integer(skip, "breakpoint: skip", 0)
    meet = partial(_meet, rank, _limit(timeout_s))
    if world.next_number(("breakpoint", call_site())) <= skip:
        return
    if world.rank != rank:
        meet()
        return
    if not _has_input():
        meet(without_input=os.getpid())
    debugger = _Debugger(rank, meet)
    debugger.message(
        f"rank {rank} of {world.size} has stopped; type continue to let all ranks go on\n"
    )
    debugger.set_trace(sys._getframe(1))  # stops as soon as this function has returned


def _limit(timeout_s: object) -> timedelta | None:
    if timeout_s is None:
        return None
    seconds = get_number(timeout_s, "breakpoint: timeout_s", expected="seconds")
    try:
        limit = timedelta(seconds=seconds)
    except (OverflowError, ValueError):
        limit = timedelta.max
    check_timeout(limit)
    return limit


def _meet(rank: int, limit: timedelta | None, without_input: int | None = None) -> None:
    """Wait for all ranks; raise on each if ``rank`` passed ``without_input``, its process id."""
    with stall_warning(None):
        barrier(timeout=limit)
    found = [without_input]
    broadcast_object_list(found, rank)
    if found[0] is not None:
        raise WorldError(
            f"breakpoint() cannot stop rank {rank}: its process has no standard input",
            where=f"rank {rank}, process {found[0]}",
            expected="a terminal, or a file or pipe with the debugger's commands",
            fix="start the program from a terminal (under mpiexec only rank 0 has an input), "
            "or pass commands: meshdist run -n 4 script.py < commands",
        )


def _has_input() -> bool:
    if _is_terminal(sys.stdin):
        return True
    try:
        return not os.path.samestat(os.fstat(_STDIN), os.stat(os.devnull))
    except OSError:  # closed
        return False


class _Debugger(pdb.Pdb):
    """pdb that releases the other ranks when its first commands continue the program."""

    def __init__(self, rank: int, meet: Callable[[], object]) -> None:
        if _is_terminal(sys.stdin) and _is_terminal(sys.stdout):
            super().__init__(nosigint=True)
        else:
            stdin: Any = _StandardInput()
            super().__init__(stdin=stdin, stdout=sys.stdout, nosigint=True)
        self.prompt = f"(Pdb, rank {rank}) "
        self._meet: Callable[[], object] | None = meet

    def interaction(self, *where: Any) -> None:
        """Ask for commands; release the other ranks unless the first commands quit."""
        super().interaction(*where)
        meet, self._meet = self._meet, None
        if meet is not None and not self.quitting:
            meet()


def _is_terminal(stream: Any) -> bool:
    with suppress(AttributeError, ValueError):  # none, or closed
        return bool(stream.isatty())
    return False


class _StandardInput:
    """The process's standard input, unbuffered because ranks may share it."""

    def __init__(self) -> None:
        self._raw = open(_STDIN, "rb", buffering=0, closefd=False)  # noqa: SIM115

    def readline(self) -> str:
        """Return the next line with its newline, and read no further; "" at the end."""
        return self._raw.readline().decode(errors="replace")
