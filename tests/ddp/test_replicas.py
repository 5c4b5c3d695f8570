"""Replicas compared."""

from __future__ import annotations

import pytest
import torch

import meshdist as md
from meshdist.ddp.replicas import check_equal_lines, tensor_line
from meshdist.errors import AgreementError

CPU = torch.device("cpu")


def test_equal_lines_pass_and_different_ones_are_shown_by_rank() -> None:
    def program(size: int, odd: int) -> str:
        lines = [f"line {n}" for n in range(size)]
        if md.get_rank() == odd:
            lines = ["other"] * size
        check_equal_lines(lines, md.group.WORLD, device=CPU, summary="they differ", fix="mend")
        return "equal"

    assert md.simulate(program, 3, (20, -1)) == ["equal"] * 3
    with pytest.raises(AgreementError) as error:
        md.simulate(program, 3, (2, 1))
    assert str(error.value).startswith(
        "they differ\n"
        "  where:    group of ranks 0-2\n"
        "  expected: equal lines, in the same order, on every rank\n"
        "  found:    0: ranks 0, 2: line 0; rank 1: other\n"
        "            1: ranks 0, 2: line 1; rank 1: other\n"
        "  fix:      mend"
    )
    with pytest.raises(AgreementError) as error:
        md.simulate(program, 3, (20, 1))
    assert "            7: ranks 0, 2: line 7; rank 1: other\n            and 12 more\n" in str(
        error.value
    )


def test_options_are_compared_by_name_whatever_the_lines() -> None:
    def program() -> str:
        odd = md.get_rank() == 1
        with pytest.raises(AgreementError) as error:
            check_equal_lines(
                ["line"] * (2 if odd else 1),
                md.group.WORLD,
                device=CPU,
                summary="they differ",
                fix="mend",
                options={"depth": 3 if odd else 2, "width": 1},
            )
        return error.value.found or ""

    expected = "depth: rank 0: 2; rank 1: 3\n1: rank 0: nothing; rank 1: line"
    assert md.simulate(program, 2) == [expected] * 2


def test_a_line_tells_what_replicas_must_share() -> None:
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    assert tensor_line("a", frozen) == "a (2,) float32 frozen"
    assert tensor_line("b", torch.zeros(2, 3).t()) == "b (3, 2) float32 strides (1, 3)"
    assert tensor_line("c", torch.tensor(True)) == "c () bool"
