"""Custom Functions inside typed contexts: their ``apply`` is no function that a mode sees.

While a context is open anywhere in the process, ``apply`` is overridden on a class of torch's that
every custom Function has it from, and that is asked at each call: an ``apply`` that the program has
taken from its class before is seen as well.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.checkpoint import CheckpointFunction

from ..errors import AxisTypeError
from .axis_types import ATTRIBUTE
from .contexts import find_mode
from .instruments import watchers
from .torch_private import BackwardHookFunction, NotSeen, SingleLevelFunction
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
            SingleLevelFunction.apply = _seen_apply  # type: ignore[attr-defined]
            watchers.append(watch)
    try:
        yield
    finally:
        with _changing:
            _num_open -= 1
            if not _num_open:
                del SingleLevelFunction.apply  # type: ignore[attr-defined]
                watchers.remove(watch)


@classmethod  # type: ignore[misc]
def _seen_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
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
