"""One bucket: where gradients lie, how they move in and how averages are handed out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import meshdist as md
from meshdist.ddp import flat_bucket
from meshdist.ddp.flat_bucket import Bucket
from meshdist.ddp.reports import Reports


def allocate(like: torch.Tensor, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=like.dtype)


def bucket_of(parameters: list[Parameter], indices: tuple[int, ...], **changes: Any) -> Bucket:
    options: dict[str, Any] = {"num_flags": 0, "scale": 0.5, "as_views": True, "reports": None}
    return Bucket(indices, parameters, **{"allocate": allocate, **options, **changes})


def test_views_lie_one_after_the_other_and_flags_behind_them() -> None:
    parameters = [Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), (200, 200))]
    bucket = bucket_of(parameters, (2, 0), num_flags=3)
    assert [view.shape for view in bucket.views] == [(200, 200), (2, 3)]
    bucket.sent.copy_(torch.arange(bucket.sent.numel()))
    assert bucket.views[1].tolist() == [[40000, 40001, 40002], [40003, 40004, 40005]]
    assert bucket.flags.tolist() == [40006, 40007, 40008]
    assert bucket.at_once == [True, False]
    assert [(parameter is parameters[0]) for parameter, _ in bucket.later] == [True]


@pytest.mark.parametrize("as_views", [True, False])
@pytest.mark.parametrize("size", [2, 40_000])  # one that moves in later, one that does at once
def test_gradients_move_in_scaled(size: int, as_views: bool) -> None:
    fresh, kept, missing = parameters = [Parameter(torch.zeros(size)) for _ in range(3)]
    bucket = bucket_of(parameters, (0, 1, 2), as_views=as_views)
    bucket.flat.fill_(6.0)
    fresh.grad, kept.grad = torch.full((size,), 4.0), bucket.views[1]
    for slot, goes_at_once in enumerate(bucket.at_once):
        if goes_at_once:
            bucket.move_in(slot)
    bucket.move_in_later_ones()
    assert [view.unique().tolist() for view in bucket.views] == [[2.0], [3.0], [0.0]]
    assert (fresh.grad is bucket.views[0]) == as_views
    assert missing.grad is None


@pytest.mark.parametrize("size", [2, 40_000])
def test_a_sparse_gradient_is_refused_by_name(size: int) -> None:
    def program() -> str:
        parameters = [Parameter(torch.zeros(size)) for _ in range(2)]
        reports = Reports(["left", "right"], md.group.WORLD)
        bucket = bucket_of(parameters, (1, 0), reports=reports)
        parameters[1].grad = torch.zeros(size).to_sparse()
        with pytest.raises(md.errors.GradientError) as error:
            bucket.move_in(0) if bucket.at_once[0] else bucket.move_in_later_ones()
        return str(error.value).splitlines()[0]

    assert md.simulate(program, 1) == ["right (index 1) has a sparse gradient"]


@pytest.mark.parametrize("as_views", [True, False])
def test_averages_are_handed_out(as_views: bool) -> None:
    lacking, held, unused = parameters = [Parameter(torch.zeros(2)) for _ in range(3)]
    bucket = bucket_of(parameters, (0, 1, 2), as_views=as_views)
    held.grad = bucket.views[1] if as_views else torch.zeros(2)
    bucket.flat.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0, 0.0]))
    bucket.num_pending = 0
    bucket.hand_out(is_complete=False)
    assert lacking.grad is not None
    assert (lacking.grad.tolist(), held.grad.tolist(), unused.grad) == ([1, 2], [3, 4], None)
    assert (lacking.grad is bucket.views[0]) == as_views
    assert bucket.num_pending == 3


def test_averages_are_handed_out_without_a_look_at_what_lies_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flat_bucket, "streams_for", lambda _: object())
    (lacking,) = parameters = [Parameter(torch.zeros(2, device="meta"))]
    bucket = bucket_of(parameters, (0,), allocate=torch.Tensor.new_empty)
    bucket.hand_out(is_complete=False)  # to look at a meta tensor is an error
    assert lacking.grad is bucket.views[0]


def test_small_gradients_are_kept_for_the_stream_that_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[torch.Tensor] = []

    class Streams:
        def await_others(self, gradients: Iterable[torch.Tensor]) -> None:
            kept.extend(gradients)

    monkeypatch.setattr(flat_bucket, "streams_for", lambda _: Streams())
    parameters = [Parameter(torch.zeros(size)) for size in (2, 40_000, 2)]
    for parameter in parameters[:2]:
        parameter.grad = torch.ones_like(parameter)
    bucket_of(parameters, (0, 1, 2)).await_streams()
    assert [grad is parameters[0].grad for grad in kept] == [True]
