"""``md.clip_grad_norm_``: one norm of gradients that lie on a mesh in any way, by one message.

Each rank sums the powers of its gradients' norms, each divided by the number of ranks that hold the
same elements; an all-reduce over the mesh adds these up, so that each element counts once and every
rank has the same bits. Nothing is sent where no gradient is cut. The number of ranks follows from
marks, or from a DTensor's placements; the axes of its mesh are found in ours by their ranks.

Drawn case: the norm of order 2 on a mesh (dp=2, tp=2); w is cut over 'tp', b is equal on all ranks.

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
from ..error_text import ranks_text
from ..errors import ArgumentError, AxisTypeError, GradientError, KindError, MeshError
from ..mesh.current_mesh import find_current_mesh, mesh_in_force, with_hidden_mesh
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
    """Every rank scales its gradients by one factor, so that the norm of all is at most a maximum.

    Each element counts once, however many ranks hold it: a parameter that varies over an axis by
    its mark (``md.annotate``) has elements of its own on each rank there, and others are equal.
    DTensors count by their placements, beside plain tensors. Collective over the mesh where a
    parameter is cut: all its ranks call it.

    Args:
        parameters: those whose ``.grad`` is scaled in place, each once: tensors in any iterable, or
            a single tensor. A gradient of None counts as zeros. If a parameter is cut, every rank
            passes a cut parameter: a rank without experts passes an empty expert with the mark.
        max_norm: the largest norm that the gradients have afterwards.
        norm_type: the order of the norm, above 0; ``math.inf`` is the largest absolute value.
        error_if_nonfinite: whether a norm that is NaN or infinite is an error.
        foreach: whether many gradients share a kernel; None where the device can.
        mesh: has the axes that cut parameters; None takes the mesh in force. Where there is none,
            and no parameter is cut, it is ``torch.nn.utils.clip_grad_norm_``.

    Returns:
        The norm before clipping, of no dims, equal in its bits on all ranks: in float64 where a
        parameter is, else in float32; on the device of the first gradient.

    Cost:
        An all-reduce of 24 bytes over the mesh; none where no parameter is cut.

    Raises:
        AxisTypeError: a gradient is unreduced, a partial sum on each rank.
        AxisError: the mesh lacks an axis that cuts a parameter.
        MeshError: there is no current mesh, and parameters are cut; or a DTensor lies along no axes.
        GradientError: on every rank, and nothing has been scaled: ``error_if_nonfinite``; gradients
            of a backward under ``no_sync``; of equal elements some holders have none. The last two
            need the sum: on an accelerator, which is not waited for, the norm is NaN in place.
        MismatchError: other arguments on some ranks, or other parameters that are equal on all.
        ArgumentError: a norm_type that is not above 0, a max_norm below 0. KindError: something
            else than parameters, or sparse gradients.

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
            expected=f"a finite norm, here of order {norm_type}, as error_if_nonfinite=True asks",
            found="a gradient with NaN or infinity, or with numbers too large for their dtype",
            fix="nothing has been scaled: leave this step out on every rank, or look for the loss "
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
        GradientError: a gradient is local, or some of its holders lack it; on a device NaN results.
    """
    is_local, lacking = flags_of(parameters, mesh)
    # Of the largest value nothing is missing where a holder lacks the gradient.
    flags = [is_local] if math.isinf(order) else [is_local, lacking]
    told = torch.cat((share.view(1), share.new_tensor(flags)))
    op = ReduceOp.MAX if math.isinf(order) else ReduceOp.SUM
    run_named("all_reduce", mesh.open_group(), op_name, told, op)
    total, is_rejected = told[0], told[1:].any()
    if share.device.type != "cpu":  # which the host does not wait for
        return torch.where(is_rejected, torch.nan, total)
    if is_rejected:
        raise rejected_norm(parameters, mesh)
    return total


def _listed(parameters: Any) -> list[torch.Tensor]:
    """Return the parameters, each once; raise for anything but tensors with dense gradients."""
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    if isinstance(parameters, nn.Module) or not isinstance(parameters, Iterable):
        raise KindError(
            "clip_grad_norm_ takes parameters",
            found=f"a {type(parameters).__name__}",
            fix="give it module.parameters()",
        )
    given = list(parameters)
    for index, parameter in enumerate(given):
        if not isinstance(parameter, torch.Tensor):
            raise KindError(
                "clip_grad_norm_ takes parameters alone",
                expected="tensors with gradients",
                found=f"entry {index} is a {type(parameter).__name__}",
                fix="give it module.parameters(), without names",
            )
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise KindError(
                "clip_grad_norm_ takes dense gradients",
                found=f"{name_of(index, parameter)}, whose gradient is {parameter.grad.layout}",
                fix="parameter.grad = parameter.grad.to_dense()",
            )
    if not given and isinstance(parameters, GeneratorType):
        warn_caller("clip_grad_norm_: the generator has no parameters (left), nothing is clipped")
    return list({id(parameter): parameter for parameter in given}.values())


def _checked_numbers(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    limit = float(get_number(max_norm, "clip_grad_norm_: max_norm"))
    order = math.inf if norm_type == "inf" else get_number(norm_type, "clip_grad_norm_: norm_type")
    if not limit >= 0:
        raise ArgumentError(
            "clip_grad_norm_: max_norm is no norm", expected="a number from 0", found=f"{limit}"
        )
    if not order > 0:
        raise ArgumentError(
            "clip_grad_norm_: norm_type is the order of no norm",
            expected="a number above 0, or math.inf",
            found=f"{order}",
        )
    return limit, float(order)


def _find_mesh(given: Sequence[torch.Tensor], mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return ``mesh`` or the current mesh; without any, None, or raise if gradients need it."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise mesh_kind_error(
            "clip_grad_norm_ takes a mesh",
            mesh,
            fix="pass mesh=mesh, or mesh=mesh['dp'] for one axis",
        )
    mesh = mesh or find_current_mesh()
    if mesh is None:
        for index, parameter in enumerate(given):
            kinds = kinds_in(gradient_type_of(parameter))
            _reject_unreduced(index, parameter, kinds, None)
            if axes := [axis for axis, kind in kinds.items() if kind == "V"]:
                mesh_in_force("clip_grad_norm_", f" of a parameter that is cut over {shown(axes)}")
        if len({getattr(parameter, "device_mesh", None) for parameter in given}) > 1:
            mesh_in_force(
                "clip_grad_norm_", " of DTensors on several meshes, or beside plain tensors"
            )
    return mesh


_Gradient: TypeAlias = tuple[torch.Tensor, frozenset[str]]
"""A gradient as this rank holds it, and the axes along which ranks hold other elements."""


def _gradients_of(
    given: Sequence[Any], mesh: DeviceMesh, given_mesh: DeviceMesh | None
) -> tuple[list[NormParameter], list[_Gradient]]:
    """Return parameters, and gradients, with the axes that cut them."""
    known: dict[object, frozenset[str]] = {}  # parameters have few types

    def axes_of(index: int, parameter: Any, tensor: Any, text: str) -> frozenset[str]:
        key = (text, getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None))
        if key not in known:
            kinds = _kinds_of(tensor, text, index, mesh)
            if tensor is not parameter:
                _reject_unreduced(index, parameter, kinds, mesh)
            axes = _axes_cut(kinds, mesh, given_mesh)
            if "U" in kinds.values():  # each gradient is looked at, to be named
                return axes
            known[key] = axes
        return known[key]

    parameters, gradients = list[NormParameter](), list[_Gradient]()
    for index, parameter in enumerate(given):
        # By the parameter itself, too: a rank that lacks its gradient takes part all the same.
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
                "clip_grad_norm_: a DTensor lies over ranks that are along no axes of the mesh",
                where=where(mesh),
                expected=f"ranks along one or several axes of {mesh_text(mesh)}",
                found=f"{name_of(index, tensor)}, as {placement} over "
                + (ranks_text(ranks) if ranks else "other ranks"),
                fix="clip with a mesh that has the axis: mesh=md.DeviceMesh.from_torch(...)",
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
    """Return axes larger than 1 with the kind "V"; raise for an axis that ``mesh`` lacks.

    Args:
        given_mesh: the mesh that the program's call names; None if it takes the mesh in force.
    """
    for axis in kinds:
        if axis not in mesh.axis_names:
            error = no_axis(axis, mesh.axis_names, f"clip_grad_norm_ on {mesh_text(mesh)}")
            raise with_hidden_mesh(error, given_mesh)
    return frozenset(a for a, kind in kinds.items() if kind == "V" and mesh.axis_sizes[a] > 1)


def _reject_unreduced(
    index: int, parameter: torch.Tensor, kinds: Mapping[str, str], mesh: DeviceMesh | None
) -> None:
    sizes = {} if mesh is None else mesh.axis_sizes
    axes = [axis for axis, kind in kinds.items() if kind == "U" and sizes.get(axis, 2) > 1]
    if not axes or parameter.grad is None:
        return
    varying = [axis for axis, kind in kinds.items() if kind == "V"]
    mark = f", varying={axes_argument(varying)}" if varying else ""
    raise AxisTypeError(
        f"clip_grad_norm_ of a gradient that is unreduced over {shown(axes)}",
        where=None if mesh is None else where(mesh, axes),
        expected="complete gradients: the norm of a sum does not follow from those of its "
        "partial sums",
        found=name_of(index, parameter),
        fix="p.grad = p.grad.redistribute(placements=p.placements)"
        if hasattr(parameter, "placements")
        else f"sum it first: p.grad = md.annotate(lax.psum(p.grad, {axes_argument(axes)}){mark}); "
        "or clip behind md.accumulate_gradients, which sums at its end",
    )


def _local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor, in the same memory, or the plain tensor itself."""
    local: Any = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _LikeGradients:
    """Gradients of this rank, none empty, of equal device, dtype and axes that cut them."""

    axes: frozenset[str]
    locals: list[torch.Tensor]
    is_foreach: bool


def _grouped(gradients: Iterable[_Gradient], foreach: bool | None) -> list[_LikeGradients]:
    """Group gradients by device, dtype and axes; raise if ``foreach`` kernels are missing."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for local, axes in gradients:
        if local.numel():  # torch knows no largest value of none
            groups.setdefault((axes, local.device, local.dtype), []).append(local)
    made = []
    for (axes, device, _), group in groups.items():
        if foreach and not has_foreach_support([], device):
            raise KindError(
                f"clip_grad_norm_: torch has no kernels for many tensors on {device.type}",
                found="foreach=True",
                fix="leave foreach out",
            )
        is_foreach = has_foreach_support(group, device) if foreach is None else bool(foreach)
        made.append(_LikeGradients(axes, group, is_foreach))
    return made


def _local_power(
    groups: Iterable[_LikeGradients], mesh: DeviceMesh | None, order: float, device: torch.device
) -> torch.Tensor:
    """Return this rank's share of the sum of powers, or its largest value, in float64.

    Args:
        mesh: whose ranks add their shares up; None where this rank's is the whole.
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
