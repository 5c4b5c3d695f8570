"""16-bit averages: what float32 gives, rounded, whatever the size of the bucket."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.ddp.comm_hooks import compression
from tests.ddp.comm_hooks.test_uncompressed import averaged

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def gradients(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=dtype)


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 15, 16, 17, 31, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("name", DTYPES)
def test_the_bits_are_those_of_a_plain_conversion(
    name: str, dtype: torch.dtype, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large buckets are converted in their own memory, by pieces; here a piece is 8 elements."""
    monkeypatch.setattr(compression, "PIECE", 8)
    half = DTYPES[name]

    def program() -> tuple[torch.Tensor, torch.Tensor]:
        x = gradients(md.get_rank(), numel, dtype)
        expected = x.to(half) / 3
        md.all_reduce(expected)
        return averaged(getattr(md.comm_hooks, f"{name}_compress_hook"), x), expected.to(dtype)

    for found, expected in md.simulate(program, 3):
        assert found.dtype is dtype and torch.equal(found, expected)


@pytest.mark.parametrize(
    ("numel", "dtype", "is_inside"),
    [
        (9, torch.float32, True),
        (8, torch.float32, False),
        (9, torch.float16, False),
    ],
)
def test_a_large_bucket_takes_no_other_memory(
    numel: int, dtype: torch.dtype, is_inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "PIECE", 8)
    sent: list[torch.Tensor] = []
    reduced = compression.reduced

    def noted(tensor: torch.Tensor, *others: Any) -> Any:
        sent.append(tensor)
        return reduced(tensor, *others)

    monkeypatch.setattr(compression, "reduced", noted)

    def program() -> bool:
        x = gradients(0, numel, dtype)
        averaged(md.comm_hooks.bf16_compress_hook, x)
        return sent[0].dtype is torch.bfloat16 and sent[0].data_ptr() == x.data_ptr()

    assert md.simulate(program, 1) == [is_inside]


@pytest.mark.parametrize("name", DTYPES)
def test_a_wrapped_hook_sees_the_half_and_its_result_is_converted_back(name: str) -> None:
    def program() -> list[Any]:
        seen: list[Any] = []

        def hook(state: Any, bucket: md.GradBucket) -> Any:
            seen.append(bucket.buffer().dtype)
            seen.extend(one.dtype for one in bucket.gradients())
            work = md.all_reduce(bucket.buffer(), group=bucket.group(), async_op=True)
            return work.get_future()  # of a list of one

        wrapper = getattr(md.comm_hooks, f"{name}_compress_wrapper")
        x = averaged(wrapper(hook), torch.tensor([1.0 + 2.0**-12, 2.0]))
        return [seen, x.dtype, x.tolist()]

    half = DTYPES[name]
    assert md.simulate(program, 2) == [[[half] * 2, torch.float32, [2.0, 4.0]]] * 2


def test_float16_is_divided_before_it_is_added() -> None:
    def program() -> list[float]:
        return averaged(md.comm_hooks.fp16_compress_hook, torch.tensor([60000.0])).tolist()

    assert md.simulate(program, 4) == [[60000.0]] * 4  # the largest number is 65,504


def test_they_have_torchs_names() -> None:
    for name in DTYPES:
        wrapper = getattr(md.comm_hooks, f"{name}_compress_wrapper")
        assert wrapper(md.comm_hooks.allreduce_hook).__name__ == f"{name}_compress_wrapper_hook"
