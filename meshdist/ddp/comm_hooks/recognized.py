"""Torch's own hooks, and ours of the same names that take their place.

Torch's ask torch's world where their state names no group. Some fail on CPU tensors in any case.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .halves import (
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from .power_sgd import batched_powerSGD_hook
from .quantizing import quantization_perchannel_hook, quantization_pertensor_hook
from .reducing import allreduce_hook, noop_hook, post_localSGD_hook
from .states import is_mesh

__all__ = ["ours_for"]

_TORCHS = "torch.distributed.algorithms.ddp_comm_hooks."
_IN_ANY_CASE = {
    hook.__name__: hook
    for hook in (
        batched_powerSGD_hook,
        quantization_perchannel_hook,
        quantization_pertensor_hook,
    )
}
_WITHOUT_A_GROUP = {
    hook.__name__: hook
    for hook in (
        allreduce_hook,
        bf16_compress_hook,
        fp16_compress_hook,
        noop_hook,
        post_localSGD_hook,
    )
}
_WRAPPERS = {
    f"{wrapper.__name__}.<locals>.{wrapper.__name__}_hook": wrapper
    for wrapper in (bf16_compress_wrapper, fp16_compress_wrapper)
}


def ours_for(hook: Callable[..., Any], state: Any) -> Callable[..., Any]:
    """The hook to call in place of ``hook``: itself, unless it is torch's and cannot serve.

    One that torch's wrappers hold is looked at as well.
    """
    if not str(getattr(hook, "__module__", "")).startswith(_TORCHS):
        return hook
    name = getattr(hook, "__qualname__", "")
    if name in _IN_ANY_CASE:
        return _IN_ANY_CASE[name]
    if name in _WITHOUT_A_GROUP and _names_no_group(state):
        return _WITHOUT_A_GROUP[name]
    if name in _WRAPPERS:
        inner = inspect.getclosurevars(hook).nonlocals["hook"]
        ours = ours_for(inner, state)
        return hook if ours is inner else _WRAPPERS[name](ours)
    return hook


def _names_no_group(state: Any) -> bool:
    """Whether torch's hooks would find no group of ours in the state."""
    if state is None or is_mesh(state):
        return True
    return any(
        (given := getattr(state, field, state)) is None or is_mesh(given)
        for field in ("process_group", "subgroup")
    )
