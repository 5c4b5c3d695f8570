"""List private names of torch that meshdist uses; a test checks that torch has them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import _C, _ops
from torch.autograd import Function, function as function_module
from torch.nn.modules._functions import BackwardHookFunction as BackwardHookFunction
from torch.optim import optimizer as optimizer_module
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
"""Returns the number of this thread's current backward, or -1."""

keeps_graph = _C._autograd._get_current_graph_task_keep_graph
"""Returns whether this thread's current backward keeps its graph."""

is_wrapped = _C._functorch.is_functorch_wrapped_tensor
"""Whether a transform of torch.func has wrapped a tensor."""

unwrapped = _C._functorch.get_unwrapped
"""Returns the tensor in such a wrapper."""

HiddenFromModes = _C.DisableTorchFunction
"""A context that hides calls from torch function modes."""

is_mode_enabled = _C._is_torch_function_mode_enabled
"""Whether a torch function mode is active."""

num_modes = _C._len_torch_function_stack
"""Returns the number of this thread's active torch function modes."""

mode_at = _C._get_function_stack_at
"""Returns an active torch function mode by its index, the outermost first."""

num_dispatch_modes = _C._len_torch_dispatch_stack
"""Returns the number of this thread's active torch dispatch modes."""

without_dispatch_modes = _python_dispatch._disable_current_modes
"""A context without torch dispatch modes."""

SingleLevelFunction = function_module._SingleLevelFunction
"""The torch class with the ``apply`` that every custom Function's ``apply`` looks up."""

has_foreach_support = _foreach_utils._has_foreach_support
"""Returns whether a device has kernels for lists of such tensors."""

step_pre_hooks = optimizer_module._global_optimizer_pre_hooks
"""torch's hooks that run before each step of any optimizer, by number."""

FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default
"""Flash attention on CUDA; returns the output, the logarithm of its sums, and seven others."""

FLASH_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
"""Its backward."""

FLASH_ATTENTION_FOR_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""Flash attention on CPUs; returns the output and the logarithm of its sums."""

FLASH_ATTENTION_BACKWARD_FOR_CPU = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
)
"""Its backward."""

OverloadPacket = _ops.OpOverloadPacket
"""The class of the functions of ``torch.ops``, each with its overloads."""

bare_apply = _C._FunctionBase.__dict__["apply"]
"""torch's native method that runs a custom Function."""

is_apply_bare = vars(Function)["apply"] is bare_apply
"""Whether programs call ``bare_apply`` directly (2.15); else ``Function.apply`` looks it up."""

FunctionMeta = function_module.FunctionMeta
"""The metaclass of custom Functions, whose attributes torch's core reads."""
_unwrapped_if_dead = _C._functorch.unwrap_if_dead


@untraced
def call_function(function: type[Function], x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return ``function.apply(x, *rest)``, at a fifth of its cost outside torch.func."""
    result: torch.Tensor
    if are_transforms_active():
        result = function.apply(x, *rest)
    else:
        # ``apply`` binds arguments to the signature of ``forward`` to fill in defaults. The
        # Functions of meshdist have none.
        result = bare_apply(function, _unwrapped_if_dead(x), *rest)
    return result


def storage_uses(tensor: torch.Tensor) -> int:
    """Return how many tensors, arrays and storages share the memory of ``tensor``."""
    return _raw_uses(tensor) - _RAW_USES_OF_ONE + 1


def _raw_uses(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()  # the same Python object at each call
    return int(_C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)


tensor_uses: Callable[[torch.Tensor], int] = _C.TensorBase._use_count  # type: ignore[attr-defined]
"""Returns the number of owners of a tensor; Python counts once."""

_RAW_USES_OF_ONE = _raw_uses(torch.empty(0, device="cpu"))


def version_of(tensor: torch.Tensor) -> int:
    """Return autograd's count of writes to ``tensor``; -1 for an uncounted inference tensor."""
    return -1 if tensor.is_inference() else tensor._version


def hidden_from_modes(function: _F) -> _F:
    """Return ``function`` wrapped so that no torch mode sees its calls."""

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
