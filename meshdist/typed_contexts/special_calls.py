"""Calls that a typed context sees in other ways: numbers that are read, lists, custom Functions.

While a context is open anywhere in the process, ``apply`` of custom Functions is overridden on a
class of torch's that every one has it from, and that is asked at each call: an ``apply`` that the
program has taken from its class before is seen as well. From torch 2.15 on ``apply`` is torch's
core's, so the class of the Functions hands out ours. One that was taken before goes straight to the
core, and is refused when that asks the Function for its ``forward``.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import BuiltinMethodType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from ..checking.program import program_frame
from ..collectives.marks import watchers
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
from ..functional.axis_types import ATTRIBUTE, kinds_in, shown
from ..mesh.device_mesh import DeviceMesh
from .context import ContextMode, collect, find_context
from .refusals import tensor_text, type_of, where
from .torch_functions import LINEARITY, TorchFunction
from .verb_calls import watch

__all__ = ["calls_seen", "run_on_items", "warn_of_number"]

_UNTYPED = "read it in `with md.untyped():`, where it may differ"


def warn_of_number(name: str, operands: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
    """Warn, once a place, where one of the operands varies over some axis."""
    kinds = {axis: kind for one in operands for axis, kind in kinds_in(type_of(one)).items()}
    varying = sorted(axis for axis, kind in kinds.items() if kind == "V")
    if not varying:
        return
    frame = program_frame(sys._getframe(1))
    ways = [f"make it equal first, for example lax.pmean(x, {varying[0]!r}) or lax.pmax", _UNTYPED]
    if any(DTYPES[one.dtype].group in ("integers", "unsigned") for one in operands):
        ways.reverse()  # sizes and counts are data: the ranks' own, such as tokens of each expert
    text = explain(
        f"{name} of a value that varies over {shown(varying)} gives another number on each rank",
        found=", ".join(map(tensor_text, operands)),
        expected="an invariant value: what a program decides by the number, its ranks decide alike",
        fix="; or ".join(ways),
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
    """``_foreach_*`` and ``_fused_*``: what holds of the items' operation holds of each item."""
    given = [*args, *kwargs.values()]
    several = (one for one in given if isinstance(one, (list, tuple)) and one)
    lists = [each for each in several if all(isinstance(one, torch.Tensor) for one in each)]
    singles = [one for one in given if isinstance(one, torch.Tensor)]
    if not lists:
        return call(*args, **kwargs)
    length = len(lists[0])
    written = {id(one) for one in _written(operation, args)}
    read = [one for one in singles if id(one) not in written]
    name = operation.name.removeprefix("_foreach_")
    single = TorchFunction(operation.name, linearity=LINEARITY.get(name, ""))
    texts, swaps = [], {}
    for place in range(length):
        operands = [one[place] for one in lists if len(one) == length] + read
        joined = mode.joined(single, operands)
        texts.append(joined.text)
        for one, missing in zip(operands, joined.missing, strict=True):
            if id(one) in written:
                mode.check_write(single, one, joined.text, operands)
            elif missing and one.requires_grad and torch.is_grad_enabled():
                swaps[id(one), place] = mode.casts.cast(one, missing)
    if swaps:
        args = [_swapped(one, swaps, length) for one in args]
        kwargs = {key: _swapped(one, swaps, length) for key, one in kwargs.items()}
    totals = [one for one in singles if id(one) in written]
    for one in totals:  # made of all items
        whole = mode.joined(single, [*totals, *(item for each in lists for item in each)]).text
        mode.check_write(single, one, whole, lists[0])
    result = call(*args, **kwargs)
    for one in totals:
        one.__dict__[ATTRIBUTE] = whole
    for one in lists:
        if len(one) == length:
            for entry, text in zip(one, texts, strict=True):
                if id(entry) in written:
                    entry.__dict__[ATTRIBUTE] = text
    if isinstance(result, (list, tuple)) and len(result) == length:
        for entry, text in zip(result, texts, strict=True):
            if isinstance(entry, torch.Tensor):
                entry.__dict__[ATTRIBUTE] = text
    return result


@cache
def _written_places(name: str) -> frozenset[int]:
    """The positions of the arguments that a function of this name writes, lists and tensors."""
    packet = getattr(torch.ops.aten, name)
    schema = getattr(packet, packet.overloads()[0])._schema
    return frozenset(
        place
        for place, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    )


def _written(operation: TorchFunction, args: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that are written: items of lists, and those that stand alone."""
    if not operation.name.endswith("_"):
        return []
    places = _written_places(operation.name)
    found: list[torch.Tensor] = []
    collect([one for place, one in enumerate(args) if place in places], found)
    return found


def _swapped(given: Any, swaps: Mapping[Any, torch.Tensor], length: int) -> Any:
    if isinstance(given, (list, tuple)) and len(given) == length:
        return [swaps.get((id(one), place), one) for place, one in enumerate(given)]
    return given


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
    mode = find_context()
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
    mode: Any = find_context()
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
        with HiddenFromModes():
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
