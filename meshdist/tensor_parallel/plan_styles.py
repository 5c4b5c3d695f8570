"""The words of a plan: what each does to a module and sends, and which words cannot be meant.

transformers' words are taken as they are. torch's styles and words of what is no plain product are
rejected, with the word or the call to take in their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import nn

from ..errors import ArgumentError, KindError
from .layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SplitLayer,
    VocabParallelEmbedding,
)


@dataclass(frozen=True)
class Word:
    """The meaning of a word of a plan for a module.

    Args:
        takes: the class of module that it is for, exactly; None for modules of any class.
        becomes: the class that the module gets; None leaves it.
        cut: the name of the size that is cut.
        forward, backward: what is sent, by the sizes ``d``, of the input, and ``f``, of the output.
    """

    takes: type[nn.Module] | None
    becomes: type[SplitLayer] | None
    cut: str
    forward: str
    backward: str


_COLUMN = nn.Linear, ColumnParallelLinear, "out_features"
_ROW = nn.Linear, RowParallelLinear, "in_features"
_VOCAB = nn.Embedding, VocabParallelEmbedding, "num_embeddings"
_SUM_X = "all-reduce of the input's gradient, [..., {d}], one for all layers of this input"
_GATHER_X = "all-gather of the input, [..., s, {d}], one for all layers of this input"
_SCATTER_X = "reduce-scatter of the input's gradient, [..., s, {d}], one for all of them"
_NOTHING = "nothing"

WORDS: Mapping[str, Word] = {
    "column": Word(*_COLUMN, _NOTHING, _SUM_X),
    "column_whole": Word(*_COLUMN, "all-gather of the output, [..., {f}]", _SUM_X),
    "column_sequence": Word(*_COLUMN, _GATHER_X, _SCATTER_X),
    "column_sequence_whole": Word(
        *_COLUMN, f"{_GATHER_X}; all-gather of the output, [..., s, {{f}}]", _SCATTER_X
    ),
    "row": Word(*_ROW, "all-reduce of the output, [..., {f}]", _NOTHING),
    "row_whole": Word(
        *_ROW,
        "all-reduce of the output, [..., {f}]",
        "all-gather of the input's gradient, [..., {d}]",
    ),
    "row_sequence": Word(
        *_ROW,
        "reduce-scatter of the output, [..., s, {f}]",
        "all-gather of the output's gradient, [..., s, {f}]",
    ),
    "vocab": Word(*_VOCAB, "all-reduce of the output, [..., {f}]", _NOTHING),
    "vocab_sequence": Word(
        *_VOCAB,
        "reduce-scatter of the output, [..., s, {f}]",
        "all-gather of the output's gradient, [..., s, {f}]",
    ),
    "reduced": Word(None, None, "", _NOTHING, "all-reduce of the gradients of its parameters"),
    "cut_sequence": Word(None, None, "", _NOTHING, "all-gather of the output's gradient"),
    "gather_sequence": Word(None, None, "", "all-gather of the output", _NOTHING),
}
"""The words of a plan."""

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
"""The meaning of the words of transformers' ``model.tp_plan``."""

_PACKED = (
    "split it into a module for each part; or let the features lie head after head, as 'column'"
)
_EXPERTS = "leave the experts out of the plan, and carry tokens to them by md.experts"
_WHOLE = "leave it out of the plan: what a plan does not name stays whole"
_REFUSED = {
    "packed_colwise": ("weights packed into one are no plain column", _PACKED),
    "packed_rowwise": ("weights packed into one are no plain row", _PACKED),
    "embedding_colwise": ("an embedding is cut by rows", "write 'vocab'"),
    "loss_parallel": (
        "a loss is no module",
        "call md.tensor_parallel.cross_entropy(logits, target, mesh['tp']) on the output of a head "
        "that is 'column'",
    ),
    "moe_tp_experts": ("experts are no plain products", _EXPERTS),
    "moe_identity_expert": ("experts are no plain products", _EXPERTS),
    "grouped_gemm": ("experts are no plain products", _EXPERTS),
    "ep_dispatch_experts": ("experts are no plain products", _EXPERTS),
    "ep_router": ("experts are no plain products", _EXPERTS),
    "mla_kv_a_proj": ("an output that is used in two ways", _WHOLE),
    "all_reduce": ("a sum of what a module of another class returns", _WHOLE),
    "local_params": ("parameters that are no layer's", _WHOLE),
    "keep_full_weight": ("a weight that stays whole", _WHOLE),
    "replicate": ("a module that stays whole", _WHOLE),
}
"""Words that cannot be meant on plain tensors: why, and what to do."""


def words_of(plan: object) -> dict[str, str]:
    """Return a plan as {pattern: word of ours}; raise for anything else."""
    if not isinstance(plan, Mapping) or not plan:
        raise KindError(
            "parallelize takes a plan: patterns of module names, with words",
            expected='such as {"layers.*.up": "column", "layers.*.down": "row"}',
            found=f"{plan!r}, a {type(plan).__name__}",
            fix="model.tp_plan is empty where transformers has no plan: write one"
            if plan is None or plan == {}
            else None,
        )
    return {pattern: word_of(pattern, word) for pattern, word in plan.items()}


def word_of(pattern: object, word: object) -> str:
    """Return our word for ``word`` in a plan; if unknown or rejected, raise, naming ``pattern``."""
    where = f"{pattern!r}: {word!r}"
    if not isinstance(pattern, str):
        raise KindError("parallelize: the keys of a plan are patterns of names", found=where)
    if not isinstance(word, str):
        raise _of_torch(pattern, word)
    ours = OF_TRANSFORMERS.get(word, word)
    if ours in WORDS:
        return ours
    if word in _REFUSED:
        why, fix = _REFUSED[word]
        raise ArgumentError(
            f"parallelize: {word!r} cannot be meant on plain tensors: {why}", where=where, fix=fix
        )
    near = get_close_matches(word, [*WORDS, *OF_TRANSFORMERS], 1, 0.0)
    raise ArgumentError(
        f"parallelize: {word!r} is no word of a plan",
        where=where,
        expected=", ".join(WORDS),
        fix=f"did you mean {near[0]!r}?",
    )


def _of_torch(pattern: str, style: Any) -> KindError:
    """Return the error for a ParallelStyle of torch's, which names our word for it."""
    name = style.__name__ if isinstance(style, type) else type(style).__name__
    is_cut_in, is_cut_out, is_whole_in, is_whole_out = (
        any(getattr(layout, "is_" + kind, bool)() for layout in _layouts(style, which))
        for kind in ("shard", "replicate")
        for which in ("input_layouts", "output_layouts")
    )
    says = {
        "ColwiseParallel": "'column" + "_sequence" * is_cut_in + "_whole" * is_whole_out + "'",
        "RowwiseParallel": "'row_sequence', of an embedding 'vocab_sequence'"
        if is_cut_out
        else "'row_whole', of an embedding 'vocab'"
        if is_whole_in
        else "'row'",
        "SequenceParallel": "'reduced'",
        "PrepareModuleInput": "nothing: layers whose words have _sequence gather their input, once",
        "PrepareModuleOutput": "'gather_sequence' or 'cut_sequence'",
    }.get(name)
    if says is None and not hasattr(style, "_apply"):
        return KindError(
            "parallelize: the values of a plan are words",
            where=f"{pattern!r}: {style!r}",
            expected=", ".join(WORDS),
            found=f"a {type(style).__name__}",
        )
    ours = "" if says is None else f"the word that says the same: {says}; or "
    return KindError(
        f"parallelize: {name} is a style of torch's, which makes DTensors of parameters",
        where=f"{pattern!r}: {name}",
        fix=f"{ours}torch.distributed.tensor.parallel.parallelize_module(module, "
        "mesh.to_torch()['tp'], plan)",
    )


def _layouts(style: object, which: str) -> tuple[Any, ...]:
    given = getattr(style, which, None) or ()
    return given if isinstance(given, tuple) else (given,)
