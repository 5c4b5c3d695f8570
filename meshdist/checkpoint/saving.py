"""``md.checkpoint.save``: every rank writes its part, and the folder appears whole or not at all.

1. All ranks agree on names, dtypes, shapes, specs and leaves; the sizes of marked parts are told.
2. The first rank makes the folder, and all see it.
3. Each rank writes one file of what it saves, a note for the manifest, and counts itself.
4. The rank that counts last writes the manifest, and renames the folder.
5. All ranks agree on how it went: at once in ``save``, in ``wait()`` after ``save_async``.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from ..collectives.torch_private import hidden_from_modes
from ..errors import KindError
from ..mesh.current_mesh import find_current_mesh
from ..mesh.device_mesh import DeviceMesh
from .manifest import Manifest
from .participants import Members
from .pending_saves import PendingSave, staging_of
from .pieces import Holding, holding_of, parts_of
from .save_jobs import SaveJob
from .trees import (
    StateArray,
    Tree,
    entries_of,
    facts_of,
    facts_of_wholes,
    find_mesh,
    find_sizes,
    values_of,
)

__all__ = ["save", "save_async"]

Facts: TypeAlias = tuple[dict[str, StateArray], dict[str, str], dict[str, torch.Tensor]]


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
        MismatchError: ranks have other names, arrays, leaves, or values of arrays that are not
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
    job.write()
    job.end()


@hidden_from_modes
@torch.no_grad()
def save_async(
    state: Any, path: str | os.PathLike[str], *, mesh: DeviceMesh | None = None
) -> PendingSave:
    """Copy what this rank saves, and let a thread write it; see ``save``.

    You may change the state as soon as this returns. The rank that writes last completes the
    checkpoint. No rank waits for another rank. The next save waits for the thread. A process that
    ends still writes its part. Simulated ranks write before this returns.

    Returns:
        The pending save. Its ``wait()`` is collective. It returns once the checkpoint is whole, and
        raises the failure of any rank on every rank. The next save and the next load of the same
        ranks do the same. ``destroy_process_group`` waits for this rank's part alone.

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
    return staging_of(job.members.world).start(job)


def _prepare(call: str, state: Any, path: Any, mesh: DeviceMesh | None) -> SaveJob:
    """Return a checked save whose folder exists; raise alike on all ranks; collective."""
    tree, error = read_state(call, state, mesh)
    members = Members(mesh or find_mesh(tree.arrays.values()), call)

    def read() -> Facts:
        staging_of(members.world).settle()
        final = checked_path(call, path)
        if error is not None:
            raise error
        entries = entries_of(tree.arrays, members)
        leaves = {
            name: json.dumps(leaf.json)
            for name, leaf in tree.leaves.items()
            if not leaf.is_first_ranks
        }
        texts = {"argument path": repr(final), **leaves, **facts_of(entries)}
        return entries, texts, values_of(entries, members)

    entries = agreed_entries(members, read)
    holdings = {
        name: _holding(entry, members)
        for name, entry in entries.items()
        if members.is_first or entry.whose != "first"
    }
    values = {name: leaf.json for name, leaf in tree.leaves.items()} if members.is_first else {}
    leaves = copy.deepcopy(values)  # a list of the state may change while a thread writes
    job = SaveJob(
        members, checked_path(call, path), tree.shape, leaves, entries, parts_of(holdings)
    )
    job.begin()
    return job


def mesh_of(state: Any, mesh: DeviceMesh | None, call: str) -> DeviceMesh | None:
    """Return ``mesh``, or the mesh in force, or that of the state's arrays; None without any."""
    found = mesh or find_current_mesh()  # else the state is read once more
    return found or find_mesh(read_state(call, state, None)[0].arrays.values())


def read_state(
    call: str, state: Any, mesh: DeviceMesh | None, saved: Manifest | None = None
) -> tuple[Tree, Exception | None]:
    """Return a state taken apart, or an empty tree and the error, which all ranks will raise.

    Args:
        saved: the contents of the checkpoint that the state is loaded from; None to save it.
    """
    try:
        if hasattr(state, "to_tree"):
            state = state.to_tree(mesh or find_current_mesh(), saved)
        return Tree.of(state, call), None
    except Exception as error:
        return Tree({}, {}, {}), error


def checked_path(call: str, path: Any) -> str:
    """Return a path as absolute text; raise KindError for anything else."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise KindError(
            f"{call} takes the path of a folder",
            expected="a text or a pathlib.Path",
            found=f"{path!r}, a {type(path).__name__}",
        )
    return os.path.abspath(os.fspath(path))


def agreed_entries(members: Members, read: Callable[[], Facts]) -> dict[str, StateArray]:
    """Return this member's entries, checked to equal all others', with whole sizes; collective.

    Args:
        read: returns this member's, and texts and tensors that must be equal on all members.
    """
    entries: dict[str, StateArray] = members.all_agree(read)
    marked = {name: each for name, each in entries.items() if not each.sizes_are_known}
    if marked:
        find_sizes(marked, members)
        members.all_agree(lambda: (None, facts_of_wholes(marked, members), {}))
    return entries


def _holding(entry: StateArray, members: Members) -> Holding:
    rank, itemsize = members.rank, entry.tensor.dtype.itemsize
    if entry.sharding is not None:
        return holding_of(entry.sharding, entry.shape, itemsize, rank)
    if entry.whose == "all":
        return Holding(entry.box(rank), itemsize, "all", members.place, len(members.ranks))
    return Holding(entry.box(rank), itemsize)
