"""Models compared before they are wrapped."""

from __future__ import annotations

import pytest
import torch

import meshdist as md
from meshdist.ddp.replicas import check_equal, tensor_facts
from meshdist.errors import MismatchError


def test_equal_texts_pass_and_different_ones_are_an_error_on_every_rank() -> None:
    def program(odd: int) -> str:
        texts = {"weight": "(2,) float32", "depth": "3" if md.get_rank() == odd else "2"}
        device = torch.device("cpu")
        try:
            check_equal(texts, md.group.WORLD, device=device, summary="they differ", fix="mend")
        except MismatchError as error:
            return str(error)
        return "equal"

    assert md.simulate(program, 3, (-1,)) == ["equal"] * 3
    assert (
        md.simulate(program, 3, (1,))
        == [
            "they differ\n"
            "  where:    group of ranks 0-2\n"
            "  expected: equal entries, in the same order, on every rank\n"
            "  found:    depth: ranks 0, 2: 2; rank 1: 3\n"
            "  fix:      mend"
        ]
        * 3
    )


def test_facts_are_what_replicas_must_share() -> None:
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    assert tensor_facts(frozen) == "(2,) float32 frozen"
    assert tensor_facts(torch.zeros(2, 3).t()) == "(3, 2) float32 strides (1, 3)"
    assert tensor_facts(torch.tensor(True)) == "() bool"


def test_options_and_names_are_compared_when_a_model_is_wrapped() -> None:
    def program(case: str) -> str | None:
        odd = md.get_rank() == 1
        layers = {"first": torch.nn.Linear(2, 2), "last": torch.nn.Linear(2, 2, bias=False)}
        if case == "order" and odd:
            layers = dict(reversed(layers.items()))
        if case == "names" and odd:
            layers["more"] = layers.pop("last")
        with pytest.raises(MismatchError) as error:
            md.DDP(torch.nn.ModuleDict(layers), static_graph=case == "options" and odd)
        return error.value.found

    for case, found in {
        "order": "the same entries, in another order",
        "names": "last.weight: ranks 0, 2: (2, 2) float32; rank 1: missing\n"
        "more.weight: ranks 0, 2: missing; rank 1: (2, 2) float32",
        "options": "option static_graph: ranks 0, 2: False; rank 1: True",
    }.items():
        assert md.simulate(program, 3, (case,)) == [found] * 3
