"""How elements lie in memory."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from meshdist.backends.operation_args import ROW_MAJOR, find_layout, flat


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5,), (2, 3), (2, 1, 3), (4, 2, 3, 2)])
def test_dense_tensors_have_a_layout_in_every_order(shape: tuple[int, ...]) -> None:
    for order in itertools.permutations(range(len(shape))):
        back = sorted(range(len(shape)), key=order.__getitem__)
        x = torch.arange(math.prod(shape)).view(shape).permute(order).contiguous().permute(back)
        layout = find_layout(x)
        assert layout is not None
        assert (layout == ROW_MAJOR) == x.is_contiguous()
        in_memory = flat(x)
        assert in_memory.data_ptr() == x.data_ptr() and in_memory.shape == (x.numel(),)
        assert sorted(in_memory.tolist()) == list(range(x.numel()))
        if layout != ROW_MAJOR:  # the layout alone gives the elements back
            assert in_memory.as_strided(*layout).flatten().tolist() == list(range(x.numel()))


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(4, 4)[:, :2],
        torch.zeros(4, 4)[::2],
        torch.zeros(3).expand(2, 3),
        torch.zeros(3, 1).expand(3, 2).t(),
        torch.zeros(6).as_strided((2, 3), (1, 1)),
        torch.zeros(9).as_strided((3, 3), (2, 1)),
        torch.zeros(4, 6).t()[:, ::2],
        torch.zeros(2, 2, 2)[:, 0],
    ],
)
def test_tensors_with_gaps_or_shared_places_have_none(x: torch.Tensor) -> None:
    assert find_layout(x) is None


def test_dims_of_one_element_do_not_count() -> None:
    x = torch.zeros(3, 2).t()
    layouts = {find_layout(one) for one in (x, x.unsqueeze(0), x[:, None], x.unsqueeze(-1))}
    assert layouts == {((2, 3), (1, 2))}
    assert find_layout(torch.zeros(2, 3).as_strided((1, 6), (77, 1))) == ROW_MAJOR
