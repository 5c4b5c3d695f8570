"""The words of plans: transformers' mean ours, torch's styles and foreign words are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard, parallel as torchs

from meshdist import parallelize
from meshdist.errors import ArgumentError, KindError
from meshdist.tensor_parallel.plan_styles import OF_TRANSFORMERS, WORDS, word_of, words_of

COLUMN, ROW = torchs.ColwiseParallel, torchs.RowwiseParallel


def test_transformers_words_are_ours() -> None:
    assert set(OF_TRANSFORMERS.values()) <= WORDS.keys()
    assert word_of("lm_head", "colwise_gather_output") == "column_whole"
    assert words_of({"a": "colwise", "b": "row"}) == {"a": "column", "b": "row"}


def test_the_page_and_the_docstring_have_every_word() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "tensor_parallel.md").read_text()
    told = parallelize.__doc__ or ""
    assert [word for word in (*WORDS, *OF_TRANSFORMERS) if f"`{word}`" not in page] == []
    assert [word for word in WORDS if f"``{word}``" not in told] == []


def test_words_change_torchs_own_classes() -> None:
    for word in WORDS.values():
        if word.becomes is None:
            assert word.takes is None
        else:
            assert word.takes in (nn.Linear, nn.Embedding)
            assert issubclass(word.becomes, word.takes)


STYLES: dict[str, tuple[Any, str | None]] = {
    "column": (COLUMN(), "'column'"),
    "column, whole": (COLUMN(output_layouts=Replicate()), "'column_whole'"),
    "column, sequence": (COLUMN(input_layouts=Shard(1)), "'column_sequence'"),
    "both": (
        COLUMN(input_layouts=Shard(1), output_layouts=Replicate()),
        "'column_sequence_whole'",
    ),
    "row": (ROW(), "'row'"),
    "row, sequence": (ROW(output_layouts=Shard(1)), "'row_sequence', of an embedding "),
    "embedding": (ROW(input_layouts=Replicate()), "'row_whole', of an embedding 'vocab'"),
    "the class": (COLUMN, "'column'"),
    "norm": (torchs.SequenceParallel(), "'reduced'"),
    "input": (
        torchs.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "nothing: layers whose words have _sequence gather their input, once",
    ),
    "output": (
        torchs.PrepareModuleOutput(
            output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),)
        ),
        "'gather_sequence' or 'cut_sequence'",
    ),
    "another": (type("MyStyle", (torchs.ParallelStyle,), {}), None),
}


@pytest.mark.parametrize("name", STYLES)
def test_a_style_of_torchs_is_rejected_with_the_word_that_says_the_same(name: str) -> None:
    style, word = STYLES[name]
    with pytest.raises(KindError) as raised:
        word_of("layers.*.up", style)
    error = raised.value
    assert "is a style of torch's, which makes DTensors of parameters" in error.summary
    assert error.fix is not None
    assert error.fix.endswith(
        "torch.distributed.tensor.parallel.parallelize_module(module, mesh.to_torch()['tp'], plan)"
    )
    said = "" if word is None else f"the word that says the same: {word}"
    assert error.fix.startswith(said)
    assert word is not None or error.fix.startswith("torch.")


FOREIGN = {
    "packed_colwise": (
        "parallelize: 'packed_colwise' cannot be meant on plain tensors: weights packed into one "
        "are no plain column\n"
        "  where:    'a': 'packed_colwise'\n"
        "  fix:      split it into a module for each part; or let the features lie head after "
        "head, as 'column'"
    ),
    "moe_tp_experts": (
        "parallelize: 'moe_tp_experts' cannot be meant on plain tensors: experts are no plain "
        "products\n"
        "  where:    'a': 'moe_tp_experts'\n"
        "  fix:      leave the experts out of the plan, and carry tokens to them by md.experts"
    ),
    "loss_parallel": (
        "parallelize: 'loss_parallel' cannot be meant on plain tensors: a loss is no module\n"
        "  where:    'a': 'loss_parallel'\n"
        "  fix:      call md.tensor_parallel.cross_entropy(logits, target, mesh['tp']) on the "
        "output of a head that is 'column'"
    ),
    "embedding_colwise": (
        "parallelize: 'embedding_colwise' cannot be meant on plain tensors: an embedding is cut "
        "by rows\n"
        "  where:    'a': 'embedding_colwise'\n"
        "  fix:      write 'vocab'"
    ),
    "colum": (
        "parallelize: 'colum' is no word of a plan\n"
        "  where:    'a': 'colum'\n"
        f"  expected: {', '.join(WORDS)}\n"
        "  fix:      did you mean 'column'?"
    ),
    "row_wise": (
        "parallelize: 'row_wise' is no word of a plan\n"
        "  where:    'a': 'row_wise'\n"
        f"  expected: {', '.join(WORDS)}\n"
        "  fix:      did you mean 'rowwise'?"
    ),
}


@pytest.mark.parametrize("word", FOREIGN)
def test_a_word_that_is_unknown_or_cannot_be_meant(word: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        word_of("a", word)
    assert str(raised.value) == FOREIGN[word]


def test_what_is_no_plan() -> None:
    expected = '  expected: such as {"layers.*.up": "column", "layers.*.down": "row"}\n'
    head = "parallelize takes a plan: patterns of module names, with words\n"
    empty = "\n  fix:      model.tp_plan is empty where transformers has no plan: write one"
    for plan, found, fix in (
        ("column", "  found:    'column', a str", ""),
        (None, "  found:    None, a NoneType", empty),
        ({}, "  found:    {}, a dict", empty),
    ):
        with pytest.raises(KindError) as raised:
            words_of(plan)
        assert str(raised.value) == head + expected + found + fix
    with pytest.raises(KindError) as raised:
        words_of({1: "column"})
    assert str(raised.value) == (
        "parallelize: the keys of a plan are patterns of names\n  found:    1: 'column'"
    )
    with pytest.raises(KindError) as raised:
        words_of({"a": 1})
    assert str(raised.value) == (
        "parallelize: the values of a plan are words\n"
        "  where:    'a': 1\n"
        f"  expected: {', '.join(WORDS)}\n"
        "  found:    a int"
    )
