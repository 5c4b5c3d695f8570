"""``md.checkpoint.save``: every rank writes its part, and the folder appears whole or not at all.

1. All ranks agree on names, dtypes, shapes, specs and leaves; the sizes of marked parts are told.
2. The first rank makes the folder, and all see it.
3. Each rank writes one file of what it saves, and tells the first rank what it has written.
4. The first rank writes the manifest, and renames the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..collectives.torch_private import hidden_from_modes
from ..errors import CheckpointError, KindError
from ..mesh.device_mesh import DeviceMesh
from ..mesh.placement import Box, index_of
from . import files
from .manifest import SUFFIX, Manifest, Piece, SavedArray
from .members import Members, Messages, told_again, told_error
from .pending_saves import PendingSave, staging_of
from .pieces import Holding, holding_of, parts_of, within
from .trees import (
    StateArray,
    Tree,
    check_wholes,
    entries_of,
    facts_of,
    facts_of_leaves,
    find_mesh,
    find_sizes,
)

__all__ = ["save", "save_async"]


@hidden_from_modes
@torch.no_grad()
def save(state: Any, path: str | os.PathLike[str], *, mesh: DeviceMesh | None = None) -> None:
    """All ranks have written a state to a folder, which is whole, or is not there.

    Collective over the mesh, or the world where there is no mesh; without a world the process
    saves alone. Each byte is written once: ranks that hold the same share the work. The folder
    holds a file of safetensors per rank and a manifest, and any mesh can load it; see the page on
    checkpoints. Other ranks' failures are raised on every rank.

    Args:
        state: nested dicts of arrays and JSON values, or a ``State``. Arrays: ShardedArrays,
            tensors that carry a spec (``md.annotate``, ``md.shard``, ``md.parallelize``), DTensors;
            all other arrays, and the values, are equal on all ranks. The keys joined by dots are
            the names.
        path: of the folder; nothing may be there. Folders above it are made.
        mesh: has the axes of the specs; None takes the mesh in force, or that of ShardedArrays.

    Cost: besides the writing five small messages, one more for each set of axes that cuts marked
        tensors.

    Raises:
        CheckpointError: the path is taken, the disk fails, ranks see different disks.
        AgreementError: ranks have other names, arrays, leaves, or values of arrays that are not
            marked; of arrays above 16 KiB 64 elements are compared, all on simulated ranks and at
            DETAIL.
        AxisTypeError: an array is unreduced. DtypeError: files lack the dtype. KindError: a leaf
            that JSON lacks. MeshError: specs, and no mesh.

    Example:
        >>> import tempfile, torch, meshdist as md
        >>> def program(path):
        ...     with md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)):
        ...         weight = md.shard(torch.arange(8.0).view(4, 2), "f@tp d")
        ...         md.checkpoint.save({"weight": weight, "step": 5}, path)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = md.simulate(program, 2, args=(f"{folder}/five",))
        ...     found = md.checkpoint.open(f"{folder}/five")
        ...     found.read("weight")[3], found.leaves
        (tensor([6., 7.]), {'step': 5})
    """
    job = _prepare("checkpoint.save", state, path, mesh)
    try:
        staging_of(job.members.world).close()  # raises where the save before has failed
    except BaseException:
        job.drop()
        raise
    job.finish(job.members)


@hidden_from_modes
@torch.no_grad()
def save_async(
    state: Any, path: str | os.PathLike[str], *, mesh: DeviceMesh | None = None
) -> PendingSave:
    """All ranks have copied what they save, and a thread of each writes it; see ``save``.

    The state may change as soon as this returns. One save is under way at a time: the next waits
    for it after it has copied. Ranks agree on how it ends through the store, so that the program's
    groups are free. Simulated ranks, and a process without a world, write before this returns.

    Returns:
        The pending save. Its ``wait()`` returns once the checkpoint is whole, and raises on every
        rank what failed on any; so do the next save and ``destroy_process_group``. Where none of
        these comes, the error stands on stderr as the process ends.

    Cost: a copy of this rank's part, into host memory that is kept for later saves.

    Raises:
        As ``save``.

    Example:
        >>> import tempfile, torch, meshdist as md
        >>> weight = torch.ones(3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pending = md.checkpoint.save_async({"weight": weight}, f"{folder}/five")
        ...     _ = weight.zero_()
        ...     pending.wait()
        ...     md.checkpoint.open(f"{folder}/five").read("weight")
        tensor([1., 1., 1.])
    """
    job = _prepare("checkpoint.save_async", state, path, mesh)
    job.is_beside = True
    return staging_of(job.members.world).start(job, job.members.world)


@dataclass
class SaveJob:
    """A save from the moment at which its folder is there.

    Args:
        folder: the folder on the rank that commits it, None on others.
        path: the path of the folder.
        parts: which part of each array this rank saves.
    """

    members: Members
    final: str
    path: str
    folder: files.UnfinishedFolder | None
    tree: Tree
    entries: dict[str, StateArray]
    parts: dict[str, Box]
    pieces: dict[str, torch.Tensor] = field(default_factory=dict)
    is_beside: bool = False
    """Whether a thread finishes it, which cannot start threads as the interpreter ends."""
    error: Exception | None = None
    """The error with which copying this rank's pieces has failed, for all ranks."""

    def views(self) -> dict[str, torch.Tensor]:
        """Return what this rank saves, in the memory of the state."""
        found = {}
        for name, box in self.parts.items():
            entry = self.entries[name]
            local = within(box, entry.box(self.members.rank))
            found[name] = entry.tensor[index_of(local)].resolve_conj().resolve_neg()
        return found

    def finish(self, messages: Messages) -> None:
        """Write, and commit on the first rank; raise on all ranks what fails on any."""
        told: tuple[Any, Any]
        try:
            told = self._write(), None
        except Exception as error:
            told = None, told_error(error, self.members.call)
        try:
            of_all = messages.gather(told)
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
        """Give the save up: remove its folder, on the rank that has made it."""
        if self.folder is not None:
            self.folder.drop()

    def _write(self) -> tuple[int, dict[str, Any]]:
        """Write this rank's file; return its size, and by name offsets, shape and CRC-32."""
        if self.error is not None:
            raise self.error
        if not self.is_beside:
            self.pieces = {name: view.cpu().contiguous() for name, view in self.views().items()}
        if not self.pieces:
            return 0, {}
        offsets = {name: [start for start, _ in self.parts[name]] for name in self.pieces}
        path = os.path.join(self.path, file_of(self.members.rank))
        size, sums = files.write_arrays(
            path, _apart(self.pieces), offsets, sums_beside=not self.is_beside
        )
        written = {
            name: (offsets[name], list(piece.shape), sums[name])
            for name, piece in self.pieces.items()
        }
        return size, written

    def _commit(self, of_all: list[Any]) -> list[tuple[int, dict[str, Any]]]:
        """Commit the folder, or drop it; return the failures by rank."""
        assert self.folder is not None
        pairs = zip(self.members.ranks, of_all, strict=True)
        failures = [(rank, failure) for rank, (_, failure) in pairs if failure]
        if not failures:
            try:
                self.folder.commit(self._manifest([written for written, _ in of_all]).to_json())
            except Exception as error:
                failures = [(self.members.rank, told_error(error, self.members.call))]
        if failures:
            self.folder.drop()
        return failures

    def _manifest(self, written: list[tuple[int, dict[str, Any]]]) -> Manifest:
        arrays = {
            name: SavedArray(entry.dtype, entry.shape) for name, entry in self.entries.items()
        }
        leaves = {name: leaf.json for name, leaf in self.tree.leaves.items()}
        manifest = Manifest(arrays, leaves, self.tree.shape, {})
        for rank, (size, pieces) in zip(self.members.ranks, written, strict=True):
            if pieces:
                manifest.file_bytes[file_of(rank)] = size
            for name, (starts, shape, crc) in pieces.items():
                box = tuple((start, start + k) for start, k in zip(starts, shape, strict=True))
                arrays[name].pieces.append(Piece(file_of(rank), box, crc))
        return manifest


def _prepare(call: str, state: Any, path: Any, mesh: DeviceMesh | None) -> SaveJob:
    """Return a save whose folder is there; collective, and raises the same on all ranks."""
    tree, error = read_state(call, state)
    mesh = mesh or find_mesh(tree.arrays.values())
    members = Members(mesh, call)

    def read() -> dict[str, StateArray]:
        if error is not None:
            raise error
        return entries_of(tree.arrays, members)

    entries = agreed_entries(members, read, tree, lambda: f"path {checked_path(call, path)!r}")
    final = checked_path(call, path)
    folder: files.UnfinishedFolder | None = None

    def make_folder() -> str:
        nonlocal folder
        files.remove_leftovers(os.path.dirname(final))
        folder = files.UnfinishedFolder(final)
        return folder.path

    def look() -> None:
        if not os.path.isdir(path):
            raise CheckpointError(
                f"{call}: this rank does not see the folder that the first rank has made",
                where=path,
                expected="a file system that all ranks share",
                fix="save to a shared file system; a folder local to a host holds a part alone",
            )

    try:
        path = members.first_does(make_folder)
        members.all_do(look)
    except BaseException:
        if folder is not None:
            folder.drop()
        raise
    parts = _parts_of(entries, members)
    return SaveJob(members, final, path, folder, tree, entries, parts)


def read_state(
    call: str, state: Any, saved: Manifest | None = None
) -> tuple[Tree, Exception | None]:
    """Return a state taken apart, or an empty tree and the error, which all ranks will raise.

    Args:
        saved: the contents of the checkpoint that the state is loaded from; None to save it.
    """
    try:
        return Tree.of(state.to_tree(saved) if hasattr(state, "to_tree") else state, call), None
    except Exception as error:
        return Tree({}, {}, {}), error


def checked_path(call: str, path: Any) -> str:
    """Return a path as an absolute text."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise KindError(
            f"{call} takes the path of a folder",
            expected="a text or a pathlib.Path",
            found=f"{path!r}, a {type(path).__name__}",
        )
    return os.path.abspath(os.fspath(path))


def agreed_entries(
    members: Members,
    read: Callable[[], dict[str, StateArray]],
    tree: Tree,
    about: Callable[[], str],
    *,
    is_load: bool = False,
) -> dict[str, StateArray]:
    """Return the entries that all members have alike, with the sizes of wholes; collective."""
    entries, error = {}, None
    facts: list[str] = []
    try:
        facts.append(about())
        entries = read()
        facts += [*map(str, tree.leaves)] if is_load else facts_of_leaves(tree.leaves)
        facts += facts_of(entries, members, has_values=not is_load)
    except Exception as raised:
        error = raised
    members.agree(error, facts)
    marked = {name: each for name, each in entries.items() if not each.sizes_are_known}
    if marked:
        find_sizes(marked, members)
        members.all_do(lambda: check_wholes(marked, members), facts_of(marked, members))
    return entries


def file_of(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank}{SUFFIX}"


def _parts_of(entries: Mapping[str, StateArray], members: Members) -> dict[str, Box]:
    """Return which part of each array this rank saves: replicas share what they hold."""
    return parts_of({name: _holding(entry, members) for name, entry in entries.items()})


def _holding(entry: StateArray, members: Members) -> Holding:
    rank, itemsize = members.rank, entry.tensor.dtype.itemsize
    if entry.sharding is not None:
        return holding_of(entry.sharding, entry.shape, itemsize, rank)
    box = entry.box(rank)
    if entry.whose == "each":
        return Holding(box, itemsize)
    if entry.whose == "first":
        return Holding(box if members.is_first else None, itemsize)
    return Holding(box, itemsize, "all", members.ranks.index(rank), len(members.ranks))


def _apart(pieces: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return pieces of which none has memory of another; the library refuses those that do."""
    found, end = dict(pieces), 0
    for name, piece in sorted(pieces.items(), key=lambda item: item[1].data_ptr()):
        if piece.data_ptr() < end:
            found[name] = piece.clone()
        end = max(end, piece.data_ptr() + piece.nbytes)
    return found
