"""Reductions as MPI is asked for them: what is encoded comes back, reduced as NumPy reduces it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.backends.mpi.datatypes import find_plan
from meshdist.reduce_ops import ReduceOp
from tests.backends.samples import DTYPES, bits, draw, legal_ops, reduced_in_numpy
from tests.inner import Scratch

_OF_MPI: dict[Any, Any] = {
    ReduceOp.SUM: torch.Tensor.add,
    ReduceOp.PRODUCT: torch.Tensor.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.Tensor.bitwise_and,
    ReduceOp.BOR: torch.Tensor.bitwise_or,
    ReduceOp.BXOR: torch.Tensor.bitwise_xor,
}
WHOLE = [dtype for dtype in DTYPES if not dtype.is_floating_point and not dtype.is_complex]
KNOWN_TO_TORCH = [d for d in WHOLE if d not in (torch.uint16, torch.uint32, torch.uint64)]


@pytest.mark.parametrize("dtype", [*KNOWN_TO_TORCH, torch.float32, torch.bfloat16], ids=str)
def test_encoded_reduced_and_decoded(dtype: torch.dtype) -> None:
    for op in legal_ops(dtype):
        data = [draw(dtype, (5,), seed) for seed in range(3)]
        plan = find_plan(getattr(ReduceOp, op), dtype)
        codes = [plan.encode(x.clone(), Scratch()) for x in data]
        total = codes[0]
        for other in codes[1:]:
            total = _OF_MPI[plan.op](total, other)
        output = torch.empty(5, dtype=dtype)
        plan.decode(total, output, 3)
        if dtype.is_floating_point and op not in ("MIN", "MAX"):
            torch.testing.assert_close(output, reduced_in_numpy(data, op))
        else:
            assert bits(output) == bits(reduced_in_numpy(data, op)), op


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_floats_in_the_order_of_integers(dtype: torch.dtype, device: str) -> None:
    info = torch.finfo(dtype)
    values = [-float("inf"), info.min, -1.0, -info.tiny, -0.0, 0.0, info.tiny, 1.0, info.max]
    x = torch.tensor([*values, float("inf")], dtype=dtype, device=device)
    for op, extreme in ((ReduceOp.MIN, min), (ReduceOp.MAX, max)):
        plan = find_plan(op, dtype)
        codes = plan.encode(x, Scratch()).tolist()
        assert codes == sorted(codes) and len(set(codes)) == len(codes)
        back = torch.empty_like(x)
        plan.decode(plan.encode(x, Scratch()), back, 1)
        assert bits(back.cpu()) == bits(x.cpu())
        undefined = torch.tensor([float("nan")], dtype=dtype, device=device)
        for either in (undefined, torch.copysign(undefined, x[:1])):
            (nan,) = plan.encode(either, Scratch()).tolist()
            assert extreme([nan, *codes]) == nan


def test_what_mpi_does_alone() -> None:
    for dtype in (torch.float32, torch.int64, torch.uint32, torch.complex64):
        assert find_plan(ReduceOp.SUM, dtype).is_plain
    for dtype in (torch.float16, torch.bfloat16):
        assert not find_plan(ReduceOp.PRODUCT, dtype).is_plain
    assert find_plan(ReduceOp.MAX, torch.bool).is_plain
    for dtype in (torch.float16, torch.bfloat16, torch.int16, torch.complex32):
        assert not find_plan(ReduceOp.SUM, dtype).is_plain
    assert not find_plan(ReduceOp.AVG, torch.float32).is_plain


def test_what_has_no_meaning_is_rejected() -> None:
    with pytest.raises(md.DtypeError, match="backend 'mpi' cannot reduce complex64 with MAX"):
        find_plan(ReduceOp.MAX, torch.complex64)
