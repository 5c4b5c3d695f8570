"""A terminal that stays a terminal for one rank."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, sys, time
rank = int(os.environ["RANK"])
if rank == 1:
    time.sleep(0.5)
    print("a line of rank 1")
    sys.exit(0)
print("stdout", sys.stdout.isatty(), "stderr", sys.stderr.isatty(), os.get_terminal_size(1).columns)
for done in (" 10%", " 50%"):
    print("\\r" + done, end="", file=sys.stderr)
    time.sleep(0.1)
time.sleep(0.8)
print("\\r100%", file=sys.stderr)
"""


SAYS = """
import os, sys
if os.environ["RANK"] == "0":
    print("stdout", sys.stdout.isatty(), "stderr", sys.stderr.isatty())
"""


def typed(program: str, script: Path, *flags: str) -> str:
    """What a person sees who starts two ranks at a terminal of 77 columns."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 77, 0, 0))
    script.write_text(program)
    job = subprocess.Popen(
        [sys.executable, "-m", "meshdist", "run", "-n", "2", *flags, str(script)],
        stdin=writer,
        stdout=writer,
        stderr=writer,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        start_new_session=True,
    )
    os.close(writer)
    seen, end = b"", time.monotonic() + 30
    try:
        while time.monotonic() < end:
            try:
                data = os.read(reader, 4096)
            except OSError:  # how the end looks
                break
            seen += data
    finally:
        job.kill()
        job.wait()
        os.close(reader)
    return seen.decode().replace("\r\n", "\n")


def test_a_bar_lives_and_other_lines_stand_above_it(tmp_path: Path) -> None:
    seen = typed(PROGRAM, tmp_path / "script.py")
    assert seen.startswith("stdout True stderr True 77\n")
    assert "\r 10%\r 50%" in seen
    assert "\r 50%\r\x1b[Ka line of rank 1\n\r 50%\r100%\n" in seen


@pytest.mark.parametrize("flags", [["--terminal", "1"], ["--prefix"]])
def test_a_rank_without_a_terminal_writes_to_pipes(flags: list[str], tmp_path: Path) -> None:
    assert "stdout False stderr False\n" in typed(SAYS, tmp_path / "script.py", *flags)
