"""Normalize over the batches of all replicas with synchronized batch norm.

Each rank computes its mean, and the sum of squared distances from it. One all-reduce combines them,
in float64, so that squares of means of float32 data lose no precision. A rank without data
contributes zeros.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from ..bootstrap.world import find_launched_rank, find_world
from ..collectives.tensor_collectives import all_reduce
from ..error_text import with_article
from ..errors import ArgumentError, GradientError, KindError, ShapeError
from ..groups.process_group import GroupLike, ProcessGroup, resolve_group
from ..mesh.device_mesh import DeviceMesh
from ..runtime.graph_breaks import untraced
from ..typed_mode.collective_calls import made_equal
from .device_streams import reader_for

__all__ = ["SyncBatchNorm"]

_NUM_FLAGS = 2  # the number of ranks that need an input gradient, and that have no backward


class SyncBatchNorm(_BatchNorm):
    """Apply batch norm with statistics of the batches of all ranks of an axis.

    In training mode, each forward and backward is collective over the axis, in the same order on
    all ranks. In eval mode, in a group of one rank, and without a world, it is
    ``torch.nn.BatchNorm1d`` (2d, 3d).

    Batches may differ in size; a rank without data passes a batch of size 0. If all are empty, the
    running estimates do not change. Means and variances are bitwise equal on all ranks. For float16
    and bfloat16 inputs, statistics and gradients are computed in float32. Gradients of ``weight``
    and ``bias`` are this rank's, for DDP to average, as in torch.

    Args:
        num_features: the number of channels, dimension 1 of the input.
        eps: added to the variance.
        momentum: the weight of a new batch in the running estimates; None averages all batches.
        affine: whether the module has ``weight`` and ``bias``.
        track_running_stats: whether the module has running estimates.
        process_group: an axis, ``mesh["dp"]``; several together, ``mesh["dp", "cp"]``; a
            ProcessGroup; or None for all ranks during forward.
        device, dtype: of parameters and buffers.
        bias: False leaves out ``bias``.

    Returns:
        The normalized input, in its shape and dtype.

    Gradient: exact, through mean and variance, of the sum of all ranks' losses. If any rank's input
        needs a gradient, every rank must run its backward. There is no second derivative.

    Cost: an all-reduce of 3 C + 3 float64 numbers for C channels in the forward and, if any rank's
        input needs a gradient, of 2 C in the backward.

    Raises:
        ShapeError: the input has fewer than 2 dimensions, or a different number of channels.
        GradientError: in the backward, if another rank's forward has no backward (for example,
            under ``no_grad``) while this rank needs it.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     norm = dist.SyncBatchNorm(1, affine=False)
        ...     return norm(torch.tensor([[0.0], [0.0]]) + 2 * md.get_rank()).flatten().round()
        >>> md.simulate(program, 2)
        [tensor([-1., -1.]), tensor([1., 1.])]

    Source: Ioffe and Szegedy, "Batch Normalization" (2015); Chan, Golub and LeVeque, "Updating
        Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979)."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: GroupLike = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        if process_group is not None and not isinstance(process_group, DeviceMesh):
            resolve_group(process_group)  # raises if it is not a group
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            device=device,
            dtype=dtype,
        )
        if not bias:  # torch 2.11 has no such argument
            self.register_parameter("bias", None)
        self.process_group = process_group

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize ``input``, of shape (N, C, ...); collective in training mode."""
        self._check_input_dim(input)
        momentum = self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / self.num_batches_tracked.item()
        tracks = self.track_running_stats or not self.training
        mean = self.running_mean if tracks else None
        var = self.running_var if tracks else None
        group = self._find_group() if self.training else None
        if group is None:
            is_by_batch = self.training or (mean is None and var is None)
            return F.batch_norm(
                input, mean, var, self.weight, self.bias, is_by_batch, momentum or 0.0, self.eps
            )
        return _normalize(input, self, momentum or 0.0, group)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: GroupLike = None
    ) -> nn.Module:
        """Replace each batch norm inside ``module`` by a SyncBatchNorm over ``process_group``.

        Args:
            module: changed in place: ``BatchNorm1d``, 2d and 3d, and SyncBatchNorm of torch and of
                meshdist are replaced; parameters, buffers, mode and ``qconfig`` are kept.
            process_group: as for ``SyncBatchNorm``.

        Returns:
            ``module``; a new module if ``module`` is a batch norm.

        Raises:
            KindError: ``module`` is not a module.
            ArgumentError: a lazy module has no shape yet.

        Example:
            >>> import meshdist as md
            >>> import meshdist.distributed as dist
            >>> net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
            >>> [type(layer).__name__ for layer in dist.SyncBatchNorm.convert_sync_batchnorm(net)]
            ['Linear', 'SyncBatchNorm']
        """
        if not isinstance(module, nn.Module):
            raise KindError(
                "convert_sync_batchnorm() requires a module, not "
                f"{with_article(type(module).__name__)}",
                expected="a torch.nn.Module",
                fix="pass the model, and use the returned module: "
                "net = SyncBatchNorm.convert_sync_batchnorm(net)",
            )
        converted = module
        if isinstance(module, _BatchNorm):
            converted = cls._made_of(module, process_group)
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return converted

    @classmethod
    def _made_of(cls, module: _BatchNorm, process_group: Any) -> SyncBatchNorm:
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            raise ArgumentError(
                f"convert_sync_batchnorm() cannot convert an uninitialized {type(module).__name__}",
                expected="batch norms whose parameters are initialized",
                fix="run one forward of the module before you convert it",
            )
        made = cls(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            process_group,
            bias=module.bias is not None,
        )
        estimates = ("running_mean", "running_var", "num_batches_tracked")
        for name in ("weight", "bias", *estimates, "training", "qconfig"):
            if hasattr(module, name):  # ``qconfig`` rarely exists
                setattr(made, name, getattr(module, name))
        return made

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features or self.num_features == 0:
            raise ShapeError(
                f"SyncBatchNorm({self.num_features}) cannot normalize an input of shape "
                f"{tuple(input.shape)}",
                expected=f"at least 2 dimensions, of size {self.num_features or 'above 0'} in "
                "dimension 1",
                fix="pass an input of shape (N, C, ...); on a rank without data, of shape (0, C, "
                "...)"
                if input.dim() < 2
                else "pass num_features=C to SyncBatchNorm for inputs of shape (N, C, ...)",
            )

    @untraced
    def _find_group(self) -> ProcessGroup | None:
        """Return the group to synchronize; None without a world or other ranks."""
        if self.process_group is None and find_world() is None and find_launched_rank() is None:
            return None
        group = resolve_group(self.process_group)
        return group if group.size() > 1 else None

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        memo[id(self.process_group)] = self.process_group
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone


@untraced
def _normalize(
    x: torch.Tensor,
    module: SyncBatchNorm,
    momentum: float,
    group: ProcessGroup,
) -> torch.Tensor:
    """Return the group's batch norm of ``x``; update the running estimates."""
    weight, bias, tracks = module.weight, module.bias, module.track_running_stats
    has_backward = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)
    )
    y, count, mean, squares = _Normalization.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, module.eps, has_backward, group
    )
    made_equal(group, count, mean, squares)
    with torch.no_grad():
        # A mean needs one value, an unbiased variance two.
        for running, new, least in (
            (module.running_mean, mean, 1),
            (module.running_var, squares / (count - 1).clamp(min=1), 2),
        ):
            if tracks and running is not None:
                old = running.to(new.dtype)
                running.copy_(torch.where(count >= least, old.lerp(new, momentum), old))
    return y  # type: ignore[no-any-return]


class _Normalization(torch.autograd.Function):
    """The autograd function of synchronized batch norm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        has_backward: bool,
        group: ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the group's (result, values per channel, means, sums of squared distances)."""
        wide = x.to(_wide_dtype(x.dtype))
        near = wide.mean(_channel_dims(wide)) if wide.numel() else wide.new_zeros(wide.shape[1])
        centred = wide - _by_channel(near, wide)
        own_mean, own_squares = _local_statistics(centred, near)
        own_count = wide.numel() // wide.shape[1]
        needs_x = has_backward and ctx.needs_input_grad[0]
        heads = [own_mean.new_full((1,), value) for value in (needs_x, not has_backward, own_count)]
        sums = torch.cat([*heads, own_count * own_mean, own_count * own_mean.square(), own_squares])
        all_reduce(sums, group=group)
        count, mean, squares = _combined(sums)
        inverse = (squares / count.clamp(min=1) + eps).rsqrt()
        # Use the distances from the mean, which are small: input times scale could be large.
        scale = inverse if weight is None else inverse * weight
        offset = (near - mean) * scale
        if bias is not None:
            offset = offset + bias
        y = centred.mul_(_by_channel(scale, wide)).add_(_by_channel(offset, wide)).to(x.dtype)
        if has_backward:
            ctx.save_for_backward(x, weight, bias, mean, inverse, count)
            ctx.group = group
            ctx.flags = None
            ctx.reader = reader_for(x.device, _NUM_FLAGS)
            ctx.reader.note(sums[:_NUM_FLAGS].float())
        ctx.mark_non_differentiable(count, mean, squares)
        return y, count, mean, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, inverse, count = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = x.to(_wide_dtype(x.dtype))
        grad = grad.to(wide.dtype)
        near = mean.to(wide.dtype)
        centred = wide - _by_channel(near, wide)
        dims = _channel_dims(wide)
        summed = grad.sum(dims, dtype=wide.dtype).to(mean.dtype)
        # Sums of grad times the distance from the mean, which ``near`` approximates.
        moment = (grad * centred).sum(dims).to(mean.dtype) + (near - mean) * summed
        grad_x = grad_weight = grad_bias = None
        if needs_weight:
            grad_weight = (moment * inverse).to(weight.dtype)
        if needs_bias:
            grad_bias = summed.to(bias.dtype)
        flags = ctx.reader.take()
        if flags is not None:  # kept for a second backward of the same forward
            ctx.flags = flags.tolist()
        if _is_exchanged(ctx.flags, ctx.group):
            sums = torch.cat([summed, moment])
            all_reduce(sums, group=ctx.group)
            if needs_x:
                summed, moment = (sums / count.clamp(min=1)).chunk(2)
                slope = moment * inverse.square()
                scale = inverse if weight is None else inverse * weight
                less = _by_channel(summed + (near - mean) * slope, wide)
                inner = centred.mul_(_by_channel(slope, wide)).add_(less)
                grad_x = torch.sub(grad, inner, out=inner).mul_(_by_channel(scale, wide))
                grad_x = grad_x.to(x.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _is_exchanged(flags: list[float] | None, group: ProcessGroup) -> bool:
    """Return whether any rank's input needs a gradient; raise if some ranks have no backward.

    Args:
        flags: how many ranks need it, and have no backward; None if unknown.
    """
    if flags is None:  # unknown on every rank during a graph capture
        return True
    num_needing, num_without = flags
    if num_needing and num_without:
        raise GradientError(
            f"SyncBatchNorm: the forward of {num_without:.0f} of {group.size()} ranks has no "
            "backward",
            where=f"rank {group.world.rank}, {group.group_name}",
            expected="a backward on every rank, for the gradients of mean and variance",
            fix="run the forward with gradients enabled on every rank, or under torch.no_grad() on "
            "every rank; if the norm has no weights, make every rank's input require a gradient",
        )
    return num_needing > 0


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _channel_dims(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _by_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return values per channel, reshaped to broadcast to ``x``, in its dtype."""
    return values.to(x.dtype).view(-1, *(1 for _ in range(x.dim() - 2)))


def _local_statistics(
    centred: torch.Tensor, near: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return means and sums of squared distances per channel; ``centred`` is ``x - near``."""
    count = max(centred.numel() // centred.shape[1], 1)
    rest = centred.sum(_channel_dims(centred)).double()  # the rounding error of ``near``
    squares = centred.square().sum(_channel_dims(centred)).double()
    return near.double() + rest / count, (squares - rest.square() / count).clamp(min=0)


def _combined(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return count, means and sums of squared distances of all ranks, from their sums."""
    count = sums[_NUM_FLAGS]
    first, second, squares = sums[_NUM_FLAGS + 1 :].chunk(3)
    mean = first / count.clamp(min=1)
    between = (second - first * mean).clamp(min=0)  # of the ranks' means
    return count, mean, squares + between
