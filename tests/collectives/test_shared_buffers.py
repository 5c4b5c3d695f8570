"""Copies into memory that is sent next: past a CPU's caches where both tensors lie alike."""

from __future__ import annotations

import pytest
import torch

from meshdist.collectives import shared_buffers
from meshdist.collectives.shared_buffers import copy_past_caches

NUMBERS = torch.arange(1.0, 20_000.0)
WIDE = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64
SIZES = 0, 1, 15, 16, 17, 63, 4095, 4096, 4097, 19_999


def image(memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    return torch.randn(3, 5, 7, 9).to(memory_format=memory_format)


@pytest.fixture(params=["native", "without a native core"], autouse=True)
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "native":
        monkeypatch.setattr(shared_buffers, "core", None)


@pytest.mark.parametrize("scale", [None, 0.5, 1 / 3])
@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("dtype", WIDE)
def test_it_copies_to_the_bit_and_nothing_beside(
    dtype: torch.dtype, start: int, scale: float | None
) -> None:
    for size in SIZES:
        source = NUMBERS[start:][:size].to(dtype)
        memory = torch.full((len(source) + 40,), -1.0, dtype=dtype)
        target = memory[start + 3 :][: len(source)]
        copy_past_caches(target, source, scale)
        expected = source if scale is None else source * scale
        assert torch.equal(target, expected)
        assert torch.equal(memory[: start + 3], torch.full_like(memory[: start + 3], -1.0))
        behind = memory[start + 3 + len(source) :]
        assert torch.equal(behind, torch.full_like(behind, -1.0))


@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize(
    ("to", "source"),
    [
        (image(), image(torch.channels_last)),
        (image(torch.channels_last), image(torch.channels_last)),
        (torch.zeros(40, 30), torch.randn(30, 40).t()),
        (torch.zeros(40, 30), torch.randn(1, 30).expand(40, 30)),
        (torch.zeros(40, 30, dtype=torch.bfloat16), torch.randn(40, 30)),
        (torch.zeros(40, 30), torch.randn(40, 30, dtype=torch.float64)),
        (torch.zeros(9, dtype=torch.complex64), torch.randn(9, dtype=torch.complex64).conj()),
        (torch.zeros(9), torch.randn(9, dtype=torch.complex64).conj().imag),
        (torch.zeros(()), torch.tensor(3.0)),
        (torch.zeros(40, 30), torch._efficientzerotensor((40, 30))),  # without memory
        (torch.zeros(3), torch.nn.Parameter(torch.randn(3)).data),
        (torch.zeros(3), torch.randn(3).as_subclass(torch.nn.Buffer)),
    ],
)
def test_tensors_that_lie_otherwise(
    to: torch.Tensor, source: torch.Tensor, scale: float | None
) -> None:
    target = to.clone()
    expected = torch.zeros_like(to).copy_(source if scale is None else source * scale)
    copy_past_caches(target, source, scale)
    torch.testing.assert_close(target, expected, rtol=0, atol=0)
    assert target.stride() == to.stride()


def test_other_shapes_write_nothing_behind() -> None:
    memory = torch.zeros(60)
    with pytest.raises(RuntimeError, match="must match the size"):
        copy_past_caches(memory[:20], torch.ones(40))
    assert memory.tolist() == [0.0] * 60


@pytest.mark.parametrize("scale", [None, 0.5])
def test_autograd_sees_the_write(scale: float | None) -> None:
    x = torch.ones(5, requires_grad=True)
    target = torch.ones(5)
    y = (x * target).sum()
    copy_past_caches(target, torch.zeros(5), scale)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
