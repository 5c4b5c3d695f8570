"""Take a state apart into arrays and leaves by name, with each array's sharding on the mesh.

A name is the nested dicts' keys, joined by dots. Arrays are torch's, NumPy's and CuPy's,
ShardedArrays and DTensors; everything else must be JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..annotations.axis_types import kinds_in, type_of
from ..annotations.tensor_specs import find_spec
from ..arrays import as_tensor, is_of
from ..collectives.objects import gather_from_all
from ..dtypes import dtype_name
from ..error_text import with_article
from ..errors import (
    ArgumentError,
    AxisTypeError,
    CheckpointError,
    DtypeError,
    KindError,
    MeshError,
)
from ..functional.equality_checks import is_compared
from ..mesh.current_mesh import find_current_mesh
from ..mesh.device_mesh import DeviceMesh
from ..mesh.partition_spec import PartitionSpec, sharding_axes
from ..mesh.placement import Box
from ..mesh.spec import NamedSharding, sized_by_shards
from ..sharding.descriptions import array_type
from ..sharding.dtensors import from_dtensor
from ..sharding.sharded_array import ShardedArray
from .manifest import DTYPES_IN_FILES, MOST_LEVELS, is_plain
from .participants import Members
from .pieces import whole_box

_SAMPLED = 64
"""The number of elements of a large array that ranks compare."""
_LARGE_BYTES = 16 << 10
"""Arrays of up to this size are compared entirely, which is cheaper than sampling."""
_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_KEPT_NAME = "__metadata__"
"""A name reserved by safetensors files."""


@dataclass(frozen=True)
class FirstRanks:
    """An array or leaf with the first rank's value saved for all ranks."""

    array: Any


@dataclass(frozen=True)
class EachRanks:
    """An array with every rank's value saved, as a row."""

    array: Any


@dataclass
class StateArray:
    """An array of a state: this rank's part and the sharding of the global array.

    Args:
        tensor: this rank's part, in the state's memory.
        sharding: on the participants' mesh; None if every rank has the global array.
        shape: of the global array; of this rank's part while ``sizes_are_known`` is False.
        saved_by: "all" if ranks with the same part have the same values, "first" to save the first
            rank's values, "each" if the part is this rank's row.
    """

    tensor: torch.Tensor
    sharding: NamedSharding | None
    shape: tuple[int, ...]
    sizes_are_known: bool = True
    saved_by: str = "all"
    row: int = 0

    @property
    def dtype(self) -> str:
        return dtype_name(self.tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """The bytes of the global array."""
        return math.prod(self.shape) * self.tensor.dtype.itemsize

    def box(self, rank: int) -> Box:
        """Return the part of the global array that ``rank`` holds."""
        if self.sharding is not None:
            return self.sharding.box(rank, self.shape)
        whole = whole_box(self.shape)
        return whole if self.saved_by != "each" else ((self.row, self.row + 1), *whole[1:])

    def fact(self) -> str:
        """Return the dtype, sizes and spec as a text, which must be equal on all ranks."""
        if self.sharding is None:
            return f"{self.dtype}{list(self.shape)}"
        if not self.sizes_are_known:
            return f"{self.dtype} of {self.tensor.dim()} dims, {self.sharding.spec!r}"
        text = array_type(self.dtype, self.shape, self.sharding)
        sizes = self.sharding.shard_sizes
        return text + (f", shard_sizes={sizes}" if sizes else "")


@dataclass
class Leaf:
    """A JSON value of a state, with the dict and key that hold it."""

    value: Any
    owner: Any
    key: Any
    is_first_ranks: bool = False

    @property
    def json(self) -> Any:
        """The value in JSON types."""
        return self.value.item() if isinstance(self.value, np.generic) else self.value

    def converted(self, value: Any) -> Any:
        """Return a loaded value in the state value's type."""
        if isinstance(self.value, tuple) and isinstance(value, list):
            value = tuple(value)
        elif isinstance(self.value, np.generic) and isinstance(value, (int, float)):
            value = type(self.value)(value)
        return value


@dataclass
class Tree:
    """A state taken apart into arrays and leaves, by name."""

    arrays: dict[str, Any]
    leaves: dict[str, Leaf]
    shape: dict[str, Any]
    """Nested dicts of the state's keys; a leaf is 0, an array 1."""

    @classmethod
    def of(cls, state: Any, call: str) -> Tree:
        """Take ``state`` apart; raise if any part cannot be saved."""
        tree = cls({}, {}, {})
        tree._add(state, (), tree.shape, call)
        return cls(dict(sorted(tree.arrays.items())), dict(sorted(tree.leaves.items())), tree.shape)

    def _add(self, state: Any, path: tuple[str, ...], shape: dict[str, Any], call: str) -> None:
        if not isinstance(state, MutableMapping):
            raise _no_state(state, path, call)
        if len(path) == MOST_LEVELS:
            raise KindError(
                f"{call}: dicts of the state are nested too deeply, or contain each other",
                where=".".join(path[:3]),
                expected=f"at most {MOST_LEVELS} levels of dicts",
                fix="remove the reference to an enclosing dict",
            )
        for key, given in state.items():
            if isinstance(key, bool) or not isinstance(key, (str, int)) or not _is_utf8(str(key)):
                raise _wrong(call, (*path, repr(key)), "a key", "a str or an int", key)
            here = (*path, str(key))
            name = ".".join(here)
            if name in self.arrays or name in self.leaves or str(key) in shape:
                raise CheckpointError(
                    f"{call}: two leaves of the state have the name {name!r}",
                    expected="different names (the keys joined by dots)",
                    fix="rename one of the keys",
                )
            if isinstance(given, MutableMapping):
                shape[str(key)] = {}
                self._add(given, here, shape[str(key)], call)
            elif is_array(given):
                if name == _KEPT_NAME:
                    raise _wrong(
                        call,
                        here,
                        "the name of an array",
                        "a name that safetensors does not reserve",
                        name,
                    )
                self.arrays[name] = given
                shape[str(key)] = 1
            else:
                is_first_ranks = isinstance(given, FirstRanks)
                value = _checked_leaf(given.array if is_first_ranks else given, here, call)
                self.leaves[name] = Leaf(value, state, key, is_first_ranks)
                shape[str(key)] = 0


def is_array(given: Any) -> bool:
    if isinstance(given, FirstRanks):
        return is_array(given.array)
    kinds = (torch.Tensor, np.ndarray, ShardedArray, EachRanks)
    return isinstance(given, kinds) or is_of("cupy", given, "ndarray")


def axes_to_json(mesh: DeviceMesh) -> list[list[Any]]:
    """Return a mesh's axis names and sizes for JSON."""
    return [[name, size] for name, size in mesh.axis_sizes.items()]


def find_mesh(arrays: Iterable[Any]) -> DeviceMesh | None:
    """Return the current mesh, else the first ShardedArray's or largest DTensor's; or None."""
    mesh = find_current_mesh()
    if mesh is not None:
        return mesh
    arrays = list(arrays)
    mesh = next((x.mesh.root for x in arrays if isinstance(x, ShardedArray)), None)
    meshes = [x.device_mesh for x in arrays if isinstance(x, DTensor)]
    if mesh is None and meshes:
        mesh = DeviceMesh.from_torch(max(meshes, key=lambda each: each.size()))
    return mesh


def entries_of(
    arrays: Mapping[str, Any], members: Members, *, writable: bool = False
) -> dict[str, StateArray]:
    """Return entries of arrays, which a load fills if ``writable``; raise if invalid."""
    return {name: _entry(name, x, members, writable=writable) for name, x in arrays.items()}


def facts_of(entries: Mapping[str, StateArray]) -> dict[str, str]:
    return {name: entry.fact() for name, entry in entries.items()}


def values_of(entries: Mapping[str, StateArray], members: Members) -> dict[str, torch.Tensor]:
    """Return arrays, or samples, that must be equal on all ranks."""
    # On simulated ranks and at DETAIL all elements are compared.
    is_thorough = members.world is not None and is_compared(members.world)
    return {
        name: entry.tensor if is_thorough else _sampled(entry.tensor)
        for name, entry in entries.items()
        if entry.sharding is None and entry.saved_by == "all"
    }


def find_sizes(entries: Mapping[str, StateArray], members: Members) -> None:
    """Set the global shapes of arrays whose local sizes alone are known; collective."""
    # One message along each set of sharding axes exchanges the sizes of the shards.
    by_axes: dict[tuple[str, ...], list[StateArray]] = {}
    for entry in entries.values():
        if not entry.sizes_are_known and entry.sharding is not None:
            cut = sharding_axes(entry.sharding.spec)
            names = entry.sharding.layout.names or ()
            by_axes.setdefault(tuple(axis for axis in names if axis in cut), []).append(entry)
    for axes in sorted(by_axes):
        assert members.mesh is not None
        _set_global_shapes(by_axes[axes], members.mesh, axes)


def _set_global_shapes(
    entries: Sequence[StateArray], mesh: DeviceMesh, axes: tuple[str, ...]
) -> None:
    part = mesh[axes]
    group = part.open_group()
    of_all = gather_from_all([tuple(entry.tensor.shape) for entry in entries], group)
    for entry, *shapes in zip(entries, *of_all, strict=True):
        assert entry.sharding is not None
        spec, by_rank = entry.sharding.spec, dict(zip(group.ranks, shapes, strict=True))
        found, entry.shape = sized_by_shards(NamedSharding(part, spec), by_rank)
        entry.sharding = NamedSharding(mesh, spec, shard_sizes=found.shard_sizes)
        entry.sizes_are_known = True


def facts_of_global_arrays(entries: Mapping[str, StateArray], members: Members) -> dict[str, str]:
    """Return a text per array, equal on all ranks; raise if a part mismatches its spec."""
    for name, entry in entries.items():
        if entry.sharding is not None:
            expected_shape = entry.sharding.shard_shape(entry.shape, members.rank)
            if expected_shape != tuple(entry.tensor.shape):
                raise CheckpointError(
                    f"{members.call}: the shards of {name} do not form a global array",
                    expected=f"shape {expected_shape}, the shard of {entry.shape} by "
                    f"{entry.sharding.spec!r}",
                    found=f"shape {tuple(entry.tensor.shape)}",
                    fix="annotate it with its sharding: md.annotate(x, spec)",
                )
    return facts_of(entries)


def _mesh_argument(call: str) -> str:
    """Return how to pass a mesh to ``call``."""
    checkpointer = "Checkpointer(root, mesh=mesh)"
    if call.startswith("Checkpointer"):
        return f"create {checkpointer}"
    return f"call {call}(..., mesh=mesh), or create {checkpointer}"


def _entry(name: str, x: Any, members: Members, *, writable: bool) -> StateArray:
    saved_by = {FirstRanks: "first", EachRanks: "each"}.get(type(x), "all")
    if saved_by != "all":
        x = x.array
    if isinstance(x, DTensor):
        detached: Any = x.detach()
        x = from_dtensor(detached, _mesh_of(x, members))
    if isinstance(x, ShardedArray):
        sharding = _on_mesh_of(members, x.sharding, name)
        if sharding.spec.unreduced:
            raise _partial_sums(name, repr(sharding.spec), members.call)
        tensor = as_tensor(x.local, argument=name, operation=members.call, writable=writable)
        entry = StateArray(tensor.detach(), sharding, x.shape)
    else:
        tensor = as_tensor(x, argument=name, operation=members.call, writable=writable)
        spec, types = None, dict[str, str]()
        if isinstance(x, torch.Tensor):
            spec, types = find_spec(x), dict(kinds_in(type_of(x)))
        if "U" in types.values() or (spec is not None and spec.unreduced):
            raise _partial_sums(name, str(types), members.call)
        if "V" in types.values() and spec is None:
            raise AxisTypeError(
                f"{members.call}: {name} is annotated as varying, but has no spec",
                expected="a spec for each array that varies over an axis",
                found=str({axis: kind for axis, kind in types.items() if kind == "V"}),
                fix="annotate it with its sharding, md.annotate(x, spec), or reduce it first",
            )
        entry = StateArray(tensor.detach(), None, tuple(tensor.shape), saved_by=saved_by)
        if saved_by == "each":
            entry.tensor = entry.tensor[None]
            entry.shape = (len(members.ranks), *entry.shape)
            entry.row = members.group_rank
        if spec is not None and sharding_axes(spec):
            if members.mesh is None:
                raise MeshError(
                    f"{members.call}: {name} is sharded by {spec!r}, but there is no mesh",
                    expected="a mesh that has these axes",
                    fix=f"{_mesh_argument(members.call)}, or call it inside `with mesh:`",
                )
            entry.sharding = NamedSharding(members.mesh, PartitionSpec(*spec.partitions))
            entry.sizes_are_known = False
    if tensor.is_meta:
        raise KindError(
            f"{members.call}: {name} has no values because it is on the meta device",
            fix="call model.to_empty(device=...) first",
        )
    if (
        tensor.numel()
        and writable
        and any(
            k > 1 and not stride for k, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    ):
        raise ArgumentError(
            f"{members.call} cannot load into {name}: several elements share memory",
            found=f"shape {tuple(tensor.shape)}, stride {tensor.stride()}",
            fix="pass x.clone() or x.contiguous()",
        )
    if dtype_name(tensor.dtype) not in DTYPES_IN_FILES:
        raise DtypeError(
            f"{members.call}: safetensors files do not support {dtype_name(tensor.dtype)}",
            where=name,
            expected=", ".join(DTYPES_IN_FILES),
            fix="pass torch.view_as_real(x)"
            if tensor.dtype.is_complex
            else "convert it first, for example x.to(torch.float32)",
        )
    return entry


def _mesh_of(x: DTensor, members: Members) -> DeviceMesh | None:
    """Return the participants' mesh, or a submesh, with a DTensor's ranks; or None."""
    mesh, theirs = members.mesh, x.device_mesh
    names = theirs.mesh_dim_names
    if mesh is not None and names and set(names) <= set(mesh.axis_names):
        mesh = mesh[tuple(names)]
    if mesh is None or mesh.mesh.tolist() != theirs.mesh.tolist():
        return None
    return mesh


def _on_mesh_of(members: Members, sharding: NamedSharding, name: str) -> NamedSharding:
    """Return ``sharding``, on the participants' mesh if its own lacks ranks; raise if none fits."""
    own, mesh = sharding.mesh, members.mesh
    if own is mesh or set(own.layout.ranks().flat) == set(members.ranks):
        return sharding
    assert mesh is not None  # the ShardedArray's mesh, if no other is given
    names = own.axis_names
    if set(names) <= set(mesh.axis_names) and mesh[names].layout == own.layout:
        return NamedSharding(mesh, sharding.spec, shard_sizes=sharding.shard_sizes)
    raise MeshError(
        f"{members.call}: {name} is on different ranks than those that take part",
        expected=f"a mesh of {len(members.ranks)} ranks, or axes of ({mesh.layout.axis_text()})",
        found=f"({own.layout.axis_text()}) of {own.size()} ranks",
        fix="pass the mesh that has all ranks: mesh=mesh",
    )


def _partial_sums(name: str, found: str, call: str) -> AxisTypeError:
    return AxisTypeError(
        f"{call}: {name} is unreduced (each rank holds a partial sum)",
        expected="replicated or sharded arrays",
        found=found,
        fix="reduce it first: x.reshard(P()), or lax.psum",
    )


def _sampled(x: torch.Tensor) -> torch.Tensor:
    """Return some of a large tensor's elements, else all."""
    if x.nbytes <= _LARGE_BYTES:
        return x
    # As signed integers, since torch can take elements of these.
    bits = x.resolve_conj().resolve_neg().view(_NUMBERS[x.dtype.itemsize])
    indices = torch.arange(_SAMPLED, device=x.device) * (x.numel() - 1) // (_SAMPLED - 1)
    return bits.take(indices).view(x.dtype)


def _checked_leaf(given: Any, path: tuple[str, ...], call: str) -> Any:
    """Return a leaf's value; raise if JSON cannot hold it."""
    value = given.item() if isinstance(given, np.generic) else given
    try:
        json.dumps(value)
        if not is_plain(value, MOST_LEVELS - len(path)):
            raise TypeError("JSON would make texts of other keys; or it is too deep")
    except (TypeError, ValueError, RecursionError):
        if isinstance(given, nn.Module) or hasattr(given, "state_dict"):
            raise _no_state(given, path, call) from None
        expected = "an array, or a JSON value: None, bool, number, str, list or dict"
        raise _wrong(call, path, "a leaf", expected, given) from None
    return given


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _wrong(call: str, path: Sequence[str], what: str, expected: str, given: Any) -> KindError:
    return KindError(
        f"{call} does not support {what} of the state",
        where=".".join(path),
        expected=expected,
        found=f"{str(given)[:80]!r}, {with_article(type(given).__name__)}",
        fix="save arrays in dicts, and everything else as numbers and strings: nothing is pickled",
    )


def _no_state(given: Any, path: Sequence[str], call: str) -> KindError:
    if isinstance(given, nn.Module):
        fix = "pass md.checkpoint.State(model=model)"
    elif hasattr(given, "state_dict"):
        fix = "pass md.checkpoint.State(name=object), or the object's state_dict()"
    else:
        fix = 'pass {"x": x}'
    return KindError(
        f"{call} requires a dict of arrays and JSON values, or a State",
        where=".".join(path) or None,
        found=with_article(type(given).__name__),
        fix=fix,
    )
