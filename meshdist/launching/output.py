"""Where the output of the ranks goes: to the console, into files, or both."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import BinaryIO, TextIO

from .rank_environment import LaunchError

__all__ = ["Output", "Sink"]

_BITS = {"stdout": 1, "stderr": 2}


@dataclass(frozen=True)
class Sink:
    """Where one stream of one rank goes.

    Args:
        screen: the console; None where the stream is not shown.
        file: the file that keeps it; None where none does.
        is_terminal: whether the rank writes to a terminal of its own, which the console shows.
    """

    screen: TextIO | None
    file: BinaryIO | None
    prefix: bytes = b""
    kind: str = "stdout"
    is_terminal: bool = False

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
        ranks: the ranks whose output is shown on the console; None for all.
        shown: the same by local rank; both must have a rank that is shown.
        terminal: the rank for which a terminal stays a terminal, so that progress bars live; None
            for the first of this host, -1 for none. Without prefixes only.
        redirects: the streams that go into files alone.
        tee: the streams that go into files and to the console.
        log_dir: where a new folder for the files of this launch is made; None for the system's
            place for temporary files.
        job: how that folder's name begins.
    """

    prefix: bool = False
    ranks: Collection[int] | None = None
    shown: Collection[int] | None = None
    terminal: int | None = None
    redirects: int | Mapping[int, int] = 0
    tee: int | Mapping[int, int] = 0
    log_dir: str | None = None
    job: str = "none"

    def check_ranks(self, world_size: int) -> None:
        """Raise LaunchError where a rank is named that a job of this size does not have."""
        terminal = () if self.terminal is None else (self.terminal,)
        for flag, ranks in (("--ranks", self.ranks or ()), ("--terminal", terminal)):
            if max(ranks, default=0) >= world_size:
                raise LaunchError(
                    f"there is no rank {max(ranks)} among {world_size}",
                    where=flag,
                    expected=f"0 to {world_size - 1}",
                )

    def sink(self, kind: str, *, rank: int, local_rank: int) -> Sink:
        """Open where the stream ``kind``, "stdout" or "stderr", of one rank goes."""
        redirects, tee = (
            bool(_of_rank(choice, local_rank) & _BITS[kind])
            for choice in (self.redirects, self.tee)
        )
        is_shown = (
            (tee or not redirects)
            and (self.ranks is None or rank in self.ranks)
            and (self.shown is None or local_rank in self.shown)
        )
        is_chosen = local_rank == 0 if self.terminal is None else rank == self.terminal
        screen = sys.stdout if kind == "stdout" else sys.stderr
        return Sink(
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
