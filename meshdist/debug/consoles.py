"""Where a person can type to this process, though a launcher has taken its standard streams."""

from __future__ import annotations

import io
import os
import sys
import weakref

from ..errors import WorldError
from ..runtime.hosts import read_process

__all__ = ["Console", "find_console"]


class Console:
    """A terminal, or what stands in for one, as the two streams of a debugger.

    Reads no byte beyond the line that is asked for, so that the next console on the same input
    misses none.

    Args:
        fd: what is read, and written to if it can be.
        is_own: whether to close it at the end.
    """

    def __init__(self, fd: int, *, is_own: bool) -> None:
        self._fd = fd
        self._input = io.FileIO(fd, closefd=False)  # unbuffered
        self._is_terminal = os.isatty(fd)
        if is_own:
            weakref.finalize(self, os.close, fd)

    def readline(self) -> str:
        """The next line with its end; "" at the end of the input."""
        return self._input.readline().decode(errors="replace")

    def write(self, text: str) -> int:
        """Write to the terminal; to standard output where the input is none."""
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


def find_console() -> Console:
    """This process's standard input, its terminal, or that of the process that started it.

    Raises:
        WorldError: there is none.
    """
    if _is_input(0):
        return Console(0, is_own=False)
    for path in ["/dev/tty", *_terminals_above()]:
        try:
            return Console(os.open(path, os.O_RDWR | os.O_NOCTTY), is_own=True)
        except OSError:
            continue
    raise WorldError(
        "there is no terminal for a debugger",
        where=f"process {os.getpid()}",
        expected="a standard input, or a terminal of this process or of one that started it",
        fix="start the program from a terminal, or give it commands: meshdist run ... < commands",
    )


def _is_input(fd: int) -> bool:
    """Whether something may come from ``fd``."""
    try:
        return not os.path.samestat(os.fstat(fd), os.stat(os.devnull))
    except OSError:  # closed
        return False


def _terminals_above() -> list[str]:
    """The terminals that the processes above this one have as standard streams, nearest first."""
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
