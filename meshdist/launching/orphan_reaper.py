"""Kill the process tree of a launch if the launcher itself is killed.

A launch marks its processes' environment. Children inherit the mark, so the tree can be found even
after parents have died or sessions have changed. The guard process waits on a pipe held only by the
launcher: the system closes it however the launcher dies, and the guard then kills the tree.

With other arguments, the script removes a directory after a process has ended. It runs as a plain
script, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time
from typing import NamedTuple

MARK = "MESHDIST_LAUNCH"
REMOVE_AFTER = "--remove-after"
_PROC = "/proc"
# Between fork and exec a new process still shows its parent's environment, without the mark, so
# the guard looks for processes again after this time.
_SECOND_LOOK_S = 0.1
_KILLING_PERIOD_S = 0.005
_PR_SET_PDEATHSIG = 1


class _Process(NamedTuple):
    parent: int
    session: int
    started: int
    marked: bool


def mark_value(outer: str | None, mark: str) -> str:
    """Return the value of MESHDIST_LAUNCH for launch ``mark``, nested in ``outer``."""
    return f"{outer or ''}/{mark}"


def end_with_parent(parent: int) -> None:
    """Make Linux kill this process when ``parent`` ends; exit now if it has ended."""
    if sys.platform == "linux":  # for this process only, not for its children
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # not Linux, or the parent has ended before
        os._exit(1)


def _read_process(pid: int, needle: bytes) -> _Process | None:
    try:
        with open(f"{_PROC}/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    # The command's name is in parentheses, and may itself contain spaces and parentheses.
    fields = stat[stat.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return None
    marked = False
    with contextlib.suppress(OSError), open(f"{_PROC}/{pid}/environ", "rb") as file:
        prefix = f"{MARK}=".encode()
        marked = any(
            needle in entry[len(prefix) :].split(b"/")
            for entry in file.read().split(b"\0")
            if entry.startswith(prefix)
        )
    return _Process(int(fields[1]), int(fields[3]), int(fields[19]), marked)


class ProcessTree:
    """All descendants of a launch, found by its mark."""

    def __init__(self, mark: str) -> None:
        self._needle = mark.encode()
        self._roots: dict[int, int | None] = {}

    def add(self, pid: int) -> None:
        """Add the child ``pid``, even if it overwrites the mark in its environment."""
        # A program that sets its process title overwrites its visible environment.
        process = _read_process(pid, self._needle)
        self._roots[pid] = process.started if process else None

    def members(self) -> list[int]:
        """Return the running members' process ids, without the caller."""
        if not os.path.isdir(f"{_PROC}/self"):
            return [pid for pid in self._roots if _leads_a_group(pid)]
        seen = {
            int(name): process
            for name in os.listdir(_PROC)
            if name.isdigit() and (process := _read_process(int(name), self._needle))
        }
        seen.pop(os.getpid(), None)
        # A later process may have the number of a root, but not its start time.
        found = {
            pid
            for pid, process in seen.items()
            if process.marked or (pid in self._roots and self._roots[pid] == process.started)
        }
        while True:
            more = {
                pid
                for pid, process in seen.items()
                if pid not in found and (process.parent in found or process.session in found)
            }
            if not more:
                return sorted(found)
            found |= more

    def kill(self, patience_s: float = 2.0) -> None:
        """Kill every member; return when none is left, or after ``patience_s``."""
        end = time.monotonic() + patience_s
        while members := self.members():
            for pid in members:
                with contextlib.suppress(OSError):
                    if os.path.isdir(f"{_PROC}/self"):
                        os.kill(pid, signal.SIGKILL)
                    else:
                        os.killpg(pid, signal.SIGKILL)
            if time.monotonic() > end:
                return
            time.sleep(_KILLING_PERIOD_S)


def _leads_a_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except OSError:
        return False


def _guard(mark: str, directory: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    process_tree = ProcessTree(mark)
    for line in sys.stdin:
        process_tree.add(int(line))
    process_tree.kill()
    time.sleep(_SECOND_LOOK_S)
    process_tree.kill()
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


def _remove_after(pid: int, directory: str) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        handle = os.pidfd_open(pid)
        select.select([handle], [], [])
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1] == REMOVE_AFTER:
        _remove_after(int(sys.argv[2]), sys.argv[3])
    else:
        _guard(*sys.argv[1:])
