"""The question of a launcher that is interrupted to its ranks: where they are.

Question and answers are files in the launch's own directory. A thread of a rank's answers, so that
the answer comes while the program is stuck in a collective, in a lock or in a data loader:

    rank-2    empty: rank 2 has a thread that will answer; then its answer
    where     the question
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

FOLDER = "MESHDIST_QUESTIONS"
"""The environment variable that has the directory."""
_QUESTION = "where"


class StackDumper:
    """Writes this rank's place in the program to a file when the launcher asks; else idle."""

    def __init__(self, answer: Callable[[], str]) -> None:
        self._answer = answer
        self._folder = os.environ.get(FOLDER, "")
        self._path = os.path.join(self._folder, f"rank-{os.environ.get('RANK')}")
        if self._folder:
            self._write("")

    def look(self) -> None:
        """Write the answer to the launcher's file, once, if the launcher has asked."""
        if self._folder and os.path.exists(os.path.join(self._folder, _QUESTION)):
            self._write(self._answer())
            self._folder = ""

    def close(self) -> None:
        """Withdraw the promise of an answer, if this rank has not answered."""
        if self._folder:
            with suppress(OSError):
                os.unlink(self._path)

    def _write(self, text: str) -> None:
        with suppress(OSError):  # it was removed: the launcher has ended
            with open(f"{self._path}-new", "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(f"{self._path}-new", self._path)  # so that the answer is whole


def ask_where(folder: str) -> None:
    """Create the file in ``folder`` that lets all ranks report where in the program they are."""
    open(os.path.join(folder, _QUESTION), "w").close()


def read_answers(folder: str) -> dict[int, bytes]:
    """Return the files of ranks in ``folder``: each rank's answer, b"" if it has yet to answer."""
    answers = {}
    for name in os.listdir(folder):
        rank = name.removeprefix("rank-")
        if rank != name and rank.isdecimal():
            with suppress(OSError), open(os.path.join(folder, name), "rb") as file:
                answers[int(rank)] = file.read()
    return answers
