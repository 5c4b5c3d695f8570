"""Arrays that are whole: on one rank, the root, or on every rank; gathered there, or laid out.

Between the root and the others each element travels once. ``device_put`` takes two steps where
replicas hold the array: what they will hold is cut among them, and they exchange their parts.
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

from ..arguments import get_whole_number
from ..arrays import Array, as_tensor, like as as_array_of
from ..collectives.objects import broadcast_object_list
from ..collectives.torch_private import HiddenFromModes, call_function
from ..dtypes import dtype_name
from ..error_text import fields_among, ranks_text
from ..errors import (
    ArgumentError,
    DtypeError,
    GradientError,
    KindError,
    MeshdistError,
    NotInGroupError,
)
from ..functional.linear_function import LinearFunction
from ..functional.value_checks import check_replicas
from ..mesh.definition import select_device
from ..mesh.device_mesh import DeviceMesh
from ..mesh.partition_spec import P, PartitionSpec
from ..mesh.placement import Placement, place_along, volume
from ..mesh.spec import NamedSharding, sharding_of
from ..typed_contexts.carried_specs import mark_spec
from ..typed_contexts.context import find_context
from .carrying import Carrier
from .change_steps import group_at, relative
from .requests import move_title
from .resharding import Move, move
from .sharded_array import ShardedArray
from .shardings import checked_sharding, cut_further, mesh_text
from .steps import Exchange

__all__ = ["device_put"]


def checked_root(root: Any, verb: str, mesh: DeviceMesh) -> int:
    """Return the root as a whole number, or raise unless it is a rank of the mesh."""
    rank = get_whole_number(root, f"{verb}: root", expected="a rank")
    if mesh.layout.coordinate_of(rank) is None:
        raise NotInGroupError(
            f"{verb}: the mesh does not hold the root, rank {rank}",
            where=f"rank {mesh.get_rank()}, mesh ({mesh.layout.axis_text()})",
            expected=f"one of {ranks_text(mesh.layout.ranks().ravel().tolist())}",
        )
    return rank


class RootedGather:
    """A callable that gathers a sharded array on the root rank alone."""

    # Of ranks that hold equal parts those with the root's coordinates along the free axes send, so
    # that the group is over the axes that cut dims. Summands are added first, scattered over the
    # axes along which they lie.
    def __init__(self, source: NamedSharding, shape: tuple[int, ...], root: int) -> None:
        mesh = source.mesh
        self._title = f"{move_title(source, NamedSharding(mesh, P()), shape)} on rank {root}"
        self._sum = None
        if source.spec.unreduced:
            source, summands = _scattered(source, shape), source
            self._sum = Move(summands, source, shape, verb="unshard")
        placement = source.placement(shape)
        there = mesh.layout.coordinate_of(root) or ()
        here = mesh.get_coordinate() or ()
        self._is_root = here == there
        self._carrier = None
        if all(here[axis] == there[axis] for axis in placement.free_axes):
            steps = (_exchanges(placement, here, there)[0],) if placement.cut_axes else ()
            self._carrier = Carrier(steps, placement.local_shape(here), mesh, self._title)

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the whole array on the root, in new memory; None on all other ranks."""
        if x.requires_grad and torch.is_grad_enabled():
            raise GradientError(
                "unshard with a root has no gradient",
                where=self._title,
                expected="a tensor that needs none: ranks without a result have no backward",
                fix="pass local.detach(), or leave root out: every rank then holds the whole",
            )
        if self._sum is not None:
            x = self._sum(x)
        if self._carrier is None:
            return None
        found = self._carrier(x)
        return found if self._is_root else None


def _scattered(source: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Return ``source`` with its unreduced axes cutting the dim that has the largest cells."""
    if not shape:  # nothing that could be cut
        return NamedSharding(source.mesh, P())
    axes = source.layout.axis_indices(tuple(source.spec.unreduced))
    return cut_further(source, shape, tuple(sorted(axes)))


def scatter(
    x: torch.Tensor, mesh: DeviceMesh, placement: Placement, root: int, title: str
) -> torch.Tensor:
    """Return this rank's part of an array that the root holds, differentiably; collective.

    Args:
        x: the whole, on the root; elsewhere a tensor without elements, of its dtype and device.
        placement: tells each element's rank, so that no axis is free (replicates). Where an axis is
            unreduced, coordinate 0 gets the values, and the others zeros.
        title: the call's name in reports, equal on all ranks.
    """
    here = mesh.get_coordinate() or ()
    gather, send = _exchanges(placement, here, mesh.layout.coordinate_of(root) or ())
    carriers = (
        Carrier((send,), tuple(x.shape), mesh, title),
        Carrier((gather,), send.shape, mesh, f"gradient of {title}"),
    )
    return call_function(_Rooted, x, *carriers)


class _Rooted(LinearFunction):
    @staticmethod
    def forward(x: torch.Tensor, carrier: Carrier, transpose: Carrier) -> torch.Tensor:
        return carrier(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return call_function(_Rooted, grad, *reversed(ctx.rest)), None, None


def _exchanges(
    placement: Placement, here: tuple[int, ...], there: tuple[int, ...]
) -> tuple[Exchange, Exchange]:
    """Return two steps of the rank at ``here``: gather to the root at ``there``; the transpose."""
    # The group has the ranks with the root's coordinates along the free axes. Ranks other than the
    # root gather, and scatter, an array without elements.
    axes = tuple(sorted((*placement.cut_axes, *placement.unreduced)))
    group = group_at(axes, placement.mesh_sizes, here)
    mine, root = group[2], place_along(axes, placement.mesh_sizes, there)
    boxes = [
        placement.box(at) if placement.has_values(at) else None
        for at in _members(placement, axes, there)
    ]
    parts = tuple((at, box) for at, box in enumerate(boxes) if box is not None and volume(box))
    shape, own = placement.local_shape(here), placement.box(here)
    local = relative(own, own)
    is_covered = boxes[mine] is not None
    if mine != root:
        part = ((root, local),) if any(place == mine for place, _ in parts) else ()
        return (
            Exchange((0,), *group, part, (), None),
            Exchange(shape, *group, (), part, None, is_covered=is_covered),
        )
    others = tuple(part for part in parts if part[0] != root)
    is_kept = len(others) < len(parts)
    return (
        Exchange(placement.shape, *group, (), others, (local, own) if is_kept else None),
        Exchange(
            shape, *group, others, (), (own, local) if is_kept else None, is_covered=is_covered
        ),
    )


def _members(
    placement: Placement, axes: tuple[int, ...], there: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Return all coordinates that equal ``there`` except along ``axes``, row-major."""
    found = [there]
    for axis in axes:
        found = [
            (*at[:axis], number, *at[axis + 1 :])
            for at in found
            for number in range(placement.mesh_sizes[axis])
        ]
    return found


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

    Gradient: without a root the shards' gradients are gathered on every rank; with a root, there,
        and every rank takes part in the backward.

    Cost: nothing is sent without a root. With a root, each element leaves it once; ranks that hold
        equal parts send these to each other.

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
    moved = move(tensor, NamedSharding(where.mesh, P()), where, shape)
    return ShardedArray(in_library(moved, library), where, shape)


@dataclass(frozen=True)
class _Facts:
    """The facts of the root's array that the other ranks receive: shape, dtype, library."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    library: str
    requires_grad: bool


def _put_from_root(x: Any, target: NamedSharding, root: object) -> ShardedArray:
    mesh = target.mesh
    rank = checked_root(root, "device_put", mesh)
    place = mesh.open_group().ranks.index(rank)
    tensor, facts = _share_facts(x, target, place, is_root=mesh.get_rank() == rank)
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


def _share_facts(
    x: Any, target: NamedSharding, place: int, *, is_root: bool
) -> tuple[torch.Tensor | None, _Facts]:
    """Return (root's tensor, else None; facts of it); raise the root's errors on all ranks."""
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
    """Return the root's array as a tensor, or raise where it cannot have the sharding."""
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
    """The library, dtype and device of new arrays."""

    library: str  # "torch", "numpy" or "cupy"
    dtype: Any  # None leaves it to the library
    device: torch.device  # of tensors alone: CuPy's arrays lie on CuPy's current device

    @classmethod
    def of(cls, call: str, mesh: DeviceMesh, dtype: Any, device: Any, like: Any) -> Making:
        """Return the checked library, dtype and device of ``call``, by ``like`` if None."""
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
        """The module of the library, imported."""
        return import_module(self.library)

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments dtype and device for the library's constructors."""
        made = {} if self.dtype is None else {"dtype": self.dtype}
        return {**made, "device": self.device} if self.library == "torch" else made


def library_of(array: Array) -> str:
    """Return the library of an array: "torch", "numpy" or "cupy"."""
    if isinstance(array, torch.Tensor):
        return "torch"
    return "numpy" if isinstance(array, (np.ndarray, np.generic)) else "cupy"


def in_library(tensor: torch.Tensor, library: str) -> Array:
    """Return ``tensor`` as an array of ``library``, in the same memory."""
    if library == "torch":
        return tensor
    if library == "numpy":
        return as_array_of(tensor, np.empty(0))
    import_module(library)
    return as_array_of(tensor, sys.modules[library].empty(0))


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank's tensors on ``mesh``."""
    return select_device(mesh.device_type, mesh.world) or torch.device(mesh.device_type)


def _dtype_in(library: str, dtype: Any, call: str) -> Any:
    """Return ``dtype``, of any library or a name, as a dtype of ``library``; or raise."""
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
