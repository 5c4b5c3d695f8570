"""Plans carried out on tensors, with derivatives: the backward is the plan's transpose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange

from ..arrays import describe
from ..collectives.torch_private import HiddenFromModes, call_function
from ..errors import ArgumentError, DtypeError
from ..functional.axis_types import (
    ATTRIBUTE,
    REDUCED_BY_OWNER,
    SPEC_ATTRIBUTE,
    kinds_in,
    with_kinds,
)
from ..functional.linear_function import LinearFunction
from ..functional.value_checks import check_replicas
from ..mesh.device_mesh import DeviceMesh
from ..mesh.partition_spec import PartitionSpec, axes_of
from ..mesh.placement import Placement, split_dim
from ..mesh.spec import NamedSharding
from ..typed_contexts.annotations import find_spec, mark_spec
from ..typed_contexts.context import ContextMode, find_context
from ..typed_contexts.refusals import foreign_mesh, refused_sharding, unmarked_shard
from .carrying import Carrier
from .plans import Plan, make_plan
from .requests import ReshardRequest

__all__ = [
    "Resharding",
    "Transfer",
    "get_transfer",
    "kinds_of",
    "typed_operand",
    "typed_result",
]

_PASSES = {"V": "IRV", "R": "IR", "U": "UV", "I": "I"}
"""By the kind that a sharding says, the kinds of values that are cast to it, or taken for it: what
each rank has is its summand where the sharding says so, as for ``lax.psum``."""


def kinds_of(sharding: NamedSharding) -> Mapping[str, str]:
    """The kind of a value over each axis of a sharding's mesh.

    Example:
        >>> from ..mesh.layout import Layout
        >>> from ..mesh.spec import P
        >>> mesh = Layout.from_shape((2, 2, 2), ("dp", "tp", "cp"))
        >>> dict(kinds_of(NamedSharding(mesh, P("dp", unreduced={"cp"}))))
        {'dp': 'V', 'tp': 'I', 'cp': 'U'}
    """
    spec = sharding.spec
    kinds = dict.fromkeys(sharding.layout.names or (), "V")
    kinds.update(dict.fromkeys(sharding.replicated_axes, "I"))
    kinds.update(dict.fromkeys(spec.unreduced, "U"))
    kinds.update(dict.fromkeys(spec.reduced, "R"))
    return kinds


def typed_operand(
    mode: ContextMode, verb: str, x: torch.Tensor, source: NamedSharding, mesh: DeviceMesh
) -> torch.Tensor:
    """``x``, cast where it is invariant and its sharding says more.

    Raises:
        AxisTypeError: ``x`` is of another kind over one of the axes; it requires a gradient, is
            cut, and nothing says that its parts differ; or the axes are none of the context's mesh.
    """
    _check_mesh(mode, verb, mesh)
    kinds = kinds_in(mode.operand_type(x, verb))
    missing = {}
    for axis, wanted in kinds_of(source).items():
        kind = kinds.get(axis, "I")
        is_cut = kind == "V" and find_spec(x) is not None
        if kind not in _PASSES[wanted] or (is_cut and wanted == "U"):
            raise refused_sharding(verb, x, axis, wanted, mode.mesh, repr(source.spec))
        if kind == "I" != wanted:
            if wanted == "V" and x.requires_grad and torch.is_grad_enabled() and not _is_said(x):
                raise unmarked_shard(verb, x, axis, mode.mesh, repr(source.spec))
            missing[axis] = wanted
    return mode.cast(x, missing)


def _is_said(x: torch.Tensor) -> bool:
    """Return whether the program has said of ``x`` itself that it is equal: ``md.annotate(w)``.

    A result may be made from a leaf that lacks its mark, and a wrapper marks all its leaves.
    """
    return x.is_leaf and ATTRIBUTE in x.__dict__ and REDUCED_BY_OWNER not in x.__dict__


def typed_result(
    mode: ContextMode, verb: str, x: torch.Tensor, target: NamedSharding, mesh: DeviceMesh
) -> str:
    """The type of what a resharding of ``x`` to ``target`` gives; as ``x`` over other axes."""
    _check_mesh(mode, verb, mesh)
    return with_kinds(mode.operand_type(x, verb), kinds_of(target))


def _check_mesh(mode: ContextMode, verb: str, mesh: DeviceMesh) -> None:
    own = mode.mesh
    if mesh is own or all(
        name in own.axis_names and own.get_group(name).ranks == mesh.get_group(name).ranks
        for name in mesh.axis_names
    ):
        return
    raise foreign_mesh(verb, mesh.axis_names, own, mesh)


def get_transfer(plan: Plan, mesh: DeviceMesh) -> Transfer:
    """The plan on this mesh's groups, which are opened at the first call, collectively."""
    found = mesh.caches.find(Transfer, plan)
    return mesh.caches.keep(Transfer, plan, Transfer(plan, mesh)) if found is None else found


class Transfer:
    """A plan on the groups of a mesh; making one opens them, collectively."""

    def __init__(self, plan: Plan, mesh: DeviceMesh) -> None:
        self._plan = plan
        self._mesh = mesh
        self._transpose: Transfer | None = None
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        self.shape = plan.source.local_shape(coordinate)
        self._carrier = Carrier(plan.steps, self.shape, mesh, plan.title)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The plan on ``x``, differentiable."""
        if x.requires_grad and self._transpose is None:
            self._transpose = self.transpose  # opens its groups: in a backward none may open
        return call_function(_Transferred, x, self)

    @property
    def transpose(self) -> Transfer:
        """The transfer from the target's cotangent to the source's, whose transpose is this one."""
        # No cached_property: until Python 3.12 it holds a lock, which all simulated ranks share,
        # while groups are opened.
        found = self._transpose
        if found is None:
            found = self._transpose = get_transfer(self._plan.T, self._mesh)
            found._transpose = self
        return found

    def carry(self, x: torch.Tensor) -> torch.Tensor:
        """The plan on ``x``, or on a batch of such, whose dims stand first; without a gradient."""
        if x.dim() == len(self.shape):
            return self._carrier(x)
        batch = x.shape[: x.dim() - len(self.shape)]
        plan = self._plan
        batched = make_plan(
            _with_batch(plan.source, batch),
            _with_batch(plan.target, batch),
            plan.coordinate,
            layout=plan.layout,
            links=plan.links,
            title=f"{plan.title}, {tuple(batch)} times",
        )
        return get_transfer(batched, self._mesh).carry(x)


def _with_batch(placement: Placement, batch: torch.Size) -> Placement:
    """The placement of a batch of such arrays; every rank holds its part of all of them."""
    dims = (*(split_dim(size, (), ()) for size in batch), *placement.dims)
    shape = (*batch, *placement.shape)
    return Placement(placement.mesh_sizes, shape, dims, placement.unreduced, placement.reduced)


class _Transferred(LinearFunction):
    @staticmethod
    def forward(x: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        return transfer.carry(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (transfer,) = ctx.rest
        return call_function(_Transferred, grad, transfer.transpose), None


class Resharding:
    """A request on the groups of its mesh; making one opens them, collectively."""

    __slots__ = ("_alike", "_is_summed", "_join", "_lies", "_request", "_take_apart", "_transfer")

    def __init__(self, request: ReshardRequest) -> None:
        self._request = request
        self._take_apart, self._join = request.take_apart, request.join
        self._is_summed = bool(request.plan.source.unreduced or request.plan.target.unreduced)
        self._transfer = get_transfer(request.plan, request.mesh)
        here, there = kinds_of(request.source), kinds_of(request.target)
        # Along these axes parts of what each rank holds come together.
        self._alike = {axis for axis in here if here[axis] in "IR" and there.get(axis, "V") in "UV"}
        self._lies: str | None = None  # what a tensor carried that was found to lie so

    def __call__(self, x: torch.Tensor, check: bool | None = False) -> torch.Tensor:
        """The result of the request on this rank's ``x``, in new memory; differentiable.

        Raises:
            DtypeError: summands that are bool.
            ArgumentError: ``x`` carries a spec by which it lies otherwise.
            UnequalError: what ``check_replicas`` compares is not the same on every rank.
            AxisTypeError: in a typed context, the type of ``x`` is not what the request says.
        """
        request = self._request
        if self._is_summed and x.dtype is torch.bool:
            raise DtypeError(
                f"{request.verb}: bool values have no sum",
                where=request.plan.title,
                expected="numbers, where ranks hold summands",
                found=describe(x),
                fix="count in integers: x.to(torch.int32)",
            )
        mode = find_context()
        if mode is None:
            self._check_lies(x)
            return mark_spec(self._moved(x, check), request.target.spec)
        mesh, other = request.meshes
        text = typed_result(mode, request.verb, x, request.target, other)
        cast = typed_operand(mode, request.verb, x, request.source, mesh)
        self._check_lies(x)
        with HiddenFromModes():
            result = mark_spec(self._moved(cast, check), request.target.spec)
        result.__dict__[ATTRIBUTE] = text
        mode.note(result, request.verb, [x])
        return result

    def _check_lies(self, x: torch.Tensor) -> None:
        text = x.__dict__.get(SPEC_ATTRIBUTE)
        if text == self._lies or (carried := find_spec(x)) is None:
            return
        verb, source = self._request.verb, self._request.source
        sizes = dict(zip(source.layout.names or (), source.layout.sizes, strict=False))
        said = _cut_dims(source.spec)
        for axis, dim in _cut_dims(carried).items():
            is_summand = axis in source.spec.unreduced
            if sizes.get(axis, 1) > 1 and said.get(axis) != dim and not is_summand:
                raise ArgumentError(
                    f"{verb}: the tensor does not lie as the left side, or the source, says",
                    where=self._request.plan.title,
                    expected=f"a tensor that lies as {source.spec!r}",
                    found=f"x carries {carried!r}",
                    fix="write how it lies; if it lies otherwise by now, md.annotate(x, ...)",
                )
        self._lies = text

    def _moved(self, x: torch.Tensor, check: bool | None) -> torch.Tensor:
        check_replicas(x, self._request.meshes[0], self._alike, self._request.plan.title, check)
        if self._take_apart is None or self._join is None:
            return self._transfer(x)
        text, sizes = self._take_apart
        return rearrange(self._transfer(rearrange(x, text, **sizes)), self._join)


def _cut_dims(spec: PartitionSpec) -> dict[str, int]:
    """The dim that each axis cuts."""
    return {axis: dim for dim, entry in enumerate(spec.partitions) for axis in axes_of(entry)}
