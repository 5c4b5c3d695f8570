"""A save under way: its folder is there, each rank writes its part, and the first rank commits."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CheckpointError
from ..mesh.placement import Box, index_of
from . import files
from .manifest import SUFFIX, manifest_text
from .members import Members, MembersInStore, told_again, told_error, tried
from .pieces import within
from .trees import StateArray, Tree


@dataclass
class SaveJob:
    """A save under way: makes the folder, writes this rank's parts, commits on the first rank.

    Args:
        final: the path of the checkpoint.
        parts: which part of each array this rank saves.
    """

    members: Members
    final: str
    tree: Tree
    entries: dict[str, StateArray]
    parts: dict[str, Box]
    path: str = ""
    """The path of the folder that is written."""
    folder: files.UnfinishedFolder | None = None
    """The folder, on the rank that makes and commits it."""
    pieces: dict[str, torch.Tensor] = field(default_factory=dict)
    is_beside: bool = False
    """Whether a thread finishes it, which cannot start threads as the interpreter ends."""
    error: Exception | None = None
    """The error with which copying this rank's pieces has failed, for all ranks."""

    def begin(self) -> None:
        """Make the folder on the first rank; raise on all if any rank fails to see it."""
        try:
            self.path = self.members.first_does(self._make_folder)
            self.members.all_do(self._look)
        except BaseException:
            self.drop()
            raise

    def views(self) -> dict[str, torch.Tensor]:
        """Return views of the parts that this rank saves, by name."""
        found = {}
        for name, box in self.parts.items():
            entry = self.entries[name]
            local = within(box, entry.box(self.members.rank))
            found[name] = entry.tensor[index_of(local)].resolve_conj().resolve_neg()
        return found

    def finish(self, messages: Members | MembersInStore) -> None:
        """Write this rank's file, commit on the first; by ``messages`` raise any failure on all."""
        try:
            of_all = messages.gather(tried(self._write, self.members.call))
            failures = None if of_all is None else self._commit(of_all)
        except BaseException as error:
            self.drop()
            if self.folder is not None and isinstance(error, CheckpointError):
                # A rank has ended: those that wait for this rank are told.
                messages.share([(self.members.rank, told_error(error, self.members.call))])
            raise
        if failures := messages.share(failures):
            raise told_again(failures, self.members.ranks)

    def drop(self) -> None:
        """Remove the save's folder, on the rank that made it."""
        if self.folder is not None:
            self.folder.drop()

    def _make_folder(self) -> str:
        files.remove_leftovers(os.path.dirname(self.final))
        self.folder = files.UnfinishedFolder(self.final)
        return self.folder.path

    def _look(self) -> None:
        if not os.path.isdir(self.path):
            raise CheckpointError(
                f"{self.members.call}: this rank does not see the folder that the first rank has "
                "made",
                where=self.path,
                expected="a file system that all ranks share",
                fix="save to a shared file system; a folder local to a host holds a part alone",
            )

    def _write(self) -> dict[str, Any] | None:
        """Write this rank's file; return its entry for the manifest, None without arrays."""
        if self.error is not None:
            raise self.error
        if not self.is_beside:
            self.pieces = {name: view.cpu().contiguous() for name, view in self.views().items()}
        if not self.pieces:
            return None
        offsets = {name: [start for start, _ in self.parts[name]] for name in self.pieces}
        size, sums = files.write_arrays(
            os.path.join(self.path, _file_of(self.members.rank)),
            _apart(self.pieces),
            offsets,
            sums_beside=not self.is_beside,
        )
        pieces = {
            name: {"offsets": offsets[name], "shape": list(piece.shape), "crc32": sums[name]}
            for name, piece in self.pieces.items()
        }
        return {"bytes": size, "pieces": pieces}

    def _commit(self, of_all: list[Any]) -> list[tuple[int, dict[str, Any]]]:
        """Commit the folder unless a rank failed, else drop it; return (rank, error) pairs.

        Args:
            of_all: (the file that it wrote, its error or None), for each rank.
        """
        folder, ranks = self.folder, self.members.ranks
        assert folder is not None
        failures = [(rank, each) for rank, (_, each) in zip(ranks, of_all, strict=True) if each]
        if not failures:
            written = [file for file, _ in of_all]
            _, failure = tried(lambda: folder.commit(self._manifest(written)), self.members.call)
            failures = [(self.members.rank, failure)] if failure else []
        if failures:
            folder.drop()
        return failures

    def _manifest(self, written: list[dict[str, Any] | None]) -> str:
        pairs = zip(self.members.ranks, written, strict=True)
        return manifest_text(
            {name: leaf.json for name, leaf in self.tree.leaves.items()},
            self.tree.shape,
            {name: (entry.dtype, entry.shape) for name, entry in self.entries.items()},
            {_file_of(rank): file for rank, file in pairs if file},
        )


def _file_of(rank: int) -> str:
    return f"rank-{rank}{SUFFIX}"


def _apart(pieces: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``pieces`` with copies of those whose memory overlaps another's."""
    found, end = dict(pieces), 0
    for name, piece in sorted(pieces.items(), key=lambda item: item[1].data_ptr()):
        if piece.data_ptr() < end:
            found[name] = piece.clone()
        end = max(end, piece.data_ptr() + piece.nbytes)
    return found
