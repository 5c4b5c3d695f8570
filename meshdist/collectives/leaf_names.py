"""A program's name for a tensor: the variable, parameter or part of a tree that holds it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import optree
import torch

__all__ = ["names_of"]

_CONTAINERS = (dict, list, tuple)
_LARGEST_CONTAINER = 1000
"""Entries up to which a container is looked into: those of data sets are not."""


def names_of(tensors: Iterable[torch.Tensor], frame: FrameType) -> dict[int, str]:
    """The names of ``tensors``, by ``id``, in the functions of a program from ``frame`` on.

    A variable's is its own, a parameter's that of the module with the path in it, and that of a
    part of a tree is its path: ``weight``, ``model.0.bias``, ``params['head']``. Inner functions
    are asked first. What no variable holds has none.
    """
    wanted = {id(tensor) for tensor in tensors}
    found: dict[int, str] = {}
    here: FrameType | None = frame
    while here is not None and len(found) < len(wanted):
        for name, tensor in _held(here.f_locals):
            if id(tensor) in wanted:
                found.setdefault(id(tensor), name)
        here = here.f_back
    return found


def _held(variables: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that variables hold, with their names: plain ones, parameters, parts of trees."""
    values = dict(variables)
    for owner, value in variables.items():  # of an object, such as a trainer, its attributes
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and not isinstance(value, (torch.nn.Module, torch.Tensor)):
            values.update({f"{owner}.{name}": one for name, one in attributes.items()})
    yield from ((name, one) for name, one in values.items() if isinstance(one, torch.Tensor))
    for name, value in values.items():
        if isinstance(value, torch.nn.Module):
            yield from _parameters(name, value)
    for name, value in values.items():
        if isinstance(value, _CONTAINERS) and len(value) <= _LARGEST_CONTAINER:
            yield from _parts(name, value)


def _parameters(name: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, parameter in module.named_parameters():
        yield f"{name}.{path}", parameter


def _parts(name: str, tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        paths, leaves, _ = optree.tree_flatten_with_accessor(tree)
    except Exception:  # a tree that holds itself, or a class whose own flattening raises
        return
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            yield path.codify(name), leaf
        elif isinstance(leaf, torch.nn.Module):
            yield from _parameters(path.codify(name), leaf)
