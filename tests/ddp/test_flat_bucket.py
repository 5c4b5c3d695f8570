"""One bucket's memory."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from meshdist.ddp.flat_bucket import Bucket


def allocate(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(count, dtype=like.dtype)


def test_views_lie_one_after_the_other_and_flags_behind_them() -> None:
    parameters = [Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), (200, 200))]
    bucket = Bucket((2, 0), parameters, 3, allocate)
    assert [view.shape for view in bucket.views] == [(200, 200), (2, 3)]
    bucket.sent.copy_(torch.arange(bucket.sent.numel()))
    assert bucket.views[1].tolist() == [[40000, 40001, 40002], [40003, 40004, 40005]]
    assert bucket.flags.tolist() == [40006, 40007, 40008]
    assert bucket.at_once == [True, False]
    assert [(parameter is parameters[0]) for parameter, _ in bucket.later] == [True]


def test_averages_are_handed_out() -> None:
    lacking, held, unused = (Parameter(torch.zeros(2)) for _ in range(3))
    parameters = [lacking, held, unused]
    held.grad = torch.zeros(2)
    bucket = Bucket((0, 1, 2), parameters, 0, allocate)
    bucket.flat.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0, 0.0]))
    bucket.hand_out_missing(parameters, as_views=False)
    bucket.hand_out_copies(parameters)
    assert lacking.grad is not None
    assert (lacking.grad.tolist(), held.grad.tolist(), unused.grad) == ([1, 2], [3, 4], None)
    lacking.grad = None
    bucket.hand_out_missing(parameters, as_views=True)
    assert lacking.grad is bucket.views[0]
