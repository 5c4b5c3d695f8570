"""Register hooks on parameters that autograd calls once ``.grad`` is accumulated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ..bootstrap.world import World, get_world


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples, dicts and dataclasses."""
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


def moved(tree: Any, device: torch.device) -> Any:
    return optree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf,
        tree,
        none_is_leaf=True,
    )


_reduced_parameters = WeakIdKeyDictionary()  # an attribute of the parameter would be pickled


def find_reducing_world(parameter: torch.Tensor) -> World | None:
    """Return the world in which a wrapper averages the gradient of ``parameter``, or None."""
    return _reduced_parameters.get(parameter)  # type: ignore[no-any-return]


class GradientHooks:
    """Hooks on parameters that call ``arrived(index, parameter)`` once ``.grad`` is set."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        arrived: Callable[[int, torch.Tensor], None],
    ) -> None:
        self._parameters = parameters
        self._hooks = [partial(arrived, index) for index in range(len(parameters))]
        for hook in self._hooks:
            hook.__module__ = __name__  # typed contexts wrap the hooks of the program alone
        self._handles: list[RemovableHandle] = []
        self.register()

    def register(self) -> None:
        """Register the hooks after all others; remove those registered before."""
        self.close()
        for parameter, hook in zip(self._parameters, self._hooks, strict=True):
            _reduced_parameters[parameter] = get_world()
            # A frozen parameter gets a hook too: it may be unfrozen.
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
            parameter.requires_grad_(is_trained)

    def move_to_end(self) -> None:
        """Register the hooks again if the user added later hooks."""
        for parameter, handle in zip(self._parameters, self._handles, strict=True):
            if next(reversed(parameter._post_accumulate_grad_hooks or {}), None) != handle.id:
                self.register()
                return

    def close(self) -> None:
        """Remove the hooks; no longer list the parameters as reduced."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter in self._parameters:
            _reduced_parameters.pop(parameter, None)
