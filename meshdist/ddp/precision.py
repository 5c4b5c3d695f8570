"""Run forward and backward in low precision, with full-precision parameters and gradients.

Each module runs on casts of its parameters. The casts are part of the graph, so gradients have full
precision. A checkpoint that recomputes a module casts again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import optree
import torch
from torch import nn

from ..errors import KindError

__all__ = ["MixedPrecision"]


class MixedPrecisionConfig(Protocol):
    """The fields of ``mixed_precision``: torch's ``_MixedPrecision``, or ours."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None


@dataclass
class MixedPrecision:
    """The dtypes in which a wrapped model computes and communicates; None keeps a dtype.

    Only floating-point tensors are cast. Parameters and gradients have full precision between
    steps.

    Args:
        param_dtype: of parameters and floating-point inputs, in forward and backward.
        reduce_dtype: of the gradients sent; by default ``param_dtype``.
        buffer_dtype: of buffers, after the wrapper's construction.

    Cost: a copy of each parameter in ``param_dtype`` during forward and backward; communication in
        ``reduce_dtype``.

    Raises:
        KindError: a field passed to the wrapper is not a floating-point dtype.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     precision = dist.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
        ...     model = md.DDP(torch.nn.Linear(1, 1), mixed_precision=precision)
        ...     out = model(torch.ones(1, 1))
        ...     out.sum().backward()
        ...     return out.dtype, model.module.weight.dtype, model.module.weight.grad.dtype
        >>> md.simulate(program, 2)[0]
        (torch.bfloat16, torch.float32, torch.float32)
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


def check_precision(config: object) -> None:
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = getattr(config, name, ...)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise KindError(
                f"mixed_precision is {config!r}",
                expected=f"a MixedPrecision with a floating-point dtype, or None, as {name}",
                fix="pass for example md.distributed.MixedPrecision(param_dtype=torch.bfloat16)",
            )


class CastParameters:
    """Hooks that run modules on casts of their parameters, except the ``ignored``."""

    def __init__(
        self, module: nn.Module, config: MixedPrecisionConfig, ignored: frozenset[str]
    ) -> None:
        self._module = module
        self._dtype = config.param_dtype
        excluded = {
            id(tensor)
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
            if name in ignored
        }
        if config.buffer_dtype is not None:
            for buffer in module.buffers():
                if buffer.is_floating_point() and id(buffer) not in excluded:
                    buffer.data = buffer.to(config.buffer_dtype)
        self._is_cast = False  # whether all parameters are cast, as the root module runs
        self._owners: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        self._restored: list[list[tuple[nn.Module, str, nn.Parameter]]] = []
        self._handles: list[Any] = []
        if self._dtype is None:
            return
        for owner in module.modules():
            owners = [
                (child, name)
                for child in owner.modules()
                for name, parameter in child._parameters.items()
                if parameter is not None
                and parameter.is_floating_point()
                and id(parameter) not in excluded
            ]
            if owners:
                self._owners[owner] = owners
                self._handles += [
                    owner.register_forward_pre_hook(self._cast),
                    owner.register_forward_hook(self._restore, always_call=True),
                ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def cast_inputs(self, inputs: Any) -> Any:
        """Return ``inputs`` with floating-point tensors cast to ``param_dtype``."""
        if self._dtype is None:
            return inputs
        return optree.tree_map(
            lambda leaf: (
                leaf.to(self._dtype)
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
                else leaf
            ),
            inputs,
            none_is_leaf=True,
        )

    def _cast(self, owner: nn.Module, _: Any) -> None:
        cast: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._restored.append(cast)
        if self._is_cast:
            return
        self._is_cast = owner is self._module
        known: dict[int, torch.Tensor] = {}
        for child, name in self._owners[owner]:
            parameter = child._parameters[name]
            if isinstance(parameter, nn.Parameter) and parameter.dtype is not self._dtype:
                low = known.get(id(parameter))
                if low is None:
                    low = known[id(parameter)] = parameter.to(self._dtype)
                child._parameters[name] = low  # type: ignore[assignment]
                cast.append((child, name, parameter))
        _renew_flat_weights(cast)

    def _restore(self, owner: nn.Module, *_: Any) -> None:
        cast = self._restored.pop()
        for child, name, parameter in cast:
            child._parameters[name] = parameter
        _renew_flat_weights(cast)
        if owner is self._module:
            self._is_cast = False


def _renew_flat_weights(changed: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    """Rebuild the flat weight lists of recurrent modules with changed parameters."""
    for owner in {child for child, _, _ in changed if isinstance(child, nn.RNNBase)}:
        names = owner._flat_weights_names
        owner._flat_weights = [getattr(owner, name, None) for name in names]
