"""torch's functions on lists of tensors, as optimizers call them: each item has its own type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from .axis_types import ATTRIBUTE
from .contexts import ContextMode, collect
from .operation_rules import LINEARITY, Operation

__all__ = ["run_on_items"]


def run_on_items(
    mode: ContextMode,
    operation: Operation,
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """``_foreach_*`` and ``_fused_*``: what holds of the items' operation holds of each item."""
    given = [*args, *kwargs.values()]
    lists = [one for one in given if isinstance(one, (list, tuple)) and _is_of_tensors(one)]
    singles = [one for one in given if isinstance(one, torch.Tensor)]
    if not lists:
        return call(*args, **kwargs)
    length = len(lists[0])
    written = {id(one) for one in _written(operation, args)}
    read = [one for one in singles if id(one) not in written]
    name = operation.name.removeprefix("_foreach_")
    single = Operation(operation.name, linearity=LINEARITY.get(name, ""))
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


def _is_of_tensors(given: Sequence[Any]) -> bool:
    return bool(given) and all(isinstance(one, torch.Tensor) for one in given)


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


def _written(operation: Operation, args: Sequence[Any]) -> list[torch.Tensor]:
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
