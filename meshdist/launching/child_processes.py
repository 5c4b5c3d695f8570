"""Start, monitor and stop child processes, including all processes that they start themselves."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from ..runtime.deadlines import Deadline
from . import orphan_reaper
from .orphan_reaper import MARK, REMOVE_AFTER, ProcessTree
from .stack_dump import FOLDER, ask_where, read_answers

GRACE_S = 3.0
"""Grace period of a process between the request to end and SIGKILL."""

_POLL_S = 0.02
_ANSWER_S = 1.0  # ranks check for questions eight times a second


def open_closed_streams() -> None:
    """Open /dev/null as each standard stream that is closed, as in a daemon."""
    # Otherwise the next file or pipe gets its number, and children would use it as their stream.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


@dataclass(frozen=True)
class ProcessExit:
    """Exit of a process: its exit code, or minus the signal, and its time (monotonic)."""

    rank: int
    pid: int
    code: int
    at: float = field(default=0.0, compare=False)

    @property
    def exit_code(self) -> int:
        """The exit code in shell convention: 128 + N for signal N."""
        return 128 - self.code if self.code < 0 else self.code

    def __str__(self) -> str:
        if self.code >= 0:
            return f"failed with exit code {self.code}"
        hint = " (the system does this when memory runs out)" if self.code == -9 else ""
        named = {number.value: number.name for number in signal.Signals}
        return f"was ended by {named.get(-self.code, f'signal {-self.code}')}{hint}"


def is_dying(pid: int) -> bool:
    """Return whether a child is about to end: its main thread has, or SIGKILL is pending."""
    try:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError:
        return False
    pending = int(fields.get("SigPnd", "0"), 16) | int(fields.get("ShdPnd", "0"), 16)
    return fields.get("State", "").startswith("Z") or bool(pending >> (signal.SIGKILL - 1) & 1)


class Launch:
    """Children of one launch and their descendants; none outlives this process."""

    # With process file descriptors (Linux), exits are seen in their true order. Not thread-safe.

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)  # in the environment of its processes
        self.directory = tempfile.mkdtemp(prefix="meshdist-launch-")  # private; removed at the end
        self.running: dict[int, subprocess.Popen[Any]] = {}  # by rank
        self.endings: list[ProcessExit] = []  # exits so far, in order
        self.failed: ProcessExit | None = None  # the first child that failed
        self.killed: list[int] = []  # ranks still running after the grace periods of stop()
        self.hurried = False  # makes stop() kill without waiting
        self._handles: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._process_tree = ProcessTree(self.mark)
        self._guard = Guard(self.mark, self.directory)
        self._is_stopped = False

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        listener: socket.socket | None = None,
        inherited: Sequence[int] = (),
        **streams: Any,
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` as child ``rank``; it inherits ``listener``, which is closed here."""
        inherited = [*inherited, *([] if listener is None else [listener.fileno()])]
        child = subprocess.Popen(
            command,
            env={**environment, FOLDER: self.directory},
            pass_fds=inherited,
            start_new_session=True,
            bufsize=0,
            **streams,
        )
        if listener is not None:
            listener.close()
        self._guard.adopt(child.pid)
        self._process_tree.add(child.pid)
        self.add(rank, child)
        return child

    def add(self, rank: int, child: subprocess.Popen[Any]) -> None:
        """Monitor ``child`` as ``rank``; ``step`` returns its exit."""
        self.running[rank] = child
        with contextlib.suppress(AttributeError, OSError):
            handle = os.pidfd_open(child.pid)
            self._handles[rank] = handle
            self._selector.register(handle, selectors.EVENT_READ, rank)

    def attend(self, file: BinaryIO | int, read: Callable[[], bool]) -> None:
        """Make ``step`` call ``read`` whenever ``file`` is readable, until it returns False."""
        self._selector.register(file, selectors.EVENT_READ, (file, read))

    def step(self, timeout_s: float | None = None) -> list[ProcessExit]:
        """Wait up to ``timeout_s`` for an exit or output; return new exits in order."""
        is_polling = len(self._handles) < len(self.running)
        if is_polling:
            timeout_s = _POLL_S if timeout_s is None else min(timeout_s, _POLL_S)
        num_ended = len(self.endings)
        due = []
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, int):
                due.append(key.data)
            else:
                file, read = key.data
                if not read():
                    self._selector.unregister(file)
        if is_polling:
            due += sorted(self.running.keys() - self._handles.keys())
        for rank in due:
            self._look_at(rank)
        return self.endings[num_ended:]

    def _look_at(self, rank: int) -> None:
        child = self.running.get(rank)
        code = None if child is None else child.poll()
        if child is None or code is None:
            return
        if code != 0 and self.failed is None:
            self._await_dying()
        self._note_exit(rank, code)

    def _await_dying(self) -> None:
        """Wait briefly for children about to end, and record their exits first."""
        dying = [rank for rank, child in self.running.items() if is_dying(child.pid)]
        grace = Deadline(_ANSWER_S)
        for rank in dying:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._note_exit(rank, self.running[rank].wait(grace.left_s))

    def _note_exit(self, rank: int, code: int) -> None:
        child = self.running.pop(rank)
        self._forget_handle(rank)
        self.endings.append(ProcessExit(rank, child.pid, code, time.monotonic()))
        if code != 0 and self.failed is None:
            self.failed = self.endings[-1]

    def _forget_handle(self, rank: int) -> None:
        handle = self._handles.pop(rank, None)
        if handle is not None:
            self._selector.unregister(handle)
            os.close(handle)

    def ask_where(self) -> dict[int, bytes]:
        """Return the stacks of running ranks; b"" for a rank that does not answer."""
        running, grace = {*self.running}, Deadline(_ANSWER_S)
        ask_where(self.directory)
        while True:
            answers = read_answers(self.directory)
            if all(answers.values()) or grace.is_over or self.hurried:
                return {rank: text for rank, text in answers.items() if rank in running}
            self.step(_POLL_S)

    def stop(self, signals: Sequence[tuple[int, float]] = ((signal.SIGTERM, GRACE_S),)) -> None:
        """Stop all running children and their descendants.

        Args:
            signals: (signal, grace period in seconds) pairs, sent in turn before SIGKILL.
        """
        self._is_stopped = True
        for number, patience_s in signals:
            self._send(number)
            grace = Deadline(patience_s)
            while self.running and not self.hurried and not grace.is_over:
                self.step(grace.left_s)
        self.killed = sorted(self.running)
        self._send(signal.SIGKILL)
        grace = Deadline(1.0)
        while self.running and not grace.is_over:
            self.step(grace.left_s)
        self._process_tree.kill()

    def _send(self, number: int) -> None:
        for child in self.running.values():
            # No other process can have the number of a child that is not reaped. A child that
            # leads a process group is signalled together with its group.
            with contextlib.suppress(OSError):
                if os.getpgid(child.pid) == child.pid:
                    os.killpg(child.pid, number)
                else:
                    os.kill(child.pid, number)

    def close(self) -> None:
        """Kill running children, release their handles, and remove the job's directory."""
        if not self._is_stopped:
            self.stop(())
        for rank in list(self._handles):
            self._forget_handle(rank)
        self._selector.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._guard.dismiss()


class Guard:
    """Process that kills a launch's processes and removes its directory if this process dies."""

    def __init__(self, mark: str, directory: str = "") -> None:
        self._process = _start_script(mark, directory, stdin=subprocess.PIPE)

    def adopt(self, pid: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{pid}\n".encode())

    def dismiss(self) -> None:
        """Stop the guard process, after the launch's other processes have ended."""
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()


def remove_after(pid: int, directory: str) -> None:
    """Start a process that removes ``directory`` once process ``pid`` has ended."""
    if hasattr(os, "pidfd_open"):  # elsewhere the directory remains
        remover = _start_script(REMOVE_AFTER, str(pid), directory, stdin=subprocess.DEVNULL)
        remover.returncode = 0  # it outlives this process, which must not wait for it


def _start_script(*arguments: str, stdin: int) -> subprocess.Popen[bytes]:
    # Remove the mark of an outer launch, which could kill it before its work is done.
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", orphan_reaper.__file__, *arguments],
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
        bufsize=0,
    )
