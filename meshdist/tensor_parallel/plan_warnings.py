"""Warn of mistakes in a parallelize plan that meshdist can only guess from names and classes."""

from __future__ import annotations

import re

from torch import nn

from ..annotations.axis_types import find_type
from ..checking.call_sites import warn_caller
from ..error_text import explain as explain_text, first_texts
from .layers import ColumnParallelLinear
from .plan_styles import DRAWS, STYLES, Assignment

__all__ = ["warn_of_dropout", "warn_of_norms", "warn_of_packed"]

_PACKED = re.compile(
    r"(to_|c_)?(qkv|kv|query_key_value|key_value|gate_up)(_?(proj|lin|linear))?"
    r"|Wqkv|Wkv|W_pack|c_attn|in_proj"
)
"""The names of layers that pack several projections."""


def warn_of_norms(model: nn.Module, assigned: list[Assignment], axis: str) -> None:
    """Warn of norm layers that a plan omits although it splits the sequence."""
    if not any("sequence" in each.style for each in assigned):
        return
    named = {id(each.module) for each in assigned}
    excluded = [
        name
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Norm")
        and id(module) not in named
        # If the norm is annotated, the user has handled it.
        and any(find_type(x) is None for x in module.parameters(recurse=False))
    ]
    if excluded:
        summary = "parallelize: the plan splits the sequence but omits norm layers"
        warn_caller(
            explain_text(
                summary,
                expected=f"'reduced' for each norm whose input is split over {axis!r} (otherwise "
                "its gradient is only this rank's part, outside md.typed)",
                found=first_texts(excluded, ", "),
                fix="add them to the plan; if a norm reads complete sequences, annotate it: "
                "md.annotate(model, {'norm.*': '...'}, mesh=mesh)",
            )
        )


def warn_of_packed(assigned: list[Assignment]) -> None:
    """Warn of column layers with names of packed projections."""
    packed = [
        each.name
        for each in assigned
        if STYLES[each.style].becomes is ColumnParallelLinear
        and "whole" not in each.style
        and _PACKED.fullmatch(each.name.rpartition(".")[2])
    ]
    if packed:
        warn_caller(
            explain_text(
                "parallelize: a column layer is named like a packed projection",
                expected="features stored head by head (if q, k and v are stored one after the "
                "other, chunk(3) of a rank's part mixes them)",
                found=first_texts(packed, ", "),
                fix="split it into one layer for each projection, or use 'column_whole'; if its "
                "features are stored head by head, pass example=(x,), which compares outputs, or\n"
                "warnings.filterwarnings('ignore', '.*named like a packed projection')",
            )
        )


def warn_of_dropout(model: nn.Module, assigned: list[Assignment]) -> None:
    """Warn of active dropout next to split layers that a plan omits."""
    named = {id(each.module) for each in assigned}
    split = {id(each.module) for each in assigned if STYLES[each.style].takes is not None}
    inside = tuple(f"{each.name}." * bool(each.name) for each in assigned if each.style in DRAWS)
    found = []
    for path, parent in model.named_modules():
        children = dict(parent.named_children())
        if split.isdisjoint(map(id, children.values())):
            continue
        for leaf, module in {"": parent, **children}.items():
            name = ".".join(filter(None, (path, leaf)))
            if _drops(module) and id(module) not in named and not f"{name}.".startswith(inside):
                found.append(name or type(module).__name__)
    if found:
        warn_caller(
            explain_text(
                "parallelize: the plan omits active dropout next to split layers",
                expected="'own_draws' for dropout on split features or heads, whose masks must "
                "differ between ranks, and 'whole_draws' for all other dropout",
                found=first_texts(list(dict.fromkeys(found)), ", "),
                fix="add them to the plan",
            )
        )


def _drops(module: nn.Module) -> bool:
    """Return whether a module itself draws for dropout when it runs."""
    is_dropout = "dropout" in type(module).__name__.lower()
    rates = [
        value
        for name, value in vars(module).items()
        if "dropout" in name or (name == "p" and is_dropout)
    ]
    return module.training and any(isinstance(rate, float) and rate > 0 for rate in rates)
