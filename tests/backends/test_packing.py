"""Consecutive parts of flat tensors, against plain lists."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from meshdist.backends.operation_args import blocks, packed, parts, write, write_all, write_blocks

SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@given(SIZES)
def test_parts_are_views_and_packing_is_their_inverse(sizes: list[int]) -> None:
    whole = torch.arange(sum(sizes))
    cut = parts(whole, sizes)
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    assert [x.tolist() for x in cut] == [
        list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)
    ]
    assert packed(cut).tolist() == whole.tolist()
    for part in cut:
        part.fill_(-1)
    assert whole.tolist() == [-1] * len(whole)


@given(st.integers(1, 4), st.integers(0, 4))
def test_blocks_are_equal_parts(num_blocks: int, size: int) -> None:
    whole = torch.arange(num_blocks * size).view(num_blocks, size)
    assert [x.tolist() for x in blocks(whole, num_blocks)] == whole.tolist()


def test_what_is_written_may_be_a_parameter_of_any_shape() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    with torch.inference_mode():
        inferred = torch.zeros(4)
    write(parameter, torch.arange(4.0))
    write_all([parameter.detach(), inferred], [torch.arange(4.0), torch.ones(2, 2)])
    assert parameter.tolist() == [[0.0, 1.0], [2.0, 3.0]] and inferred.tolist() == [1.0] * 4
    outputs = [torch.zeros(2, 1), torch.zeros(2)]
    write_blocks(outputs, torch.arange(4.0))
    write_blocks([], torch.arange(4.0))
    assert [x.flatten().tolist() for x in outputs] == [[0.0, 1.0], [2.0, 3.0]]
