"""A terminal for a rank whose output passes through the launcher.

A program that writes to a terminal shows progress bars and colours, which it leaves out for a pipe.
"""

from __future__ import annotations

import contextlib
from typing import TextIO

__all__ = ["follow_size", "open_terminal"]


def open_terminal(screen: TextIO) -> tuple[int, int]:
    """Open a terminal of the size of ``screen``: the end to read, and the rank's to write."""
    import pty
    import termios

    reader, writer = pty.openpty()
    settings = termios.tcgetattr(writer)
    settings[1] &= ~termios.OPOST  # the screen itself turns "\n" into "\r\n"
    termios.tcsetattr(writer, termios.TCSANOW, settings)
    follow_size(reader, screen)
    return reader, writer


def follow_size(terminal: int, screen: TextIO) -> None:
    """Make a terminal as wide and high as ``screen`` is now."""
    import fcntl
    import termios

    with contextlib.suppress(OSError, ValueError):  # the screen has been closed
        size = fcntl.ioctl(screen.fileno(), termios.TIOCGWINSZ, bytes(8))
        if size != fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8)):
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)
