"""A breakpoint for one rank of many.

A person types to it at the process's standard input or terminal, though a launcher may have taken
its standard streams.
"""

from __future__ import annotations

import bdb
import ctypes
import io
import os
import pdb  # noqa: T100 - this is the debugger that users ask for
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import Any, TypeAlias

from ..arguments import DEFAULT_TIMEOUT, check_timeout, get_number, get_whole_number
from ..bootstrap.bounded_store import read_number
from ..bootstrap.world import World, get_usable_world
from ..checking.program import call_site, show_site
from ..errors import AbortedError, CollectiveTimeoutError, WorldError
from ..groups.communicators import get_registry
from ..groups.signals import ask, clocks_paused, last_call_text
from ..runtime.deadlines import Grace, wait_until
from ..runtime.hosts import read_process
from ..wires.simulated.scheduler import find_rank_here
from ..wires.simulated.store import CallWait

__all__: list[str] = []  # the name breakpoint would shadow the builtin

_ENTERED, _LEFT, _QUIT = "breakpoint/entered", "breakpoint/left", "breakpoint/quit"
_UNOPENED = "breakpoint/unopened"

_Add: TypeAlias = Callable[[str, int], int]


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = 3600) -> None:
    """Stop one rank in the debugger (pdb), at the line of this call; the others wait for it.

    Every rank of the world calls it. The others wait until the rank is let go: by ``continue``, or
    by a step, after which all ranks run on while this rank is stepped through. ``quit`` ends it on
    all ranks.

    While the debugger asks for a command, no timeout of a verb runs down on any rank, wherever it
    waits. This reaches the others within a quarter of a second; should the debugger's process
    end, within ten seconds. What counts time by itself goes on: NCCL, backends
    registered with torch, the opening of a group by its wire, Gloo with TORCH_GLOO_LAZY_INIT,
    waits on a store.

    Args:
        rank: the global rank to stop.
        skip: how often this line passes before it stops.
        timeout_s: how long, in seconds, the others wait and timeouts stand; None takes the
            world's timeout.

    The debugger talks to the process's standard input and output where they are a terminal, else
    to the terminal from which the job was started. Simulated ranks wait because only one of them
    runs at a time.

    Raises:
        KindError, ArgumentError: no such rank, a wrong ``skip`` or ``timeout_s``.
        CollectiveTimeoutError: on the others, when they have waited for ``timeout_s``.
        AbortedError: on the others, after ``quit``, or where ``rank`` could not open a debugger.
        WorldError: on ``rank``, where there is no terminal.
    """
    world = get_usable_world()
    rank = get_whole_number(rank, "breakpoint: rank", 0, world.size - 1)
    skip = get_whole_number(skip, "breakpoint: skip", 0)
    limit = _limit(world, timeout_s)
    if world.next_number(("breakpoint", call_site())) <= skip:
        return
    number = world.next_number("breakpoint")
    if world.rank != rank:
        _wait(world, rank, number, limit)
        return
    add = _open_counts(world)
    add(_ENTERED, 1)
    frame = sys._getframe(1)
    try:
        debugger = _Debugger(world, limit)
        debugger.stop_at(frame, f"rank {rank} of {world.size} is here; type continue to let go\n")
    except BaseException as error:
        key = _UNOPENED if isinstance(error, WorldError) else _QUIT
        add(key, number - add(key, 0))
        raise
    finally:
        add(_LEFT, 1)
    debugger.resume()  # last, so that no line of this function is stepped through


def _limit(world: World, timeout_s: object) -> timedelta:
    if timeout_s is None:
        return world.timeout or DEFAULT_TIMEOUT
    seconds = get_number(timeout_s, "breakpoint: timeout_s", expected="seconds")
    try:
        limit = timedelta(seconds=seconds)
    except (OverflowError, ValueError):
        limit = timedelta.max
    check_timeout(limit)
    return limit


def _open_counts(world: World) -> _Add:
    """Return a function that adds to a named number that all ranks share, and returns the sum."""
    # All ranks stop at one breakpoint after the other, so that four numbers are enough: how many
    # were entered and left, and which was quit or had no debugger. Simulated ranks, which wait by
    # letting others run, keep them in the table that they share.
    if not world.is_simulated:
        return lambda key, amount: (
            world.store.add(key, amount) if amount else read_number(world.store, key)
        )
    rank = find_rank_here()
    if rank is None:
        raise WorldError(
            f"breakpoint of simulated rank {world.rank} was called from another thread",
            where=f"called at {show_site(call_site())}",
            expected="the rank's own thread",
            fix="use the builtin breakpoint() there, or run the program as processes",
        )
    table: dict[str, int] = rank.scheduler.tables.setdefault("breakpoints", {})

    def add(key: str, amount: int) -> int:
        table[key] = table.get(key, 0) + amount
        return table[key]

    return add


def _wait(world: World, rank: int, number: int, limit: timedelta) -> None:
    """Wait until ``rank`` left breakpoint ``number``; raise if late, or if its debugger failed."""
    where = f"rank {world.rank}, breakpoint(rank={rank}) at {show_site(call_site())}"
    add = _open_counts(world)

    def has_left() -> bool:
        return add(_LEFT, 0) >= number

    here = find_rank_here() if world.is_simulated else None
    if here is not None:
        here.wait(CallWait(f"breakpoint(rank={rank})", call_site(), has_left))
    elif not wait_until(has_left, Grace(limit)):
        found = f"rank {rank} is in the debugger"
        if add(_ENTERED, 0) < number:
            found = f"rank {rank} has not come: {last_call_text(ask(world, (rank,)).get(rank))}"
        raise CollectiveTimeoutError(
            f"rank {rank} did not leave breakpoint() within {limit.total_seconds():g} s",
            where=where,
            expected="the same call on all ranks, and `continue` in time",
            found=found,
            fix="give a longer timeout_s, or leave the debugger earlier",
        )
    if add(_QUIT, 0) == number:
        raise AbortedError(
            f"the debugger on rank {rank} was quit",
            where=where,
            fix="leave it with continue to let the program go on",
        )
    if add(_UNOPENED, 0) == number:
        raise AbortedError(
            f"rank {rank} could not open a debugger",
            where=where,
            found=f"rank {rank} has no terminal, and no standard input",
            fix="start the program from a terminal, or give it commands: "
            "meshdist run ... < commands",
        )


class _Debugger(pdb.Pdb):
    """pdb on the frame of a caller, while the caller waits in a call."""

    def __init__(self, world: World, limit: timedelta) -> None:
        if world.is_simulated or (_is_terminal(sys.stdin) and _is_terminal(sys.stdout)):
            super().__init__(nosigint=True)
        else:
            console: Any = _find_console()
            super().__init__(stdin=console, stdout=console, nosigint=True)
        self.prompt = f"(Pdb, rank {world.rank}) "
        self._steps = True
        self._follows = False  # until ``resume`` what is traced is not the program
        self._world = world
        self._limit = limit
        get_registry(world)  # its signal thread shows the others that this process lives

    def interaction(self, *where: Any) -> None:
        """Ask for commands; meanwhile no timeout runs down anywhere."""
        with clocks_paused(self._world, self._limit.total_seconds()):
            super().interaction(*where)

    def stop_at(self, frame: FrameType, greeting: str) -> None:
        """Ask for commands at ``frame``, until one of them lets the program go on or quits."""
        trace = sys.gettrace()
        self.set_trace(frame)
        sys.settrace(trace)
        self.message(greeting)
        self.interaction(frame, None)
        # Before Python 3.13 the dictionary of a frame's local variables is a copy, which Python
        # itself writes back only from a call of a trace function.
        if sys.version_info < (3, 13):
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        sys.settrace(trace)
        if self.quitting:
            raise bdb.BdbQuit

    def resume(self) -> None:
        """Go on tracing the program, if the last command was a step or breakpoints are left."""
        if self._steps:
            self._follows = True
            sys.settrace(self.trace_dispatch)

    def stop_here(self, frame: FrameType) -> bool:
        """Return whether to stop in ``frame``; not before ``resume`` has let the program go on."""
        return self._follows and super().stop_here(frame)

    def set_continue(self) -> None:
        """Let the program go on, traced if any breakpoints are left."""
        super().set_continue()
        self._steps = bool(self.breaks)


def _is_terminal(stream: Any) -> bool:
    with suppress(AttributeError, ValueError):  # none, or closed
        return bool(stream.isatty())
    return False


class _DebuggerConsole:
    """A terminal, or what stands in for it, as the two streams of a debugger.

    Args:
        fd: what is read, and written to if it can be.
        is_own: whether to close it at the end.
    """

    def __init__(self, fd: int, *, is_own: bool) -> None:
        self._fd = fd
        # Unbuffered: the next console on the same input misses no byte behind the line asked for.
        self._input = io.FileIO(fd, closefd=False)
        self._is_terminal = os.isatty(fd)
        if is_own:
            weakref.finalize(self, os.close, fd)

    def readline(self) -> str:
        """Return the next line with its end; "" at the end of the input."""
        return self._input.readline().decode(errors="replace")

    def write(self, text: str) -> int:
        """Write to the terminal, or to standard output where the input is no terminal."""
        if not self._is_terminal:
            return sys.stdout.write(text)
        data = text.encode(errors="replace")
        while data:
            data = data[os.write(self._fd, data) :]
        return len(text)

    def flush(self) -> None:
        """Flush the stream that was written to."""
        if not self._is_terminal:
            sys.stdout.flush()


def _find_console() -> _DebuggerConsole:
    """Return this process's standard input, its terminal, or that of a process above; or raise."""
    if _is_input(0):
        return _DebuggerConsole(0, is_own=False)
    for path in ["/dev/tty", *_terminals_above()]:
        try:
            return _DebuggerConsole(os.open(path, os.O_RDWR | os.O_NOCTTY), is_own=True)
        except OSError:
            continue
    raise WorldError(
        "there is no terminal for a debugger",
        where=f"process {os.getpid()}",
        expected="a standard input, or a terminal of this process or of one that started it",
        fix="start the program from a terminal, or give it commands: meshdist run ... < commands",
    )


def _is_input(fd: int) -> bool:
    """Return whether ``fd`` is open, and is not /dev/null."""
    try:
        return not os.path.samestat(os.fstat(fd), os.stat(os.devnull))
    except OSError:  # closed
        return False


def _terminals_above() -> list[str]:
    """Return paths of terminals that the processes above this have as streams, nearest first."""
    found = []
    process = os.getppid()
    while process > 1 and (seen := read_process(process)) is not None:
        try:
            streams = [os.readlink(f"/proc/{process}/fd/{fd}") for fd in range(3)]
        except OSError:  # a process of another user
            break
        process = int(seen[1][1])
        found += [path for path in streams if path.startswith(("/dev/pts/", "/dev/tty"))]
    return found
