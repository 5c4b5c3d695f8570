"""On Ctrl-C, ask every rank for its current stack.

Question and answers are files in the launch's directory. A thread of each rank answers, even if the
program is stuck in a collective, a lock or a data loader:

    rank-2    empty while rank 2 has a thread that will answer; then its answer
    where     the question
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

FOLDER = "MESHDIST_QUESTIONS"
"""The environment variable with the directory."""
_QUESTION = "where"


class StackDumper:
    """Writer of this rank's stack to a file when the launcher asks."""

    def __init__(self, answer: Callable[[], str]) -> None:
        self._answer = answer
        self._folder = os.environ.get(FOLDER, "")
        self._path = os.path.join(self._folder, f"rank-{os.environ.get('RANK')}")
        if self._folder:
            self._write("")

    def look(self) -> None:
        """Write the answer once, if the launcher has asked."""
        if self._folder and os.path.exists(os.path.join(self._folder, _QUESTION)):
            self._write(self._answer())
            self._folder = ""

    def close(self) -> None:
        """Remove this rank's empty answer file, if it has not answered."""
        if self._folder:
            with suppress(OSError):
                os.unlink(self._path)

    def _write(self, text: str) -> None:
        with suppress(OSError):  # the launcher has ended and removed the directory
            with open(f"{self._path}-new", "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(f"{self._path}-new", self._path)  # atomic: never a partial answer


def ask_where(folder: str) -> None:
    """Create the file in ``folder`` that asks all ranks for their stacks."""
    open(os.path.join(folder, _QUESTION), "w").close()


def read_answers(folder: str) -> dict[int, bytes]:
    """Return each rank's answer in ``folder``; b"" if not answered yet."""
    answers = {}
    for name in os.listdir(folder):
        rank = name.removeprefix("rank-")
        if rank != name and rank.isdecimal():
            with suppress(OSError), open(os.path.join(folder, name), "rb") as file:
                answers[int(rank)] = file.read()
    return answers
