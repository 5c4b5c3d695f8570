"""Custom Functions inside typed contexts: their ``apply`` is no function that a mode sees.

While a context is open anywhere in the process, ``apply`` is overridden on a class of torch's that
every custom Function has it from, and that is asked at each call: an ``apply`` that the program has
taken from its class before is seen as well. From torch 2.15 on ``apply`` is torch's core's, so the
class of the Functions hands out ours. One that was taken before goes straight to the core, and is
refused when that asks the Function for its ``forward``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinMethodType
from typing import Any

from torch.utils.checkpoint import CheckpointFunction

from ..errors import AxisTypeError
from .axis_types import ATTRIBUTE
from .contexts import find_mode
from .instruments import watchers
from .torch_private import (
    BackwardHookFunction,
    FunctionMeta,
    NotSeen,
    SingleLevelFunction,
    are_transforms_active,
    is_apply_bare,
    is_mode_enabled,
)
from .type_errors import where
from .typed_in_place import watch

__all__ = ["calls_seen"]

_changing = threading.Lock()
_num_open = 0


@contextmanager
def calls_seen() -> Iterator[None]:
    """Let contexts see the calls of custom Functions, and of verbs in place."""
    global _num_open
    with _changing:
        _num_open += 1
        if _num_open == 1:
            if is_apply_bare:
                FunctionMeta.__getattribute__ = _part_of  # type: ignore[method-assign]
            else:
                SingleLevelFunction.apply = classmethod(_seen_call)  # type: ignore[attr-defined]
            watchers.append(watch)
    try:
        yield
    finally:
        with _changing:
            _num_open -= 1
            if not _num_open:
                if is_apply_bare:
                    del FunctionMeta.__getattribute__
                else:
                    del SingleLevelFunction.apply  # type: ignore[attr-defined]
                watchers.remove(watch)


def _part_of(cls: Any, name: str) -> Any:
    """An attribute of a custom Function: its ``apply`` as contexts see it, if it is torch's core's.

    Torch's core asks for ``forward`` with no mode enabled where that ``apply`` has been called.
    """
    found = type.__getattribute__(cls, name)
    if name not in ("apply", "forward") or not is_mode_enabled() or are_transforms_active():
        return found
    mode = find_mode()
    if mode is None:
        return found
    if name == "apply":
        is_core = isinstance(found, BuiltinMethodType)
        return partial(_seen_call, cls) if is_core else found
    if cls.__module__.partition(".")[0] not in ("meshdist", "torch"):
        raise AxisTypeError(
            f"{cls.__name__}.apply was taken from its class before the typed context began",
            where=where(mode.mesh),
            expected="with this torch, an apply that is looked up inside the context",
            fix=f"call {cls.__name__}.apply(...) itself",
        )
    return found


def _seen_call(cls: Any, *args: Any, **kwargs: Any) -> Any:
    call = super(SingleLevelFunction, cls).apply
    mode: Any = find_mode()
    if mode is None:
        return call(*args, **kwargs)
    if issubclass(cls, CheckpointFunction):
        raise AxisTypeError(
            "a re-entrant checkpoint in a typed context",
            where=where(mode.mesh),
            expected="a checkpoint without re-entry: one with re-entry runs its function anew, "
            "with a graph of its own, where no context sees it",
            fix="checkpoint(..., use_reentrant=False)",
        )

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with NotSeen():
            return call(*args, **kwargs)

    if issubclass(cls, BackwardHookFunction):  # its results are its arguments, place by place
        texts = [mode.type_of(one, cls.__name__) for one in args]
        results = unseen(*args, **kwargs)
        for one, text in zip(
            results if isinstance(results, tuple) else (results,), texts, strict=True
        ):
            one.__dict__[ATTRIBUTE] = text
        return results
    return mode.apply(cls, unseen, args, kwargs)
