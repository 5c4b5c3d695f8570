"""Trees of arrays, of which dataclasses are nodes like dicts: to optree most are leaves."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable
from typing import Any

import optree

__all__ = ["flattened"]

_NAMESPACE = "meshdist"
"""Where classes are registered, so that programs and other libraries see no difference."""

_registering = threading.Lock()


def flattened(tree: Any) -> tuple[list[optree.PyTreeAccessor], list[Any], optree.PyTreeSpec]:
    """Return the accessors of all leaves, the leaves, and the structure, which unflattens them.

    Example:
        >>> @dataclasses.dataclass
        ... class Layer:
        ...     weight: float
        ...     bias: float | None = None
        >>> accessors, leaves, structure = flattened({"head": Layer(1.0)})
        >>> accessors[0].codify("tree"), leaves, structure.unflatten([2.0])
        ("tree['head'].weight", [1.0], {'head': Layer(weight=2.0, bias=None)})
    """
    while True:
        accessors, leaves, structure = optree.tree_flatten_with_accessor(tree, namespace=_NAMESPACE)
        nodes = [one for one in leaves if dataclasses.is_dataclass(type(one))]
        if not nodes:
            return accessors, leaves, structure
        with _registering:
            for node in nodes:
                if optree.tree_is_leaf(node, namespace=_NAMESPACE):  # it is one of a new class
                    _register(type(node))


def _register(kind: Any) -> None:
    """Let instances of a dataclass be nodes, whose parts are all of their fields."""
    names = tuple(field.name for field in dataclasses.fields(kind))

    def flatten(node: Any) -> tuple[list[Any], None, tuple[str, ...]]:
        return [getattr(node, name) for name in names], None, names

    def unflatten(_: object, parts: Iterable[Any]) -> Any:
        node = kind.__new__(kind)  # it was checked when the program made the first
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(node, name, part)  # frozen ones, too
        return node

    optree.register_pytree_node(
        kind, flatten, unflatten, path_entry_type=optree.DataclassEntry, namespace=_NAMESPACE
    )
