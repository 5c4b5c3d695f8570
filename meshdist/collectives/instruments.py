"""What every public verb wears: a place in torch's profiler, a clean end of torch.compile's graph.

Both cost a call next to nothing while neither is in use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.autograd.profiler as profiler
from torch._C._dynamo.eval_frame import (
    _FrameAction as FrameAction,
    _FrameExecStrategy as FrameExecStrategy,
    set_code_exec_strategy,
)

from ..errors import MeshdistError
from ..mesh.groups import resolve_group
from ..wires.work import Work

__all__ = ["bare_verb", "profiled", "verb"]

_F = TypeVar("_F", bound=Callable[..., Any])

_WHY_NOT_TRACED = (
    "a verb of meshdist waits for other ranks, and no graph can hold that; without fullgraph=True "
    "one graph ends before it and another begins behind it"
)


def verb(function: _F) -> _F:
    """Mark ``function`` as a public verb.

    While a profiler of torch's is on, a call appears in it under the verb's name, its group and
    the bytes of all tensors it was given (none for a verb on objects): ``meshdist::all_reduce axis
    'tp' of DeviceMesh(dp=2, tp=2) 4096 bytes``. torch.compile ends its graph before the call, runs
    the call as it is, and begins another graph behind it.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Reading the flag takes 20 ns; a record_function takes 10 us even where nobody records.
        if profiler._is_profiler_enabled:
            with profiler.record_function(_title(function, args, kwargs)):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    _leave_untraced(call)
    return cast(_F, call)


def bare_verb(function: _F) -> _F:
    """Mark a public verb that looks for a profiler itself.

    It then opens ``profiled``, or leaves the call to a ``verb`` of its name with an underscore. For
    others ``verb`` does that, by a call around them that takes a quarter of a microsecond.
    """
    _leave_untraced(function)
    return function


def profiled(function: Callable[..., Any], *args: Any) -> AbstractContextManager[Any]:
    """What shows a call of ``function`` in torch's profiler, while it is open."""
    return profiler.record_function(_title(function, args, {}))


def _leave_untraced(function: Callable[..., Any]) -> None:
    """Let torch.compile run ``function``, and all that it calls, as they are.

    This says what torch.compiler.disable says, without its import of the whole compiler and
    without a wrapper.
    """
    never = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, never)  # once it runs
    marked = cast(Any, function)
    marked._torchdynamo_disable = True  # where a graph comes to its call
    marked._torchdynamo_disable_msg = _WHY_NOT_TRACED


# What async verbs hand out is part of them.
for _name, _method in inspect.getmembers(Work, inspect.isfunction):
    if not _name.startswith("_"):
        _leave_untraced(_method)


def _title(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What a profiler shows of one call."""
    words = [f"meshdist::{function.__name__.removeprefix('_')}"]
    try:
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        words = [f"meshdist::{arguments['name']}"] if "name" in arguments else words
        words.append(resolve_group(_group(arguments)).name)
    except (TypeError, MeshdistError):  # the call itself will say what is wrong with it
        return words[0]
    if "object" not in function.__name__:
        words.append(f"{sum(map(_num_bytes, arguments.values()))} bytes")
    return " ".join(words)


def _group(arguments: Mapping[str, Any]) -> Any:
    """The argument that names the group; operations in a list name it themselves."""
    if "group" in arguments:
        return arguments["group"]
    for value in arguments.values():
        if isinstance(value, list) and value and hasattr(value[0], "group"):
            return value[0].group
    return None


def _num_bytes(value: Any) -> int:
    """The bytes of a tensor, of an array of another library, or of all in a list."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(map(_num_bytes, value))
    if hasattr(value, "tensor"):  # one operation of a batch
        return _num_bytes(value.tensor)
    return int(getattr(value, "nbytes", 0))
