"""``md.checkpoint.load``: each byte leaves the disk once, and plans bring it to where it belongs.

1. The first rank reads the manifest, or the headers of files that lack it, and tells the others.
2. All ranks check names, shapes, dtypes and files; nothing has changed yet if they differ.
3. Arrays come in batches: each rank reads its target's part. Processes of one host copy it from the
   mapped files, whose pages they share. Between hosts it is cut further where replicas share it,
   and a plan brings the parts together. Small arrays come in one message for all.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch

from ..collectives.prepare import run_titled
from ..collectives.torch_private import hidden_from_modes
from ..error_text import first_line, first_texts
from ..errors import ArgumentError, CheckpointError, DtypeError, KindError, ShapeError
from ..mesh.device_mesh import DeviceMesh
from ..mesh.placement import Box, index_of, shape_of, volume
from ..mesh.spec import NamedSharding
from ..reduce_ops import ReduceOp
from ..sharding.shardings import cut_further, whole_sharding
from ..sharding.shards import move
from . import files
from .manifest import Manifest, Piece, SavedArray, damaged, headers_as_manifest
from .members import Members
from .pieces import SMALL, intersect, own_parts, whole_box, within
from .saving import agreed_entries, checked_path, read_state
from .trees import EachRanks, StateArray, Tree, entries_of, find_mesh

__all__ = ["load"]

S = TypeVar("S")

_BATCH_BYTES = 64 << 20
_NEVER = 1 << 62


@hidden_from_modes
@torch.no_grad()
def load(
    state: S,
    path: str | os.PathLike[str],
    *,
    mesh: DeviceMesh | None = None,
    only: str | Sequence[str] | None = None,
    missing: str = "error",
    verify: bool = False,
) -> S:
    """Every rank's arrays and leaves of a state have the values of a checkpoint; returns the state.

    Collective as ``save``. The mesh, the number of ranks and the specs may be others than those
    of the save. Arrays are filled in place, leaves are replaced. Files of torch's
    HuggingFaceStorageWriter, of Hugging Face, or a single file of safetensors are read as well.

    Args:
        state: as for ``save``: it says which names are loaded, and how each array lies here.
        path: the folder of a checkpoint, or a file.
        mesh: as for ``save``.
        only: a pattern of names, ``"model.*"``, or several; others stay as they are.
        missing: "error", or "keep": names that the checkpoint lacks stay as they are.
        verify: whether all checksums are compared first, each rank's share by itself.

    Returns: ``state``.

    Cost: each byte leaves the disk once for each host, as long as memory keeps it for the other
        ranks there. Where replicas span hosts, it leaves the disk once for all: they gather whole
        arrays, and receive (p - 1) / p of their bytes. Small arrays, of less than 64 KiB, are
        summed in batches.

    Raises:
        CheckpointError: no checkpoint, or it is damaged; names that it lacks; a disk that fails:
            then the state is undefined.
        ShapeError: an array has another shape there. DtypeError: another dtype.
        AgreementError: ranks call otherwise. ArgumentError: ``only`` fits no name.

    Example:
        >>> import tempfile, torch, meshdist as md
        >>> def program(path):
        ...     mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        ...     rows = md.zeros((4, 2), sharding=md.NamedSharding(mesh, md.P("dp")))
        ...     return md.checkpoint.load({"weight": rows}, path)["weight"].local.tolist()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     md.checkpoint.save({"weight": torch.arange(8.0).view(4, 2)}, f"{folder}/five")
        ...     md.simulate(program, 3, args=(f"{folder}/five",))
        [[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0]], [[6.0, 7.0]]]
    """
    call = "checkpoint.load"
    arrays = read_state(call, state)[0].arrays.values() if isinstance(state, Mapping) else ()
    members = Members(mesh or find_mesh(arrays), call)
    folder, manifest = members.first_does(lambda: read_manifest(checked_path(call, path)))
    tree, error = read_state(call, state, manifest)

    def read() -> dict[str, StateArray]:
        if error is not None:
            raise error
        _select(tree, only, call)
        _leave_rows_of_others(tree, manifest, len(members.ranks))
        _match(tree, manifest, missing, folder, call)
        return entries_of(tree.arrays, members, writable=True)

    def about() -> str:
        where = checked_path(call, path)
        return f"path {where!r}, only={only!r}, missing={missing!r}, verify={verify!r}"

    entries = agreed_entries(members, read, tree, about, is_load=True)
    opened = files.OpenFiles(folder)
    reader = _ArrayReader(members, manifest, opened, entries, folder)
    members.all_do(reader.check)
    if verify:
        members.all_do(reader.verify)
    reader.load()
    for name, leaf in tree.leaves.items():
        leaf.put(manifest.leaves[name])
    if hasattr(state, "was_loaded"):
        state.was_loaded(LoadedState(members, manifest, opened, tree))
    return state


@dataclass(frozen=True)
class LoadedState:
    """A load as it ends, for a state that has been filled."""

    members: Members
    manifest: Manifest
    opened: files.OpenFiles
    tree: Tree


def read_manifest(path: str) -> tuple[str, Manifest]:
    """Return the folder of a checkpoint, and its manifest, made of headers where it has none."""
    folder, sizes, text = files.find_files(path)
    if text is None:
        opened = files.OpenFiles(folder)
        headers = {file: opened.header(file) for file in sorted(sizes)}
        return folder, headers_as_manifest(headers, sizes, path)
    manifest = Manifest.from_json(text, path)
    for file, size in manifest.file_bytes.items():
        if sizes.get(file) != size:
            found = "no such file" if file not in sizes else f"{sizes[file]} bytes"
            raise damaged(path, f"{file}: {found}; the manifest says {size} bytes")
    return folder, manifest


class _ArrayReader:
    """The arrays of a state on their way from files."""

    def __init__(
        self,
        members: Members,
        manifest: Manifest,
        opened: files.OpenFiles,
        entries: dict[str, StateArray],
        folder: str,
    ) -> None:
        self._members, self._manifest, self._opened = members, manifest, opened
        self._entries, self._folder = entries, folder
        self._place = members.ranks.index(members.rank)
        world = members.world
        # Simulated ranks read as those of several hosts do, so that one process tries their plans.
        self._has_plans = world is not None and (
            world.is_simulated or world.spans_hosts(tuple(members.ranks))
        )
        self._small = {
            name: entry
            for name, entry in entries.items()
            if entry.num_bytes < SMALL and entry.whose != "each"
        }
        self._read_as = {
            name: self._reading(entry)
            for name, entry in entries.items()
            if name not in self._small and entry.whose != "each"
        }
        reads = own_parts(
            [
                (whole_box(entry.shape), entry.tensor.dtype.itemsize)
                for entry in self._small.values()
            ],
            self._place,
            len(members.ranks),
        )
        self._reads_small = [
            name for name, part in zip(self._small, reads, strict=True) if part is not None
        ]

    def check(self) -> None:
        """Raise where the files do not have what this rank will read, or other shapes or dtypes."""
        files.check_manifest(self._folder, self._manifest)
        for name, entry in self._entries.items():
            saved = self._manifest.arrays[name]
            if saved.shape != entry.shape:
                raise ShapeError(
                    f"{self._members.call}: {name} has another shape in the checkpoint",
                    where=self._folder,
                    expected=f"shape {entry.shape}, of the state",
                    found=f"shape {saved.shape}, in the checkpoint",
                )
            if saved.dtype != entry.dtype:
                raise DtypeError(
                    f"{self._members.call}: {name} has another dtype in the checkpoint",
                    where=self._folder,
                    expected=f"{entry.dtype}, of the state",
                    found=f"{saved.dtype}, in the checkpoint",
                    fix=f"load it as {saved.dtype} and convert it; or md.checkpoint.open(path)"
                    f".read({name!r})",
                )
        for name, box in self._boxes():
            for piece, _ in _pieces_in(self._manifest.arrays[name], box):
                self._opened.check(piece, name, self._manifest.arrays[name].dtype)

    def verify(self) -> None:
        """Raise where the bytes of a piece, of this rank's share of all, have another checksum."""
        found = [
            (name, piece, array.torch_dtype.itemsize * volume(piece.box))
            for name, array in self._manifest.arrays.items()
            for piece in array.pieces
        ]
        found.sort(key=lambda each: (each[1].file, each[0]))
        lines = [(((0, size),), 1) for _, _, size in found]
        parts = own_parts(lines, self._place, len(self._members.ranks), small=_NEVER)
        for (name, piece, _), part in zip(found, parts, strict=True):
            if part is None:
                continue
            if piece.crc32 is None:
                raise CheckpointError(
                    f"{self._members.call}: no checksums are here, verify=True needs them",
                    where=self._folder,
                    fix="load it without verify=True; md.checkpoint.save writes checksums",
                )
            if files.crc32(self._opened.get(piece.file).get_tensor(name)) != piece.crc32:
                raise damaged(self._folder, f"{piece.file}: the bytes of {name} have changed")

    def load(self) -> None:
        """Fill all arrays of the state; collective."""
        for batch in _batches(self._small):
            self._load_small(batch)
        large = {name: self._entries[name] for name in self._entries if name not in self._small}
        for batch in _batches(large):
            self._load_large(batch)

    def _load_small(self, batch: dict[str, StateArray]) -> None:
        """Fill small arrays: each rank reads some of them, and a sum brings all to all."""
        places, total = {}, 0
        for name, entry in batch.items():
            places[name] = total
            total += -(-entry.num_bytes // 8) * 8
        group = self._members.group
        line = torch.zeros(total, dtype=torch.uint8)

        def part(name: str, of: torch.Tensor) -> torch.Tensor:
            entry = batch[name]
            found = of[places[name] : places[name] + entry.num_bytes]
            return found.view(entry.tensor.dtype).view(entry.shape)

        def read() -> None:
            for name in self._reads_small:
                if name in batch:
                    self._fill(name, part(name, line), whole_box(batch[name].shape))

        self._all_read(read)
        if group is not None:
            line = line.to(group.first_device_type())
            run_titled("all_reduce", group, f"{self._members.call}: small", line, ReduceOp.SUM)
        for name, entry in batch.items():
            index = index_of(entry.box(self._members.rank))
            entry.tensor.copy_(part(name, line)[index])

    def _load_large(self, batch: dict[str, StateArray]) -> None:
        read: dict[str, torch.Tensor] = {}

        def read_parts() -> None:
            for name, entry in batch.items():
                box = self._box(name)
                source = self._read_as.get(name)
                if source is None or source == self._target(entry):
                    self._fill(name, entry.tensor, box)
                else:
                    part = torch.empty(shape_of(box), dtype=entry.tensor.dtype)
                    self._fill(name, part, box)
                    read[name] = part.to(entry.tensor.device)

        self._all_read(read_parts)
        for name, part in read.items():
            entry = batch[name]
            source = self._read_as[name]
            assert source is not None
            entry.tensor.copy_(move(part, source, self._target(entry), entry.shape))

    def _all_read(self, read: Any) -> None:
        """Read on all ranks, and raise on all what fails on any."""
        call = self._members.call

        def read_here() -> None:
            try:
                read()
            except files.FAILURES as error:
                raise CheckpointError(
                    f"{call}: a file could not be read; the state is undefined now",
                    where=self._folder,
                    found=f"{type(error).__name__}: {first_line(error)}",
                    fix="load again, or another checkpoint, before the state is used",
                ) from error

        self._members.all_do(read_here)

    def _fill(self, name: str, target: torch.Tensor, box: Box) -> None:
        _fill(target, self._opened, self._manifest.arrays[name], name, box)

    def _boxes(self) -> Iterator[tuple[str, Box]]:
        """The arrays of which this rank reads a part, and the part."""
        for name in self._reads_small:
            yield name, whole_box(self._entries[name].shape)
        for name in self._entries:
            if name not in self._small:
                yield name, self._box(name)

    def _box(self, name: str) -> Box:
        source = self._read_as.get(name)
        entry = self._entries[name]
        if source is None:
            return entry.box(self._members.rank)
        return source.box(self._members.rank, entry.shape)

    def _target(self, entry: StateArray) -> NamedSharding:
        mesh = self._members.any_mesh()
        assert mesh is not None
        return entry.sharding or whole_sharding(mesh)

    def _reading(self, entry: StateArray) -> NamedSharding | None:
        """Return how ranks read a large array where replicas share the work; None if each reads."""
        if not self._has_plans:
            return None
        target = self._target(entry)
        sizes = target.layout.sizes
        placement = target.placement(entry.shape)
        free = tuple(axis for axis in placement.free_axes if sizes[axis] > 1)
        if not free:
            return target
        return cut_further(target, entry.shape, free)


def read_part(opened: files.OpenFiles, saved: SavedArray, name: str, box: Box) -> torch.Tensor:
    """Return the part of a saved array in a box."""
    for piece, _ in _pieces_in(saved, box):
        opened.check(piece, name, saved.dtype)
    part = torch.empty(shape_of(box), dtype=saved.torch_dtype)
    _fill(part, opened, saved, name, box)
    return part


def _fill(
    target: torch.Tensor, opened: files.OpenFiles, saved: SavedArray, name: str, box: Box
) -> None:
    """Copy the part of a saved array in a box to a tensor of that shape."""
    for piece, common in _pieces_in(saved, box):
        found = opened.get(piece.file).get_tensor(name)
        part = found[index_of(within(common, piece.box))]
        target[index_of(within(common, box))].copy_(part)


def _pieces_in(saved: SavedArray, box: Box) -> Iterator[tuple[Piece, Box]]:
    """The pieces that have elements of a box, and what they have in common with it."""
    for piece in saved.pieces:
        common = intersect(piece.box, box)
        if common is not None:
            yield piece, common


def _batches(entries: Mapping[str, StateArray]) -> Iterator[dict[str, StateArray]]:
    """Some of the entries after the other, of about 64 MiB."""
    batch: dict[str, StateArray] = {}
    size = 0
    for name, entry in entries.items():
        batch[name] = entry
        size += entry.num_bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


def _select(tree: Tree, only: str | Sequence[str] | None, call: str) -> None:
    """Leave out of a state what the patterns do not name."""
    if only is None:
        return
    patterns = [only] if isinstance(only, str) else only
    if not isinstance(patterns, Sequence) or not all(isinstance(each, str) for each in patterns):
        raise KindError(
            f"{call}: only= names what is loaded",
            expected='a pattern of names, such as "model.*", or a list of patterns',
            found=f"{only!r}, a {type(only).__name__}",
        )
    names = [*tree.arrays, *tree.leaves]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, 1, 0)
            raise ArgumentError(
                f"{call}: only={pattern!r} fits no name of the state",
                expected='a pattern of names, such as "model.*"',
                found=first_texts(names, ", "),
                fix=f"write {near[0]!r}" if near else None,
            )

    def is_meant(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    tree.arrays = {name: x for name, x in tree.arrays.items() if is_meant(name)}
    tree.leaves = {name: leaf for name, leaf in tree.leaves.items() if is_meant(name)}


def _leave_rows_of_others(tree: Tree, manifest: Manifest, num_ranks: int) -> None:
    """Leave out arrays that each rank has for itself, where another number of ranks saved them."""
    for name in [name for name, x in tree.arrays.items() if isinstance(x, EachRanks)]:
        saved = manifest.arrays.get(name)
        if saved is not None and saved.shape[:1] != (num_ranks,):
            del tree.arrays[name]


def _match(tree: Tree, manifest: Manifest, missing: str, folder: str, call: str) -> None:
    """Raise where a checkpoint lacks names of a state; or leave these names out."""
    if missing not in ("error", "keep"):
        raise ArgumentError(f"{call}: missing={missing!r}", expected='"error" or "keep"')
    pairs = (tree.arrays, manifest.arrays, "a leaf"), (tree.leaves, manifest.leaves, "an array")
    for mine, saved, other in pairs:
        lacking = [name for name in mine if name not in saved]
        swapped = [name for name in lacking if name in {*manifest.arrays, *manifest.leaves}]
        if swapped:
            raise CheckpointError(
                f"{call}: {swapped[0]} is {other} in the checkpoint",
                where=folder,
                fix=f"load it as {other}, or leave it out",
            )
        if lacking and missing == "error":
            names = [*manifest.arrays, *manifest.leaves]
            near = difflib.get_close_matches(lacking[0], names, 1)
            raise CheckpointError(
                f"{call}: the checkpoint lacks {len(lacking)} names of the state",
                where=folder,
                expected=first_texts(lacking, ", "),
                found=f"{near[0]!r} is nearest to {lacking[0]!r}"
                if near
                else first_texts(names, ", ") or "no names",
                fix='missing="keep" leaves them as they are, only= names those that are meant',
            )
        for name in lacking:
            del mine[name]
