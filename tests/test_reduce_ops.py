"""Reductions under torch's names, and the factor of PREMUL_SUM."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshdist as md
from meshdist.reduce_ops import (
    find_factor_refusal,
    find_refusal,
    multiply,
    split_premul,
)

NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


@pytest.mark.parametrize("name", NAMES)
def test_torchs_own_ops_are_ours(name: str) -> None:
    plain = getattr(md.ReduceOp, name)
    assert plain is getattr(dist.ReduceOp, name)
    assert split_premul(plain) == (plain, None) == split_premul(dist.ReduceOp(plain))
    assert plain.name == name


@pytest.mark.parametrize("wrong", ["sum", None, 0, sum])
def test_anything_else_is_rejected_with_the_list(wrong: object) -> None:
    with pytest.raises(md.KindError, match="is not a reduction") as caught:
        split_premul(wrong)
    assert "ReduceOp.SUM, ReduceOp.AVG" in str(caught.value)


def test_ops_behave_as_torchs() -> None:
    made, premul = md.ReduceOp(md.ReduceOp.SUM), md.ReduceOp.premul_sum(0.5)
    assert type(made) is type(premul) is dist.ReduceOp
    assert made == md.ReduceOp.SUM and made != md.ReduceOp.MAX
    assert hash(made) == hash(dist.ReduceOp(dist.ReduceOp.SUM))
    assert premul == md.ReduceOp.PREMUL_SUM and premul != md.ReduceOp.SUM
    for op in (made, premul):
        for twin in (copy.copy(op), copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
            assert twin == op and split_premul(twin) == split_premul(op)
    torchs = (dist.ReduceOp(dist.ReduceOp.SUM), dist.ReduceOp.SUM, dist._make_nccl_premul_sum(1.0))
    for op in (made, premul, *torchs):
        assert isinstance(op, md.ReduceOp) == isinstance(op, dist.ReduceOp)
        assert isinstance(op, (md.ReduceOp, md.ReduceOp.RedOpType))
    assert not isinstance(0, md.ReduceOp)
    assert issubclass(md.ReduceOp, dist.ReduceOp)
    assert pickle.loads(pickle.dumps(md.ReduceOp)) is md.ReduceOp


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (0.5, 0.5),
        (2, 2),
        (2**53 + 1, 2**53 + 1),
        (2.0**70, 2.0**70),
        (1 + 2j, 1 + 2j),
        (np.float32(0.25), 0.25),
        (np.int64(-3), -3),
        (np.array([0.5]), 0.5),
        (np.array(7), 7),
        (torch.tensor([[0.5]]), 0.5),
        (torch.tensor(2**53 + 1), 2**53 + 1),
        (torch.tensor(1.5, requires_grad=True), 1.5),
    ],
)
def test_the_factor_of_premul_sum(factor: object, expected: complex) -> None:
    assert split_premul(md.ReduceOp.premul_sum(factor)) == (md.ReduceOp.SUM, expected)


def test_torchs_premul_sum_is_understood() -> None:
    assert split_premul(dist._make_nccl_premul_sum(0.5)) == (md.ReduceOp.SUM, 0.5)
    assert split_premul(dist._make_nccl_premul_sum(torch.tensor([3]))) == (md.ReduceOp.SUM, 3)


@pytest.mark.parametrize("wrong", ["2", None, True, np.bool_(True), [1.0], sum, np.array(["a"])])
def test_what_is_no_factor(wrong: object) -> None:
    with pytest.raises(md.KindError, match="is not a factor for PREMUL_SUM") as caught:
        md.ReduceOp.premul_sum(wrong)
    assert caught.value.expected == "a number, or a tensor or array of one element"
    assert caught.value.found == type(wrong).__name__


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (torch.ones(2), "shape (2,), float32"),
        (np.ones((0,)), "shape (0,), float64"),
        (torch.tensor(True), "shape (), bool"),
    ],
)
def test_a_factor_is_one_number(wrong: object, found: str) -> None:
    with pytest.raises(md.ArgumentError, match="the factor of PREMUL_SUM is one number") as caught:
        md.ReduceOp.premul_sum(wrong)
    assert caught.value.found == found and "use ReduceOp.SUM" in caught.value.fix


@pytest.mark.parametrize("wrong", [10**400, 2**80 + 1])
def test_a_factor_fits_a_dtype(wrong: int) -> None:
    with pytest.raises(md.ArgumentError, match="a factor that no dtype holds") as caught:
        md.ReduceOp.premul_sum(wrong)
    assert caught.value.expected == "an integer of 64 bits, or a float"


def test_premul_sum_needs_its_factor() -> None:
    for use in (split_premul, md.ReduceOp):
        with pytest.raises(md.KindError, match=r"ReduceOp\.PREMUL_SUM needs a factor") as caught:
            use(md.ReduceOp.PREMUL_SUM)
        assert caught.value.fix == "pass for example op=meshdist.ReduceOp.premul_sum(0.5)"


@pytest.mark.parametrize("name", [*NAMES, "PREMUL_SUM"])
def test_what_a_dtype_cannot_be_reduced_with(name: str) -> None:
    op = getattr(md.ReduceOp, name)
    rejected = {
        dtype
        for dtype in (
            torch.bool,
            torch.uint16,
            torch.int64,
            torch.bfloat16,
            torch.float8_e5m2,
            torch.complex64,
        )
        if find_refusal(op, dtype) is not None
    }
    floating = {torch.bfloat16, torch.float8_e5m2}
    assert rejected == {
        "SUM": set(),
        "AVG": {torch.bool},
        "BAND": {*floating, torch.complex64},
        "BOR": {*floating, torch.complex64},
        "BXOR": {*floating, torch.complex64},
        "PREMUL_SUM": {torch.bool},
    }.get(name, {torch.complex64})
    assert all(str(find_refusal(op, dtype)).endswith(f" for {name}") for dtype in rejected)


@pytest.mark.parametrize(
    ("factor", "dtype", "expected"),
    [
        (0.5, torch.float16, None),
        (0.5, torch.float8_e4m3fn, None),
        (0.5, torch.complex64, None),
        (1j, torch.complex64, None),
        (2.0, torch.int8, None),
        (2, torch.uint16, None),
        (torch.tensor(2), torch.int32, None),
        (torch.tensor(0.5), torch.float32, None),
        (2, torch.bool, "a dtype of numbers for PREMUL_SUM"),
        (
            0.5,
            torch.int32,
            "an integer as factor of an integer tensor, not 0.5",
        ),
        (
            float("inf"),
            torch.int32,
            "an integer as factor of an integer tensor, not inf",
        ),
        (
            torch.tensor(2.0),
            torch.uint8,
            "an integer as factor of an integer tensor, not a tensor of torch.float32",
        ),
        (
            1j,
            torch.float32,
            "a complex dtype for the complex factor 1j",
        ),
        (
            torch.tensor(1j),
            torch.int8,
            "a complex dtype for the complex factor a tensor of torch.complex64",
        ),
    ],
)
def test_which_factors_suit_a_dtype(factor, dtype: torch.dtype, expected: str | None) -> None:
    assert find_factor_refusal(factor, dtype) == expected


WHOLE = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")


@pytest.mark.parametrize("factor", [3.0, -2, 300, 2**40 + 1, 2**63 - 1])
@pytest.mark.parametrize("name", WHOLE)
def test_integers_wrap(name: str, factor: float) -> None:
    dtype = getattr(torch, name)
    values = [0, 1, 5, 100, int(np.iinfo(name).max)]
    tensor = torch.tensor(values, dtype=dtype)
    multiply(tensor, factor)
    bits = np.iinfo(name).bits
    assert [int(x) % (1 << bits) for x in tensor.tolist()] == [
        v * int(factor) % (1 << bits) for v in values
    ]
    assert tensor.dtype is dtype


@pytest.mark.parametrize(
    "name",
    [
        "float8_e4m3fn",
        "float8_e5m2",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex32",
        "complex64",
        "complex128",
    ],
)
@pytest.mark.parametrize("factor", [0.5, 2, torch.tensor(0.5, dtype=torch.float64)])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_floats_of_every_width(name: str, factor: float | torch.Tensor) -> None:
    dtype = getattr(torch, name)
    leaf = torch.tensor([1.0, -4.0]).to(dtype)
    multiply(leaf, factor)
    assert leaf.dtype is dtype
    assert leaf.to(torch.complex128).tolist() == [1.0 * float(factor), -4.0 * float(factor)]


def test_an_inference_tensor_is_multiplied_too() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2)
    multiply(tensor, 3.0)
    assert tensor.tolist() == [3.0, 3.0]


def test_autograd_knows_that_a_tensor_was_multiplied() -> None:
    tensor = torch.ones(2)
    multiply(tensor, 3.0)
    assert tensor._version == 1


def test_a_leaf_is_multiplied_too() -> None:
    leaf = torch.ones(2, requires_grad=True)
    multiply(leaf, 3.0)
    assert leaf.tolist() == [3.0, 3.0] and leaf.grad_fn is None


def test_reduce_op_has_no_members() -> None:
    assert not hasattr(md.ReduceOp, "__members__")


def test_the_old_spelling_warns() -> None:
    for name in (*NAMES, "PREMUL_SUM"):
        with pytest.warns(FutureWarning, match=r"use meshdist\.ReduceOp instead") as caught:
            assert getattr(md.reduce_op, name) is getattr(md.ReduceOp, name)
        assert caught[0].filename == __file__
    with pytest.warns(FutureWarning):
        assert md.reduce_op.__members__["SUM"] is md.ReduceOp.SUM
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert repr(md.reduce_op) == "meshdist.distributed.reduce_op"
        with pytest.raises(AttributeError, match="reduce_op has no reduction 'MEAN'"):
            _ = md.reduce_op.MEAN
