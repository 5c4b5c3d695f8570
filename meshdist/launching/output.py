"""What the ranks write: to the console, into files, and the end of it kept for a report."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import BinaryIO, TextIO

from .rank_environment import LaunchError
from .root_cause import TRACEBACK

__all__ = ["LINE_S", "Output", "Sink", "Stream", "show"]

LINE_S = 0.05
"""How long a line may wait for its end; too short for a person to notice at a prompt."""

_KEPT_BYTES = 32 * 1024
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r(?!\n|\Z))")
_BITS = {"stdout": 1, "stderr": 2}


@dataclass(frozen=True)
class Sink:
    """Where one stream of one rank goes.

    Args:
        screen: the console; None where the stream is not shown.
        file: the file that keeps it; None where none does.
        prefix: what every line on the console begins with.
    """

    screen: TextIO | None
    file: BinaryIO | None
    prefix: bytes

    @property
    def is_inherited(self) -> bool:
        """Whether the rank may write to the launcher's own stream itself."""
        return self.screen is not None and self.file is None and not self.prefix

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()


@dataclass(frozen=True)
class Output:
    """Where the output of the ranks of one launch on this host goes.

    Streams are chosen by torchrun's numbers: 0 none, 1 stdout, 2 stderr, 3 both; for all ranks, or
    by local rank. The files are ``stdout.log`` and ``stderr.log`` in a folder per local rank.

    Args:
        prefix: whether every line on the console begins with the rank that wrote it.
        shown: the local ranks whose output is shown on the console; None for all.
        redirects: the streams that go into files alone.
        tee: the streams that go into files and to the console.
        log_dir: where a new folder for the files of this launch is made; None for the system's
            place for temporary files.
        job: how that folder's name begins.
    """

    prefix: bool = False
    shown: Collection[int] | None = None
    redirects: int | Mapping[int, int] = 0
    tee: int | Mapping[int, int] = 0
    log_dir: str | None = None
    job: str = "none"

    def sink(self, kind: str, *, rank: int, local_rank: int) -> Sink:
        """Open where the stream ``kind``, "stdout" or "stderr", of one rank goes.

        Raises:
            LaunchError: its file cannot be written.
        """
        redirects, tee = (
            bool(_of_rank(choice, local_rank) & _BITS[kind])
            for choice in (self.redirects, self.tee)
        )
        is_shown = (tee or not redirects) and (self.shown is None or local_rank in self.shown)
        screen = sys.stdout if kind == "stdout" else sys.stderr
        return Sink(
            screen if is_shown else None,
            self._open(local_rank, f"{kind}.log") if tee or redirects else None,
            f"[rank {rank}] ".encode() if self.prefix else b"",
        )

    @functools.cached_property
    def _folder(self) -> str:
        if self.log_dir is not None:
            os.makedirs(self.log_dir, exist_ok=True)
        made = tempfile.mkdtemp(prefix=f"{self.job}_", dir=self.log_dir)
        folder = os.path.join(made, "attempt_0")  # as torchrun's first, where there may be more
        print(f"meshdist: the ranks' output goes to {folder}", file=sys.stderr, flush=True)
        return folder

    def _open(self, local_rank: int, name: str) -> BinaryIO:
        try:
            folder = os.path.join(self._folder, str(local_rank))
            os.makedirs(folder, exist_ok=True)
            return open(os.path.join(folder, name), "wb", buffering=0)
        except OSError as error:
            raise LaunchError(
                f"the ranks' output cannot be written to files: {error.strerror}",
                where=f"--log-dir, {error.filename}",
                expected="a folder in which files can be made",
                fix="name another --log-dir",
            ) from None


def _of_rank(choice: int | Mapping[int, int], local_rank: int) -> int:
    return choice if isinstance(choice, int) else choice.get(local_rank, 0)


class Stream:
    """Takes what one rank writes into a pipe where it is to go, and keeps the end of it.

    Ranks write pieces of lines at the same time: whole lines are shown, so that they stay readable.

    Attributes:
        pipe: what the rank writes into; close it at the end.
        has_ended: whether the rank, and all that inherited the pipe, have closed it.
        reported_at: when the last traceback began to come; None where none has come.
    """

    def __init__(self, pipe: BinaryIO, sink: Sink) -> None:
        self._kept = b""
        self.pipe = pipe
        self._screen = sink.screen
        self._file = sink.file
        self._prefix = sink.prefix
        self._partial = b""
        self._latest = 0.0
        self.has_ended = False
        self.reported_at: float | None = None
        os.set_blocking(pipe.fileno(), False)

    def read(self) -> bool:
        """Show, and write down, what there is to read; return False at the end."""
        try:
            data = os.read(self.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            self.has_ended = True
            return False
        self._write_down(data)
        self._kept = (self._kept + data)[-_KEPT_BYTES - 1 :]  # one more shows that some are lost
        data = self._partial + data
        lines = _LINE.findall(data)
        self._partial = data[sum(map(len, lines)) :]
        self._latest = time.monotonic()
        if any(TRACEBACK in line for line in lines):
            self.reported_at = self._latest
        if lines:
            show(self._screen, b"".join(self._prefix + line for line in lines))
        return True

    def is_holding(self) -> bool:
        """Return whether a line without an end waits to be shown."""
        return bool(self._partial) and not self._prefix

    def show_late_part(self) -> None:
        """Show a line without an end, as in a prompt, if its end is long in coming."""
        if self.is_holding() and time.monotonic() - self._latest >= LINE_S:
            show(self._screen, self._partial)
            self._partial = b""

    def flush(self) -> None:
        """Show what is held at the end of the output."""
        if self._partial:
            show(self._screen, self._prefix + self._partial + (b"\n" if self._prefix else b""))
            self._partial = b""

    def _write_down(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:  # the job goes on without it
            text = f"meshdist: no more is written to {self._file.name}: {error.strerror}\n"
            show(sys.stderr, text.encode())
            self._file = None

    def tail(self) -> bytes:
        """Return the last lines, whole ones."""
        is_whole = len(self._kept) <= _KEPT_BYTES
        return self._kept if is_whole else self._kept.partition(b"\n")[2]


def show(screen: TextIO | None, data: bytes) -> None:
    """Write ``data`` to ``screen``, if it is there to be written to."""
    if screen is None:
        return
    # A reader that has gone away must not end the job.
    with contextlib.suppress(OSError, ValueError):
        binary = getattr(screen, "buffer", None)
        if binary is None:
            screen.write(data.decode(errors="replace"))
        else:
            screen.flush()
            binary.write(data)
        screen.flush()
