"""Save a checkpoint from all ranks: ``md.checkpoint.save``.

1. All ranks compare names, dtypes, shapes, specs and leaves, and exchange shard sizes.
2. The first rank creates the folder, and all ranks check that they see it.
3. Each rank writes its part to one file, and a record for the manifest, and counts itself.
4. The rank that counts last writes the manifest and renames the folder.
5. All ranks agree on the result: at the end of ``save``, or in ``wait()`` after ``save_async``.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from ..collectives.torch_private import hidden_from_modes
from ..error_text import with_article
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
    facts_of_global_arrays,
    find_mesh,
    find_sizes,
    values_of,
)

__all__ = ["save", "save_async"]

Facts: TypeAlias = tuple[dict[str, StateArray], dict[str, str], dict[str, torch.Tensor]]


@hidden_from_modes
@torch.no_grad()
def save(state: Any, path: str | os.PathLike[str], *, mesh: DeviceMesh | None = None) -> None:
    """Save a state to a folder that appears only when it is complete; collective.

    The call is collective over the mesh, or over all ranks without a mesh; without a world the
    process saves alone. Each byte is written once: ranks with equal values share the work. The
    folder holds one safetensors file per rank and a manifest, and any mesh can load it. If any rank
    fails, every rank raises.

    Args:
        state: nested dicts of arrays and JSON values, or a ``State``. Sharded arrays are
            ShardedArrays, tensors with a spec (``md.annotate``, ``md.shard``, ``md.parallelize``)
            and DTensors. Other arrays, and the values, must be equal on all ranks. Dict keys joined
            by dots are names.
        path: the folder, which must not exist. Parent folders are created.
        mesh: the mesh with the specs' axes; None uses the current mesh, or the ShardedArrays' mesh.

    Cost: besides writing, five small messages, and another for each set of axes that shards
        annotated tensors.

    Raises:
        CheckpointError: the path exists, the disk fails, or ranks see different disks.
        MismatchError: names, arrays, leaves or values of replicated arrays differ between ranks. Of
            arrays above 16 KiB, 64 elements are compared; all on simulated ranks and at DETAIL.
        AxisTypeError: an array is unreduced.
        DtypeError: safetensors files do not support the dtype.
        KindError: JSON does not support a leaf.
        MeshError: there are specs but no mesh.

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
    """Copy this rank's part and write it in a background thread; see ``save``.

    You may change the state as soon as this returns. The last rank to finish writing completes the
    checkpoint; no rank waits for another. A process that exits still writes its part. Simulated
    ranks write before this returns.

    Returns:
        The pending save. Its ``wait()`` is collective: it returns once the checkpoint is complete,
        and raises any rank's failure on every rank. The next save and load of the same ranks also
        wait and raise. ``destroy_process_group`` waits for this rank's part only.

    Cost: a copy of this rank's part in host memory, kept for later saves.

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
    """Return a checked save whose folder exists; raise the same error on all ranks; collective."""
    tree, error = read_state(call, state, mesh)
    members = Members(mesh or find_mesh(tree.arrays.values()), call)

    def read() -> Facts:
        staging_of(members.world).finalize()
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
        if members.is_first or entry.saved_by != "first"
    }
    values = {name: leaf.json for name, leaf in tree.leaves.items()} if members.is_first else {}
    leaves = copy.deepcopy(values)  # the user may change a list while a thread writes
    job = SaveJob(
        members, checked_path(call, path), tree.shape, leaves, entries, parts_of(holdings)
    )
    job.begin()
    return job


def mesh_of(state: Any, mesh: DeviceMesh | None, call: str) -> DeviceMesh | None:
    """Return ``mesh``, the current mesh, or the state's mesh; None without any."""
    found = mesh or find_current_mesh()  # read the state only if needed
    return found or find_mesh(read_state(call, state, None)[0].arrays.values())


def read_state(
    call: str, state: Any, mesh: DeviceMesh | None, saved: Manifest | None = None
) -> tuple[Tree, Exception | None]:
    """Return the state's tree, or an empty tree and the error, which all ranks will raise.

    Args:
        saved: the checkpoint's manifest for a load; None for a save.
    """
    try:
        if hasattr(state, "to_tree"):
            state = state.to_tree(mesh or find_current_mesh(), saved)
        return Tree.of(state, call), None
    except Exception as error:
        return Tree({}, {}, {}), error


def checked_path(call: str, path: Any) -> str:
    """Return an absolute path; raise KindError unless ``path`` is a path."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise KindError(
            f"{call} requires the path of a folder",
            expected="a non-empty str or a pathlib.Path",
            found=f"{path!r}, {with_article(type(path).__name__)}",
            fix="pass for example path='checkpoints/step-10'",
        )
    return os.path.abspath(os.fspath(path))


def agreed_entries(members: Members, read: Callable[[], Facts]) -> dict[str, StateArray]:
    """Return this rank's entries with global sizes, equal on all ranks; collective.

    Args:
        read: returns this rank's entries, and texts and tensors that must be equal on all ranks.
    """
    entries: dict[str, StateArray] = members.all_agree(read)
    marked = {name: each for name, each in entries.items() if not each.sizes_are_known}
    if marked:
        find_sizes(marked, members)
        members.all_agree(lambda: (None, facts_of_global_arrays(marked, members), {}))
    return entries


def _holding(entry: StateArray, members: Members) -> Holding:
    rank, itemsize = members.rank, entry.tensor.dtype.itemsize
    if entry.sharding is not None:
        return holding_of(entry.sharding, entry.shape, itemsize, rank)
    if entry.saved_by == "all":
        return Holding(entry.box(rank), itemsize, "all", members.group_rank, len(members.ranks))
    return Holding(entry.box(rank), itemsize)
