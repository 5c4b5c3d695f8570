"""Reductions of several ranks' tensors, against NumPy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from meshdist.backends.composed_collectives import find_lack, reduced
from meshdist.reduce_ops import ReduceOp, find_refusal
from tests.backends.samples import DTYPES, OPS, bits, draw, legal_ops, reduced_in_numpy

CASES = [(op, dtype) for dtype in DTYPES for op in legal_ops(dtype)]
COMPLEX_HALF = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


@COMPLEX_HALF
@pytest.mark.parametrize(("op", "dtype"), CASES, ids=str)
@settings(max_examples=10)
@given(num_parts=st.integers(1, 5), count=st.integers(0, 7), seed=st.integers(0, 1 << 40))
def test_every_op_on_every_dtype_matches_numpy(
    op: str, dtype: torch.dtype, num_parts: int, count: int, seed: int
) -> None:
    parts = [draw(dtype, (count,), seed + member) for member in range(num_parts)]
    before = [bits(part) for part in parts]
    total = reduced(parts, getattr(ReduceOp, op))
    assert total.dtype is dtype
    assert bits(total) == bits(reduced_in_numpy(parts, op))
    assert [bits(part) for part in parts] == before
    assert total.data_ptr() not in [part.data_ptr() for part in parts] or not count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX"])
def test_infinities_and_nan_go_through(op: str, dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    parts = [torch.tensor(row, dtype=dtype) for row in ([inf, 1.0, nan], [2.0, nan, -inf])]
    total = reduced(parts, getattr(ReduceOp, op))
    finite = {"SUM": inf, "PRODUCT": inf, "MIN": 2.0, "MAX": inf}[op]
    assert torch.equal(total[:1], torch.tensor([finite], dtype=dtype))
    assert total[1:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_the_order_of_unsigned_numbers_has_no_sign(dtype: torch.dtype) -> None:
    low, high = (
        torch.tensor([0, 1], dtype=dtype),
        torch.tensor([torch.iinfo(dtype).max, 0], dtype=dtype),
    )
    assert reduced([low, high], ReduceOp.MAX).tolist() == [torch.iinfo(dtype).max, 1]
    assert reduced([low, high], ReduceOp.MIN).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.uint64, torch.int64], ids=str)
def test_a_mean_of_integers_is_their_wrapped_sum_divided_toward_zero(
    dtype: torch.dtype,
) -> None:
    bits = dtype.itemsize * 8
    ends = torch.iinfo(dtype)
    numbers = [ends.min, ends.min + 1, ends.max // 3, ends.max - 1, ends.max]
    for num in (1, 2, 3, 7, 200):  # more than int8 counts
        parts = [torch.tensor(numbers, dtype=dtype)] * num
        sums = [(one * num) % (1 << bits) for one in numbers]
        sums = [one - (1 << bits) if one > ends.max else one for one in sums]
        expected = [abs(one) // num * (-1 if one < 0 else 1) for one in sums]
        assert reduced(parts, ReduceOp.AVG).tolist() == expected


def test_narrow_floats_are_rounded_once() -> None:
    parts = [torch.tensor([2048.0], dtype=torch.float16)]
    parts += [torch.tensor([1.0], dtype=torch.float16)] * 4
    assert reduced(parts, ReduceOp.SUM).item() == 2052.0  # in float16, 2048 + 1 is 2048
    large = torch.tensor([60000.0], dtype=torch.float16)
    assert reduced([large, large], ReduceOp.AVG).item() == large.item()  # the sum is no float16


def test_a_reduction_lacks_what_has_no_meaning_and_what_torch_cannot_add() -> None:
    for dtype in DTYPES:
        for op in OPS:
            kind = getattr(ReduceOp, op)
            assert (find_lack(kind, dtype) is None) == (op in legal_ops(dtype))
            assert find_lack(kind, dtype) == find_refusal(kind, dtype)
    for dtype in (torch.float4_e2m1fn_x2, torch.qint8, torch.bits8, torch.uint4):
        assert find_lack(ReduceOp.SUM, dtype) == (
            "bool, or integers, floats and complex numbers of 8 bits and more"
        )
