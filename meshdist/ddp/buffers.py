"""Buffers of the model: taken from one rank before each forward, or as a hook says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..errors import KindError
from ..groups.process_group import ProcessGroup
from .replicas import broadcast_from
from .typed_owner import note_equal

__all__ = ["Buffers"]


class Buffers:
    """The buffers of one model, found again by their names where the model re-assigns them."""

    def __init__(self, module: nn.Module, ignored: Iterable[str]) -> None:
        left_out = set(ignored)
        self._places = [
            (owner, name, f"{prefix}.{name}" if prefix else name)
            for prefix, owner in module.named_modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None and (f"{prefix}.{name}" if prefix else name) not in left_out
        ]
        self._hook: tuple[object, Callable[..., Any], bool] | None = None

    def named(self) -> dict[str, torch.Tensor]:
        """The buffers that the model has now."""
        found = ((name, getattr(owner, key)) for owner, key, name in self._places)
        return {name: buffer for name, buffer in found if buffer is not None}

    def set_hook(self, state: object, hook: Callable[..., Any], *, is_before: bool) -> None:
        """Let ``hook(state, named_buffers)`` take the place of the broadcast."""
        if not callable(hook):
            raise KindError(
                f"the buffers' hook is of type {type(hook).__name__}",
                expected="a function of the state and a dict of buffers by name",
            )
        self._hook = (state, hook, is_before)

    def is_synchronised_now(self, *, is_before: bool) -> bool:
        """Whether buffers are made equal before the forward, or behind it."""
        runs_before = self._hook is None or self._hook[2]
        return bool(self._places) and runs_before is is_before

    def synchronise(self, group: ProcessGroup, source: int = 0) -> list[Any]:
        """Take the buffers of one rank; return the futures that a hook asks to be awaited."""
        if self._hook is None:
            # Through ``.data``, whose version is its own: an earlier forward may have saved a
            # buffer for its backward, as batch norm does, which does not read it there.
            buffers = list(self.named().values())
            broadcast_from(source, [one.data for one in buffers], group)
            note_equal(buffers, group)
            return []
        state, hook, _ = self._hook
        futures = hook(state, self.named())
        return list(futures) if isinstance(futures, (list, tuple)) else []
