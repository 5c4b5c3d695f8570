"""Multiply sharded tensors: ``md.einsum``.

Each operand moves to the layout that ``einsum_layouts`` chooses, torch computes the local product,
and the result moves to the layout in the pattern. Autograd differentiates all three.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from ..annotations.axis_types import (
    ANNOTATION,
    INVARIANT,
    Annotation,
    Refusal,
    join_types,
    kinds_in,
    set_type,
    type_of,
    with_kinds,
)
from ..annotations.tensor_specs import spec_texts
from ..arrays import describe
from ..checking.call_sites import one_frame
from ..collectives.torch_private import HiddenFromModes, are_transforms_active
from ..dtypes import dtype_name
from ..error_text import with_article
from ..errors import AxisError, DtypeError, KindError, MeshdistError, PatternError, ShapeError
from ..functional.equality_checks import check_replicas
from ..mesh.current_mesh import find_current_mesh, get_mesh, with_outer_mesh_hint
from ..mesh.device_mesh import DeviceMesh
from ..mesh.pattern import column_error, parse
from ..mesh.pattern_sizes import checked_sizes, spec_of
from ..mesh.spec import NamedSharding
from ..typed_mode.context import ContextMode, find_context
from ..typed_mode.type_errors import rejected_join, rejected_sharding
from .deferred_reductions import axes_of_leaves, axes_of_marks
from .einsum_layouts import EinsumLayout, lay_out_einsum
from .planner import backend_links, plan_einsum
from .rematerialization import GatheredOperand, gather_before_backward, saved_as_shards
from .resharding import (
    FITTING_KINDS,
    check_spec,
    kinds_of,
    transfer_or_alias,
    typed_operand,
)

__all__ = ["einsum"]


@one_frame
def einsum(
    pattern: str,
    /,
    *operands: torch.Tensor,
    mesh: DeviceMesh | None = None,
    regather: bool = False,
    **sizes: int,
) -> torch.Tensor:
    """Multiply sharded tensors, and return this rank's shard of the product; collective.

    ``"b s d, d f@tp -> b s f@tp"`` is a column-parallel layer, ``"b s f@tp, f@tp d -> b s d"``
    row-parallel, ``"b@dp s d, d@dp f -> b@dp s f"`` fully sharded. The pattern determines all
    communication, also for gradients. Along an axis that a side does not name, its values are
    equal on all ranks.

    Args:
        pattern: the sharding of each operand and, after "->", of the result, as for ``reshard``;
            dims that the result lacks are summed over. "..." stands for unsharded dims, equally
            many in each operand that has it.
        operands: this rank's shards, tensors of one dtype, not bool.
        mesh: the mesh whose axes the pattern names; None takes the current mesh.
        regather: whether the backward gathers operands again, instead of keeping them from the
            forward. Under autocast the product keeps its own copy in the lower dtype, and
            torch.func transforms keep all.
        sizes: global sizes by dim, for uneven shards and inside of groups: ``b=10, k=4``.

    Returns:
        This rank's shard of the result, of the operands' dtype, annotated with its spec. It
        aliases no operand.

    Gradient:
        As on one device, sharded as the operands. Einsum sums it over the ranks, unless the
        operand is annotated as reduced over an axis (by ``md.annotate``, or by ``md.DDP``, which
        sums there): then each rank gets a partial sum.

    Cost:
        ``md.plan`` with the same text computes it, forward and backward: the fewest elements among
        the ways to divide the work.

    Raises:
        PatternError, AxisError, ShapeError: the pattern does not fit the operands or the mesh.
        KindError: an operand is not a tensor. DtypeError: bool, or operands of several dtypes.
        AxisTypeError, ArgumentError: an annotation or a type contradicts the pattern.
        MeshError: there is no current mesh. NotInGroupError: this rank is not in the mesh.
        MismatchError: ranks have different plans. UnequalError: on simulated ranks, and at debug
            level DETAIL, ranks that use parts of a replicated operand hold different values.
        GradientError: with ``regather``, an operand was written to before the backward.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     x, w = torch.ones(1, 4), torch.arange(8.0).view(4, 2)
        ...     mine = md.shard(w, "d@tp f", mesh)                      # two of four rows
        ...     return md.einsum("b d, d@tp f -> b f", x, mine, mesh=mesh).tolist()
        >>> md.simulate(program, 2)
        [[[12.0, 16.0]], [[12.0, 16.0]]]

    Source:
        Xu et al., GSPMD: General and Scalable Parallelization for ML Computation Graphs, 2021,
        section 4.2, without halo exchanges: how operands and results of a dot are resharded.
    """
    mode = find_context()
    where: Any = find_current_mesh() if mesh is None else mesh
    is_mesh = isinstance(where, DeviceMesh)
    key: list[Any] = [pattern, *sizes.items()]
    with HiddenFromModes():  # A typed context would count each attribute access as a call.
        for x in operands:
            if not isinstance(x, torch.Tensor):
                _check_operands(pattern, operands)  # Always raises here.
            key += x.shape, x.dtype, x.__dict__.get(ANNOTATION)
    of_leaves: tuple[tuple[str, ...], ...] = ((),) * len(operands)
    if mode is None and is_mesh and where.world.averaged and torch.is_grad_enabled():
        _check_operands(pattern, operands)
        of_leaves = axes_of_leaves(pattern, operands, where)
    found = where.caches.find(_Einsum, (*key, of_leaves)) if is_mesh else None
    if found is None or found.is_mixed:
        _check_operands(pattern, operands)
    if found is None:
        where = get_mesh("einsum", mesh)
        try:
            found = _Einsum(pattern, operands, where, sizes, of_leaves)
        except AxisError as error:
            raise with_outer_mesh_hint(error, mesh) from None
        where.caches.keep(_Einsum, (*key, of_leaves), found)
    result: torch.Tensor = found(operands, regather, mode)
    return result


class _Einsum:
    """An einsum on a mesh for known operand shapes and annotations, called with the operands."""

    def __init__(
        self,
        text: str,
        operands: Sequence[torch.Tensor],
        mesh: DeviceMesh,
        sizes: Mapping[str, int],
        of_leaves: Sequence[Collection[str]],
    ) -> None:
        asked = tuple(checked_sizes(parse(text), sizes).items())
        self._mesh, links = mesh, backend_links(mesh)
        marks = tuple(
            tuple(sorted(axes_of_marks(x, mesh, f"operand {number} of einsum {text!r}") | {*axes}))
            for number, (x, axes) in enumerate(zip(operands, of_leaves, strict=True))
        )
        shapes = tuple(tuple(x.shape) for x in operands)
        self.is_mixed = len({x.dtype for x in operands}) > 1  # Only autocast allows this.
        try:
            laid = lay_out_einsum(text, mesh.layout, mesh.get_rank(), shapes, asked, marks)
        except ShapeError as error:  # A text that cuts another dim often causes it.
            raise _find_error_of_cuts(text, operands, mesh) or error from None
        self._laid = laid
        planned = plan_einsum(laid, mesh.layout, mesh.get_coordinate() or (), links)
        self._plans, self._result_plan = planned.operands, planned.result
        shardings = [
            _reduced_too(side, mesh, axes) for side, axes in zip(laid.operands, marks, strict=True)
        ]
        self._sources = [(sharding, kinds_of(sharding)) for sharding in shardings]
        for number, (x, sharding) in enumerate(zip(operands, shardings, strict=True)):
            _check_marks(x, sharding, mesh, number, text)
        # Along these axes each rank uses a part of an operand that all must hold equally.
        self._alike = [
            {
                mesh.axis_names[axis]
                for axis in {*work.cut_axes, *work.unreduced} & {*source.free_axes}
                if mesh.layout.sizes[axis] > 1
            }
            for source, work in zip(laid.sources, laid.work.operands, strict=True)
        ]
        self._part_shapes = [plan.source.local_shape(plan.coordinate) for plan in self._plans]
        self._result_kinds = kinds_of(laid.result)
        self._shape = laid.result.shard_shape(laid.result.parts.shape, mesh.get_rank())
        self._annotation = tuple(Annotation(*spec_texts(laid.result.spec, self._shape)))

    def __call__(
        self, operands: Sequence[torch.Tensor], regather: bool, mode: ContextMode | None
    ) -> torch.Tensor:
        """Return this rank's shard of the product of ``operands``.

        Args:
            operands: this rank's shards.
            regather: do not keep gathered operands for the backward; gather them again there.
            mode: the open ``md.typed`` context, which checks and sets axis types, or None.
        """
        if mode is None:
            return self._computed(operands, regather)
        with HiddenFromModes():
            cast, text = self._typed(mode, operands)
            result = self._computed(cast, regather)
        set_type(result, text)
        mode.note(result, "einsum", list(operands))
        return result

    def _typed(
        self, mode: ContextMode, operands: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], str]:
        """Return the operands, cast to matching axis types, and the axis type of the result."""
        mesh = self._mesh
        own = [
            typed_operand(mode, "einsum", x, *source, mesh)
            for x, source in zip(operands, self._sources, strict=True)
        ]
        names = {*mesh.axis_names}
        if mode.axes <= names:
            return own, with_kinds(INVARIANT, self._result_kinds)
        # Over the context's other axes einsum follows the type rules of any torch product.
        apart = dict.fromkeys(names, "I")
        others = [with_kinds(mode.operand_type(x, "einsum"), apart) for x in operands]
        joined = join_types(others, "multiply")
        if isinstance(joined, Refusal):
            raise rejected_join("einsum", operands, joined.axis, joined.operand, mode.mesh)
        cast = [
            mode.cast(x, kinds_in(missing)) for x, missing in zip(own, joined.missing, strict=True)
        ]
        return cast, with_kinds(joined.text, self._result_kinds)

    def _computed(self, operands: Sequence[torch.Tensor], regather: bool) -> torch.Tensor:
        parts = []
        for x, shape in zip(operands, self._part_shapes, strict=True):
            parts.append(x if x.shape == shape else x.reshape(shape))
        for part, alike, plan in zip(parts, self._alike, self._plans, strict=True):
            if alike:
                check_replicas(part, self._mesh, alike, plan.op_name, None, has_argument=False)
        moved = []
        for part, plan in zip(parts, self._plans, strict=True):
            moved.append(transfer_or_alias(part, plan, self._mesh))
        gathered = self._gathered_again(parts, moved) if regather else []
        with saved_as_shards(gathered) if gathered else nullcontext():
            result = _product(self._laid, moved)
        gather_before_backward(result, gathered)
        result = transfer_or_alias(result, self._result_plan, self._mesh)
        if result.shape != self._shape:
            result = result.reshape(self._shape)
        result.__dict__[ANNOTATION] = self._annotation
        return result

    def _gathered_again(
        self, parts: Sequence[torch.Tensor], moved: Sequence[torch.Tensor]
    ) -> list[GatheredOperand]:
        """Return the operands that the backward gathers again, the same on all ranks."""
        device, dtype = parts[0].device.type, parts[0].dtype
        is_cast = torch.is_autocast_enabled(device) and dtype != torch.get_autocast_dtype(device)
        # torch.func tensors have no memory to look up again, and autocast copies: keep all.
        if not torch.is_grad_enabled() or are_transforms_active() or is_cast or self.is_mixed:
            return []
        return [
            GatheredOperand(whole, part, plan, self._mesh)
            for at, (whole, part, plan) in enumerate(zip(moved, parts, self._plans, strict=True))
            # An operand is needed for the gradients of the others.
            if plan.grows and any(x.requires_grad for x in (*moved[:at], *moved[at + 1 :]))
        ]


def _product(laid: EinsumLayout, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if laid.is_matmul:
        return torch.matmul(*parts)
    if laid.is_linear:
        return torch.matmul(parts[0], parts[1].mT)
    result = torch.einsum(laid.equation, *parts)
    # torch.einsum of a single operand may return a view of it.
    return result.clone() if len(parts) == 1 else result


# -- errors ---------------------------------------------------------------------------------------


def _check_operands(text: str, operands: Sequence[Any]) -> None:
    pattern = parse(text)
    for number, x in enumerate(operands):
        if not isinstance(x, torch.Tensor):
            raise KindError(
                f"einsum: operand {number} is not a tensor",
                where=f"einsum {text!r}",
                expected="this rank's shard, a torch.Tensor",
                found=with_article(type(x).__name__),
                fix=_fix_of_kind(x),
            )
    if len(pattern.operands) != len(operands):
        _fail_count(text, len(operands))
    dtypes = {x.dtype for x in operands}
    if torch.bool in dtypes:
        raise DtypeError(
            "einsum cannot multiply and sum bool values",
            where=f"einsum {text!r}",
            expected="numbers",
            found="; ".join(map(describe, operands)),
            fix="count in integers: x.to(torch.int32)",
        )
    if len(dtypes) > 1 and not torch.is_autocast_enabled(operands[0].device.type):
        raise DtypeError(
            "einsum: the operands have different dtypes",
            where=f"einsum {text!r}",
            expected="operands of one dtype",
            found=", ".join(dtype_name(x.dtype) for x in operands),
            fix="convert one first: w.to(x.dtype)",
        )


def _fix_of_kind(x: object) -> str | None:
    if isinstance(x, DeviceMesh):
        return "pass the mesh by name: mesh=mesh"
    if isinstance(x, (list, tuple)):
        return "pass the tensors one after the other: einsum(text, x, w)"
    if isinstance(x, np.ndarray):
        return "convert it to a tensor that shares its memory: torch.from_numpy(x)"
    return "pass its shard: x.local" if hasattr(x, "local") else None


def _fail_count(text: str, count: int) -> None:
    pattern = parse(text)
    named = len(pattern.operands)
    # A comma outside of brackets separates operands: "b@dp,cp d" is "b@dp" and "cp d".
    fix = pattern.find_missing_brackets() if named == count + 1 > 1 else None
    error: PatternError = column_error(
        text,
        pattern.commas[0] if pattern.commas else 0,
        expected=f"an operand for each tensor: {count}",
        found=f"{named} operand{'s' if named != 1 else ''} in the text",
        fix=fix,
        summary=f"einsum got {count} tensors for a pattern of {named}",
    )
    raise error


def _find_error_of_cuts(
    text: str, operands: Sequence[torch.Tensor], mesh: DeviceMesh
) -> MeshdistError | None:
    """Return the error of an operand whose spec contradicts the text, or None."""
    pattern = parse(text)
    for number, (x, side) in enumerate(zip(operands, pattern.operands, strict=True)):
        try:
            spec = spec_of(pattern, side, mesh.layout, x.dim())
            name = f"operand {number}"
            check_spec("einsum", x, NamedSharding(mesh, spec), f"{name} of einsum {text!r}", name)
        except MeshdistError as error:
            return error
    return None


def _check_marks(
    x: torch.Tensor, sharding: NamedSharding, mesh: DeviceMesh, number: int, text: str
) -> None:
    name = f"operand {number}"
    check_spec("einsum", x, sharding, f"{name} of einsum {text!r}", name)
    wanted = kinds_of(sharding)
    for axis, kind in kinds_in(type_of(x)).items():
        if mesh.axis_sizes.get(axis, 1) > 1 and (
            kind not in FITTING_KINDS[wanted[axis]] or (kind, wanted[axis]) == ("R", "V")
        ):
            spec = repr(sharding.spec)
            raise rejected_sharding("einsum", x, axis, wanted[axis], mesh, spec, name)


def _reduced_too(sharding: NamedSharding, mesh: DeviceMesh, axes: Sequence[str]) -> NamedSharding:
    """Return ``sharding`` on ``mesh``, reduced also over the replicated axes among ``axes``."""
    spec = sharding.spec
    reduced = spec.reduced | (sharding.replicated_axes & {*axes})
    return NamedSharding(mesh, spec.update(reduced=reduced), shard_sizes=sharding.shard_sizes)
