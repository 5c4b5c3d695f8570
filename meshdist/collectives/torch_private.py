"""The private names of torch that the functional verbs use; a test says that torch has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import _C
from torch.autograd import Function

from .instruments import leave_untraced

__all__ = ["are_transforms_active", "call_function", "outside_transforms"]

are_transforms_active = _C._are_functorch_transforms_active
"""Whether the call is inside a transform of torch.func."""

outside_transforms = _C._DisableFuncTorch
"""A context in which new tensors are plain ones, also inside a transform of torch.func."""

_bare_apply = _C._FunctionBase.__dict__["apply"]
_unwrapped_if_dead = _C._functorch.unwrap_if_dead


@leave_untraced
def call_function(function: type[Function], x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """``function.apply(x, *rest)``, at a fifth of its cost outside torch.func's transforms.

    torch's own binds the arguments to the signature of ``forward`` at each call, for its defaults;
    the Functions here have none. torch.compile ends its graph before the call, as it does before
    every verb.
    """
    result: torch.Tensor
    if are_transforms_active():
        result = function.apply(x, *rest)
    else:
        result = _bare_apply(function, _unwrapped_if_dead(x), *rest)
    return result
