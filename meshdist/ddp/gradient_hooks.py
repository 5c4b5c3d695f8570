"""Hooks on parameters, which autograd calls when a gradient is in ``.grad``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import optree
import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ..bootstrap.world import World, get_world
from ..runtime.untraced import untraced
from .autograd_engines import current_task
from .backward import Backward
from .buckets import Bucket


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
    """Return a copy of ``tree`` with its tensors moved to ``device``."""
    return optree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf,
        tree,
        none_is_leaf=True,
    )


Hook: TypeAlias = Callable[[torch.Tensor], None]

_reduced_parameters = WeakIdKeyDictionary()  # a mark on the parameter would be pickled with it


def find_reducing_world(parameter: torch.Tensor) -> World | None:
    """Return the world in which a wrapper averages the gradient of ``parameter``, if any does."""
    return _reduced_parameters.get(parameter)  # type: ignore[no-any-return]


class GradientTaker(Protocol):
    """Interface of a reducer by which gradient hooks find the backward of their gradient."""

    @property
    def backward(self) -> Backward | None:
        """Return the backward that has reached the model's outputs and has not ended."""

    def find_backward(self, index: int, hook: Hook, parameter: torch.Tensor) -> Backward | None:
        """Return the running averaged backward; if None, the gradient ``index`` is kept for later.

        Args:
            index: of ``parameter`` among those of the wrapper.
            hook: called again if this autograd task reaches an output that is to be averaged; if it
                reaches none, the gradient stays as it is.
        """


class GradientHooks:
    """Hooks on parameters that give each gradient to their reducer, the ``taker``."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], taker: GradientTaker) -> None:
        self._parameters = parameters
        self._taker = taker
        self._handles: list[tuple[torch.nn.Parameter, RemovableHandle]] = []

    def put(self, buckets: Sequence[Bucket]) -> None:
        """Put hooks on the parameters that ``buckets`` mark as hooked; remove all former hooks."""
        self.close()
        for parameter in self._parameters:
            _reduced_parameters[parameter] = get_world()
        for number, bucket in enumerate(buckets):
            for slot, (member, is_hooked) in enumerate(
                zip(bucket.members, bucket.is_hooked, strict=True)
            ):
                if is_hooked:
                    is_trained = member.requires_grad  # else it may be again, and keeps its hook
                    member.requires_grad_(True)
                    hook = self._hook(bucket.indices[slot], number, slot)
                    handle = member.register_post_accumulate_grad_hook(hook)
                    self._handles.append((member, handle))
                    member.requires_grad_(is_trained)

    def come_last(self, buckets: Sequence[Bucket]) -> None:
        """Put the hooks anew if the program put others behind them, so that these run last."""
        for parameter, handle in self._handles:
            if next(reversed(parameter._post_accumulate_grad_hooks or {}), None) != handle.id:
                self.put(buckets)
                return

    def close(self) -> None:
        """Remove the hooks, and the notes that the parameters are reduced."""
        for _, handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter in self._parameters:
            _reduced_parameters.pop(parameter, None)

    def _hook(self, index: int, number: int, slot: int) -> Hook:
        taker = self._taker

        @untraced
        def gradient_came(parameter: torch.Tensor) -> None:
            backward = taker.backward
            if backward is None or current_task() != backward.task:
                backward = taker.find_backward(index, gradient_came, parameter)
                if backward is None:
                    return
            backward.arrived(number, slot, parameter)

        return gradient_came
