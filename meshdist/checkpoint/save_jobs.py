"""Run a save: each rank writes its part, and the rank that finishes last commits the folder.

No rank waits for another while it writes, so a thread can write, also during program exit. The
ranks agree on the result when the program waits for the save.

    rank 0    creates the folder  writes its part, counts 1              agrees: success
    rank 1                        writes its part, counts 3, commits     agrees: success
    rank 2                        writes its part, counts 2              agrees: success
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..error_text import without_frames
from ..errors import CheckpointError
from ..mesh.placement import Box, index_of
from . import files
from .manifest import SUFFIX, manifest_text
from .participants import Members, as_checkpoint_error
from .pieces import within
from .trees import StateArray


@dataclass
class SaveJob:
    """A running save: creates the folder, writes this rank's part, commits on the last rank.

    Args:
        leaves: copies by name; {} on all ranks except the first.
        parts: the part of each array that this rank saves.
    """

    members: Members
    final: str
    tree: dict[str, Any]
    leaves: dict[str, Any]
    entries: dict[str, StateArray]
    parts: dict[str, Box]
    path: str = ""
    """The path of the unfinished folder."""
    folder: files.UnfinishedFolder | None = None
    """The folder, locked by this rank until it has written its part."""
    pieces: dict[str, torch.Tensor] | None = None
    """Copies of the parts if a thread writes them; it cannot start threads during Python's exit."""
    error: Exception | None = None
    """This rank's error, which all ranks raise."""

    def begin(self) -> None:
        """Create the folder on the first rank, lock it on all; raise on all if any rank fails."""
        try:
            self.path = self.members.first_does(self._make_folder)
            self.members.all_do(self._lock)  # before any rank drops its lock
        except CheckpointError:  # on all ranks
            self.members.all_do(self._unlock)
            self._drop()
            raise
        except BaseException:
            self._unlock()
            raise

    def _unlock(self) -> None:
        if self.folder is not None:
            self.folder.unlock()

    def views(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, box in self.parts.items():
            entry = self.entries[name]
            local = within(box, entry.box(self.members.rank))
            found[name] = entry.tensor[index_of(local)].resolve_conj().resolve_neg()
        return found

    def write(self) -> None:
        """Write this rank's part, and commit if it is the last; keep an error for ``end``."""
        folder = self.folder
        assert folder is not None
        try:
            try:
                self.raise_error()
                folder.note(self.members.rank, {"file": self._write(), "leaves": self.leaves})
                if self.members.is_last(f"checkpoint/{os.path.basename(self.path)}"):
                    folder.commit(self._manifest(folder.take_notes(self.members.ranks)))
            finally:
                folder.unlock()
        except Exception as error:
            self.error = as_checkpoint_error(without_frames(error), self.members.call)

    def end(self) -> None:
        """Raise on all ranks if any failed to write; collective."""
        try:
            self.members.all_do(self.raise_error)
        except CheckpointError:  # after other errors a rank may still commit
            self._drop()
            raise

    def raise_error(self) -> None:
        if self.error is not None:
            raise without_frames(self.error)

    def _drop(self) -> None:
        """Remove the folder, unless a rank still writes it; then the next save removes it."""
        if self.members.is_first:
            with suppress(OSError):
                files.remove_leftovers(os.path.dirname(self.final))

    def _make_folder(self) -> str:
        files.remove_leftovers(os.path.dirname(self.final))
        self.folder = files.UnfinishedFolder(self.final)
        return self.folder.path

    def _lock(self) -> None:
        if not os.path.isdir(self.path):
            raise CheckpointError(
                f"{self.members.call}: this rank cannot see the folder that the first rank created",
                where=self.path,
                expected="a file system shared by all ranks",
                fix="save to a shared file system, not to a folder that is local to a host",
            )
        if self.folder is None:
            self.folder = files.UnfinishedFolder(self.final, self.path)

    def _write(self) -> dict[str, Any] | None:
        """Write this rank's file; return its manifest entry, None without arrays."""
        pieces = self.pieces
        if pieces is None:
            pieces = {name: view.cpu().contiguous() for name, view in self.views().items()}
        if not pieces:
            return None
        offsets = {name: [start for start, _ in self.parts[name]] for name in pieces}
        size, sums = files.write_arrays(
            os.path.join(self.path, _file_of(self.members.rank)),
            _apart(pieces),
            offsets,
            sums_on_thread=self.pieces is None,
        )
        sizes_and_sums = {
            name: {"offsets": offsets[name], "shape": list(piece.shape), "crc32": sums[name]}
            for name, piece in pieces.items()
        }
        return {"bytes": size, "pieces": sizes_and_sums}

    def _manifest(self, notes: list[Any]) -> str:
        """Return the manifest of all ranks' files and the first rank's leaves."""
        pairs = zip(self.members.ranks, notes, strict=True)
        return manifest_text(
            notes[0]["leaves"],
            self.tree,
            {name: (entry.dtype, entry.shape) for name, entry in self.entries.items()},
            {_file_of(rank): note["file"] for rank, note in pairs if note["file"]},
        )


def _file_of(rank: int) -> str:
    return f"rank-{rank}{SUFFIX}"


def _apart(pieces: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``pieces``, copied if their memory overlaps."""
    found, end = dict(pieces), 0
    for name, piece in sorted(pieces.items(), key=lambda item: item[1].data_ptr()):
        if piece.data_ptr() < end:
            found[name] = piece.clone()
        end = max(end, piece.data_ptr() + piece.nbytes)
    return found
