"""A verb on every array of a pytree, in the library of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import optree
import torch

from ...arrays import as_tensor, like
from ...groups.process_group import ProcessGroup, resolve_group
from ...mesh.device_mesh import DeviceMesh
from ..torch_private import NotSeen
from ..typed_verbs import TypedVerb, find_typed_verb
from .axes import AxisName, get_axes

__all__ = ["itself", "on_leaves"]

T = TypeVar("T")

OnTensor: TypeAlias = Callable[..., Any]
"""A verb on a tensor and a group; gives a tensor."""

_NUMBERS = (bool, int, float, complex)  # exactly these: numpy.float64 is a float, and an array


def on_leaves(
    verb: str,
    on_tensor: OnTensor,
    x: T,
    axis_name: AxisName,
    mesh: DeviceMesh | None,
    *,
    on_number: Callable[[Any, int], Any] | None = None,
    check: Callable[[torch.Tensor, ProcessGroup], object] | None = None,
    to: str | None = None,
) -> T:
    """Apply a verb to every leaf of ``x``, once all of them are known to be fit for it.

    Args:
        verb: its public name.
        on_tensor: applies it to a tensor, over a group.
        x, axis_name, mesh: the verb's own arguments.
        on_number: applies it to a Python number, given the size of the axis; None refuses numbers.
        check: raises where a tensor is not fit, beyond being one; ``on_tensor`` does so, too.
        to: the kind of result that the call asks for, where the verb leaves that open.
    """
    result: T  # of the form of `x`, which no checker can see
    axes = get_axes(verb, axis_name, mesh)
    typed = find_typed_verb(verb, axes, to)
    if typed is not None:
        with NotSeen():
            result = _on_leaves(verb, on_tensor, x, axes, on_number, check, typed)
            return result
    if isinstance(x, torch.Tensor):  # by far the most frequent, and needs no tree
        plain = as_tensor(x, argument="x", verb=verb, writable=False)
        result = on_tensor(plain, resolve_group(axes))
    else:
        result = _on_leaves(verb, on_tensor, x, axes, on_number, check, None)
    return result


def itself(number: Any, size: int) -> Any:
    """The number itself: the result of most verbs on a Python number, equal on all ranks."""
    return number


def _on_leaves(
    verb: str,
    on_tensor: OnTensor,
    x: Any,
    axes: DeviceMesh,
    on_number: Callable[[Any, int], Any] | None,
    check: Callable[[torch.Tensor, ProcessGroup], object] | None,
    typed: TypedVerb | None,
) -> Any:
    paths, leaves, tree = optree.tree_flatten_with_accessor(x)
    tensors = [
        None
        if on_number is not None and type(leaf) in _NUMBERS
        else as_tensor(leaf, argument=path.codify("x"), verb=verb, writable=False)
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    if check is not None:
        for tensor in tensors:
            if tensor is not None:
                check(tensor, resolve_group(axes))
    calls: list[OnTensor] = [on_tensor] * len(leaves)
    if typed is not None:  # arrays of other libraries have no types
        for place, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
            if isinstance(leaf, torch.Tensor):
                calls[place] = typed.checked(on_tensor, leaf, path.codify("x"))
    return tree.unflatten(
        like(call(tensor, resolve_group(axes)), leaf)
        if tensor is not None
        else on_number(leaf, axes.size())  # type: ignore[misc]  # None is for what it takes
        for call, leaf, tensor in zip(calls, leaves, tensors, strict=True)
    )
