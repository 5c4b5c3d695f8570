"""Reductions under torch's names."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import meshdist as md
from meshdist.reduce_ops import find_refusal, get_reduce_op, op_name

NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


@pytest.mark.parametrize("name", NAMES)
def test_torchs_own_ops_are_ours(name: str) -> None:
    plain = getattr(md.ReduceOp, name)
    assert plain is getattr(dist.ReduceOp, name)
    assert get_reduce_op(plain) is plain
    assert get_reduce_op(dist.ReduceOp(plain)) == plain
    assert op_name(plain) == name


@pytest.mark.parametrize("wrong", ["sum", None, 0, sum])
def test_anything_else_is_refused_with_the_list(wrong: object) -> None:
    with pytest.raises(md.KindError, match="is not a reduction") as caught:
        get_reduce_op(wrong)
    assert "ReduceOp.SUM, ReduceOp.AVG" in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_dtype_cannot_be_reduced_with(name: str) -> None:
    op = getattr(md.ReduceOp, name)
    refused = {
        dtype
        for dtype in (torch.bool, torch.uint16, torch.int64, torch.bfloat16, torch.complex64)
        if find_refusal(op, dtype) is not None
    }
    assert refused == {
        "SUM": set(),
        "AVG": {torch.bool, torch.uint16, torch.int64},
        "BAND": {torch.bfloat16, torch.complex64},
        "BOR": {torch.bfloat16, torch.complex64},
        "BXOR": {torch.bfloat16, torch.complex64},
    }.get(name, {torch.complex64})
    assert all(str(find_refusal(op, dtype)).startswith(f"{name} on ") for dtype in refused)


def test_reduce_op_has_no_members() -> None:
    assert not hasattr(md.ReduceOp, "__members__")
