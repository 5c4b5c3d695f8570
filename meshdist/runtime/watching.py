"""Watches child processes: who ends, in which order, and how to stop the others.

Serves every way of starting processes; knows nothing of ranks' environments or output.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from . import guard
from .guard import MARK, Family

__all__ = ["GRACE_S", "Child", "Ending", "Guard", "Watch", "exit_code_of", "signal_name"]

GRACE_S = 3.0
"""How long a process that was asked to end may take before it is killed."""

_POLL_S = 0.02


def signal_name(number: int) -> str:
    """Return the name of a signal, as in SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_code_of(code: int) -> int:
    """Return a shell's exit code for a subprocess return code: 128 + N for signal N."""
    return 128 - code if code < 0 else code


@dataclass(frozen=True)
class Ending:
    """How one process ended. code is an exit code, or minus the signal that ended it."""

    rank: int
    pid: int
    code: int

    @property
    def exit_code(self) -> int:
        """The exit code as a shell gives it: 128 + N for signal N."""
        return exit_code_of(self.code)

    def __str__(self) -> str:
        if self.code >= 0:
            return f"failed with exit code {self.code}"
        hint = " (the system does this when memory runs out)" if self.code == -9 else ""
        return f"was ended by {signal_name(-self.code)}{hint}"


class Child(Protocol):
    """A started process: subprocess.Popen has this form."""

    @property
    def pid(self) -> int:
        """The process id."""

    def poll(self) -> int | None:
        """Return None while it runs, then its exit code, or minus the signal that ended it."""


class Watch:
    """Watches child processes: tells in which order they end, and stops them.

    Where the system has process file descriptors (Linux), the order is the true one. Not safe for
    use by several threads.

    Attributes:
        running: the children that have not ended, by rank.
        failed: how the first child that failed has ended; None as long as none has.
        hurried: set it to make stop() kill without waiting.
    """

    def __init__(self) -> None:
        self.running: dict[int, Child] = {}
        self.failed: Ending | None = None
        self.hurried = False
        self._handles: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()

    def add(self, rank: int, child: Child) -> None:
        """Watch child as the given rank."""
        self.running[rank] = child
        with contextlib.suppress(AttributeError, OSError):
            handle = os.pidfd_open(child.pid)
            self._handles[rank] = handle
            self._selector.register(handle, selectors.EVENT_READ, rank)

    def attend(self, file: BinaryIO | int, read: Callable[[], bool]) -> None:
        """Call read() whenever file is readable, until it returns False."""
        self._selector.register(file, selectors.EVENT_READ, (file, read))

    def step(self, timeout_s: float | None = None) -> list[Ending]:
        """Wait until something happens, at most timeout_s; return who ended, first one first."""
        is_polling = len(self._handles) < len(self.running)
        if is_polling:
            timeout_s = _POLL_S if timeout_s is None else min(timeout_s, _POLL_S)
        ended = []
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, int):
                ended += self._look_at(key.data)
            else:
                file, read = key.data
                if not read():
                    self._selector.unregister(file)
        if is_polling:
            for rank in sorted(self.running.keys() - self._handles.keys()):
                ended += self._look_at(rank)
        return ended

    def _look_at(self, rank: int) -> list[Ending]:
        child = self.running[rank]
        code = child.poll()
        if code is None:
            return []
        del self.running[rank]
        self._forget_handle(rank)
        ending = Ending(rank, child.pid, code)
        if code != 0 and self.failed is None:
            self.failed = ending
        return [ending]

    def _forget_handle(self, rank: int) -> None:
        handle = self._handles.pop(rank, None)
        if handle is not None:
            self._selector.unregister(handle)
            os.close(handle)

    def stop(
        self,
        signals: Sequence[tuple[int, float]] = ((signal.SIGTERM, GRACE_S),),
        family: Family | None = None,
    ) -> list[Ending]:
        """End all children that still run, and with a family all that belongs to it.

        Args:
            signals: what to send in turn, and how many seconds to wait after each; SIGKILL follows
                by itself. A child that leads a process group is signalled with its whole group.
            family: the processes of the launch; its members are killed when the children are gone.

        Returns:
            Who ended meanwhile, first one first.
        """
        ended = []
        for number, patience_s in signals:
            self._send(number)
            end = time.monotonic() + patience_s
            while self.running and not self.hurried and (rest := end - time.monotonic()) > 0:
                ended += self.step(rest)
        self._send(signal.SIGKILL)
        if family is not None:
            family.kill()
        end = time.monotonic() + 1.0
        while self.running and (rest := end - time.monotonic()) > 0:
            ended += self.step(rest)
        return ended

    def _send(self, number: int) -> None:
        for child in self.running.values():
            # Not reaped yet, so that nobody else can have this number.
            with contextlib.suppress(OSError):
                if os.getpgid(child.pid) == child.pid:
                    os.killpg(child.pid, number)
                else:
                    os.kill(child.pid, number)

    def close(self) -> None:
        """Release what watching needs; the children are left as they are."""
        for rank in list(self._handles):
            self._forget_handle(rank)
        self._selector.close()


class Guard:
    """A process that ends a launch's family if this process dies, however it dies.

    Args:
        mark: the name of the launch, which must stand in the environment of its processes.
    """

    def __init__(self, mark: str) -> None:
        # Without the mark of an outer launch, which could end the guard before its work is done.
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
            bufsize=0,
        )

    def adopt(self, pid: int) -> None:
        """Tell the guard about a started process."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{pid}\n".encode())

    def dismiss(self) -> None:
        """End the guard, which then harms nobody: the family must have ended before."""
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
