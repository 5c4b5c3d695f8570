"""``device_put``: an array that is whole on every rank, or on one of them, laid out on a mesh.

From one rank the array goes in two steps. The root sends each element to one rank: what replicas
will hold is cut among them. Then the replicas exchange their parts. So each element leaves the root
once in the first step or, as the root's own part, in the second.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from ..arrays import Array, as_tensor, like as as_array_of
from ..collectives.objects import broadcast_object_list
from ..collectives.torch_private import HiddenFromModes
from ..dtypes import dtype_name
from ..error_text import fields_among
from ..errors import ArgumentError, DtypeError, KindError, MeshdistError
from ..functional.value_checks import check_replicas
from ..mesh.definition import select_device
from ..mesh.device_mesh import DeviceMesh
from ..mesh.spec import NamedSharding, PartitionSpec
from ..typed_contexts.annotations import mark_spec
from ..typed_contexts.context import find_context
from .rooted import checked_root, scatter
from .sharded_array import ShardedArray
from .shardings import checked_sharding, cut_further, mesh_text, sharding_of, whole_sharding
from .shards import move

__all__ = ["Making", "device_put", "in_library", "library_of", "mesh_device"]


def device_put(
    x: Array | ShardedArray | None,
    sharding: NamedSharding | PartitionSpec,
    root: int | None = None,
    *,
    check: bool | None = None,
) -> ShardedArray:
    """The array ``x`` with a sharding: every rank holds its shard.

    Args:
        x: without ``root``: the whole, equal on every rank, of any library; or a sharded array,
            which is resharded. With ``root``: the whole there; on the other ranks it is not read.
        sharding: how it shall lie; a ``PartitionSpec`` alone takes the mesh in force.
        root: the one rank that holds the whole, as a rank of the world; the same on every rank.
            Then the call is collective over the mesh.
        check: whether all ranks compare ``x``, where there is no root; None as in ``reshard``.

    Returns: an array in new memory, of the library of ``x``; tensors lie on the mesh's device.
        Along axes over which it is unreduced coordinate 0 holds the values, and all others zeros.

    Gradient: without a root the shards' gradients are gathered on every rank; with one, on the
        root, and every rank takes part in the backward.

    Cost: nothing is sent without a root. With one, each element leaves it once; ranks that hold
        equal parts send these to one another.

    Raises:
        KindError: ``x`` is no array, or None on the root; in the latter case on every rank.
        NotInGroupError: this rank, or the root, is not in the mesh.
        ShapeError: the sharding does not fit the shape.
        AgreementError: ranks name different roots. UnequalError: a comparison finds a difference.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     whole = torch.arange(5) if md.get_rank() == 0 else None
        ...     return md.device_put(whole, md.NamedSharding(mesh, md.P("dp")), root=0).local
        >>> md.simulate(program, 2)
        [tensor([0, 1, 2]), tensor([3, 4])]
    """
    where = checked_sharding(sharding, "device_put")
    if root is not None:
        return _put_from_root(x, where, root)
    if isinstance(x, ShardedArray):
        local = as_tensor(x.local, argument="x", verb="device_put", writable=False)
        check_replicas(local, x.mesh, x.sharding.replicated_axes, f"put {x.shape}", bool(check))
        return x.reshard(where)
    tensor = as_tensor(x, argument="x", verb="device_put", writable=False)
    library = library_of(x)
    if library == "torch":
        tensor = tensor.to(mesh_device(where.mesh))
    shape = tuple(tensor.shape)
    where.placement(shape)  # raises before anything is sent
    check_replicas(
        tensor, where.mesh, where.mesh.axis_names, f"device_put as {where.spec!r}", check
    )
    moved = move(tensor, whole_sharding(where.mesh), where, shape)
    return ShardedArray(in_library(moved, library), where, shape)


@dataclass(frozen=True)
class _Facts:
    """The facts of the array that the root sends to the others."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    library: str
    requires_grad: bool


def _put_from_root(x: Any, target: NamedSharding, root: object) -> ShardedArray:
    mesh = target.mesh
    rank = checked_root(root, "device_put", mesh)
    place = mesh.open_group().ranks.index(rank)
    tensor, facts = _learn(x, target, place, is_root=mesh.get_rank() == rank)
    # A scalar has no dim to be cut among replicas.
    shape = facts.shape or (1,)
    wide = sharding_of(mesh, (), unreduced=target.spec.unreduced, reduced=target.spec.reduced)
    lying = target if facts.shape else wide
    free = lying.placement(shape).free_axes  # what replicas will hold is cut among them
    source = cut_further(lying, shape, free)
    device = mesh_device(mesh) if facts.library != "numpy" else torch.device("cpu")
    if tensor is None:
        tensor = torch.empty(0, dtype=facts.dtype, device=device)
        tensor.requires_grad_(facts.requires_grad)
    else:
        tensor = tensor.to(device).reshape(shape)
    title = f"device_put {source.spec!r} of {shape} from rank {rank}"
    with HiddenFromModes() if find_context() is not None else nullcontext():
        own = mark_spec(scatter(tensor, mesh, source.placement(shape), rank, title), source.spec)
    local = move(own, source, lying, shape)
    if not facts.shape:
        local = local.reshape(())
    return ShardedArray(in_library(local, facts.library), target, facts.shape)


def _learn(
    x: Any, target: NamedSharding, place: int, *, is_root: bool
) -> tuple[torch.Tensor | None, _Facts]:
    """The root's tensor, there, and what it is, on every rank; all raise what the root refuses."""
    told: list[Any] = [None]
    tensor = None
    if is_root:
        try:
            tensor = _checked_whole(x, target)
            told = [
                {
                    "shape": list(tensor.shape),
                    "dtype": dtype_name(tensor.dtype),
                    "library": library_of(x),
                    "requires_grad": tensor.requires_grad,
                }
            ]
        except MeshdistError as error:
            fields = {name: getattr(error, name) for name in ("where", "expected", "found", "fix")}
            told = [{"error": type(error).__name__, "summary": error.summary, **fields}]
        told = [json.dumps(told[0])]
    broadcast_object_list(told, group=target.mesh.open_group(), group_src=place)
    facts = json.loads(told[0])
    if "error" in facts:
        kind = KindError if facts["error"] == "KindError" else ArgumentError
        raise kind(facts["summary"], **fields_among(facts))
    return tensor, _Facts(
        tuple(facts["shape"]),
        getattr(torch, facts["dtype"]),
        facts["library"],
        facts["requires_grad"],
    )


def _checked_whole(x: Any, target: NamedSharding) -> torch.Tensor:
    """The root's tensor, if it can lie so."""
    where = f"the root, {mesh_text(target.mesh)}"
    if x is None or isinstance(x, ShardedArray):
        raise KindError(
            "device_put: the root holds no whole array",
            where=where,
            expected="the whole, as an array, on the root",
            found="None" if x is None else "a ShardedArray",
            fix="pass it there, or name the rank that has it: root=..."
            if x is None
            else "leave root= out: a sharded array lies on all ranks",
        )
    tensor = as_tensor(x, argument="x", verb="device_put", writable=False)
    target.placement(tuple(tensor.shape))
    if target.spec.unreduced and tensor.dtype == torch.bool:
        raise ArgumentError(
            "device_put: bool values have no summands", where=where, found=repr(target.spec)
        )
    return tensor


@dataclass(frozen=True)
class Making:
    """The library, dtype and device of new arrays.

    Args:
        library: "torch", "numpy" or "cupy".
        dtype: of that library; None leaves it to the library.
        device: of torch's; where CuPy's arrays lie it is their current device.
    """

    library: str
    dtype: Any
    device: torch.device

    @classmethod
    def of(cls, call: str, mesh: DeviceMesh, dtype: Any, device: Any, like: Any) -> Making:
        """Choose and check what a call asks for; ``like`` has what is not said otherwise."""
        if like is not None:
            as_tensor(like, argument="like", verb=call, writable=False)
            library = library_of(like)
            dtype = like.dtype if dtype is None else dtype
        else:
            is_numpys = isinstance(dtype, (np.dtype, type)) and dtype not in (bool, int, float)
            library = "numpy" if is_numpys and not isinstance(dtype, torch.dtype) else "torch"
        if library != "torch" and device is not None:
            raise ArgumentError(
                f"{call}: device= is for torch tensors",
                found=f"device={device!r}, and arrays of {library}",
            )
        if library == "torch" and device is None and isinstance(like, torch.Tensor):
            device = like.device
        place = mesh_device(mesh) if device is None else torch.device(device)
        return cls(library, _dtype_in(library, dtype, call), place)

    @property
    def module(self) -> Any:
        """The library's module."""
        return import_module(self.library)

    def options(self) -> dict[str, Any]:
        """The arguments of the library's makers."""
        made = {} if self.dtype is None else {"dtype": self.dtype}
        return {**made, "device": self.device} if self.library == "torch" else made


def library_of(array: Array) -> str:
    """The library of an array: "torch", "numpy" or "cupy"."""
    if isinstance(array, torch.Tensor):
        return "torch"
    return "numpy" if isinstance(array, (np.ndarray, np.generic)) else "cupy"


def in_library(tensor: torch.Tensor, library: str) -> Array:
    """A tensor as an array of a library, which shares its memory."""
    if library == "torch":
        return tensor
    if library == "numpy":
        return as_array_of(tensor, np.empty(0))
    import_module(library)
    return as_array_of(tensor, sys.modules[library].empty(0))


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device on which this rank's tensors lie."""
    return select_device(mesh.device_type, mesh.world) or torch.device(mesh.device_type)


def _dtype_in(library: str, dtype: Any, call: str) -> Any:
    """A dtype of any library, or its name, as ``library`` has it."""
    if dtype is None or (library == "torch" and isinstance(dtype, torch.dtype)):
        return dtype
    if isinstance(dtype, torch.dtype):
        name = dtype_name(dtype)
    else:
        try:
            name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        except TypeError:
            raise KindError(f"{call} takes no {dtype!r} as a dtype") from None
    if library == "torch":
        found = getattr(torch, name, None)
        if not isinstance(found, torch.dtype):
            raise DtypeError(f"{call}: torch has no dtype {name!r}")
        return found
    try:
        return np.dtype(name)
    except TypeError:
        raise DtypeError(
            f"{call}: {library} has no dtype {name!r}", fix="make torch tensors: leave like= out"
        ) from None
