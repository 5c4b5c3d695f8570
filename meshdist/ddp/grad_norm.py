"""Clip gradients by one norm over a mesh, with one message: ``md.clip_grad_norm_``.

Each rank sums the powers of its gradients' norms, each divided by the number of ranks that hold the
same elements (by annotations, or a DTensor's placements). An all-reduce over the mesh adds these
up, so that each element counts once and all ranks get the same bits. A DTensor's axes are found in
the mesh by their ranks.

Worked example: the norm of order 2 on (dp=2, tp=2); w is sharded over 'tp', b is equal on all
ranks.

                  rank 0          rank 1          rank 2          rank 3
    w.grad        [3]             [4]             [3]             [4]            on 2 ranks each
    b.grad        [12]            [12]            [12]            [12]           on all 4
    sent          9/2 + 144/4     16/2 + 144/4    9/2 + 144/4     16/2 + 144/4
    their sum     169, whose root is the norm of [3, 4, 12]

    >>> import meshdist as md
    >>> def program():
    ...     mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ...     w = md.annotate(torch.ones(1), "f@tp", mesh=mesh)
    ...     b = torch.ones(1)
    ...     w.grad, b.grad = torch.tensor([3.0 + mesh.get_local_rank("tp")]), torch.tensor([12.0])
    ...     return clip_grad_norm_([w, b], 1.0, mesh=mesh).item()
    >>> md.simulate(program, 4)
    [13.0, 13.0, 13.0, 13.0]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import GeneratorType
from typing import Any, TypeAlias

import torch
from torch import nn

from ..annotations.axis_types import kinds_in, shown
from ..arguments import get_number, mesh_kind_error
from ..checking.call_sites import warn_caller
from ..collectives.normalize_args import run_named
from ..collectives.torch_private import has_foreach_support, hidden_from_modes
from ..error_text import ranks_text, with_article
from ..errors import ArgumentError, AxisTypeError, GradientError, KindError, MeshError
from ..mesh.current_mesh import find_current_mesh, require_current_mesh, with_outer_mesh_hint
from ..mesh.device_mesh import DeviceMesh
from ..mesh.layout_arguments import no_axis
from ..reduce_ops import ReduceOp
from ..typed_mode.gradients import find_type_of_grad, gradient_type_of
from ..typed_mode.type_errors import axes_argument, mesh_text, where
from .norm_flags import NormParameter, flags_of, name_of, rejected_norm

__all__ = ["clip_grad_norm_"]

_DOUBLE = (torch.float64, torch.complex128)
_HALVES = (torch.float16, torch.bfloat16)


@hidden_from_modes
@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Clip the norm of all gradients on a mesh: scale each rank's gradients by a common factor.

    Each element counts once, however many ranks hold it. Parameters annotated as varying over an
    axis (``md.annotate``) are sharded along it; others are equal on all ranks. DTensors count by
    their placements and can be mixed with plain tensors. If any parameter is sharded, the call is
    collective over the mesh.

    Args:
        parameters: tensors, or a single tensor; ``.grad`` is scaled in place, None counts as zeros.
            If any parameter is sharded, every rank passes a sharded parameter: a rank without
            experts passes an empty, annotated expert.
        max_norm: the largest norm of the clipped gradients.
        norm_type: the order of the norm, above 0; ``math.inf``: the largest absolute value.
        error_if_nonfinite: whether to raise if the norm is NaN or infinite.
        foreach: whether many gradients share a kernel; None if the device supports it.
        mesh: has the axes of sharded parameters; None uses the current mesh. Without a mesh, and
            without sharded parameters, this is ``torch.nn.utils.clip_grad_norm_``.

    Returns:
        The norm before clipping, a scalar tensor, bitwise equal on all ranks; float64 if any
        parameter is, else float32; on the first gradient's device.

    Cost:
        An all-reduce of 24 bytes over the mesh; none if no parameter is sharded.

    Raises:
        AxisTypeError: a gradient is unreduced (a partial sum).
        AxisError: the mesh lacks an axis of a sharded parameter.
        MeshError: parameters are sharded without a mesh; or a DTensor's ranks form no axes of it.
        GradientError: on every rank, before any scaling: ``error_if_nonfinite``; gradients of a
            backward under ``no_sync``; or only some holders of the same elements have a gradient.
            In the last two cases, on an accelerator, the norm is NaN instead.
        MismatchError: arguments, or parameters that are not sharded, differ between ranks.
        ArgumentError: norm_type is not above 0, or max_norm is below 0.
        KindError: ``parameters`` has other objects than tensors, or sparse gradients.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     weight = torch.nn.Parameter(md.shard(torch.ones(8, 2), "f@tp d", mesh))
        ...     with mesh:
        ...         weight.grad = torch.ones(4, 2)
        ...         norm = md.clip_grad_norm_([weight], 1.0)
        ...         return norm.item(), round(weight.grad[0, 0].item(), 5)
        >>> md.simulate(program, 2)
        [(4.0, 0.25), (4.0, 0.25)]
    """
    given = _listed(parameters)
    max_norm, norm_type = _checked_numbers(max_norm, norm_type)
    found = _find_mesh(given, mesh)
    if found is None:
        return nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
    norm_parameters, gradients = _gradients_of(given, found, mesh)
    groups = _grouped(gradients, foreach)
    is_cut = any(each.axes for each in norm_parameters) or any(axes for _, axes in gradients)
    device = _local(given[0]).device if given else torch.device(found.device_type)
    total = _local_power(groups, found if is_cut else None, norm_type, device)
    if is_cut:
        equal = [local.numel() for local, axes in gradients if not axes]
        op_name = (
            f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}, error_if_nonfinite="
            f"{bool(error_if_nonfinite)}) with {len(equal)} gradients, of {sum(equal)} elements, "
            "that are equal on all ranks"
        )
        total = _summed(total, norm_parameters, found, op_name, norm_type)
    is_double = any(parameter.dtype in _DOUBLE for parameter in given)
    norm = (total if math.isinf(norm_type) else total.pow(1 / norm_type)).to(
        device=gradients[0][0].device if gradients else device,
        dtype=torch.float64 if is_double else torch.float32,
    )
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise GradientError(
            f"clip_grad_norm_: the norm of all gradients is {norm.item()}",
            where=where(found),
            expected=f"a finite norm of order {norm_type}, required by error_if_nonfinite=True",
            found="a gradient with NaN, infinity, or values too large for their dtype",
            fix="skip this step on every rank (no gradient has been scaled), or correct the loss "
            "that is not finite",
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for group in groups:
        here = factor.to(group.locals[0].device)
        if group.is_foreach:
            torch._foreach_mul_(group.locals, here)
        else:
            for local in group.locals:
                local.mul_(here)
    return norm


def _summed(
    share: torch.Tensor,
    parameters: Sequence[NormParameter],
    mesh: DeviceMesh,
    op_name: str,
    order: float,
) -> torch.Tensor:
    """Return the sum of the ranks' shares, or their maximum if ``order`` is infinite.

    Raises:
        GradientError: a gradient is local, or missing on some holders; on a device the result is
            NaN.
    """
    is_local, lacking = flags_of(parameters, mesh)
    # The maximum is right even if a holder lacks the gradient.
    flags = [is_local] if math.isinf(order) else [is_local, lacking]
    sent = torch.cat((share.view(1), share.new_tensor(flags)))
    op = ReduceOp.MAX if math.isinf(order) else ReduceOp.SUM
    run_named("all_reduce", mesh.open_group(), op_name, sent, op)
    total, is_rejected = sent[0], sent[1:].any()
    if share.device.type != "cpu":  # do not synchronize with the device
        return torch.where(is_rejected, torch.nan, total)
    if is_rejected:
        raise rejected_norm(parameters, mesh)
    return total


def _listed(parameters: Any) -> list[torch.Tensor]:
    """Return the parameters without duplicates; raise unless they have dense gradients."""
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    if isinstance(parameters, nn.Module) or not isinstance(parameters, Iterable):
        raise KindError(
            "clip_grad_norm_ requires an iterable of parameters",
            found=with_article(type(parameters).__name__),
            fix="pass module.parameters()",
        )
    given = list(parameters)
    for index, parameter in enumerate(given):
        if not isinstance(parameter, torch.Tensor):
            raise KindError(
                "clip_grad_norm_ requires parameters",
                expected="tensors in the iterable",
                found=f"entry {index} is {with_article(type(parameter).__name__)}",
                fix="pass module.parameters(), without names",
            )
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise KindError(
                "clip_grad_norm_ requires dense gradients",
                found=f"{name_of(index, parameter)}, whose gradient is {parameter.grad.layout}",
                fix="convert it: parameter.grad = parameter.grad.to_dense()",
            )
    if not given and isinstance(parameters, GeneratorType):
        warn_caller(
            "clip_grad_norm_: the generator yields no (more) parameters; nothing is clipped"
        )
    return list({id(parameter): parameter for parameter in given}.values())


def _checked_numbers(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    limit = float(get_number(max_norm, "clip_grad_norm_: max_norm"))
    order = math.inf if norm_type == "inf" else get_number(norm_type, "clip_grad_norm_: norm_type")
    if not limit >= 0:
        raise ArgumentError(
            "clip_grad_norm_: max_norm must not be negative",
            expected="a number of 0 or more",
            found=f"{limit}",
            fix="pass for example max_norm=1.0",
        )
    if not order > 0:
        raise ArgumentError(
            "clip_grad_norm_: norm_type must be positive",
            expected="a number above 0, or math.inf",
            found=f"{order}",
            fix="pass for example norm_type=2.0",
        )
    return limit, float(order)


def _find_mesh(given: Sequence[torch.Tensor], mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return ``mesh`` or the current mesh; else None, or raise if gradients need a mesh."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise mesh_kind_error(
            "clip_grad_norm_ requires a mesh as mesh=",
            mesh,
            fix="pass mesh=mesh, or mesh=mesh['dp'] for one axis",
        )
    mesh = mesh or find_current_mesh()
    if mesh is None:
        for index, parameter in enumerate(given):
            kinds = kinds_in(gradient_type_of(parameter))
            _reject_unreduced(index, parameter, kinds, None)
            if axes := [axis for axis, kind in kinds.items() if kind == "V"]:
                require_current_mesh(
                    "clip_grad_norm_", f" of a parameter that is sharded over {shown(axes)}"
                )
        if len({getattr(parameter, "device_mesh", None) for parameter in given}) > 1:
            require_current_mesh(
                "clip_grad_norm_", " of DTensors on several meshes, or mixed with plain tensors"
            )
    return mesh


_Gradient: TypeAlias = tuple[torch.Tensor, frozenset[str]]
"""This rank's gradient, and the axes along which ranks hold different elements."""


def _gradients_of(
    given: Sequence[Any], mesh: DeviceMesh, given_mesh: DeviceMesh | None
) -> tuple[list[NormParameter], list[_Gradient]]:
    """Return the parameters and the gradients, with the axes that shard them."""
    known: dict[object, frozenset[str]] = {}  # parameters have few types

    def axes_of(index: int, parameter: Any, tensor: Any, text: str) -> frozenset[str]:
        key = (text, getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None))
        if key not in known:
            kinds = _kinds_of(tensor, text, index, mesh)
            if tensor is not parameter:
                _reject_unreduced(index, parameter, kinds, mesh)
            axes = _axes_cut(kinds, mesh, given_mesh)
            if "U" in kinds.values():  # check each gradient, to name it in the error
                return axes
            known[key] = axes
        return known[key]

    parameters, gradients = list[NormParameter](), list[_Gradient]()
    for index, parameter in enumerate(given):
        # Also check the parameter, since a rank without its gradient still takes part.
        cut = axes_of(index, parameter, parameter, gradient_type_of(parameter))
        parameters.append(NormParameter(index, parameter, cut))
        if (grad := parameter.grad) is not None:
            axes = axes_of(index, parameter, grad, find_type_of_grad(parameter, grad))
            gradients.append((_local(grad), axes))
    return parameters, gradients


def _kinds_of(tensor: Any, text: str, index: int, mesh: DeviceMesh) -> Mapping[str, str]:
    """Return the letter by axis of the type ``text``, or of a DTensor, parameter ``index``."""
    if not hasattr(tensor, "placements"):
        return kinds_in(text)
    kinds: dict[str, str] = {}
    theirs = tensor.device_mesh
    here: Any = theirs.get_coordinate()
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate() or theirs.size(dim) == 1:
            continue
        line = None if here is None else (*here[:dim], slice(None), *here[dim + 1 :])
        ranks = [] if line is None else theirs.mesh[line].tolist()
        axes = _find_axes(frozenset(ranks), mesh)
        if axes is None:
            raise MeshError(
                "clip_grad_norm_: the ranks of a DTensor form no axes of the mesh",
                where=where(mesh),
                expected=f"the ranks along one or several axes of {mesh_text(mesh)}",
                found=f"{name_of(index, tensor)}, as {placement} over "
                + (ranks_text(ranks) if ranks else "other ranks"),
                fix="pass a mesh that has this axis: mesh=md.DeviceMesh.from_torch(...)",
            )
        kinds.update(dict.fromkeys(axes, "U" if placement.is_partial() else "V"))
    return kinds


def _find_axes(ranks: frozenset[int], mesh: DeviceMesh) -> tuple[str, ...] | None:
    """Return the axes of ``mesh`` whose group of this rank is ``ranks``, or None."""
    for count in range(1, mesh.ndim + 1):
        for names in combinations(mesh.axis_names, count):
            if ranks == frozenset(mesh[names].layout.ranks().ravel().tolist()):
                return names
    return None


def _axes_cut(
    kinds: Mapping[str, str], mesh: DeviceMesh, given_mesh: DeviceMesh | None
) -> frozenset[str]:
    """Return axes larger than 1 with the kind "V"; raise for an axis that ``mesh`` lacks."""
    for axis in kinds:
        if axis not in mesh.axis_names:
            error = no_axis(axis, mesh.axis_names, f"clip_grad_norm_ on {mesh_text(mesh)}")
            raise with_outer_mesh_hint(error, given_mesh)
    return frozenset(a for a, kind in kinds.items() if kind == "V" and mesh.axis_sizes[a] > 1)


def _reject_unreduced(
    index: int, parameter: torch.Tensor, kinds: Mapping[str, str], mesh: DeviceMesh | None
) -> None:
    sizes = {} if mesh is None else mesh.axis_sizes
    axes = [axis for axis, kind in kinds.items() if kind == "U" and sizes.get(axis, 2) > 1]
    if not axes or parameter.grad is None:
        return
    varying = [axis for axis, kind in kinds.items() if kind == "V"]
    varying_argument = f", varying={axes_argument(varying)}" if varying else ""
    raise AxisTypeError(
        f"clip_grad_norm_ of a gradient that is unreduced over {shown(axes)}",
        where=None if mesh is None else where(mesh, axes),
        expected="complete gradients (the norm of a sum cannot be computed from partial sums)",
        found=name_of(index, parameter),
        fix="reduce it first: p.grad = p.grad.redistribute(placements=p.placements)"
        if hasattr(parameter, "placements")
        else f"reduce it first: p.grad = md.annotate(lax.psum(p.grad, {axes_argument(axes)})"
        f"{varying_argument}); "
        "or clip after md.accumulate_gradients, which reduces at its end",
    )


def _local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor, in the same memory; a plain tensor unchanged."""
    local: Any = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _LikeGradients:
    """Non-empty gradients of this rank, of the same device, dtype and sharding axes."""

    axes: frozenset[str]
    locals: list[torch.Tensor]
    is_foreach: bool


def _grouped(gradients: Iterable[_Gradient], foreach: bool | None) -> list[_LikeGradients]:
    """Group gradients by device, dtype and axes; raise if ``foreach`` kernels are missing."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for local, axes in gradients:
        if local.numel():  # torch has no maximum of an empty tensor
            groups.setdefault((axes, local.device, local.dtype), []).append(local)
    made = []
    for (axes, device, _), group in groups.items():
        if foreach and not has_foreach_support([], device):
            raise KindError(
                f"clip_grad_norm_: torch has no foreach kernels for {device.type}",
                found="foreach=True",
                fix="remove foreach=True",
            )
        is_foreach = has_foreach_support(group, device) if foreach is None else bool(foreach)
        made.append(_LikeGradients(axes, group, is_foreach))
    return made


def _local_power(
    groups: Iterable[_LikeGradients], mesh: DeviceMesh | None, order: float, device: torch.device
) -> torch.Tensor:
    """Return this rank's share of the sum of powers, or its largest value, in float64.

    Args:
        mesh: the mesh whose ranks sum their shares; None if this rank's share is the total.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for group in groups:
        dtype = torch.float32 if group.locals[0].dtype in _HALVES else None
        norms = (
            torch._foreach_norm(group.locals, order, dtype=dtype)
            if group.is_foreach
            else [torch.linalg.vector_norm(x, order, dtype=dtype) for x in group.locals]
        )
        each = torch.stack(tuple(norms)).to(device, torch.float64)
        if math.isinf(order):
            total = torch.maximum(total, each.max())
        else:
            sizes = {} if mesh is None else mesh.axis_sizes
            num_holders = math.prod(n for axis, n in sizes.items() if axis not in group.axes)
            total = total + each.pow(order).sum() / num_holders
    return total
