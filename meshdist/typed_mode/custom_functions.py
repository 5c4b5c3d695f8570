"""Type special calls in a typed context: reads of numbers, lists of tensors, custom Functions.

While a context is open, ``apply`` is overridden in the torch class from which Functions inherit it,
so a context also sees an ``apply`` that was looked up earlier. From torch 2.15 on, ``apply`` is in
torch's core, so the metaclass of Functions returns our ``apply``. An earlier lookup calls the core,
and raises when the core looks up ``forward``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import BuiltinMethodType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from ..annotations.axis_types import kinds_in, set_type, shown, type_of
from ..checking.call_sites import program_frame
from ..collectives.registration import watchers
from ..collectives.torch_private import (
    BackwardHookFunction,
    FunctionMeta,
    HiddenFromModes,
    SingleLevelFunction,
    are_transforms_active,
    is_apply_bare,
    is_mode_enabled,
)
from ..dtypes import DTYPES
from ..error_text import explain
from ..errors import AxisTypeError, VaryingNumberWarning
from ..mesh.device_mesh import DeviceMesh
from ..runtime.fork_safe_locks import ForkSafeLock
from .collective_calls import watch
from .context import ContextMode, find_context
from .function_rules import LINEARITY, TorchFunction, tensors_in
from .type_errors import tensor_text, where

_UNTYPED = "read it in `with md.untyped():`, where it may differ"


def warn_of_number(name: str, operands: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
    """Warn, once per program line, of a number read from varying operands."""
    kinds = {axis: kind for x in operands for axis, kind in kinds_in(type_of(x)).items()}
    varying = sorted(axis for axis, kind in kinds.items() if kind == "V")
    if not varying:
        return
    frame = program_frame(sys._getframe(1))
    fixes = [f"make it equal first, for example lax.pmean(x, {varying[0]!r}) or lax.pmax", _UNTYPED]
    if any(DTYPES[x.dtype].group in ("integers", "unsigned") for x in operands):
        fixes.reverse()  # Integers are often counts that may differ, such as tokens of each expert.
    text = explain(
        f"{name} of a value that varies over {shown(varying)} returns a different number on each "
        "rank",
        found=", ".join(map(tensor_text, operands)),
        expected="an invariant value, so that all ranks decide the same by the number",
        fix="; or ".join(fixes),
    )
    warnings.warn_explicit(
        text,
        VaryingNumberWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def run_on_items(
    mode: ContextMode,
    operation: TorchFunction,
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return the result of a ``_foreach_*`` call, typed item by item."""
    given = [*args, *kwargs.values()]
    several = (value for value in given if isinstance(value, (list, tuple)) and value)
    lists = [items for items in several if all(isinstance(x, torch.Tensor) for x in items)]
    singles = [value for value in given if isinstance(value, torch.Tensor)]
    if not lists:
        return call(*args, **kwargs)
    length = len(lists[0])
    written_indices = _written_indices(operation.name) if operation.name.endswith("_") else ()
    written = {
        id(x) for x in tensors_in([args[index] for index in written_indices if index < len(args)])
    }
    read = [x for x in singles if id(x) not in written]
    name = operation.name.removeprefix("_foreach_")
    single = TorchFunction(operation.name, linearity=LINEARITY.get(name, ""))
    texts, swaps = [], {}
    for index in range(length):
        operands = [items[index] for items in lists if len(items) == length] + read
        joined = mode.joined(single, operands)
        texts.append(joined.text)
        for x, missing in zip(operands, joined.missing, strict=True):
            if id(x) in written:
                mode.check_write(single, x, joined.text, operands)
            elif missing and x.requires_grad and torch.is_grad_enabled():
                swaps[id(x), index] = mode.casts.cast(x, missing)
    if swaps:
        args = [_swapped(value, swaps, length) for value in args]
        kwargs = {key: _swapped(value, swaps, length) for key, value in kwargs.items()}
    totals = [x for x in singles if id(x) in written]
    for total in totals:  # A total depends on all items.
        whole = mode.joined(single, [*totals, *(x for items in lists for x in items)]).text
        mode.check_write(single, total, whole, lists[0])
    result = call(*args, **kwargs)
    for total in totals:
        set_type(total, whole)
    for items in lists:
        if len(items) == length:
            for x, text in zip(items, texts, strict=True):
                if id(x) in written:
                    set_type(x, text)
    if isinstance(result, (list, tuple)) and len(result) == length:
        for x, text in zip(result, texts, strict=True):
            if isinstance(x, torch.Tensor):
                set_type(x, text)
    return result


@cache
def _written_indices(name: str) -> frozenset[int]:
    """Return the positions of the arguments that a function writes."""
    packet = getattr(torch.ops.aten, name)
    schema = getattr(packet, packet.overloads()[0])._schema
    return frozenset(
        index
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _swapped(given: Any, swaps: Mapping[Any, torch.Tensor], length: int) -> Any:
    if isinstance(given, (list, tuple)) and len(given) == length:
        return [swaps.get((id(item), index), item) for index, item in enumerate(given)]
    return given


_changing = ForkSafeLock()
_num_open = 0


@contextmanager
def calls_seen() -> Iterator[None]:
    """Let typed contexts see calls of custom Functions and of torch collectives inside."""
    global _num_open
    with _changing.current:
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
        with _changing.current:
            _num_open -= 1
            if not _num_open:
                if is_apply_bare:
                    del FunctionMeta.__getattribute__
                else:
                    del SingleLevelFunction.apply  # type: ignore[attr-defined]
                watchers.remove(watch)


def _part_of(cls: Any, name: str) -> Any:
    """Return a Function's attribute; in a typed context a watched ``apply``."""
    # torch's core looks up `forward` with a mode enabled only if its own `apply` was called.
    found = type.__getattribute__(cls, name)
    if name not in ("apply", "forward") or not is_mode_enabled() or are_transforms_active():
        return found
    mode = find_context()
    if mode is None:
        return found
    if name == "apply":
        is_core = isinstance(found, BuiltinMethodType)
        return partial(_seen_call, cls) if is_core else found
    if cls.__module__.partition(".")[0] not in ("meshdist", "torch"):
        raise AxisTypeError(
            f"{cls.__name__}.apply cannot run inside md.typed: it was looked up before the context",
            where=where(mode.mesh),
            expected="with this version of torch, an apply that is looked up inside the context",
            fix=f"call {cls.__name__}.apply(...) directly, inside the context",
        )
    return found


def _seen_call(cls: Any, *args: Any, **kwargs: Any) -> Any:
    call = super(SingleLevelFunction, cls).apply
    mode: Any = find_context()
    if mode is None:
        return call(*args, **kwargs)
    if issubclass(cls, CheckpointFunction):
        raise AxisTypeError(
            "a reentrant torch.utils.checkpoint cannot run inside md.typed",
            where=where(mode.mesh),
            expected="a non-reentrant checkpoint (a reentrant one recomputes in a separate graph, "
            "which md.typed cannot see)",
            fix="call checkpoint(..., use_reentrant=False)",
        )

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with HiddenFromModes():
            return call(*args, **kwargs)

    if issubclass(cls, BackwardHookFunction):  # It returns its arguments, in order.
        texts = [mode.type_of(x, cls.__name__) for x in args]
        results = unseen(*args, **kwargs)
        for x, text in zip(
            results if isinstance(results, tuple) else (results,), texts, strict=True
        ):
            set_type(x, text)
        return results
    return mode.apply(cls, unseen, args, kwargs)
