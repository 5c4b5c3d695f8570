"""Open a checkpoint for reading, without a world: ``md.checkpoint.open``."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from typing import Any

import torch

from ..collectives.torch_private import hidden_from_modes
from ..errors import CheckpointError
from ..mesh.partition_spec import PartitionSpec
from ..mesh.placement import Box, index_of, shape_of
from ..mesh.spec import NamedSharding
from ..sharding.sharded_array import ShardedArray, checked_sharding
from . import files
from .manifest import Manifest, Piece, SavedArray, damaged, headers_as_manifest
from .participants import convert_file_errors
from .pieces import intersect, whole_box, within
from .saving import checked_path

__all__ = ["Checkpoint"]


def read_manifest(path: str) -> tuple[str, Manifest]:
    """Return a checkpoint's folder and manifest, if necessary built from file headers."""
    folder, sizes, text = files.find_files(path)
    if text is None:
        opened = files.OpenFiles(folder)
        headers = {file: opened.header(file) for file in sorted(sizes)}
        return folder, headers_as_manifest(headers, sizes, path)
    manifest = Manifest.from_json(text, path)
    for file, size in manifest.file_bytes.items():
        if sizes.get(file) != size:
            found = "no such file" if file not in sizes else f"{sizes[file]} bytes"
            raise damaged(path, f"{file}: {found}; in the manifest {size} bytes")
    return folder, manifest


class OpenArrays:
    """The arrays of a checkpoint opened for reading."""

    def __init__(self, folder: str, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._files = files.OpenFiles(folder)

    def check(self, name: str, box: Box) -> None:
        """Raise CheckpointError unless the files have the manifest's pieces in ``box``."""
        for piece, _ in self._pieces_in(name, box):
            self._files.check(piece, name, self.manifest.arrays[name].dtype)

    def fill(self, target: torch.Tensor, name: str, box: Box) -> None:
        """Copy the part ``box`` of an array to ``target``, which has its shape."""
        for piece, common in self._pieces_in(name, box):
            found = self._files.get(piece.file).get_tensor(name)
            part = found[index_of(within(common, piece.box))]
            target[index_of(within(common, box))].copy_(part)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the part ``box`` of an array on the CPU; raise if files and manifest conflict."""
        self.check(name, box)
        part = torch.empty(
            shape_of(box), dtype=self.manifest.arrays[name].torch_dtype, device="cpu"
        )
        self.fill(part, name, box)
        return part

    def verify(self, piece: Piece, name: str) -> None:
        """Raise CheckpointError if a piece's bytes mismatch its checksum."""
        if files.crc32(self._files.get(piece.file).get_tensor(name)) != piece.crc32:
            raise damaged(self.folder, f"{piece.file}: the bytes of {name} have changed")

    def _pieces_in(self, name: str, box: Box) -> Iterator[tuple[Piece, Box]]:
        """Yield each piece with elements in ``box``, and these elements' box."""
        for piece in self.manifest.arrays[name].pieces:
            common = intersect(piece.box, box)
            if common is not None:
                yield piece, common


class Checkpoint:
    """A checkpoint opened for reading, returned by ``md.checkpoint.open``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = checked_path("checkpoint.open", path)
        with convert_file_errors("checkpoint.open"):
            self._arrays = OpenArrays(*read_manifest(self._path))
        self._manifest = self._arrays.manifest

    @property
    def names(self) -> list[str]:
        return list(self._manifest.arrays)

    @property
    def leaves(self) -> dict[str, Any]:
        """All values that are not arrays, by name."""
        return dict(self._manifest.leaves)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._array(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._array(name).torch_dtype

    def read(
        self, name: str, sharding: NamedSharding | PartitionSpec | None = None
    ) -> torch.Tensor | ShardedArray:
        """Return a global array on the CPU; or read only this rank's shard from disk.

        Args:
            sharding: the result's sharding; a ``PartitionSpec`` alone uses the current mesh.
        """
        shape, call = self._array(name).shape, "checkpoint.read"
        where = None if sharding is None else checked_sharding(sharding, call)
        box = whole_box(shape) if where is None else where.box(where.mesh.get_rank(), shape)
        with convert_file_errors(call):
            part = self._arrays.read(name, box)
        if where is None:
            return part
        return ShardedArray(part.to(where.mesh.device_type), where, shape)

    def __repr__(self) -> str:
        total = sum(self._manifest.file_bytes.values())
        return f"<checkpoint {self._path!r}: {len(self.names)} arrays, {total} bytes>"

    def _array(self, name: str) -> SavedArray:
        found = self._manifest.arrays.get(name)
        if found is None:
            near = difflib.get_close_matches(str(name), self.names, 1)
            raise CheckpointError(
                f"the checkpoint has no array {name!r}",
                where=self._path,
                expected=f"one of checkpoint.names ({len(self.names)} in all)",
                found="a leaf of this name" if name in self._manifest.leaves else None,
                fix=f"read checkpoint.leaves[{name!r}]"
                if name in self._manifest.leaves
                else f"read {near[0]!r}"
                if near
                else "read one of checkpoint.names",
            )
        return found


@hidden_from_modes
def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint for reading: ``names``, ``shape``, ``dtype``, ``leaves``, ``read``.

    It needs no world, and reads the same formats as ``load``: folders of meshdist, torch and
    Hugging Face, and single safetensors files.

    Raises:
        CheckpointError: the path has no checkpoint, or it is damaged.

    Example:
        >>> import tempfile, torch, meshdist as md
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     md.checkpoint.save({"model": {"bias": torch.ones(3)}, "lr": 0.1}, f"{folder}/a")
        ...     found = md.checkpoint.open(f"{folder}/a")
        ...     found.names, found.shape("model.bias"), found.read("model.bias"), found.leaves
        (['model.bias'], (3,), tensor([1., 1., 1.]), {'lr': 0.1})
    """
    return Checkpoint(path)
