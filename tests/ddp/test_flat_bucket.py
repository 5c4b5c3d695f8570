"""One bucket: where gradients lie, which have come, how they move in and averages come out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import meshdist as md
from meshdist.ddp import buckets
from meshdist.ddp.buckets import Averaging, Bucket, BucketState
from meshdist.ddp.gradient_errors import GradientErrors

LARGE = 40_000  # moves in at once


def bucket_of(
    parameters: list[Parameter],
    indices: Sequence[int],
    *,
    num_behind: int = 0,
    is_deferred: bool = False,
    as_views: bool = True,
    dtype: torch.dtype | None = None,
    **changes: Any,
) -> Bucket:
    first = parameters[indices[0]]
    count = sum(parameters[index].numel() for index in indices) + num_behind
    averaging = Averaging(None, changes.pop("scale", None), None)
    given = {"gradient_errors": None, **changes}
    return Bucket.of_several(
        indices,
        parameters,
        torch.empty(count, dtype=dtype or first.dtype, device=first.device),
        averaging,
        as_views=as_views,
        is_deferred=is_deferred,
        **given,
    )


def give(bucket: Bucket, is_used: list[bool] | None, *, is_complete: bool) -> None:
    bucket.copy_mode.give(BucketState(bucket), is_used, is_complete=is_complete, share=1.0)


def zeros(*sizes: int | tuple[int, ...], dtype: torch.dtype | None = None) -> list[Parameter]:
    return [Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def test_views_lie_one_after_the_other_large_ones_first_and_numbers_behind_them() -> None:
    parameters = zeros((2, 3), 4, (200, 200))
    bucket = bucket_of(parameters, (0, 2), num_behind=3)
    assert bucket.indices == (2, 0) and bucket.members[0] is parameters[2]
    assert [view.shape for view in bucket.views] == [(200, 200), (2, 3)]
    bucket.sent.copy_(torch.arange(bucket.sent.numel()))
    assert bucket.views[1].tolist() == [[40000, 40001, 40002], [40003, 40004, 40005]]
    assert bucket.sent[len(bucket.flat) :].tolist() == [40006, 40007, 40008]
    assert bucket.num_at_once == 1


def test_views_have_the_strides_of_parameters_and_version_counters_of_their_own() -> None:
    parameters = [Parameter(torch.zeros(2, 3).t()), *zeros(2)]
    first, second = bucket_of(parameters, (0, 1)).views
    assert first.stride() == (1, 3)
    before = second._version
    first.add_(1)
    assert second._version == before


# -- which have come ------------------------------------------------------------------------------


def kept(view: torch.Tensor) -> torch.Tensor:
    return view


def apart(view: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(view)


# -- moving in ------------------------------------------------------------------------------------


def fill(parameters: list[Parameter], bucket: Bucket) -> None:
    """One gradient that is new, one that lies in the bucket if it can, and one that is missing."""
    bucket.flat.fill_(6.0)
    fresh, inside, _ = parameters
    fresh.grad = torch.arange(1.0, 1 + fresh.numel(), dtype=fresh.dtype).view(fresh.shape)
    inside.grad = bucket.views[1].to(inside.dtype)


@pytest.mark.parametrize("as_views", [True, False])
@pytest.mark.parametrize("size", [2, LARGE])
def test_gradients_move_in(size: int, as_views: bool) -> None:
    fresh, _, missing = parameters = zeros(size, size, size)
    bucket = bucket_of(parameters, (0, 1, 2), as_views=as_views)
    fill(parameters, bucket)
    BucketState(bucket).take()
    assert bucket.views[0].tolist() == list(range(1, 1 + size))
    assert [view.unique().tolist() for view in bucket.views[1:]] == [[6.0], [0.0]]
    assert (fresh.grad is bucket.views[0]) == as_views
    assert missing.grad is None


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("as_views", [True, False])
@pytest.mark.parametrize("size", [2, LARGE])
def test_gradients_move_in_scaled_once(
    size: int, as_views: bool, dtype: torch.dtype | None
) -> None:
    fresh, _, missing = parameters = zeros(size, size, size)
    bucket = bucket_of(parameters, (0, 1, 2), as_views=as_views, dtype=dtype, scale=0.5)
    fill(parameters, bucket)
    assert fresh.grad is not None
    fresh.grad.fill_(4.0)
    bucket_state = BucketState(bucket)
    for slot in range(bucket.num_at_once)[:1]:
        bucket.copy_mode.take(bucket_state, slot)
    assert bucket_state.taken == ({0} if size == LARGE else set())
    bucket_state.take()
    assert [view.unique().tolist() for view in bucket.views] == [[2.0], [3.0], [0.0]]
    assert (fresh.grad is bucket.views[0]) == (as_views and dtype is None)
    assert missing.grad is None
    assert not BucketState(bucket).taken


@pytest.mark.parametrize("as_views", [True, False])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_small_gradients_that_are_all_new_move_by_one_call(
    shape: tuple[int, ...], as_views: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    cat = torch.cat

    def counting(parts: list[torch.Tensor], **kwargs: Any) -> torch.Tensor:
        calls.append(len(parts))
        return cat(parts, **kwargs)

    monkeypatch.setattr(torch, "cat", counting)
    parameters = zeros(shape, shape, shape)
    bucket = bucket_of(parameters, (0, 1, 2), as_views=as_views, num_behind=2)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full(shape, float(number)).t()
    BucketState(bucket).take()
    assert calls == [3]
    assert bucket.flat.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    assert all((p.grad is v) == as_views for p, v in zip(parameters, bucket.views, strict=True))


def test_gradients_of_channels_last_parameters_move_in_element_by_element() -> None:
    (weight,) = parameters = [
        Parameter(torch.zeros(2, 2, 2, 2).to(memory_format=torch.channels_last))
    ]
    bucket = bucket_of(parameters, (0,))
    expected = torch.arange(16.0).view(2, 2, 2, 2)
    weight.grad = expected.clone()
    BucketState(bucket).take()
    assert torch.equal(weight.grad, expected) and weight.grad.stride() == weight.stride()


def test_gradients_may_be_sent_in_another_dtype_and_then_stay_apart() -> None:
    parameters = zeros(2, LARGE)
    bucket = bucket_of(parameters, (0, 1), dtype=torch.bfloat16)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1.5)
    BucketState(bucket).take()
    assert bucket.sent.dtype is torch.bfloat16 and bucket.sent.unique().tolist() == [1.5]
    bucket.flat.fill_(2.5)
    give(bucket, None, is_complete=True)
    for parameter in parameters:
        assert parameter.grad is not None and parameter.grad.dtype is torch.float32
        assert parameter.grad.unique().tolist() == [2.5]
    parameters[0].grad = None
    give(bucket, [True, True], is_complete=False)
    assert parameters[0].grad is not None and parameters[0].grad.dtype is torch.float32


def test_what_is_not_sent_counts_as_zeros() -> None:
    bucket = bucket_of(zeros(2, 3), (0, 1), num_behind=1)
    bucket.sent.fill_(3.0)
    BucketState(bucket).take(is_zero=True)
    assert bucket.sent.tolist() == [0.0] * 5 + [3.0]


@pytest.mark.parametrize("others", ["missing", "dense"])
@pytest.mark.parametrize("size", [2, LARGE])
def test_a_sparse_gradient_is_rejected_by_name(size: int, others: str) -> None:
    def program() -> str:
        parameters = zeros(size, size)
        bucket = bucket_of(
            parameters, (1, 0), gradient_errors=GradientErrors(["left", "right"], md.group.WORLD)
        )
        parameters[1].grad = torch.zeros(size).to_sparse()
        if others == "dense":
            parameters[0].grad = torch.zeros(size)
        with pytest.raises(md.errors.GradientError) as error:
            BucketState(bucket).take()
        return str(error.value)

    (text,) = md.simulate(program, 1)
    assert text == (
        "right (index 1) has a sparse gradient\n"
        "  where:    rank 0, in the world\n"
        "  expected: dense gradients\n"
        "  found:    layout sparse_coo\n"
        "  fix:      create the embedding with sparse=False"
    )


@pytest.mark.parametrize("is_error", [True, False])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("factor", [0.5, 2, 100])
@pytest.mark.parametrize("size", [2, LARGE])
def test_a_gradient_of_another_shape_is_rejected_by_name(
    size: int, factor: float, scale: float | None, is_error: bool
) -> None:
    new = int(size * factor)

    def program() -> tuple[str, list[float]]:
        parameters = zeros(size, size)
        given = {
            "scale": scale,
            "gradient_errors": GradientErrors(["left", "right"], md.group.WORLD),
        }
        bucket = bucket_of(parameters, (1, 0), num_behind=3, **given)
        for parameter, count in zip(parameters, (size, new), strict=True):
            parameter.data = torch.zeros(count)
            parameter.grad = torch.ones(count)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if is_error else "ignore")
            with pytest.raises(md.errors.GradientError) as error:
                BucketState(bucket).take()
        parameters[1].grad = None
        BucketState(bucket).take()
        return str(error.value), bucket.flat.unique().tolist()

    ((text, taken),) = md.simulate(program, 1)
    assert taken == [0.0, scale or 1.0]
    assert text == (
        "right (index 1) changed its shape after the model was wrapped\n"
        "  where:    rank 0, in the world\n"
        f"  expected: a gradient of shape ({size},)\n"
        f"  found:    shape ({new},)\n"
        "  fix:      change the model first, then wrap it: del ddp and its outputs, and wrap "
        "again"
    )


# -- handing out ----------------------------------------------------------------------------------


@pytest.mark.parametrize("as_views", [True, False])
def test_averages_are_handed_out(as_views: bool) -> None:
    lacking, held, unused = parameters = zeros(2, 2, 2)
    bucket = bucket_of(parameters, (0, 1, 2), as_views=as_views)
    held.grad = bucket.views[1] if as_views else torch.zeros(2)
    bucket.flat.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0, 0.0]))
    give(bucket, [True, True, False], is_complete=False)
    assert lacking.grad is not None
    assert (lacking.grad.tolist(), held.grad.tolist(), unused.grad) == ([1, 2], [3, 4], None)
    assert (lacking.grad is bucket.views[0]) == as_views


def test_averages_are_written_into_conjugates_and_negatives() -> None:
    numbers = torch.zeros(2, dtype=torch.complex64)
    parameters = [*zeros(2, dtype=torch.complex64), *zeros(2)]
    for parameter, grad in zip(parameters, (numbers.conj(), numbers.conj().imag), strict=True):
        parameter.grad = grad
        bucket = bucket_of([parameter], (0,), as_views=False)
        bucket.flat.copy_(torch.tensor([1.0, 2.0]) * (1j if parameter.is_complex() else 1))
        give(bucket, None, is_complete=True)
        assert parameter.grad is grad and torch.equal(grad, bucket.flat)


@pytest.mark.parametrize("as_views", [True, False])
def test_a_gradient_that_no_rank_had_keeps_its_value(as_views: bool) -> None:
    (parameter,) = parameters = zeros(2)
    bucket = bucket_of(parameters, (0,), as_views=as_views)
    parameter.grad = torch.full((2,), 5.0)
    give(bucket, [False], is_complete=False)
    assert parameter.grad.tolist() == [5.0, 5.0]


def test_averages_are_handed_out_without_a_look_at_what_lies_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets, "streams_for", lambda _: object)
    (lacking,) = parameters = [Parameter(torch.zeros(2, device="meta"))]
    bucket = bucket_of(parameters, (0,))
    give(bucket, None, is_complete=False)  # to look at a meta tensor is an error
    assert lacking.grad is bucket.views[0]


def test_small_gradients_are_kept_for_the_stream_that_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    awaited: list[torch.Tensor] = []

    class Streams:
        def await_others(self, gradients: Iterable[torch.Tensor]) -> None:
            awaited.extend(gradients)

    monkeypatch.setattr(buckets, "streams_for", lambda _: Streams)
    parameters = zeros(2, LARGE, 2)
    for parameter in parameters[:2]:
        parameter.grad = torch.ones_like(parameter)
    small = parameters[0].grad
    BucketState(bucket_of(parameters, (0, 1, 2))).take()
    assert [grad is small for grad in awaited] == [True]
