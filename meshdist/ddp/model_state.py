"""The state of a wrapped model: saved and loaded, copied, pickled, and not to be converted."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ArgumentError, GradientError, KindError
from ..groups.process_group import ProcessGroup, resolve_group, world_group
from .precision import CastParameters

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["WrappedModel"]

_PREFIX = "module."
_BOUND = {
    "process_group",
    "device_mesh",
    "reducer",
    "logger",
    "_buffers_of_model",
    "_owner",
    "_parting",
    "_optimizers",
    "_join_config",
}
"""Attributes that belong to this process, and are made anew for a copy."""


class WrappedModel(nn.Module, ABC):
    """The side of ``DistributedDataParallel`` that is a module which holds another one."""

    module: nn.Module
    process_group: ProcessGroup
    device_mesh: Any
    _cast: CastParameters | None

    @abstractmethod
    def _adopt(self, module: nn.Module) -> None:
        """Take ``module`` as the model; nothing is sent."""

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state of this wrapper (names begin with ``module.``) or of the module alone.

        Load the same state on every rank; nothing is sent.

        Raises:
            ArgumentError: ``assign`` is true, which would replace the parameters.
        """
        if assign:
            raise ArgumentError(
                "load_state_dict(assign=True) would replace the parameters whose gradients are "
                "averaged",
                expected="assign=False, which copies into them",
                fix="load into the module before it is wrapped",
            )
        own = self.state_dict().keys()
        num_wrapped = sum(name in own for name in state_dict)
        num_bare = sum(_PREFIX + name in own for name in state_dict)
        if num_bare > num_wrapped:
            return self.module.load_state_dict(state_dict, strict=strict)
        return super().load_state_dict(state_dict, strict=strict)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        def kinds() -> list[tuple[torch.dtype, torch.device]]:
            return [(p.dtype, p.device) for p in self.module.parameters()]

        before = kinds()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if kinds() != before:
            raise GradientError(
                "the parameters were converted after the model was wrapped",
                where=f"rank {self.process_group.world.rank}, {type(self.module).__name__}",
                expected="the dtype and device that they had, in which gradients are reduced",
                fix="convert first, then wrap: DDP(module.to(...)); this wrapper is unusable now",
            )
        return self

    # -- copies -----------------------------------------------------------------------------------

    def _portable_state(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _BOUND}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy over the same group, with a copy of the module; nothing is sent."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        state = copy.deepcopy(self._portable_state(), memo)
        clone.__setstate__(
            {**state, "process_group": self.process_group, "device_mesh": self.device_mesh}
        )
        return clone

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not world_group(self.process_group.world):
            raise KindError(
                "a DistributedDataParallel over a part of the world cannot be pickled",
                where=f"its group is {self.process_group.group_name}",
                expected="the world as its group, or the model alone",
                fix="save ddp.state_dict() or ddp.module, and wrap again after loading",
            )
        return self._portable_state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._cast is not None:
            self._cast.close()  # its hooks are on the copied modules, too
        if "process_group" not in state:
            self.process_group, self.device_mesh = resolve_group(None), None
        self._adopt(self.module)
