"""Load a checkpoint so that each byte is read from disk once: ``md.checkpoint.load``.

1. The first rank reads the manifest, or else file headers, and broadcasts it.
2. All ranks check names, shapes, dtypes and files before they change anything.
3. Each rank reads its target's part, in batches. Processes of one host copy it from shared
   memory-mapped files. Between hosts, ranks split parts shared by replicas further, and a reshard
   plan combines them. Small arrays are sent in one message.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch

from ..backends.operation_args import flat
from ..collectives.normalize_args import run_named
from ..collectives.torch_private import hidden_from_modes
from ..error_text import first_line, first_texts, with_article
from ..errors import ArgumentError, CheckpointError, DtypeError, KindError, ShapeError
from ..mesh.device_mesh import DeviceMesh
from ..mesh.partition_spec import P
from ..mesh.placement import Box, index_of, shape_of
from ..mesh.spec import NamedSharding
from ..reduce_ops import ReduceOp
from ..sharding.resharding import cut_further, move
from . import files
from .manifest import Manifest
from .participants import Members
from .pending_saves import staging_of
from .pieces import SMALL, own_parts, whole_box
from .reader import OpenArrays, read_manifest
from .saving import Facts, agreed_entries, checked_path, mesh_of, read_state
from .trees import EachRanks, StateArray, Tree, axes_to_json, entries_of, facts_of

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
    """Load a checkpoint into the arrays and leaves of a state; return the state.

    Collective as ``save``. The mesh, the number of ranks and the specs may differ from the
    checkpoint's. Arrays are filled in place; leaves are replaced. Also reads files of torch's
    HuggingFaceStorageWriter and of Hugging Face, and single safetensors files. Like the next save,
    waits for a running save and raises its failure.

    Args:
        state: as for ``save``; it determines the loaded names and each array's sharding.
        path: a checkpoint's folder, or a file.
        mesh: as for ``save``.
        only: a name pattern such as ``"model.*"``, or several; other names are not loaded.
        missing: "error", or "keep" to leave names unchanged that the checkpoint lacks.
        verify: whether to compare all checksums first; each rank compares a share.

    Returns:
        ``state``.

    Cost: each byte is read from disk once per host, if memory caches it for the host's other ranks.
        If replicas span hosts, each byte is read once: ranks gather global arrays and receive
        (p-1)/p of their bytes. Arrays of less than 64 KiB are summed in batches.

    Raises:
        CheckpointError: the path has no checkpoint, or it is damaged, lacks names, or has different
            values of tied arrays; or the disk fails: then the state is undefined, as if an object's
            ``load_state_dict`` raised.
        ShapeError: an array has another shape in the checkpoint.
        DtypeError: an array has another dtype in the checkpoint.
        MismatchError: ranks' arguments differ.
        ArgumentError: ``only`` matches no name.

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
    members = Members(mesh_of(state, mesh, call), call)
    members.all_do(staging_of(members.world).finalize)
    folder, manifest = members.first_does(lambda: read_manifest(checked_path(call, path)))
    tree, error = read_state(call, state, mesh, manifest)
    values: dict[str, Any] = {}

    def read() -> Facts:
        where = checked_path(call, path)
        if error is not None:
            raise error
        _select(tree, only, call)
        _leave_rows_of_others(tree, manifest, members)
        _match(tree, manifest, missing, folder, call)
        values.update(_values_of(tree, manifest, folder, call))
        entries = entries_of(tree.arrays, members, writable=True)
        arguments = f"path={where!r}, only={only!r}, missing={missing!r}, verify={verify!r}"
        leaves = dict.fromkeys(tree.leaves, "a value")
        return entries, {"arguments": arguments, **leaves, **facts_of(entries)}, {}

    entries = agreed_entries(members, read)
    source = OpenArrays(folder, manifest)
    reader = _ArrayReader(members, source, entries)
    members.all_do(reader.check)
    if verify:
        members.all_do(reader.verify)
    reader.load()
    for name, leaf in tree.leaves.items():
        leaf.owner[leaf.key] = values[name]
    if hasattr(state, "was_loaded"):
        names = [*tree.arrays, *tree.leaves]
        members.all_do(lambda: state.was_loaded(names, source, members))
    return state


class _ArrayReader:
    """Loads a state's arrays."""

    def __init__(
        self, members: Members, source: OpenArrays, entries: dict[str, StateArray]
    ) -> None:
        self._members, self._source, self._entries = members, source, entries
        self._small = {
            name: entry
            for name, entry in entries.items()
            if entry.num_bytes < SMALL and entry.saved_by != "each"
        }
        small = [(whole_box(x.shape), x.tensor.dtype.itemsize) for x in self._small.values()]
        parts = own_parts(small, members.group_rank, len(members.ranks))
        self._large = {name: x for name, x in entries.items() if name not in self._small}
        self._shared = self._find_shared()
        self._boxes = {
            **{name: box for name, box in zip(self._small, parts, strict=True) if box is not None},
            **{name: self._box(name) for name in self._large},
        }
        """The boxes that this rank reads."""

    def _find_shared(self) -> dict[str, NamedSharding]:
        """Return, by name, shardings that split reading large arrays among replicas."""
        # Simulated ranks read like ranks on several hosts, so that one process tests their plans.
        world, ranks = self._members.world, tuple(self._members.ranks)
        if world is None or not (world.is_simulated or world.spans_hosts(ranks)):
            return {}
        found = {}
        for name, entry in self._large.items():
            target = self._target(entry)
            sizes, free = target.layout.sizes, target.placement(entry.shape).free_axes
            free = tuple(axis for axis in free if sizes[axis] > 1)
            if free and entry.saved_by != "each":
                found[name] = cut_further(target, entry.shape, free)
        return found

    def _target(self, entry: StateArray) -> NamedSharding:
        mesh = self._members.any_mesh()
        assert mesh is not None
        return entry.sharding or NamedSharding(mesh, P())

    def _box(self, name: str) -> Box:
        entry, shared = self._entries[name], self._shared.get(name)
        rank = self._members.rank
        return entry.box(rank) if shared is None else shared.box(rank, entry.shape)

    def check(self) -> None:
        """Raise unless the files have all that this rank reads, in equal shapes and dtypes."""
        manifest = self._source.manifest
        files.check_manifest(self._source.folder, manifest)
        for name, entry in self._entries.items():
            saved = manifest.arrays[name]
            if saved.shape != entry.shape:
                raise ShapeError(
                    f"{self._members.call}: {name} has a different shape in the checkpoint",
                    where=self._source.folder,
                    expected=f"shape {entry.shape}, as in the state",
                    found=f"shape {saved.shape}, in the checkpoint",
                    fix=f"create {name} with shape {saved.shape}, or exclude it with only=",
                )
            if saved.dtype != entry.dtype:
                raise DtypeError(
                    f"{self._members.call}: {name} has a different dtype in the checkpoint",
                    where=self._source.folder,
                    expected=f"{entry.dtype}, as in the state",
                    found=f"{saved.dtype}, in the checkpoint",
                    fix=f"load it as {saved.dtype} and convert it; or call md.checkpoint.open(path)"
                    f".read({name!r})",
                )
        for name, box in self._boxes.items():
            self._source.check(name, box)
        for names in _sharing_memory(self._entries):
            self._check_tied(names)

    def _check_tied(self, names: Sequence[str]) -> None:
        """Raise if arrays that share memory cannot all have the checkpoint's values."""
        tensors = [self._entries[name].tensor for name in names]
        arrays = self._source.manifest.arrays
        sums = [[(piece.box, piece.crc32) for piece in arrays[name].pieces] for name in names]
        are_one = all(tensor.is_set_to(tensors[0]) for tensor in tensors)
        if are_one and all(each == sums[0] for each in sums) and None not in dict(sums[0]).values():
            return
        # Read them into other memory with the same overlaps, so that nothing changes yet.
        first = min(tensor.data_ptr() for tensor in tensors) // 16 * 16
        memory = torch.empty(max(map(_end, tensors)) - first, dtype=torch.uint8, device="cpu")
        filled = []
        for name, tensor in zip(names, tensors, strict=True):
            line = memory[tensor.data_ptr() - first : _end(tensor) - first].view(tensor.dtype)
            saved = self._source.read(name, self._entries[name].box(self._members.rank))
            filled.append((line.as_strided(tensor.shape, tensor.stride()).copy_(saved), saved))
        pairs = zip(names, filled, strict=True)
        lost = [name for name, (view, saved) in pairs if not torch.equal(_bits(view), _bits(saved))]
        if lost:
            raise CheckpointError(
                f"{self._members.call}: arrays share memory in the state, but have different "
                "values in the checkpoint",
                where=self._source.folder,
                expected="equal values of tied arrays",
                found=f"{first_texts(names, ', ')}; loading would overwrite {lost[0]}",
                fix=f"untie them before the load, or exclude {lost[0]} with only=",
            )

    def verify(self) -> None:
        """Raise if bytes mismatch their checksum; each rank reads its share of the pieces."""
        arrays = self._source.manifest.arrays
        found = [(piece, name) for name, array in arrays.items() for piece in array.pieces]
        found.sort(key=lambda each: (each[0].file, each[1]))
        boxes = [(piece.box, arrays[name].torch_dtype.itemsize) for piece, name in found]
        parts = own_parts(boxes, self._members.group_rank, len(self._members.ranks), small=_NEVER)
        for (piece, name), part in zip(found, parts, strict=True):
            if part is None:
                continue
            if piece.crc32 is None:
                raise CheckpointError(
                    f"{self._members.call}: verify=True requires checksums, which the files lack",
                    where=self._source.folder,
                    fix="load without verify=True, or save with md.checkpoint.save, which writes "
                    "checksums",
                )
            self._source.verify(piece, name)

    def load(self) -> None:
        """Fill the state's arrays; collective."""
        for batch in _batches(self._small):
            self._load_small(batch)
        for batch in _batches(self._large):
            self._load_large(batch)

    def _load_small(self, batch: dict[str, StateArray]) -> None:
        """Read some arrays on each rank, and share them by an all-reduce; collective."""
        offsets, total = {}, 0
        for name, entry in batch.items():
            offsets[name] = total
            total += -(-entry.num_bytes // 8) * 8
        group = self._members.group
        line = torch.zeros(total, dtype=torch.uint8, device="cpu")

        def part(name: str, of: torch.Tensor) -> torch.Tensor:
            entry = batch[name]
            found = of[offsets[name] : offsets[name] + entry.num_bytes]
            return found.view(entry.tensor.dtype).view(entry.shape)

        def read() -> None:
            for name in batch:
                if name in self._boxes:
                    self._source.fill(part(name, line), name, self._boxes[name])

        self._all_read(read)
        if group is not None:
            line = line.to(group.first_device_type())
            run_named("all_reduce", group, f"{self._members.call}: small", line, ReduceOp.SUM)
        for name, entry in batch.items():
            index = index_of(entry.box(self._members.rank))
            entry.tensor.copy_(part(name, line)[index])

    def _load_large(self, batch: dict[str, StateArray]) -> None:
        """Read this rank's part, or a share that is sent on; collective."""
        shares: dict[str, torch.Tensor] = {}

        def read() -> None:
            for name, entry in batch.items():
                box, target = self._boxes[name], entry.tensor
                if name in self._shared:
                    target = torch.empty(shape_of(box), dtype=target.dtype, device="cpu")
                self._source.fill(target, name, box)
                if name in self._shared:
                    shares[name] = target.to(entry.tensor.device)

        self._all_read(read)
        for name, share in shares.items():
            entry = batch[name]
            part = move(share, self._shared[name], self._target(entry), entry.shape)
            entry.tensor.copy_(part)

    def _all_read(self, read: Any) -> None:
        """Run ``read`` on all ranks; raise on all if any fails; collective."""
        call = self._members.call

        def read_here() -> None:
            try:
                read()
            except files.FAILURES as error:
                raise CheckpointError(
                    f"{call}: cannot read a file; the values of the state are undefined",
                    where=self._source.folder,
                    found=f"{type(error).__name__}: {first_line(error)}",
                    fix="load again, or load another checkpoint, before you use the state",
                ) from error

        self._members.all_do(read_here)


def _end(x: torch.Tensor) -> int:
    """Return the address after the last element of a nonempty tensor."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (last + 1) * x.dtype.itemsize


def _bits(x: torch.Tensor) -> torch.Tensor:
    return flat(x.contiguous()).view(torch.uint8)


def _sharing_memory(entries: Mapping[str, StateArray]) -> Iterator[list[str]]:
    """Yield names of arrays whose memory overlaps on this rank."""
    tensors = {name: x.tensor for name, x in entries.items() if x.tensor.numel()}
    names = sorted(tensors, key=lambda name: (str(tensors[name].device), tensors[name].data_ptr()))
    found, device, end = list[str](), None, 0
    for name in names:
        tensor = tensors[name]
        if tensor.device != device or tensor.data_ptr() >= end:
            if len(found) > 1:
                yield found
            found, device, end = [], tensor.device, 0
        found.append(name)
        end = max(end, _end(tensor))
    if len(found) > 1:
        yield found


def _batches(entries: Mapping[str, StateArray]) -> Iterator[dict[str, StateArray]]:
    """Yield the entries in batches of about 64 MiB."""
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
    """Remove names that match no pattern; raise for bad patterns."""
    if only is None:
        return
    patterns = [only] if isinstance(only, str) else only
    if not isinstance(patterns, Sequence) or not all(isinstance(each, str) for each in patterns):
        raise KindError(
            f"{call}: only= must be a name pattern",
            expected='a name pattern, such as "model.*", or a list of patterns',
            found=f"{only!r}, {with_article(type(only).__name__)}",
            fix='pass for example only="model.*"',
        )
    names, meant = [*tree.arrays, *tree.leaves], set[str]()
    for pattern in patterns:
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        meant.update(fitting)
        if not fitting:
            near = difflib.get_close_matches(pattern, names, 1, 0)
            raise ArgumentError(
                f"{call}: only={pattern!r} matches no name of the state",
                expected='a name pattern, such as "model.*"',
                found=first_texts(names, ", "),
                fix=f"pass {near[0]!r}" if near else "pass a pattern of one of these names",
            )
    tree.arrays = {name: x for name, x in tree.arrays.items() if name in meant}
    tree.leaves = {name: leaf for name, leaf in tree.leaves.items() if name in meant}


def _leave_rows_of_others(tree: Tree, manifest: Manifest, members: Members) -> None:
    """Remove per-rank arrays that another mesh or number of ranks saved."""
    here = None if members.mesh is None else axes_to_json(members.mesh)
    there = manifest.leaves.get("rng.mesh")
    is_other = None not in (here, there) and here != there
    for name in [name for name, x in tree.arrays.items() if isinstance(x, EachRanks)]:
        saved = manifest.arrays.get(name)
        if saved is not None and (is_other or saved.shape[:1] != (len(members.ranks),)):
            del tree.arrays[name]


def _values_of(tree: Tree, manifest: Manifest, folder: str, call: str) -> dict[str, Any]:
    """Return the saved values of leaves; raise if a NumPy number overflows."""
    values = {}
    for name, leaf in tree.leaves.items():
        value = manifest.leaves[name]
        try:
            values[name] = leaf.converted(value)
        except (OverflowError, ValueError) as error:
            raise CheckpointError(
                f"{call}: the value of {name} does not fit the state's type",
                where=folder,
                expected=f"{with_article(type(leaf.value).__name__)}, as in the state",
                found=f"{value!r}, in the checkpoint",
                fix=f"use a Python number for {name}",
            ) from error
    return values


def _match(tree: Tree, manifest: Manifest, missing: str, folder: str, call: str) -> None:
    """Raise if the checkpoint lacks names; with missing="keep", remove them from ``tree``."""
    if missing not in ("error", "keep"):
        raise ArgumentError(
            f"{call}: missing={missing!r} is not supported",
            expected='"error" or "keep"',
            fix='pass missing="error" or missing="keep"',
        )
    names = manifest.names
    has_none = not {*tree.arrays, *tree.leaves} & {*names}
    pairs = (tree.arrays, manifest.arrays, "a leaf"), (tree.leaves, manifest.leaves, "an array")
    for mine, saved, other in pairs:
        lacking = [name for name in mine if name not in saved]
        swapped = sorted({*lacking} & {*names})
        if swapped:
            raise CheckpointError(
                f"{call}: {swapped[0]} is {other} in the checkpoint",
                where=folder,
                fix=f"load it as {other}, or exclude it with only=",
            )
        if lacking and (missing == "error" or has_none):
            near = difflib.get_close_matches(lacking[0], names, 1)
            prefix = lacking[0].partition(".")[0]
            bare = [name.removeprefix(f"{prefix}.") for name in lacking]
            raise CheckpointError(
                f"{call}: the checkpoint lacks {len(lacking)} "
                f"name{'s' * (len(lacking) != 1)} of the state",
                where=folder,
                expected=first_texts(lacking, ", "),
                found=f"{near[0]!r}, the name most similar to {lacking[0]!r}"
                if near
                else first_texts(names, ", ") or "no names",
                fix=f"remove the prefix {prefix!r}: load dict(model.state_dict(keep_vars=True))"
                if {*bare} <= {*saved}
                else 'pass missing="keep" to leave them unchanged, or only= to select names',
            )
        for name in lacking:
            del mine[name]
