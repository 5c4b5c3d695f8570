"""The private names of torch that collectives and typed contexts use; a test says that torch has
them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import _C, _ops
from torch.autograd import Function, function as function_module
from torch.nn.modules._functions import BackwardHookFunction as BackwardHookFunction
from torch.utils import _foreach_utils, _python_dispatch

from ..checking.call_sites import end_here, one_frame
from ..errors import MeshdistError
from ..runtime.graph_breaks import untraced
from .registration import watchers

_F = TypeVar("_F", bound=Callable[..., Any])

ENDS_RECORDS_ANYWHERE = torch.__version__ >= "2.12"
"""Whether the profiler keeps a ``_RecordFunctionFast`` that another thread ends; 2.11 drops it."""

are_transforms_active = _C._are_functorch_transforms_active
"""Whether the call is inside a transform of torch.func."""

outside_transforms = _C._DisableFuncTorch
"""A context in which new tensors are plain, also inside a transform of torch.func."""

current_task = _C._current_graph_task_id
"""The function that gives the number of the backward that this thread runs, or -1."""

keeps_graph = _C._autograd._get_current_graph_task_keep_graph
"""The function that says whether the backward that this thread runs keeps its graph."""

is_wrapped = _C._functorch.is_functorch_wrapped_tensor
"""Whether a transform of torch.func has wrapped a tensor."""

unwrapped = _C._functorch.get_unwrapped
"""The function that gives the tensor in such a wrapper."""

HiddenFromModes = _C.DisableTorchFunction
"""A context in which no mode sees what torch is asked to do."""

is_mode_enabled = _C._is_torch_function_mode_enabled
"""Whether there is a mode that sees what torch is asked to do."""

num_modes = _C._len_torch_function_stack
"""How many such modes this thread is inside."""

mode_at = _C._get_function_stack_at
"""The function that gives such a mode by its number, the outermost first."""

num_dispatch_modes = _C._len_torch_dispatch_stack
"""How many modes that see the dispatched operators this thread is inside."""

without_dispatch_modes = _python_dispatch._disable_current_modes
"""A context outside of these modes."""

SingleLevelFunction = function_module._SingleLevelFunction
"""The class of torch whose ``apply`` that of every custom Function looks up at each call."""

has_foreach_support = _foreach_utils._has_foreach_support
"""The function that says whether a device has kernels that take many of such tensors."""

OverloadPacket = _ops.OpOverloadPacket
"""The class of the functions of ``torch.ops``, each with its overloads."""

bare_apply = _C._FunctionBase.__dict__["apply"]
"""The method of torch's core that runs a custom Function."""

is_apply_bare = vars(Function)["apply"] is bare_apply
"""Whether that is what programs call (2.15), or what the ``apply`` that they call looks up."""

FunctionMeta = function_module.FunctionMeta
"""The class of all custom Functions, of which torch's core asks their parts."""
_unwrapped_if_dead = _C._functorch.unwrap_if_dead


@untraced
def call_function(function: type[Function], x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return ``function.apply(x, *rest)``, at a fifth of its cost outside torch.func."""
    result: torch.Tensor
    if are_transforms_active():
        result = function.apply(x, *rest)
    else:
        # ``apply`` binds the arguments to the signature of ``forward``, for its defaults, of which
        # our Functions have none.
        result = bare_apply(function, _unwrapped_if_dead(x), *rest)
    return result


def storage_uses(tensor: torch.Tensor) -> int:
    """Return how many tensors, arrays and storage objects share the memory of ``tensor``."""
    return _raw_uses(tensor) - _RAW_USES_OF_ONE + 1


def _raw_uses(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()  # one Python object, however often it is asked for
    return int(_C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)


tensor_uses: Callable[[torch.Tensor], int] = _C.TensorBase._use_count  # type: ignore[attr-defined]
"""Return by how many a tensor is held outside of Python, Python itself counted as one."""

_RAW_USES_OF_ONE = _raw_uses(torch.empty(0, device="cpu"))


def version_of(tensor: torch.Tensor) -> int:
    """Return autograd's count of writes to ``tensor``; -1 for an uncounted inference tensor."""
    return -1 if tensor.is_inference() else tensor._version


def hidden_from_modes(function: _F) -> _F:
    """Return ``function`` wrapped so that no dispatch mode of torch sees its calls."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            if not watchers:
                return function(*args, **kwargs)
            with HiddenFromModes():
                return function(*args, **kwargs)
        except MeshdistError as error:
            __tracebackhide__ = True
            end_here(error)
            raise

    return cast(_F, untraced(call))


def untransformed(function: _F) -> _F:
    """Return ``function`` wrapped so that it makes plain tensors inside torch.func, too."""

    @one_frame
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not are_transforms_active():
            return function(*args, **kwargs)
        with outside_transforms():
            return function(*args, **kwargs)

    return cast(_F, call)
