"""The words of plans: transformers' mean ours, torch's styles and foreign words are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard, parallel as torchs

from meshdist import parallelize
from meshdist.errors import ArgumentError, KindError
from meshdist.tensor_parallel.plan_styles import OF_TRANSFORMERS, STYLES, style_of, styles_of

COLUMN, ROW = torchs.ColwiseParallel, torchs.RowwiseParallel


def test_transformers_words_are_ours() -> None:
    assert set(OF_TRANSFORMERS.values()) <= STYLES.keys()
    assert style_of("lm_head", "colwise_gather_output") == "column_whole"
    assert styles_of({"a": "colwise", "b": "row"}) == {"a": "column", "b": "row"}


def test_the_page_and_the_docstring_have_every_word() -> None:
    page = (
        Path(__file__).resolve().parents[2] / "docs" / "how-to" / "tensor_parallel.md"
    ).read_text()
    told = parallelize.__doc__ or ""
    assert [word for word in (*STYLES, *OF_TRANSFORMERS) if f"`{word}`" not in page] == []
    assert [word for word in STYLES if f"``{word}``" not in told] == []


def test_words_change_torchs_own_classes() -> None:
    for word in STYLES.values():
        if word.becomes is None:
            assert word.takes is None
        else:
            assert word.takes in (nn.Linear, nn.Embedding)
            assert issubclass(word.becomes, word.takes)


TORCH_STYLES: dict[str, tuple[Any, str | None]] = {
    "column": (COLUMN(), "'column'"),
    "column, whole": (COLUMN(output_layouts=Replicate()), "'column_whole'"),
    "column, sequence": (COLUMN(input_layouts=Shard(1)), "'column_sequence'"),
    "both": (
        COLUMN(input_layouts=Shard(1), output_layouts=Replicate()),
        "'column_sequence_whole'",
    ),
    "row": (ROW(), "'row'"),
    "row, sequence": (
        ROW(output_layouts=Shard(1)),
        "'row_sequence', for an embedding 'vocab_sequence'",
    ),
    "embedding": (ROW(input_layouts=Replicate()), "'row_whole', for an embedding 'vocab'"),
    "the class": (COLUMN, "'column'"),
    "norm": (torchs.SequenceParallel(), "'reduced'"),
    "input": (
        torchs.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "nothing, because _sequence layers gather their input",
    ),
    "output": (
        torchs.PrepareModuleOutput(
            output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),)
        ),
        "'gather_sequence' or 'cut_sequence'",
    ),
    "another": (type("MyStyle", (torchs.ParallelStyle,), {}), None),
}


@pytest.mark.parametrize("name", TORCH_STYLES)
def test_a_style_of_torchs_is_rejected_with_the_word_that_says_the_same(name: str) -> None:
    style, word = TORCH_STYLES[name]
    with pytest.raises(KindError) as raised:
        style_of("layers.*.up", style)
    error = raised.value
    assert error.summary.startswith("parallelize cannot use torch's ")
    assert error.summary.endswith(", which converts parameters to DTensor")
    assert error.fix is not None
    assert error.fix.endswith(
        "torch.distributed.tensor.parallel.parallelize_module(module, mesh.to_torch()['tp'], plan)"
    )
    said = "" if word is None else f"use {word}; or call torch."
    assert error.fix.startswith(said)
    assert word is not None or error.fix.startswith("call torch.")


FOREIGN = {
    "packed_colwise": (
        "parallelize does not support the style 'packed_colwise': packed weights are not a "
        "single matrix\n"
        "  where:    'a': 'packed_colwise'\n"
        "  fix:      split it into one module for each part, or store the features head by "
        "head and use 'column'"
    ),
    "moe_tp_experts": (
        "parallelize does not support the style 'moe_tp_experts': experts are not a "
        "single matrix product\n"
        "  where:    'a': 'moe_tp_experts'\n"
        "  fix:      remove the experts from the plan, and send tokens to them with md.experts"
    ),
    "loss_parallel": (
        "parallelize does not support the style 'loss_parallel': a loss is not a module\n"
        "  where:    'a': 'loss_parallel'\n"
        "  fix:      call md.tensor_parallel.cross_entropy(logits, target, mesh['tp']) on the "
        "output of a 'column' head"
    ),
    "embedding_colwise": (
        "parallelize does not support the style 'embedding_colwise': an embedding is split "
        "by rows\n"
        "  where:    'a': 'embedding_colwise'\n"
        "  fix:      use 'vocab'"
    ),
    "colum": (
        "parallelize: unknown style 'colum'\n"
        "  where:    'a': 'colum'\n"
        f"  expected: one of {', '.join(STYLES)}\n"
        "  fix:      did you mean 'column'?"
    ),
    "row_wise": (
        "parallelize: unknown style 'row_wise'\n"
        "  where:    'a': 'row_wise'\n"
        f"  expected: one of {', '.join(STYLES)}\n"
        "  fix:      did you mean 'rowwise'?"
    ),
}


@pytest.mark.parametrize("word", FOREIGN)
def test_a_word_that_is_unknown_or_cannot_be_meant(word: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        style_of("a", word)
    assert str(raised.value) == FOREIGN[word]


def test_what_is_no_plan() -> None:
    expected = '  expected: for example {"layers.*.up": "column", "layers.*.down": "row"}\n'
    head = "parallelize takes a plan: a mapping from patterns of module names to styles\n"
    empty = (
        "\n  fix:      write a plan: model.tp_plan is empty if transformers has no plan for the "
        "model"
    )
    for plan, found, fix in (
        ("column", "  found:    'column', a str", "\n  fix:      pass a non-empty mapping"),
        (None, "  found:    None, a NoneType", empty),
        ({}, "  found:    {}, a dict", empty),
    ):
        with pytest.raises(KindError) as raised:
            styles_of(plan)
        assert str(raised.value) == head + expected + found + fix
    with pytest.raises(KindError) as raised:
        styles_of({1: "column"})
    assert str(raised.value) == (
        "parallelize: the keys of a plan are patterns of module names\n"
        "  found:    1: 'column'\n"
        '  fix:      use strings as keys, for example "layers.*.up"'
    )
    with pytest.raises(KindError) as raised:
        styles_of({"a": 1})
    assert str(raised.value) == (
        "parallelize: the values of a plan are names of styles\n"
        "  where:    'a': 1\n"
        f"  expected: one of {', '.join(STYLES)}\n"
        "  found:    an int\n"
        '  fix:      pass for example {"layers.*.up": "column"}'
    )
