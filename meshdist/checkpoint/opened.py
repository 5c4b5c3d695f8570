"""``md.checkpoint.open``: the names, shapes and values of a checkpoint, without a world too."""

from __future__ import annotations

import difflib
import os
from typing import Any

import torch

from ..errors import CheckpointError
from ..mesh.device_mesh import DeviceMesh
from ..mesh.partition_spec import PartitionSpec
from ..mesh.spec import NamedSharding
from ..sharding.sharded_array import ShardedArray
from ..sharding.shardings import checked_sharding
from . import files
from .loading import read_manifest, read_part
from .manifest import SavedArray
from .members import errors_as_ours
from .pieces import whole_box
from .saving import checked_path

__all__ = ["Checkpoint"]


class Checkpoint:
    """A checkpoint that is open to be read: what ``md.checkpoint.open`` returns."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = checked_path("checkpoint.open", path)
        with errors_as_ours("checkpoint.open"):
            folder, self._manifest = read_manifest(self._path)
        self._files = files.OpenFiles(folder)

    @property
    def names(self) -> list[str]:
        """The names of its arrays."""
        return list(self._manifest.arrays)

    @property
    def leaves(self) -> dict[str, Any]:
        """All that is no array, by name."""
        return dict(self._manifest.leaves)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array."""
        return self._array(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of an array."""
        return self._array(name).torch_dtype

    def read(
        self, name: str, sharding: NamedSharding | PartitionSpec | None = None
    ) -> torch.Tensor | ShardedArray:
        """Return an array whole, on the CPU; or this rank's part of it, read from disk alone.

        Args:
            sharding: how it shall lie; a ``PartitionSpec`` alone takes the mesh in force.
        """
        saved = self._array(name)
        if sharding is None:
            with errors_as_ours("checkpoint.read"):
                return read_part(self._files, saved, name, whole_box(saved.shape))
        where = checked_sharding(sharding, "checkpoint.read")
        mesh: DeviceMesh = where.mesh
        with errors_as_ours("checkpoint.read"):
            part = read_part(self._files, saved, name, where.box(mesh.get_rank(), saved.shape))
        return ShardedArray(part.to(mesh.device_type), where, saved.shape)

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
                expected=f"a name of {len(self.names)} arrays",
                found="a leaf of this name: .leaves" if name in self._manifest.leaves else None,
                fix=f"write {near[0]!r}" if near else None,
            )
        return found


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Return a checkpoint open to be read: ``names``, ``shape``, ``dtype``, ``leaves``, ``read``.

    It needs no world, and reads what ``load`` reads: our folders, torch's, Hugging Face's, and
    single files of safetensors.

    Raises:
        CheckpointError: no checkpoint is there, or it is damaged.

    Example:
        >>> import tempfile, torch, meshdist as md
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     md.checkpoint.save({"model": {"bias": torch.ones(3)}, "lr": 0.1}, f"{folder}/a")
        ...     found = md.checkpoint.open(f"{folder}/a")
        ...     found.names, found.shape("model.bias"), found.read("model.bias"), found.leaves
        (['model.bias'], (3,), tensor([1., 1., 1.]), {'lr': 0.1})
    """
    return Checkpoint(path)
