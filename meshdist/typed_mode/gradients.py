"""Run backward passes in a typed context: check losses, and set the axis types of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..annotations.axis_types import (
    ANNOTATION,
    EMPTY,
    GRADIENT_KINDS,
    find_owner_axes,
    find_type,
    gradient_type,
    kinds_in,
    set_type,
    type_of,
    with_kinds,
)
from ..errors import AxisTypeError
from .context import Backwards, ContextMode
from .detail_checks import check_gradient_of, check_loss
from .function_rules import Parameter, argument
from .provenance import varying_loss
from .type_errors import foreign_leaf, owned_loss, rejected_loss, tensor_text, where


def gradient_type_of(x: torch.Tensor) -> str:
    """Return the axis type of ``x.grad`` after a backward."""
    text = gradient_type(type_of(x))
    owned = find_owner_axes(x)
    return with_kinds(text, dict.fromkeys(owned, "I")) if owned else text


def run_backward(mode: ContextMode, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run ``backward``; raise if the axis type of a loss, or of a gradient, does not allow it."""
    losses = _listed(args[0] if args else kwargs.get("tensors"))
    parameter = (1, "gradient") if call is torch.Tensor.backward else (1, "grad_tensors")
    args, kwargs = _checked_arguments(mode, "backward", losses, parameter, args, kwargs)
    leaf = mode.casts.find_leaf_over(mode.owners) if mode.owners else None
    if leaf is not None:
        raise foreign_leaf(leaf, mode.owners, mode.mesh, "backward")
    with _running(mode):
        result = call(*args, **kwargs)
    for leaf in mode.leaves.values():
        check_gradient_of(leaf, leaf.grad, gradient_type_of(leaf), mode.mesh)
    return result


def run_grad(mode: ContextMode, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run ``torch.autograd.grad``; set the results' axis types; raise for an unsupported loss."""
    losses = _listed(argument((0, "outputs"), args, kwargs))
    inputs = _listed(argument((1, "inputs"), args, kwargs))
    parameter = (2, "grad_outputs")
    args, kwargs = _checked_arguments(mode, "autograd.grad", losses, parameter, args, kwargs)
    with _running(mode):
        found = call(*args, **kwargs)
    for x, grad in zip(inputs, found, strict=True):
        if mode.is_checked and x.is_leaf:
            check_gradient_of(x, grad, gradient_type(type_of(x)), mode.mesh)
        if grad is not None:
            set_type(grad, gradient_type(type_of(x)))
    return found


@contextmanager
def _running(mode: ContextMode) -> Iterator[None]:
    """Make ``mode`` the context of the backward that runs inside."""
    state = mode.mesh.caches.of(Backwards)
    state.running = mode
    try:
        yield
    finally:
        state.running = None
        mode.casts.forget_leaves()


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (tuple, list)) else [given]


def _checked_arguments(
    mode: ContextMode,
    operation: str,
    losses: Sequence[Any],
    parameter: Parameter,
    args: Any,
    kwargs: Any,
) -> tuple[Any, Any]:
    """Return (args, kwargs) with cast gradients at ``parameter``; raise for an unsupported loss."""
    gradients = _check_losses(mode, operation, losses, argument(parameter, args, kwargs))
    position, name = parameter
    if position < len(args):
        return (*args[:position], gradients, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: gradients} if name in kwargs else kwargs


def _check_losses(mode: ContextMode, operation: str, losses: Sequence[Any], given: Any) -> Any:
    """Return ``given`` gradients cast to fit the losses; raise for an unsupported axis type."""
    is_listed = isinstance(given, (tuple, list))
    gradients = list(given) if is_listed else [given] * (1 if given is not None else len(losses))
    for index, loss in enumerate(losses):
        if not isinstance(loss, torch.Tensor):
            continue
        text = mode.type_of(loss, operation)
        mode.check_axes(loss, kinds_in(text), operation)
        for axis, owner in mode.owners.items():
            if kinds_in(text).get(axis, "I") in "IU":
                raise owned_loss(loss, axis, owner, mode.mesh, operation)
        if mode.is_checked:
            check_loss(loss, mode.mesh)
        gradient = gradients[index] if index < len(gradients) else None
        if gradient is None:
            wrong = [
                axis
                for axis, kind in kinds_in(text).items()
                if kind in "RV" and axis not in mode.owners
            ]
            varying = [axis for axis in wrong if kinds_in(text)[axis] == "V"]
            if varying:
                raise varying_loss(loss, varying, mode.mesh, operation, is_noted=mode.is_noting)
            if wrong:
                raise rejected_loss(loss, wrong, mode.mesh, operation)
        else:
            gradients[index] = _cast_gradient(mode, operation, loss, gradient)
    mode.stop_notes()
    return gradients if is_listed else given if given is None else gradients[0]


def _cast_gradient(
    mode: ContextMode, operation: str, loss: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Return ``gradient`` cast to the axis type of a gradient of ``loss``; raise if impossible."""
    loss_kinds, kinds = kinds_in(type_of(loss)), kinds_in(mode.type_of(gradient, operation))
    missing = {}
    for axis in sorted({*loss_kinds, *kinds}):
        expected_kind = GRADIENT_KINDS[loss_kinds.get(axis, "I")]
        kind = kinds.get(axis, "I")
        if kind == "I" and expected_kind in "VR":
            missing[axis] = expected_kind
        elif kind != expected_kind:
            expected = gradient_type(type_of(loss))
            raise AxisTypeError(
                f"{operation} cannot take a gradient whose type does not match its tensor's",
                where=where(mode.mesh, [axis]),
                expected=f"a gradient of type {{{expected}}}"
                if expected
                else "an invariant gradient",
                found=f"tensor: {tensor_text(loss)}\ngradient: {tensor_text(gradient)}",
                fix=f"create the gradient from the tensor, for example torch.ones_like(x), or cast "
                f"it: lax.pcast(g, {axis!r}, to=...)",
            )
    return mode.cast(gradient, missing)


def find_type_of_grad(x: torch.Tensor, grad: torch.Tensor) -> str:
    """Return ``grad``'s axis type: annotated, or from ``x`` if missing or a wrapper reduces it."""
    # If a wrapper reduces the gradient, its annotation may be outdated: a backward that the wrapper
    # skips makes a complete gradient incomplete, in the same tensor.
    own = find_type(grad) if find_owner_axes(x) is None else None
    return gradient_type_of(x) if own is None else own


def get_grad(x: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``grad``; set its axis type from ``x`` if it has none or a wrapper reduces it."""
    if grad is not None and (  # Inlined, because an optimizer reads it 4 times per parameter.
        grad.__dict__.get(ANNOTATION, EMPTY)[0] is None
        or x.__dict__.get(ANNOTATION, EMPTY)[2] is not None
    ):
        set_type(grad, gradient_type_of(x))
    return grad


def set_grad(mode: ContextMode, x: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Check ``x.grad = grad``: raise if ``grad`` has another axis type than ``x.grad`` can have."""
    if grad is None:
        return
    text, expected = mode.type_of(grad, "setting .grad"), gradient_type_of(x)
    complete = with_kinds(
        expected, {axis: "I" for axis, kind in kinds_in(expected).items() if kind == "U"}
    )
    if text not in (expected, complete):
        raise _unequal("grad", x, grad, expected, mode)


def set_data(mode: ContextMode, x: torch.Tensor, data: torch.Tensor) -> None:
    """Check ``x.data = data``: raise unless ``data`` has the axis type of ``x``."""
    if mode.type_of(data, "setting .data") != type_of(x):
        raise _unequal("data", x, data, type_of(x), mode)


def _unequal(
    name: str, x: torch.Tensor, value: torch.Tensor, expected: str, mode: ContextMode
) -> AxisTypeError:
    return AxisTypeError(
        f"cannot set .{name} to a value of another type",
        where=where(mode.mesh),
        expected=f"a value of type {{{expected}}}" if expected else "an invariant value",
        found=f"tensor: {tensor_text(x)}\nvalue: {tensor_text(value)}",
        fix="cast or reduce the value first (lax.pvary, lax.psum), or annotate the tensor again: "
        "md.annotate(x, varying=...)",
    )
