"""``device_put``: an array that is whole on every rank, or on one of them, laid out on a mesh.

From one rank the array goes in two steps. The root sends each element to one rank: what replicas
will hold is cut among them. Then the replicas exchange their parts. So each element leaves the root
once in the first step or, as the root's own part, in the second.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..arrays import Array, as_tensor
from ..collectives import titled
from ..collectives.carried_specs import mark_spec
from ..collectives.contexts import find_mode
from ..collectives.linear_function import LinearFunction
from ..collectives.objects import broadcast_object_list
from ..collectives.torch_private import NotSeen, call_function
from ..dtypes import dtype_name
from ..error_text import fields_among
from ..errors import ArgumentError, KindError, MeshdistError
from ..mesh.device_mesh import DeviceMesh
from ..mesh.spec import NamedSharding, PartitionSpec
from ..mesh.splits import Box, index_of, volume
from .changes import extended
from .libraries import in_library, library_of, mesh_device
from .rooted import checked_root
from .sharded_array import ShardedArray
from .shardings import checked_sharding, mesh_text, sharding_of, whole_sharding
from .shards import move

__all__ = ["device_put"]


def device_put(
    x: Array | ShardedArray | None,
    sharding: NamedSharding | PartitionSpec,
    root: int | None = None,
) -> ShardedArray:
    """The array ``x`` with a sharding: every rank holds its shard.

    Args:
        x: without ``root``: the whole, equal on every rank, of any library; or a sharded array,
            which is resharded. With ``root``: the whole there; on the other ranks it is not read.
        sharding: how it shall lie; a ``PartitionSpec`` alone takes the mesh in force.
        root: the one rank that holds the whole, as a rank of the world; the same on every rank.
            Then the call is collective over the mesh.

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
        AgreementError: ranks name different roots.

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
        return x.reshard(where)
    tensor = as_tensor(x, argument="x", verb="device_put", writable=False)
    library = library_of(x)
    if library == "torch":
        tensor = tensor.to(mesh_device(where.mesh))
    shape = tuple(tensor.shape)
    moved = move(tensor, whole_sharding(where.mesh), where, shape)
    return ShardedArray(in_library(moved, library), where, shape)


@dataclass(frozen=True)
class _Facts:
    """What the root tells the others of the array."""

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
    source = _each_once(lying, shape)
    device = mesh_device(mesh) if facts.library != "numpy" else torch.device("cpu")
    if tensor is None:
        tensor = torch.empty(0, dtype=facts.dtype, device=device)
        tensor.requires_grad_(facts.requires_grad)
    else:
        tensor = tensor.to(device).reshape(shape)
    sending = _Sending(mesh, source, shape, place)
    with NotSeen() if find_mode() is not None else nullcontext():
        own = mark_spec(call_function(_Scattered, tensor, sending), source.spec)
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


def _each_once(target: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """How the array lies where replicas at ``target`` have a part each instead of all of it.

    The longest dim is cut further along the axes over which ranks would hold equal values, so that
    what is missing is gathered along the minor axes of one dim.
    """
    placement = target.placement(shape)
    free = placement.free_axes
    dims = list(placement.dims)
    dim = max(range(len(shape)), key=lambda dim: shape[dim] / dims[dim].num_cells)
    dims[dim] = extended(dims[dim], free, tuple(placement.mesh_sizes[axis] for axis in free))
    return sharding_of(target.mesh, dims, unreduced=target.spec.unreduced)


class _Sending:
    """Who gets what from the root.

    Args:
        mesh: the ranks.
        source: how the array lies afterwards, each element on one rank.
        shape: of the whole.
        place: the root's, in mesh order.
    """

    def __init__(
        self, mesh: DeviceMesh, source: NamedSharding, shape: tuple[int, ...], place: int
    ) -> None:
        self.mesh = mesh
        self.source = source
        self.shape = shape
        self.place = place
        self.group = mesh.open_group()
        self.rank = mesh.get_rank()
        self.is_root = self.group.ranks[place] == self.rank
        self.title = f"device_put {source.spec!r} of {shape} from rank {self.group.ranks[place]}"

    @cached_property
    def boxes(self) -> list[Box | None]:
        """What each rank gets, in mesh order; None for a summand that is zero."""
        placement = self.source.placement(self.shape)
        found: list[Box | None] = []
        for rank in self.group.ranks:
            coordinate = self.mesh.layout.coordinate_of(rank) or ()
            has_values = placement.has_values(coordinate)
            found.append(placement.box(coordinate) if has_values else None)
        return found

    @cached_property
    def own_box(self) -> Box | None:
        """What this rank gets."""
        return self.boxes[self.group.ranks.index(self.rank)]

    @cached_property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard."""
        return self.source.shard_shape(self.shape, self.rank)

    @cached_property
    def from_root(self) -> list[int]:
        """How many elements this rank gets from each."""
        count = 0 if self.own_box is None else volume(self.own_box)
        return [count if place == self.place else 0 for place in range(len(self.group.ranks))]

    @cached_property
    def to_others(self) -> list[int]:
        """How many elements this rank gives to each."""
        if not self.is_root:
            return [0] * len(self.group.ranks)
        return [0 if box is None else volume(box) for box in self.boxes]


class _Scattered(LinearFunction):
    @staticmethod
    def forward(x: torch.Tensor, sending: _Sending) -> torch.Tensor:
        packed = x.new_empty(sum(sending.to_others))
        if sending.is_root:
            begin = 0
            for box, count in zip(sending.boxes, sending.to_others, strict=True):
                if box is not None:
                    part = x[index_of(box)]
                    packed[begin : begin + count].view(part.shape).copy_(part)
                    begin += count
        arrived = packed.new_empty(sum(sending.from_root))
        titled.all_to_all_single(
            arrived, packed, sending.from_root, sending.to_others, sending.group, sending.title
        )
        if sending.own_box is None:
            return arrived.new_zeros(sending.own_shape)
        return arrived.view(sending.own_shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return call_function(_Gathered, grad, *ctx.rest), None


class _Gathered(LinearFunction):
    @staticmethod
    def forward(grad: torch.Tensor, sending: _Sending) -> torch.Tensor:
        packed = grad.contiguous().view(-1)[: sum(sending.from_root)]
        arrived = packed.new_empty(sum(sending.to_others))
        titled.all_to_all_single(
            arrived,
            packed.contiguous(),
            sending.to_others,
            sending.from_root,
            sending.group,
            f"gradient of {sending.title}",
        )
        if not sending.is_root:
            return arrived
        whole = arrived.new_empty(sending.shape)
        begin = 0
        for box, count in zip(sending.boxes, sending.to_others, strict=True):
            if box is not None:
                part = whole[index_of(box)]
                part.copy_(arrived[begin : begin + count].view(part.shape))
                begin += count
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return call_function(_Scattered, grad, *ctx.rest), None
