"""Tensors that are reduced together come to what each alone comes to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

import meshdist as md
from meshdist.collectives import flat_sums
from meshdist.collectives.flat_sums import reduce_together

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=5)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.complex64, torch.int32])


@given(shapes, dtypes, st.sampled_from([1, 2, 3, 5]), st.booleans(), st.booleans())
def test_each_is_the_sum_of_what_the_ranks_have(
    sizes: list[list[int]], dtype: torch.dtype, num_ranks: int, is_turned: bool, has_likes: bool
) -> None:
    def given_by(rank: int) -> list[torch.Tensor]:
        made = [(torch.arange(torch.Size(one).numel()) + rank).view(one).to(dtype) for one in sizes]
        # Strides may differ between ranks: elements meet by index.
        return [one.t().contiguous().t() if is_turned and one.dim() == 2 else one for one in made]

    def program() -> bool:
        tensors = given_by(md.get_rank())
        likes = given_by(0)
        found = reduce_together(tensors, md.group.WORLD, likes=likes if has_likes else None)
        expected = [sum(each) for each in zip(*map(given_by, range(num_ranks)), strict=True)]
        same = all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        as_likes = zip(found, likes, strict=True)
        is_laid = all(
            one.stride() == like.stride() or not one.numel() if has_likes else one.is_contiguous()
            for one, like in as_likes
        )
        untouched = zip(tensors, given_by(md.get_rank()), strict=True)
        return same and is_laid and all(torch.equal(*pair) for pair in untouched)

    assert md.simulate(program, num_ranks) == [True] * num_ranks


def test_they_go_by_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    all_reduce = flat_sums.all_reduce

    def noted(flat: torch.Tensor, *args: object, **kwargs: object) -> object:
        sizes.append(flat.numel())
        return all_reduce(flat, *args, **kwargs)

    monkeypatch.setattr(flat_sums, "all_reduce", noted)

    def program() -> list[float]:
        tensors = [torch.ones(2), torch.ones(1, 3) * md.get_rank()]
        return [one.sum().item() for one in reduce_together(tensors, md.group.WORLD)]

    assert md.simulate(program, 2) == [[4.0, 3.0]] * 2
    assert sizes == [5, 5]
