"""Compute losses of logits whose classes are split over an axis."""

from __future__ import annotations

import torch

from ..arrays import describe
from ..checking.call_sites import one_frame
from ..errors import ArgumentError, DtypeError, ShapeError
from ..groups.process_group import resolve_group
from ..lax.axes import AxisName, get_axes
from ..lax.reductions import pmax, psum
from ..mesh.device_mesh import DeviceMesh
from ..mesh.placement import balanced_boundaries
from .layers import local_index

__all__ = ["cross_entropy"]

_REDUCTIONS = ("mean", "sum", "none")


@one_frame
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    axis_name: AxisName,
    *,
    num_classes: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Compute the cross entropy of logits whose classes are split over an axis; collective.

    Varying -> invariant.

    Args:
        logits: this rank's classes, shape [..., classes], of any floating dtype, as from a
            ``column`` head.
        target: class indices, shape [...], of any integer dtype, equal on all ranks along the axis.
        axis_name: the axis that splits the classes: a name in the current mesh, or ``mesh["tp"]``.
        num_classes: the number of classes of all ranks together; None if it is equal on all ranks.
        ignore_index: the target of positions to ignore.
        label_smoothing: the amount of label smoothing, from 0 to 1.
        reduction: "mean" over the positions that are not ignored, "sum", or "none".
        mesh: the mesh of the axis; None means the current mesh.

    Returns:
        A scalar, or losses of the shape of ``target``; equal along the axis. float16 and bfloat16
        logits are computed and returned in float32.

    Gradient:
        The gradient of this rank's classes; nothing is sent.

    Cost:
        Two all-reduces: of one number for each position, then of two (three with label smoothing).

    Raises:
        ShapeError: if the target has the wrong shape, or the logits are not this rank's part of
            ``num_classes``.
        DtypeError: if the targets are not integers.
        ArgumentError: if the reduction is unknown or the smoothing is not from 0 to 1; on the CPU,
            also if a target is out of range.
        MismatchError: if ranks have different numbers of classes and ``num_classes`` is None.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     logits = md.shard(torch.eye(4), "n c@tp", mesh)        # two of four classes
        ...     target = torch.tensor([0, 1, 2, 3])
        ...     return md.tensor_parallel.cross_entropy(logits, target, mesh["tp"]).item()
        >>> [round(loss, 4) for loss in md.simulate(program, 2)]
        [0.7437, 0.7437]

    Source:
        Shoeybi et al., Megatron-LM, 2019, section 3, on the output embedding.
    """
    axes = get_axes("cross_entropy", axis_name, mesh)
    start, stop, size = _own_classes(logits, axes, num_classes)
    _check(logits, target, label_smoothing, reduction)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    target = target.long()
    counts = target != ignore_index
    index, is_mine = local_index(
        target.where(counts, 0), start, stop, size, "cross_entropy, target"
    )
    # Ranks compare the names of the tensors that they send, so this size detects a mismatch.
    name = f"logits of {size} classes"
    if num_classes is None:
        name += " (uneven parts need num_classes=)"
    largest = pmax({name: logits.detach().amax(-1)}, axes)[name]
    # Subtract the largest logit first, because sums of large numbers would be less exact.
    logits = logits - largest[..., None]
    picked = logits.gather(-1, index[..., None])[..., 0].masked_fill(~is_mine, 0)
    parts = [logits.exp().sum(-1), picked]
    if label_smoothing:
        parts.append(logits.sum(-1))
    total, of_target, *of_all = psum({name: torch.stack(parts)}, axes)[name].unbind()
    losses = total.log() - (1 - label_smoothing) * of_target
    if label_smoothing:
        losses = losses - label_smoothing / size * of_all[0]
    losses = losses.masked_fill(~counts, 0)
    if reduction == "none":
        return losses
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


def _own_classes(
    logits: torch.Tensor, axes: DeviceMesh, num_classes: int | None
) -> tuple[int, int, int]:
    """Return (start, stop) of this rank's classes, and the number of all; or raise."""
    group = resolve_group(axes)
    mine = logits.shape[-1] if logits.dim() else 0
    size = mine * group.size() if num_classes is None else num_classes
    if size < group.size():  # All ranks raise, so that no rank waits in a collective.
        raise ShapeError(
            f"cross_entropy: some ranks have none of the {size} classes",
            where=f"rank {group.world.rank}, {group.name}",
            expected=f"{group.size()} classes or more",
            found=f"logits of shape {tuple(logits.shape)}",
            fix="remove the head from the plan, and call torch.nn.functional.cross_entropy",
        )
    bounds = balanced_boundaries(size, axes.shape)
    start, stop = bounds[group.rank()], bounds[group.rank() + 1]
    if stop - start != mine:
        raise ShapeError(
            f"cross_entropy: the logits are not this rank's part of {size} classes",
            where=f"rank {group.world.rank}, {group.name}",
            expected=f"logits of shape [..., {stop - start}]",
            found=f"shape {tuple(logits.shape)}",
            fix="pass the number of classes of all ranks together: num_classes=...",
        )
    return start, stop, size


def _check(
    logits: torch.Tensor, target: torch.Tensor, label_smoothing: float, reduction: str
) -> None:
    if target.shape != logits.shape[:-1]:
        is_other = target.dim() == logits.dim()
        raise ShapeError(
            "cross_entropy: the shapes of logits and target do not match",
            expected=f"a target of shape {tuple(logits.shape[:-1])} "
            "(the last dim holds the classes)",
            found=f"logits of shape {tuple(logits.shape)}, target of shape {tuple(target.shape)}",
            fix="pass class indices, not probabilities"
            if is_other
            else "pass one class index for each position of the logits",
        )
    if target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
        raise DtypeError(
            "cross_entropy takes class indices as target",
            expected="a target of an integer dtype",
            found=describe(target),
            fix="convert the target: target.long()",
        )
    if reduction not in _REDUCTIONS:
        raise ArgumentError(
            f"cross_entropy does not support reduction={reduction!r}",
            expected="one of " + ", ".join(map(repr, _REDUCTIONS)),
            fix="pass for example reduction='mean'",
        )
    if not 0 <= label_smoothing <= 1:
        raise ArgumentError(
            f"cross_entropy cannot use label_smoothing={label_smoothing!r}",
            expected="a number from 0 to 1",
            fix="pass for example label_smoothing=0.1",
        )
