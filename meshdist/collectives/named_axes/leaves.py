"""A verb on every array of a pytree, in the library of each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias, TypeVar
from zlib import crc32

import optree
import torch

from ...arrays import as_tensor, like
from ...errors import ArgumentError
from ...groups.process_group import ProcessGroup, resolve_group
from ...mesh.device_mesh import DeviceMesh
from ..torch_private import NotSeen
from ..typed_verbs import TypedVerb, find_typed_verb
from .axes import AxisName, get_axes

__all__ = ["itself", "on_leaves", "unsent"]

T = TypeVar("T")

OnTensor: TypeAlias = Callable[..., Any]
"""A verb on a tensor and a group, and the name of its ``leaf``; gives a tensor."""

_NUMBERS = (bool, int, float, complex)  # exactly these: numpy.float64 is a float, and an array
_WIDE = {float: torch.float64, complex: torch.complex128}
_KEYS = (str, int, float, bytes, type(None))  # of dicts, shown and compared by their repr
_LIMIT = 1 << 63  # of numbers in 64 bits
_MOST_TREES = 64
_SHOWN_LETTERS = 240
_trees: dict[Any, tuple[list[str], list[str]]] = {}


def on_leaves(
    verb: str,
    on_tensor: OnTensor,
    x: T,
    axis_name: AxisName,
    mesh: DeviceMesh | None,
    *,
    on_number: Callable[[Any], Any] | None = None,
    check: Callable[[torch.Tensor, ProcessGroup], object] | None = None,
    to: str | None = None,
) -> T:
    """Apply a verb to every leaf of ``x``, once all of them are known to be fit for it.

    Args:
        on_number: makes the number that travels of a Python number; None refuses numbers, and with
            ``unsent`` they stay as they are.
        check: raises where a tensor is not fit, beyond being one; ``on_tensor`` does so, too.
        to: the kind of result that the call asks for, where the verb leaves that open.
    """
    result: T  # of the form of `x`, which no checker can see
    axes = get_axes(verb, axis_name, mesh)
    typed = find_typed_verb(verb, axes, to)
    if typed is None and isinstance(x, torch.Tensor):  # by far the most frequent; needs no tree
        plain = as_tensor(x, argument="x", verb=verb, writable=False)
        result = on_tensor(plain, resolve_group(axes))
        return result
    with nullcontext() if typed is None else NotSeen():
        result = _on_leaves(verb, on_tensor, x, axes, on_number, check, typed)
        return result


def itself(number: Any) -> Any:
    """The number itself, which travels in most verbs."""
    return number


def unsent(number: Any) -> None:
    """The mark of verbs that send nothing, where a number stays as it is."""


def _on_leaves(
    verb: str,
    on_tensor: OnTensor,
    x: Any,
    axes: DeviceMesh,
    on_number: Callable[[Any], Any] | None,
    check: Callable[[torch.Tensor, ProcessGroup], object] | None,
    typed: TypedVerb | None,
) -> Any:
    leaves, tree = optree.tree_flatten(x)
    paths, names = _paths_and_names(tree)
    tensors = [
        _sent(leaf, verb, path, axes, on_number)
        if on_number is not None and type(leaf) in _NUMBERS
        else as_tensor(leaf, argument=path, verb=verb, writable=False)
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
                calls[place] = typed.checked(on_tensor, leaf, path)
    results = []
    for call, leaf, tensor, name in zip(calls, leaves, tensors, names, strict=True):
        if tensor is None:
            results.append(leaf)
        elif type(leaf) in _NUMBERS:
            results.append(call(tensor, resolve_group(axes), leaf=name).item())
        else:
            results.append(like(call(tensor, resolve_group(axes), leaf=name), leaf))
    return tree.unflatten(results)


def _sent(
    number: Any, verb: str, path: str, axes: DeviceMesh, on_number: Callable[[Any], Any]
) -> torch.Tensor | None:
    """The 0-dim tensor as which a Python number travels; None where nothing is sent."""
    if on_number is unsent:
        return None
    group = resolve_group(axes)
    num_added = group.size() if verb == "psum" else 1
    if isinstance(number, int) and not -_LIMIT <= number * num_added < _LIMIT:
        raise ArgumentError(
            f"{verb} cannot take {number} as {path}: whole numbers travel in 64 bits",
            where=group.name,
            expected="a number that fits, as must the sum over all ranks in psum",
            fix=f"pass a float: {path} = float({path})",
        )
    sent = on_number(number)
    return torch.tensor(sent, dtype=_WIDE.get(type(sent)), device=group.first_device_type())


def _has_plain_text(key: Any) -> bool:
    """Whether the repr of a key is the same on every rank, as that of an object is not."""
    return all(map(_has_plain_text, key)) if isinstance(key, tuple) else isinstance(key, _KEYS)


def _paths_and_names(tree: Any) -> tuple[list[str], list[str]]:
    """The path of each leaf, as in ``x['loss']``, and its name, which tells all paths of the tree.

    They are kept for trees without objects of the program's.
    """
    found = _trees.get(tree)
    if found is None:
        accessors = tree.accessors()
        paths = [
            path.codify("x")
            if all(_has_plain_text(step.entry) for step in path)
            else "x" + "".join(f"[{type(step.entry).__name__}]" for step in path)
            for path in accessors
        ]
        whole = ", ".join(paths)
        if len(whole) > _SHOWN_LETTERS:
            whole = f"{whole[:_SHOWN_LETTERS]}... ({len(paths)}, {crc32(whole.encode()):08x})"
        names = [f"{path}, leaf {place} of {whole}" for place, path in enumerate(paths, 1)]
        found = paths, paths if paths == ["x"] else names
        is_plain = all(type(step.entry) in (str, int) for path in accessors for step in path)
        if is_plain and "CustomTreeNode" not in str(tree):
            if len(_trees) >= _MOST_TREES:
                _trees.clear()
            _trees[tree] = found
    return found
