"""Define the parallel styles of a plan.

Styles of transformers work unchanged. torch's ParallelStyle objects, and styles that plain tensors
cannot implement, raise an error with an alternative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import nn

from ..error_text import with_article
from ..errors import ArgumentError, KindError
from .layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SplitLayer,
    VocabParallelEmbedding,
)


@dataclass(frozen=True)
class Style:
    """A parallel style: how a plan changes a module.

    Args:
        takes: the exact class of the module; None for any class.
        becomes: its new class; None keeps it.
        cut: the name of the split size.
        forward, backward: the communication, as templates of the sizes ``d`` (input) and ``f``
            (output).
    """

    takes: type[nn.Module] | None
    becomes: type[SplitLayer] | None
    cut: str
    forward: str
    backward: str


@dataclass(frozen=True)
class Assignment:
    """A module, its name in the model, and its style."""

    name: str
    module: nn.Module
    style: str


_COLUMN = nn.Linear, ColumnParallelLinear, "out_features"
_ROW = nn.Linear, RowParallelLinear, "in_features"
_VOCAB = nn.Embedding, VocabParallelEmbedding, "num_embeddings"
_SUM_X = "all-reduce of the input's gradient, [..., {d}], one for all layers of this input"
_GATHER_X = "all-gather of the input, [..., s, {d}], one for all layers of this input"
_SCATTER_X = "reduce-scatter of the input's gradient, [..., s, {d}], one for all of them"
_NOTHING = "nothing"

STYLES: Mapping[str, Style] = {
    "column": Style(*_COLUMN, _NOTHING, _SUM_X),
    "column_whole": Style(*_COLUMN, "all-gather of the output, [..., {f}]", _SUM_X),
    "column_sequence": Style(*_COLUMN, _GATHER_X, _SCATTER_X),
    "column_sequence_whole": Style(
        *_COLUMN, f"{_GATHER_X}; all-gather of the output, [..., s, {{f}}]", _SCATTER_X
    ),
    "row": Style(*_ROW, "all-reduce of the output, [..., {f}]", _NOTHING),
    "row_whole": Style(
        *_ROW,
        "all-reduce of the output, [..., {f}]",
        "all-gather of the input's gradient, [..., {d}]",
    ),
    "row_sequence": Style(
        *_ROW,
        "reduce-scatter of the output, [..., s, {f}]",
        "all-gather of the output's gradient, [..., s, {f}]",
    ),
    "vocab": Style(*_VOCAB, "all-reduce of the output, [..., {f}]", _NOTHING),
    "vocab_sequence": Style(
        *_VOCAB,
        "reduce-scatter of the output, [..., s, {f}]",
        "all-gather of the output's gradient, [..., s, {f}]",
    ),
    "reduced": Style(None, None, "", _NOTHING, "all-reduce of the gradients of its parameters"),
    "cut_sequence": Style(None, None, "", _NOTHING, "all-gather of the output's gradient"),
    "gather_sequence": Style(None, None, "", "all-gather of the output", _NOTHING),
    "own_draws": Style(None, None, "", _NOTHING, _NOTHING),
    "whole_draws": Style(None, None, "", _NOTHING, _NOTHING),
}
"""The styles of a plan."""

DRAWS = ("own_draws", "whole_draws")
"""The styles for modules that draw random numbers."""

OF_TRANSFORMERS = {
    "colwise": "column",
    "colwise_gather_output": "column_whole",
    "colwise_rep": "column_whole",
    "rowwise": "row",
    "rowwise_split_input": "row_whole",
    "rowwise_rep": "row_whole",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "reduced",
    "sequence_parallel": "reduced",
}
"""Our name for each style of transformers' ``model.tp_plan``."""

_PACKED = (
    "split it into one module for each part, or store the features head by head and use 'column'"
)
_NOT_LINEAR = "experts are not a single matrix product"
_EXPERTS = "remove the experts from the plan, and send tokens to them with md.experts"
_NOT_SPLIT = "remove it from the plan: modules that the plan does not name are not split"
_REJECTED = {
    "packed_colwise": ("packed weights are not a single matrix", _PACKED),
    "packed_rowwise": ("packed weights are not a single matrix", _PACKED),
    "embedding_colwise": ("an embedding is split by rows", "use 'vocab'"),
    "loss_parallel": (
        "a loss is not a module",
        "call md.tensor_parallel.cross_entropy(logits, target, mesh['tp']) on the output of a "
        "'column' head",
    ),
    "moe_tp_experts": (_NOT_LINEAR, _EXPERTS),
    "moe_identity_expert": (_NOT_LINEAR, _EXPERTS),
    "grouped_gemm": (_NOT_LINEAR, _EXPERTS),
    "ep_dispatch_experts": (_NOT_LINEAR, _EXPERTS),
    "ep_router": (_NOT_LINEAR, _EXPERTS),
    "mla_kv_a_proj": ("its output is used in two ways", _NOT_SPLIT),
    "all_reduce": ("it sums the output of a module of another class", _NOT_SPLIT),
    "local_params": ("its parameters do not belong to a layer", _NOT_SPLIT),
    "keep_full_weight": ("the weight is not split", _NOT_SPLIT),
    "replicate": ("the module is not split", _NOT_SPLIT),
}
"""Styles that plain tensors cannot implement: (reason, fix)."""


def styles_of(plan: object) -> dict[str, str]:
    """Return a plan as {pattern: style} with our style names; else raise."""
    if not isinstance(plan, Mapping) or not plan:
        raise KindError(
            "parallelize takes a plan: a mapping from patterns of module names to styles",
            expected='for example {"layers.*.up": "column", "layers.*.down": "row"}',
            found=f"{plan!r}, {with_article(type(plan).__name__)}",
            fix="write a plan: model.tp_plan is empty if transformers has no plan for the model"
            if plan is None or plan == {}
            else "pass a non-empty mapping",
        )
    return {pattern: style_of(pattern, style) for pattern, style in plan.items()}


def style_of(pattern: object, style: object) -> str:
    """Return our name of ``style``; else raise an error with ``pattern``."""
    where = f"{pattern!r}: {style!r}"
    if not isinstance(pattern, str):
        raise KindError(
            "parallelize: the keys of a plan are patterns of module names",
            found=where,
            fix='use strings as keys, for example "layers.*.up"',
        )
    if not isinstance(style, str):
        raise _of_torch(pattern, style)
    ours = OF_TRANSFORMERS.get(style, style)
    if ours in STYLES:
        return ours
    if style in _REJECTED:
        why, fix = _REJECTED[style]
        raise ArgumentError(
            f"parallelize does not support the style {style!r}: {why}", where=where, fix=fix
        )
    near = get_close_matches(style, [*STYLES, *OF_TRANSFORMERS], 1, 0.0)
    raise ArgumentError(
        f"parallelize: unknown style {style!r}",
        where=where,
        expected="one of " + ", ".join(STYLES),
        fix=f"did you mean {near[0]!r}?",
    )


def _of_torch(pattern: str, style: Any) -> KindError:
    """Return the error for a torch ParallelStyle, which names our style."""
    name = style.__name__ if isinstance(style, type) else type(style).__name__
    is_cut_in, is_cut_out, is_whole_in, is_whole_out = (
        any(getattr(layout, "is_" + kind, bool)() for layout in _layouts(style, which))
        for kind in ("shard", "replicate")
        for which in ("input_layouts", "output_layouts")
    )
    equivalent = {
        "ColwiseParallel": "'column" + "_sequence" * is_cut_in + "_whole" * is_whole_out + "'",
        "RowwiseParallel": "'row_sequence', for an embedding 'vocab_sequence'"
        if is_cut_out
        else "'row_whole', for an embedding 'vocab'"
        if is_whole_in
        else "'row'",
        "SequenceParallel": "'reduced'",
        "PrepareModuleInput": "nothing, because _sequence layers gather their input",
        "PrepareModuleOutput": "'gather_sequence' or 'cut_sequence'",
    }.get(name)
    if equivalent is None and not hasattr(style, "_apply"):
        return KindError(
            "parallelize: the values of a plan are names of styles",
            where=f"{pattern!r}: {style!r}",
            expected="one of " + ", ".join(STYLES),
            found=with_article(type(style).__name__),
            fix='pass for example {"layers.*.up": "column"}',
        )
    ours = "" if equivalent is None else f"use {equivalent}; or "
    return KindError(
        f"parallelize cannot use torch's {name}, which converts parameters to DTensor",
        where=f"{pattern!r}: {name}",
        fix=f"{ours}call torch.distributed.tensor.parallel.parallelize_module(module, "
        "mesh.to_torch()['tp'], plan)",
    )


def _layouts(style: object, which: str) -> tuple[Any, ...]:
    given = getattr(style, which, None) or ()
    return given if isinstance(given, tuple) else (given,)
