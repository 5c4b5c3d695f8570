"""Run plans on tensors, differentiably: the backward runs the transposed plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch.utils.weak import WeakIdKeyDictionary

from ..annotations.axis_types import (
    ANNOTATION,
    Annotation,
    find_owner_axes,
    find_type,
    kinds_in,
    set_type,
    type_of,
    with_kinds,
)
from ..annotations.tensor_specs import find_spec, sizes_of, spec_texts
from ..arrays import Array, as_tensor, describe, like
from ..collectives.torch_private import (
    HiddenFromModes,
    are_transforms_active,
    call_function,
    current_task,
)
from ..errors import ArgumentError, DtypeError
from ..functional.equality_checks import check_replicas
from ..functional.linear_function import LinearFunction
from ..mesh.device_mesh import DeviceMesh
from ..mesh.partition_spec import PartitionSpec, axes_of
from ..mesh.placement import Placement, split_dim
from ..mesh.spec import NamedSharding, sharding_of
from ..typed_mode.context import ContextMode, find_context
from ..typed_mode.type_errors import foreign_mesh, rejected_sharding, unmarked_shard
from .executor import PlanExecutor
from .placement_diff import dim_of_largest_blocks, extended
from .planner import backend_links, plan_move
from .plans import Plan, make_plan
from .refinement import refine

FITTING_KINDS = {"V": "IRV", "R": "IR", "U": "UV", "I": "I"}
"""For each kind of a sharding, the kinds of values that have it or are cast to it. As for
``lax.psum``, a sharding can declare a varying value a partial sum."""


def kinds_of(sharding: NamedSharding) -> Mapping[str, str]:
    """Return the kind of a value over each mesh axis.

    Example:
        >>> from ..mesh.layout import Layout
        >>> from ..mesh.partition_spec import P
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
    mode: ContextMode,
    operation: str,
    x: torch.Tensor,
    source: NamedSharding,
    target_kinds: Mapping[str, str],
    mesh: DeviceMesh,
) -> torch.Tensor:
    """Return ``x`` cast to ``target_kinds`` over axes where it is invariant; or raise."""
    if mesh is not mode.mesh:
        _check_mesh(mode, operation, mesh)
    kinds = kinds_in(mode.operand_type(x, operation))
    missing = {}
    for axis, target_kind in target_kinds.items():
        kind = kinds.get(axis, "I")
        if kind not in FITTING_KINDS[target_kind] or (
            kind == "V" and target_kind == "U" and find_spec(x) is not None
        ):
            raise rejected_sharding(operation, x, axis, target_kind, mode.mesh, repr(source.spec))
        if kind == "I" != target_kind:
            # The gradient depends on whether the parts of this tensor differ. Only a leaf that the
            # program annotates, ``md.annotate(w)``, shows it: a result may be computed from an
            # unannotated leaf, and DDP annotates all its leaves.
            is_typed = find_type(x) is not None and find_owner_axes(x) is None
            is_leaf = x.is_leaf and is_typed
            if target_kind == "V" and x.requires_grad and torch.is_grad_enabled() and not is_leaf:
                raise unmarked_shard(operation, x, axis, mode.mesh, repr(source.spec))
            missing[axis] = target_kind
    return mode.cast(x, missing) if missing else x


def _check_mesh(mode: ContextMode, operation: str, mesh: DeviceMesh) -> None:
    own = mode.mesh
    if not all(
        name in own.axis_names and own.get_group(name).ranks == mesh.get_group(name).ranks
        for name in mesh.axis_names
    ):
        raise foreign_mesh(operation, mesh.axis_names, own, mesh)


def get_transfer(plan: Plan, mesh: DeviceMesh) -> Transfer:
    """Return the plan's transfer on ``mesh``; the first call opens its groups, collectively."""
    found = mesh.caches.find(Transfer, plan)
    return mesh.caches.keep(Transfer, plan, Transfer(plan, mesh)) if found is None else found


class Transfer:
    """A differentiable function that runs a plan; its constructor opens groups."""

    def __init__(self, plan: Plan, mesh: DeviceMesh) -> None:
        self._plan = plan
        self._mesh = mesh
        self._transpose: Transfer | None = None
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        self.shape = plan.source.local_shape(coordinate)
        self.execute = PlanExecutor(plan.steps, self.shape, mesh, plan.op_name)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad and self._transpose is None:
            self._transpose = self.transpose  # Open its groups now; a backward must not.
        return call_function(_Transferred, x, self)

    @property
    def transpose(self) -> Transfer:
        # Not a cached_property: until Python 3.12 it would hold a lock, shared by all simulated
        # ranks, while groups open.
        found = self._transpose
        if found is None:
            found = self._transpose = get_transfer(self._plan.T, self._mesh)
            found._transpose = self
        return found

    def moves_among(self, ranks: Collection[int]) -> bool:
        """Return whether values or gradients are cut, moved or summed among ``ranks``."""
        plan, rank = self._plan, self._mesh.get_rank()
        ends = plan.source, plan.target
        return any(
            len({*plan.layout.ranks_of_axis(axis, rank)} & {*ranks}) > 1
            and any(axis not in end.free_axes or axis in end.reduced for end in ends)
            for axis in range(plan.layout.ndim)
        )

    def execute_batch(self, x: torch.Tensor) -> torch.Tensor:
        """Return the plan's result on a batch (leading dims), without gradient."""
        batch = x.shape[: x.dim() - len(self.shape)]
        plan = self._plan
        batched = make_plan(
            _with_batch(plan.source, batch),
            _with_batch(plan.target, batch),
            plan.coordinate,
            layout=plan.layout,
            links=plan.links,
            op_name=f"{plan.op_name}, {tuple(batch)} times",
        )
        return get_transfer(batched, self._mesh).execute(x)


def _with_batch(placement: Placement, batch: torch.Size) -> Placement:
    """Return the placement with leading batch dims, unsharded."""
    dims = (*(split_dim(size, (), ()) for size in batch), *placement.dims)
    shape = (*batch, *placement.shape)
    return Placement(placement.mesh_sizes, shape, dims, placement.unreduced, placement.reduced)


def transfer_or_alias(x: torch.Tensor, plan: Plan, mesh: DeviceMesh) -> torch.Tensor:
    """Return the plan's result on ``x``: ``x`` or an alias if nothing is sent or copied."""
    # The alias, whose backward sums, is kept while ``x`` lives, so that its uses share one sum.
    if not plan.is_identity:
        return get_transfer(plan, mesh)(x)
    if not (x.requires_grad and torch.is_grad_enabled()) or plan.T.is_identity:
        return x
    transfer = get_transfer(plan, mesh)
    _ = transfer.transpose  # Open its groups before the backward.
    if x.is_leaf or are_transforms_active():
        return call_function(_Aliased, x, transfer)
    return mesh.caches.of(_AliasCache).alias(x, transfer, (plan.source, plan.target))


class _AliasCache:
    """Aliases of live tensors through which a backward runs, by tensor and placements."""

    # A backward runs a checkpoint's forward again: its aliases are kept separately. An alias holds
    # the history of its tensor but not the tensor.

    def __init__(self) -> None:
        self._cached: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def alias(
        self, x: torch.Tensor, transfer: Transfer, ends: tuple[Placement, Placement]
    ) -> torch.Tensor:
        """Return an alias of ``x`` with the transfer's backward, kept by (source, target)."""
        cached: dict[Any, torch.Tensor] = self._cached.setdefault(x, {})
        key = ends, x._version, current_task()
        found = cached.get(key)
        if found is None or not found.is_set_to(x):  # `.data =` does not raise the version.
            found = cached[key] = call_function(_Aliased, x, transfer)
        return found


class _Aliased(LinearFunction):
    """A plan without steps: a view whose backward runs the transpose."""

    @staticmethod
    def forward(x: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        # A view of the detached tensor does not keep the tensor itself alive.
        apart = x.detach()
        return apart.view_as(apart)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return call_function(_Transferred, grad, ctx.rest[0].transpose), None


class _Transferred(LinearFunction):
    @staticmethod
    def forward(x: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        execute = transfer.execute if x.dim() == len(transfer.shape) else transfer.execute_batch
        return execute(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (transfer,) = ctx.rest
        return call_function(_Transferred, grad, transfer.transpose), None


class Move:
    """A function that moves local arrays to another sharding; its constructor opens groups.

    Args:
        source, target: on meshes over the same ranks.
        shape: the global shape in ``source``.
        pattern: the text with "->" that states both: dims are matched by name, reordered and
            regrouped. None keeps the dims.
        collective: the public call, for messages.
    """

    def __init__(
        self,
        source: NamedSharding,
        target: NamedSharding,
        shape: tuple[int, ...],
        pattern: str | None = None,
        *,
        operation: str = "reshard",
    ) -> None:
        self.source, self.target, self._operation = source, target, operation
        self.target_shape = shape if pattern is None else target.parts.shape
        self._split = self._merge = None
        # Parts move in the order of the right side, so that merging them copies nothing.
        mesh, names = source.mesh, target.parts.names
        ends = source, target, shape
        plan = plan_move(*ends, mesh.get_rank(), backend_links(mesh), pattern, names)
        counts = source.parts.counts, target.parts.counts
        if pattern and (source.parts.names != names or {*counts[0], *counts[1]} - {1}):
            letters = {name: f"d{index}" for index, name in enumerate(names)}
            parts = " ".join(letters.values())
            left, right = (
                _side_text([letters[name] for name in side.parts.names], side.parts.counts)
                for side in (source, target)
            )
            local = plan.source.local_shape(plan.coordinate)
            sizes = dict(zip(letters.values(), local, strict=True))
            self._split = partial(rearrange, pattern=f"{left} -> {parts}", **sizes)
            self._merge = partial(rearrange, pattern=f"{parts} -> {right}")
        if plan.layout != mesh.layout:
            axes = refine(mesh.layout, target.layout).source_axis_of_each
            mesh = mesh.refined(plan.layout, axes)
        self._plan, self._transfer = plan, get_transfer(plan, mesh)
        self.keeps_shards = (
            self._split is None and source.mesh == target.mesh and plan.source == plan.target
        )
        self._is_summed = bool(plan.source.unreduced or plan.target.unreduced)
        kinds, wanted = self._kinds = kinds_of(source), kinds_of(target)
        axis_sizes = source.mesh.axis_sizes
        # Along these axes each rank uses a part of an array that all must hold equally.
        self._alike = {
            axis
            for axis in kinds
            if axis_sizes.get(axis, 1) > 1 and kinds[axis] in "IR" and wanted.get(axis, "V") in "UV"
        }
        self._fitting: tuple[Any, ...] | None = None  # the last annotation that passed the check
        self._annotation: tuple[Any, ...] = ()  # of each result, since all have the same shape

    def __call__(self, x: torch.Tensor, check: bool | None = False) -> torch.Tensor:
        """Return the result on ``x`` in new memory, differentiable; ``check`` compares replicas.

        Args:
            check: None compares them on simulated ranks and at debug level DETAIL.
        """
        if self._is_summed and x.dtype is torch.bool:
            raise DtypeError(
                f"{self._operation} cannot sum bool values",
                where=self._plan.op_name,
                expected="numbers, since ranks hold partial sums",
                found=describe(x),
                fix="count in integers: x.to(torch.int32)",
            )
        mode = find_context()
        if mode is not None:
            with HiddenFromModes():
                return self._run_typed(mode, x, check)
        annotation = x.__dict__.get(ANNOTATION)
        if annotation != self._fitting:
            self._check_marks(x)
            self._fitting = annotation
        return self._moved(x, check)

    def of(self, local: Array) -> Array:
        """Return the result on an array of any library, in that library."""
        tensor = as_tensor(local, argument="local", operation=self._operation, writable=False)
        return like(self(tensor), local)

    def _run_typed(self, mode: ContextMode, x: torch.Tensor, check: bool | None) -> torch.Tensor:
        other = self.target.mesh
        if other is not mode.mesh:
            _check_mesh(mode, self._operation, other)
        here, there = self._kinds
        text = with_kinds(mode.operand_type(x, self._operation), there)
        cast = typed_operand(mode, self._operation, x, self.source, here, self.source.mesh)
        check_spec(self._operation, x, self.source, self._plan.op_name)
        result = self._moved(cast, check)
        set_type(result, text)
        mode.note(result, self._operation, [x])
        return result

    def _check_marks(self, x: torch.Tensor) -> None:
        check_spec(self._operation, x, self.source, self._plan.op_name)
        mesh = self.source.mesh
        here, there = self._kinds
        for axis, kind in kinds_in(type_of(x)).items():
            # If values and gradients stay unchanged, DDP's annotation of a parameter is kept too.
            is_unchanged = kind == "R" and here.get(axis) == "I" == there.get(axis)
            if mesh.axis_sizes.get(axis, 1) > 1 and not (
                kind in FITTING_KINDS[here[axis]] or is_unchanged
            ):
                text = repr(self.source.spec)
                raise rejected_sharding(self._operation, x, axis, here[axis], mesh, text)

    def _moved(self, x: torch.Tensor, check: bool | None) -> torch.Tensor:
        if self._alike:
            check_replicas(x, self.source.mesh, self._alike, self._plan.op_name, check)
        if self._split is None or self._merge is None:
            result = self._transfer(x)
        else:
            result = self._merge(self._transfer(self._split(x)))
        if not self._annotation:
            target = self.target
            texts = spec_texts(target.spec, tuple(result.shape))
            sizes = sizes_of(target, self.target_shape)
            self._annotation = tuple(Annotation(*texts, global_sizes=sizes))
        result.__dict__[ANNOTATION] = self._annotation
        return result


def cached_move(mesh: DeviceMesh, key: Hashable, make: Callable[[], Move]) -> Move:
    """Return the move cached under ``key``; the first call makes it, collectively."""
    found = mesh.caches.find(Move, key)
    return mesh.caches.keep(Move, key, make()) if found is None else found


def move(
    local: Array, source: NamedSharding, target: NamedSharding, shape: tuple[int, ...]
) -> Array:
    """Return this rank's shard after the move; collective."""
    ends = source, target, shape
    return cached_move(source.mesh, ends, lambda: Move(*ends)).of(local)


def cut_further(
    sharding: NamedSharding, shape: tuple[int, ...], axes: tuple[int, ...]
) -> NamedSharding:
    """Return ``sharding`` with ``axes`` also cutting the dim with the largest blocks."""
    # The new axes are the dim's minor axes, so that a single all-gather undoes it.
    placement = sharding.placement(shape)
    dims = list(placement.dims)
    dim = dim_of_largest_blocks(dims)
    dims[dim] = extended(dims[dim], axes, tuple(placement.mesh_sizes[axis] for axis in axes))
    names = sharding.layout.names or ()
    unreduced = sharding.spec.unreduced - {names[axis] for axis in axes}
    return sharding_of(sharding.mesh, dims, unreduced=unreduced)


def _side_text(names: Sequence[str], counts: Sequence[int]) -> str:
    """Return one side of an einops pattern.

    Example:
        >>> _side_text(("h", "k", "s"), (2, 0, 1))
        '(h k) 1 s'
    """
    rest = iter(names)
    groups = [" ".join([next(rest) for _ in range(count)]) for count in counts]
    return " ".join(f"({group})" if " " in group else group or "1" for group in groups)


def check_spec(
    operation: str, x: torch.Tensor, source: NamedSharding, where: str, name: str = "x"
) -> None:
    """Raise if ``x`` carries a spec that cuts other dims than ``source``."""
    if (carried := find_spec(x)) is None:
        return
    sizes = dict(zip(source.layout.names or (), source.layout.sizes, strict=False))
    cut_dims = _cut_dims(source.spec)
    for axis, dim in _cut_dims(carried).items():
        is_partial_sum = axis in source.spec.unreduced
        if sizes.get(axis, 1) > 1 and cut_dims.get(axis) != dim and not is_partial_sum:
            cut = f"dim {dim} is cut over {axis!r}"
            raise ArgumentError(
                f"{operation}: the tensor's annotation does not match the left side, or the source",
                where=where,
                expected=f"a tensor sharded as {source.spec!r}",
                found=f"{name} is annotated as {carried!r}",
                fix=f"write its sharding: {cut}; if the annotation is outdated, call "
                f"md.annotate({'x' if name == 'x' else 'tensor'}, ...)",
            )


def _cut_dims(spec: PartitionSpec) -> dict[str, int]:
    return {axis: dim for dim, entry in enumerate(spec.partitions) for axis in axes_of(entry)}
