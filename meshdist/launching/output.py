"""Forward the output of ranks to the console and to files, in complete lines.

A rank may write to a terminal that is shown on the console, so that programs show progress bars and
colours.
"""

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

from .failed_ranks import TRACEBACK
from .rank_environment import LaunchError


def open_terminal(screen: TextIO) -> tuple[int, int]:
    """Open a pseudo-terminal of the size of ``screen``; return its read end and the rank's end."""
    import pty
    import termios

    reader, writer = pty.openpty()
    settings = termios.tcgetattr(writer)
    settings[1] &= ~termios.OPOST  # the screen itself turns "\n" into "\r\n"
    termios.tcsetattr(writer, termios.TCSANOW, settings)
    follow_size(reader, screen)
    return reader, writer


def follow_size(terminal: int, screen: TextIO) -> None:
    """Set a terminal to the current size of ``screen``."""
    import fcntl
    import termios

    with contextlib.suppress(OSError, ValueError):  # the screen has been closed
        size = fcntl.ioctl(screen.fileno(), termios.TIOCGWINSZ, bytes(8))
        if size != fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8)):
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)


_BITS = {"stdout": 1, "stderr": 2}


@dataclass(frozen=True)
class Destination:
    """Destination of one stream of one rank.

    Args:
        screen: the console, or None if not shown.
        is_terminal: whether the rank writes to a terminal that is shown on the console.
    """

    screen: TextIO | None
    file: BinaryIO | None
    prefix: bytes = b""
    kind: str = "stdout"
    is_terminal: bool = False

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


@dataclass(frozen=True)
class Output:
    """Options for the output of one launch on this host.

    Args:
        prefix: whether every console line starts with its rank.
        ranks: the ranks shown on the console; None for all.
        shown: the same by local rank; a rank is shown if both contain it.
        terminal: the rank that writes to a terminal, so that progress bars work; None for this
            host's first rank, -1 for no rank. Ignored with ``prefix``.
        redirects: the streams written only to files (``stdout.log`` and ``stderr.log`` in a folder
            per local rank), in torchrun's numbers: 0 none, 1 stdout, 2 stderr, 3 both; for all
            ranks, or by local rank.
        tee: the streams written to files and console, in the same format.
        log_dir: the new log folder's parent; None for the system's temporary folder.
    """

    prefix: bool = False
    ranks: Collection[int] | None = None
    shown: Collection[int] | None = None
    terminal: int | None = None
    redirects: int | Mapping[int, int] = 0
    tee: int | Mapping[int, int] = 0
    log_dir: str | None = None

    def check_ranks(self, nprocs: int, nnodes: int) -> None:
        """Raise LaunchError if options name a rank outside the job, with ``nprocs`` per host."""
        terminal = () if self.terminal is None else (self.terminal,)
        by_streams = (() if isinstance(it, int) else it for it in (self.redirects, self.tee))
        by_local_rank = ("--local-ranks-filter", "--redirects", "--tee")
        named = [("--ranks", self.ranks or ()), ("--terminal", terminal)]
        named += zip(by_local_rank, (self.shown or (), *by_streams), strict=True)
        for flag, ranks in named:
            is_local = flag in by_local_rank
            size = nprocs if is_local else nprocs * nnodes
            if max(ranks, default=0) >= size:
                rank, scope = ("local rank", "on a host") if is_local else ("rank", "in a job")
                raise LaunchError(
                    f"{rank} {max(ranks)} does not exist {scope} of {size} rank(s)",
                    where=flag,
                    expected=f"0 to {size - 1}",
                    fix=f"pass {rank}s below {size}, or start more ranks with -n",
                )

    def destination(self, kind: str, *, rank: int, local_rank: int) -> Destination:
        """Open and return the destination of a rank's "stdout" or "stderr" (``kind``)."""
        redirects, tee = (
            (choice if isinstance(choice, int) else choice.get(local_rank, 0)) & _BITS[kind] > 0
            for choice in (self.redirects, self.tee)
        )
        is_shown = (
            (tee or not redirects)
            and (self.ranks is None or rank in self.ranks)
            and (self.shown is None or local_rank in self.shown)
        )
        is_chosen = local_rank == 0 if self.terminal is None else rank == self.terminal
        screen = sys.stdout if kind == "stdout" else sys.stderr
        return Destination(
            screen if is_shown else None,
            self._open(local_rank, f"{kind}.log") if tee or redirects else None,
            f"[rank {rank}] ".encode() if self.prefix else b"",
            kind,
            is_terminal=is_shown and not self.prefix and is_chosen and screen.isatty(),
        )

    @functools.cached_property
    def _folder(self) -> str:
        if self.log_dir is not None:
            os.makedirs(self.log_dir, exist_ok=True)
        made = tempfile.mkdtemp(
            prefix="none_", dir=self.log_dir
        )  # as torchrun names it without a run id
        folder = os.path.join(made, "attempt_0")  # as torchrun names its first attempt
        print(f"meshdist: writing the ranks' output to {folder}", file=sys.stderr, flush=True)
        return folder

    def _open(self, local_rank: int, name: str) -> BinaryIO:
        try:
            folder = os.path.join(self._folder, str(local_rank))
            os.makedirs(folder, exist_ok=True)
            return open(os.path.join(folder, name), "wb", buffering=0)
        except OSError as error:
            raise LaunchError(
                f"cannot write the ranks' output to files: {error.strerror}",
                where=f"--log-dir, {error.filename}",
                expected="a writable folder",
                fix="pass another --log-dir",
            ) from None


LOOK_S = 0.05
"""Interval between checks for held output."""

_LINE_S = 0.15  # how long a line may wait for its end; barely visible at a prompt
REPORT_S = 3.0  # the same for a traceback: longer than most processes take to end
LONGEST_REPORT_S = 6.0  # the maximum if more output follows without a pause
_MOST_BYTES = 256 * 1024  # of a traceback, or of a line
_TAIL_BYTES = 32 * 1024
_LINE_END = re.compile(rb"(?<=\n)|(?<=\r)(?!\n)")
_ERASE = b"\r\x1b[K"  # erases the current line


def show(screen: TextIO | None, data: bytes) -> None:
    """Write ``data`` to ``screen``, unless ``screen`` is None or closed."""
    if screen is None:
        return
    # A closed reader must not end the job.
    with contextlib.suppress(OSError, ValueError):
        binary = getattr(screen, "buffer", None)
        if binary is None:
            screen.write(data.decode(errors="replace"))
        else:
            screen.flush()
            binary.write(data)
        screen.flush()


@dataclass
class _OutputLine:
    """An unfinished line on a screen, ended or redrawn if another stream writes there."""

    owner: Stream
    text: bytes


class Console:
    """The launcher's stdout and stderr, shared by the ranks; counts the writes."""

    def __init__(self) -> None:
        self.num_shown = 0
        self._lines: dict[object, _OutputLine] = {}

    def show(self, owner: Stream, screen: TextIO, data: bytes) -> None:
        """Write ``data`` to ``screen``, apart from other streams' unfinished lines."""
        self.num_shown += 1
        terminal = _terminal_of(screen)
        line = self._lines.get(terminal)
        # End an unfinished line of another stream first; redraw a terminal's line, usually a
        # progress bar, afterwards.
        if line is not None and line.owner is not owner:
            if line.owner.is_terminal and data.endswith(b"\n"):
                show(screen, _ERASE + data + line.text)
                return
            data = b"\n" + data
        show(screen, data)
        begun = line.text if line is not None and line.owner is owner else b""
        self._note(terminal, owner, (begun + data).rpartition(b"\n")[2])

    def _note(self, terminal: object, owner: Stream, text: bytes) -> None:
        self._lines.pop(terminal, None)
        _, is_redrawn, latest = text.rpartition(b"\r")
        if text:
            self._lines[terminal] = _OutputLine(owner, is_redrawn + latest)


def _terminal_of(screen: TextIO) -> object:
    """Return a screen's identity, equal if two are the same terminal or file."""
    try:
        found = os.fstat(screen.fileno())
    except (OSError, ValueError, AttributeError):
        return id(screen)
    return found.st_dev, found.st_ino


class Stream:
    """Output stream of one rank, forwarded to its destination; keeps the last lines for reports.

    Args:
        pipe: the read end of a pipe or terminal; the caller closes it.
        holds_reports: whether to hold tracebacks until complete.
    """

    def __init__(
        self,
        pipe: BinaryIO,
        destination: Destination,
        console: Console,
        *,
        holds_reports: bool = False,
    ) -> None:
        self.pipe = pipe
        self.is_terminal = destination.is_terminal
        self.has_ended = False  # whether every writer has closed the other end
        self.reported_at: float | None = None  # when the last traceback began
        # A traceback, and the output after it, that is not shown yet. It is shown in one piece:
        # after three seconds without output, after six seconds at most, or when it is taken.
        self.report = b""
        self._console = console
        self._screen = destination.screen
        self._file = destination.file
        self._prefix = destination.prefix
        self._holds_reports = holds_reports
        self._tail = b""
        self._partial = b""
        self._latest = 0.0
        self._report_began = 0.0
        os.set_blocking(pipe.fileno(), False)

    def read(self) -> bool:
        """Read from the pipe, and show and store the data; return False at its end."""
        try:
            data = os.read(self.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        except OSError:  # the end of a terminal
            data = b""
        if not data:
            self.has_ended = True
            return False
        if self.is_terminal and self._screen is not None:
            follow_size(self.pipe.fileno(), self._screen)
        self._write_down(data)
        self._tail = (self._tail + data)[
            -_TAIL_BYTES - 1 :
        ]  # one more byte shows that some were dropped
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
            # Show complete lines, because ranks write partial lines concurrently. A final "\r" may
            # be half of a line break.
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
            lines = filter(None, _LINE_END.split(data))
            data = b"".join(self._prefix + line for line in lines)
        self._console.show(self, self._screen, data)

    @property
    def is_shown(self) -> bool:
        return self._screen is not None

    def is_holding(self) -> bool:
        """Return whether an unfinished line, or a traceback, waits to be shown."""
        return bool((self._partial and not self._prefix) or self.report)

    def show_late_line(self) -> None:
        """Show an unfinished line, such as a prompt, after a short wait."""
        if self._partial and not self._prefix and time.monotonic() - self._latest >= _LINE_S:
            data, self._partial = self._partial, b""
            self._show(data)

    def has_late_report(self) -> bool:
        now = time.monotonic()
        is_late = now - self._latest >= REPORT_S or now - self._report_began >= LONGEST_REPORT_S
        return bool(self.report) and is_late

    def show_report(self) -> None:
        """Show the held traceback, and stop holding the output after it."""
        self._show(self.take_report())

    def take_report(self) -> bytes:
        data, self.report = self.report, b""
        return data

    def flush(self) -> None:
        """Show a held traceback and an unfinished line."""
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
        except OSError as error:  # the job continues without the file
            text = f"meshdist: stopped writing to {self._file.name}: {error.strerror}\n"
            show(sys.stderr, text.encode())
            self._file = None

    def ends_with(self, text: bytes) -> bool:
        """Return whether ``text`` is the last output, and no traceback is held."""
        return not self.report and self._tail.endswith(text)

    def tail(self) -> bytes:
        """Return the last complete lines, up to 32 KiB, or the end of a longer line."""
        is_whole = len(self._tail) <= _TAIL_BYTES
        return self._tail if is_whole else self._tail.partition(b"\n")[2] or self._tail
