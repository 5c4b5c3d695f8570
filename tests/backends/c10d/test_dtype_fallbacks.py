"""What is reduced in place of what a backend lacks, against NumPy."""

from __future__ import annotations

import pytest
import torch

from meshdist.backends.c10d.dtype_fallbacks import GLOO, NCCL, UCC, Arithmetic, read_as
from meshdist.dtypes import DTYPES as DTYPE_FACTS
from meshdist.reduce_ops import ReduceOp
from tests.backends.operations import expect
from tests.backends.samples import DTYPES, INTEGERS, bits, draw, legal_ops, reduced_in_numpy
from tests.inner import flip, reduced, to_order

ALL = {"gloo": GLOO, "nccl": NCCL, "ucc": UCC}
ORDER = {("MIN", torch.uint64), ("MAX", torch.uint64)}
CASES = [(op, dtype) for dtype in DTYPES for op in legal_ops(dtype)]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("name", ALL)
def test_a_substitute_gives_the_result_itself(name: str) -> None:
    arithmetic = ALL[name]
    for case, (op, dtype) in enumerate(CASES):
        kind = getattr(ReduceOp, op)
        substitute = arithmetic.find(kind, dtype)
        if substitute is None:
            continue
        assert arithmetic.has(substitute.op, substitute.dtype)
        parts = [draw(dtype, (6,), 100 * case + member) for member in range(3)]
        if substitute.is_view:
            asked = [read_as(part, substitute.dtype) for part in parts]
            answer = read_as(reduced(asked, substitute.op), dtype)
        else:
            is_ordered = dtype.is_floating_point and not substitute.dtype.is_floating_point
            wide = DTYPE_FACTS[dtype].wide or dtype
            asked = [
                to_order(part.to(wide, copy=True).view(-1), kind)
                if is_ordered
                else part.to(substitute.dtype)
                for part in parts
            ]
            answer = reduced(asked, substitute.op)
            answer = (flip(answer).view(wide) if is_ordered else answer).to(dtype)
        expect(answer, reduced_in_numpy(parts, op), op, f"{op} of {dtype} by {substitute}")


@pytest.mark.parametrize(
    ("arithmetic", "gathered"),
    [
        (GLOO, ORDER | {("AVG", dtype) for dtype in INTEGERS}),
        (UCC, ORDER | {("AVG", dtype) for dtype in INTEGERS}),
        (
            NCCL,
            {*ORDER, ("BXOR", torch.bool)}
            | {("AVG", one) for one in (torch.int16, torch.uint16, torch.uint32, torch.uint64)}
            | {
                (op, dtype)
                for op, dtype in CASES
                if op in ("BAND", "BOR", "BXOR") and dtype is not torch.bool
            },
        ),
    ],
    ids=ALL,
)
def test_what_is_left_for_gathering_or_dividing(
    arithmetic: Arithmetic, gathered: set[tuple[str, torch.dtype]]
) -> None:
    found = {
        (op, dtype) for op, dtype in CASES if arithmetic.find(getattr(ReduceOp, op), dtype) is None
    }
    assert found == gathered


def test_nothing_is_copied_where_bits_can_be_read_otherwise() -> None:
    for op, dtype, asked, native in (
        ("SUM", torch.uint32, "SUM", torch.int32),
        ("PRODUCT", torch.uint64, "PRODUCT", torch.int64),
        ("BXOR", torch.int16, "BXOR", torch.uint8),
        ("SUM", torch.bool, "MAX", torch.bool),
    ):
        substitute = GLOO.find(getattr(ReduceOp, op), dtype)
        assert substitute is not None and substitute.is_view
        assert (substitute.op, substitute.dtype) == (getattr(ReduceOp, asked), native)
    narrow = GLOO.find(ReduceOp.SUM, torch.int16)
    assert narrow is not None and (narrow.dtype, narrow.is_view) == (torch.int32, False)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,), (2, 0)], ids=str)
def test_reading_shares_memory(shape: tuple[int, ...]) -> None:
    for dtype, other in ((torch.int16, torch.uint8), (torch.complex64, torch.float32)):
        x = draw(dtype, shape, 1)
        seen = read_as(x, other)
        assert seen.dtype is other and seen.dim() == 1
        assert bits(seen) == bits(x)
        assert not x.numel() or seen.data_ptr() == x.data_ptr()
        assert read_as(x, dtype).shape == (x.numel(),)


def test_reading_one_element_of_any_stride() -> None:
    x = torch.zeros(5, 3, dtype=torch.int16)[1:2, 1].as_strided((1,), (0,), 4)
    assert x.is_contiguous()
    assert read_as(x, torch.uint8).tolist() == [0, 0]
