"""Where the leaves of a tree lie: from a path, as a user writes it, to leaves."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import optree

from ..error_text import first_texts
from ..errors import ArgumentError

__all__ = ["LeafPaths"]


@dataclass
class _Node:
    """One part of the tree: its parts by key, and the leaves below it."""

    parts: dict[Hashable, _Node] = field(default_factory=dict)
    leaves: list[int] = field(default_factory=list)


class LeafPaths:
    """The paths of a tree's leaves, and of its parts.

    A path is the tuple of keys that lead from the tree to a leaf, or to a part, as optree gives it:
    of a dict the key, of a list or tuple the index, of a dataclass the field; of a namedtuple the
    index or the field. Where one key leads there, it will do itself. An accessor of optree is a
    path, too.

    Example:
        >>> tree = {"layers": [{"weight": 1.0, "bias": 2.0}], "head": 3.0}
        >>> paths = LeafPaths(optree.tree_accessors(tree), "ready")
        >>> paths.find(("layers", 0, "bias")), paths.find("layers"), paths.find(())
        ([1], [1, 2], [0, 1, 2])
    """

    def __init__(self, accessors: Iterable[optree.PyTreeAccessor], caller: str) -> None:
        self._caller = caller
        self._root = _Node()
        for leaf, accessor in enumerate(accessors):
            node = self._root
            node.leaves.append(leaf)
            for entry in accessor:
                above, node = node, node.parts.setdefault(entry.entry, _Node())
                if isinstance(entry, optree.NamedTupleEntry):
                    above.parts[entry.field] = node
                node.leaves.append(leaf)

    def find(self, path: Any) -> list[int]:
        """Return the places of leaves at or below ``path``, in tree order; raises for none."""
        if isinstance(path, optree.PyTreeAccessor):
            path = path.path
        keys = tuple(path) if isinstance(path, (tuple, list)) else (path,)
        node = self._root
        for depth, key in enumerate(keys):
            try:
                node = node.parts[key]
            except (KeyError, TypeError):  # not there; not hashable
                raise self._unknown(keys, depth, node) from None
        return node.leaves

    def _unknown(self, keys: tuple[Any, ...], depth: int, node: _Node) -> ArgumentError:
        known = [repr(key) for key in node.parts]
        place = f"at {keys[:depth]!r}" if depth else "in the tree"
        return ArgumentError(
            f"{self._caller}: there is no leaf at path {keys!r}",
            expected="the keys that lead to a leaf, or to a part of the tree",
            found=f"{place} there is {first_texts(known, ', ') or 'a leaf itself'}",
            fix="optree.tree_paths(tree, namespace='meshdist') lists the paths of all leaves",
        )
