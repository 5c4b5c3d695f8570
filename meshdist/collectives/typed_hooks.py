"""Hooks on tensors, in the backwards of a typed context: no hook may part an equal gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..errors import AxisTypeError
from ..mesh.device_mesh import DeviceMesh
from .axis_types import ATTRIBUTE, REDUCED_BY_OWNER, gradient_type, kinds_in, with_kinds
from .type_errors import tensor_text, type_of, where

__all__ = ["RUNNING", "TypedHook", "follow_hooks"]

RUNNING = "the context whose backward runs"
"""Under which a mesh notes it."""


class TypedHook:
    """A hook of the program on ``x``, which the contexts of ``mesh`` follow."""

    def __init__(self, mesh: DeviceMesh, x: torch.Tensor, hook: Callable[..., Any]) -> None:
        self.mesh = mesh
        self._hook, self._of, self._type = hook, weakref.ref(x), type_of(x)

    def __call__(self, given: torch.Tensor) -> Any:
        """Call it with a gradient, or with the leaf that has accumulated its gradient."""
        mode, x = self.mesh.notes.get(RUNNING), self._of()
        is_behind = x is not None and given is x
        grad: Any = given.grad if is_behind else given
        if mode is None or grad is None:
            return self._hook(given)
        expected = gradient_type(self._type if x is None else type_of(x))
        if x is not None and (owned := x.__dict__.get(REDUCED_BY_OWNER)):
            expected = with_kinds(expected, dict.fromkeys(owned.split(","), "V"))
        before = grad.__dict__.get(ATTRIBUTE)
        grad.__dict__[ATTRIBUTE] = expected
        with mode:
            result = self._hook(given)
        found: Any = given.grad if is_behind else grad if result is None else result
        kinds = {} if found is None else kinds_in(type_of(found))
        for axis, _ in sorted(kinds.items() - kinds_in(expected).items()):
            raise AxisTypeError(
                f"the hook {getattr(self._hook, '__qualname__', self._hook)} gives a gradient "
                "another type than its tensor's",
                where=where(self.mesh, [axis]),
                expected=tensor_text(grad, expected),
                found=tensor_text(found),
                fix=f"make equal first what it multiplies by: lax.pmean(factor, {axis!r})",
            )
        if not is_behind:  # the engine may hand it to other tensors, too
            grad.__dict__.pop(ATTRIBUTE, None)
            if before is not None:
                grad.__dict__[ATTRIBUTE] = before
        return result


def follow_hooks(mesh: DeviceMesh, x: torch.Tensor) -> None:
    """Let contexts of ``mesh`` follow the hooks that the program has set on a leaf."""
    both: Any = (x._backward_hooks or {}, x._post_accumulate_grad_hooks or {})
    for hooks in both:
        for key, hook in hooks.items():
            if isinstance(hook, TypedHook):
                hook.mesh = mesh
            elif not str(getattr(hook, "__module__", "")).startswith("meshdist."):
                hooks[key] = TypedHook(mesh, x, hook)
