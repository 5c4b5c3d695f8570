"""The family of a launch, and the guard that ends it when the launcher itself was killed.

A launch marks the environment of every process that it starts; children inherit the mark, so the
family can be found even after parents have died and sessions were changed. The guard is a small
process of its own that waits on a pipe held by the launcher alone: the system closes that pipe
however the launcher dies, SIGKILL included, and the guard then ends the family.

The same script, called otherwise, removes a directory once a process has ended.

Runs as a plain script, hence imports the standard library only.
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
# Between fork and exec a new process still shows its parent's environment, without the mark: the
# guard believes that no process is left only after it has looked again this much later.
_SECOND_LOOK_S = 0.1
_KILLING_PERIOD_S = 0.005
_PR_SET_PDEATHSIG = 1


class _Process(NamedTuple):
    parent: int
    session: int
    started: int
    marked: bool


def mark_value(outer: str | None, mark: str) -> str:
    """Return the value of MESHDIST_LAUNCH for launch ``mark`` inside of that with ``outer``."""
    return f"{outer or ''}/{mark}"


def end_with_parent(parent: int) -> None:
    """Let Linux kill this process as soon as ``parent`` ends; exit now if that has ended."""
    if sys.platform == "linux":  # for this process alone, not for those that it forks
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # elsewhere, or where it has ended before
        os._exit(1)


def _read_process(pid: int, needle: bytes) -> _Process | None:
    try:
        with open(f"{_PROC}/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    # The command's name stands in parentheses and may itself hold spaces and parentheses.
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
    """All processes that a launch, and these in turn, have started, found by its mark."""

    def __init__(self, mark: str) -> None:
        self._needle = mark.encode()
        self._roots: dict[int, int | None] = {}

    def add(self, pid: int) -> None:
        """Record the child ``pid`` as a member even if it overwrites its environment's mark."""
        # A program that sets its process title overwrites the environment that others can see.
        process = _read_process(pid, self._needle)
        self._roots[pid] = process.started if process else None

    def members(self) -> list[int]:
        """Return the process ids of the members that live, without the caller's own."""
        if not os.path.isdir(f"{_PROC}/self"):
            return [pid for pid in self._roots if _leads_a_group(pid)]
        seen = {
            int(name): process
            for name in os.listdir(_PROC)
            if name.isdigit() and (process := _read_process(int(name), self._needle))
        }
        seen.pop(os.getpid(), None)
        # A later process may have got the number of a root: its start time differs.
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
        """End every member by SIGKILL; return when none is left, at the latest after patience_s."""
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
