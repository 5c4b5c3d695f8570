"""The output of ranks, on its way to the console and into files, in whole lines."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from dataclasses import dataclass
from typing import BinaryIO, TextIO

from .output import Sink
from .root_cause import TRACEBACK
from .terminals import follow_size

__all__ = ["LOOK_S", "Console", "Stream", "show"]

LOOK_S = 0.05
"""How often to look at what waits to be shown."""

_LINE_S = 0.15  # how long a line may wait for its end; hardly noticed at a prompt
_REPORT_S = 3.0  # the same for a traceback: longer than a process takes to end, as a rule
_LONGEST_REPORT_S = 6.0  # where more follows it without a pause
_MOST_BYTES = 256 * 1024  # of a traceback, or of a line
_KEPT_BYTES = 32 * 1024
_BEHIND_A_LINE = re.compile(rb"(?<=\n)|(?<=\r)(?!\n)")
_ERASE = b"\r\x1b[K"  # what stands in the line where the cursor is


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


@dataclass
class _Line:
    """A line without an end that stands on a screen: who wrote it, and what."""

    owner: Stream
    text: bytes


class Console:
    """The launcher's stdout and stderr, which the ranks share; it counts what was shown."""

    def __init__(self) -> None:
        self.num_shown = 0
        self._lines: dict[object, _Line] = {}

    def show(self, owner: Stream, screen: TextIO, data: bytes) -> None:
        """Show what ``owner`` has written, in a line of its own.

        A line of another's that has no end yet gets one before; that of a terminal, a progress bar
        as a rule, is drawn again behind.
        """
        self.num_shown += 1
        place = _place(screen)
        line = self._lines.get(place)
        if line is not None and line.owner is not owner:
            if line.owner.is_terminal and data.endswith(b"\n"):
                show(screen, _ERASE + data + line.text)
                return
            data = b"\n" + data
        show(screen, data)
        begun = line.text if line is not None and line.owner is owner else b""
        self._note(place, owner, (begun + data).rpartition(b"\n")[2])

    def _note(self, place: object, owner: Stream, text: bytes) -> None:
        self._lines.pop(place, None)
        _, is_redrawn, latest = text.rpartition(b"\r")
        if text:
            self._lines[place] = _Line(owner, is_redrawn + latest)


def _place(screen: TextIO) -> object:
    """The identity of a screen, equal for two that are one: a terminal, or a file."""
    try:
        found = os.fstat(screen.fileno())
    except (OSError, ValueError, AttributeError):
        return id(screen)
    return found.st_dev, found.st_ino


class Stream:
    """Takes what one rank writes where it is to go, and keeps the end of it.

    Ranks write pieces of lines at the same time: whole lines are shown. A traceback is shown in one
    piece: once nothing has followed it for three seconds, after six at most, or by who takes it
    before.

    Args:
        pipe: the end to read from, of a pipe or of a terminal; close it at the end.
        sink: where it goes.
        console: shared with the other streams.
        holds_reports: whether tracebacks wait.

    Attributes:
        has_ended: whether the rank, and all that inherited the other end, have closed it.
        reported_at: when the last traceback began to come; None where none has come.
        report: a traceback, and what followed it, that is not shown yet.
    """

    def __init__(
        self, pipe: BinaryIO, sink: Sink, console: Console, *, holds_reports: bool = False
    ) -> None:
        self.pipe = pipe
        self.is_terminal = sink.is_terminal
        self.has_ended = False
        self.reported_at: float | None = None
        self.report = b""
        self._console = console
        self._screen = sink.screen
        self._file = sink.file
        self._prefix = sink.prefix
        self._holds_reports = holds_reports
        self._kept = b""
        self._partial = b""
        self._latest = 0.0
        self._report_began = 0.0
        os.set_blocking(pipe.fileno(), False)

    def read(self) -> bool:
        """Show, and write down, what there is to read; return False at the end."""
        try:
            data = os.read(self.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        except OSError:  # how the end of a terminal looks
            data = b""
        if not data:
            self.has_ended = True
            return False
        if self.is_terminal and self._screen is not None:
            follow_size(self.pipe.fileno(), self._screen)
        self._write_down(data)
        self._kept = (self._kept + data)[-_KEPT_BYTES - 1 :]  # one more shows that some are lost
        self._latest = time.monotonic()
        self._take(self._partial + data)
        return True

    def _take(self, data: bytes) -> None:
        self._partial = b""
        begin = data.find(TRACEBACK)
        if begin >= 0:
            self.reported_at = self._latest
        if self._holds_reports and (begin >= 0 or self.report):
            if self.report:
                begin = 0
            else:
                begin, self._report_began = data.rfind(b"\n", 0, begin) + 1, self._latest
            self.report += data[begin:]
            data = data[:begin]
        if not self.is_terminal:
            # A "\r" at the end may be half of a line's end.
            whole = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
            if len(data) - whole <= _MOST_BYTES:
                self._partial, data = data[whole:], data[:whole]
        self._show(data)
        if len(self.report) > _MOST_BYTES:
            self.show_report()

    def _show(self, data: bytes) -> None:
        if not data or self._screen is None:
            return
        if self._prefix:
            data = b"".join(self._prefix + line for line in _lines_of(data))
        self._console.show(self, self._screen, data)

    @property
    def is_shown(self) -> bool:
        """Whether it goes to the console."""
        return self._screen is not None

    def is_holding(self) -> bool:
        """Return whether something waits to be shown because it may go on."""
        return bool((self._partial and not self._prefix) or self.report)

    def show_late_line(self) -> None:
        """Show a line whose end is long in coming, as in a prompt."""
        if self._partial and not self._prefix and time.monotonic() - self._latest >= _LINE_S:
            data, self._partial = self._partial, b""
            self._show(data)

    def has_late_report(self) -> bool:
        """Return whether a traceback has waited as long as it may."""
        now = time.monotonic()
        is_late = now - self._latest >= _REPORT_S or now - self._report_began >= _LONGEST_REPORT_S
        return bool(self.report) and is_late

    def show_report(self) -> None:
        """Show the traceback that waits, and let what follows it pass."""
        data, self.report = self.report, b""
        self._show(data)

    def take_report(self) -> bytes:
        """Return the traceback that waits; it is not shown then."""
        data, self.report = self.report, b""
        return data

    def flush(self) -> None:
        """Show what is held at the end of the output."""
        self.show_report()
        if self._partial:
            data, self._partial = self._partial, b""
            self._show(data + (b"\n" if self._prefix else b""))

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

    def ends_with(self, text: bytes) -> bool:
        """Return whether nothing has come behind ``text``, which is not held any more."""
        return not self.report and self._kept.endswith(text)

    def tail(self) -> bytes:
        """Return the last lines, whole ones."""
        is_whole = len(self._kept) <= _KEPT_BYTES
        return self._kept if is_whole else self._kept.partition(b"\n")[2]


def _lines_of(data: bytes) -> list[bytes]:
    """The lines of ``data`` with their ends; the last may have none."""
    return [line for line in _BEHIND_A_LINE.split(data) if line]
