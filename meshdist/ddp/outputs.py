"""The tensors in what a model takes and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import optree
import torch

__all__ = ["moved", "tensors_in"]


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples, dicts, dataclasses and RRefs of this process."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for entry in tree:
            yield from tensors_in(entry)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name))
    elif type(tree).__name__ == "PyRRef" and tree.is_owner():  # type: ignore[attr-defined]
        yield from tensors_in(tree.local_value())  # type: ignore[attr-defined]


def moved(tree: Any, device: torch.device) -> Any:
    """``tree`` with its tensors on ``device``."""
    return optree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf,
        tree,
        none_is_leaf=True,
    )
