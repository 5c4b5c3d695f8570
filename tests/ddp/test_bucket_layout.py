"""Laws of the assignment of parameters to buckets."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, strategies as st

from meshdist.ddp.bucket_layout import bucket_caps, lay_out
from meshdist.errors import ArgumentError, KindError
from tests.inner import Item, assign_buckets, dense_stride, items_of

items_and_orders = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from(["f32", "f16", "other device"])),
    max_size=30,
).flatmap(lambda items: st.tuples(st.just(items), st.permutations(range(len(items)))))
caps = st.integers(1, 60)


@given(items_and_orders, caps, caps)
def test_every_item_lies_in_one_bucket_of_its_kind_in_order(
    case: tuple[list[Item], list[int]], first: int, cap: int
) -> None:
    items, order = case
    buckets = assign_buckets(items, order, (first, cap))
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(items)))
    assert all(len({items[i][1] for i in bucket}) == 1 for bucket in buckets)
    for kind in {kind for _, kind in items}:
        laid = [i for bucket in buckets for i in bucket if items[i][1] == kind]
        assert laid == [i for i in order if items[i][1] == kind]


@given(items_and_orders, caps, caps)
def test_caps_hold_but_for_single_large_items(
    case: tuple[list[Item], list[int]], first: int, cap: int
) -> None:
    items, order = case
    buckets = assign_buckets(items, order, (first, cap))
    seen = set()
    for bucket in buckets:
        kind = items[bucket[0]][1]
        limit = cap if kind in seen else first
        seen.add(kind)
        assert len(bucket) == 1 or sum(items[i][0] for i in bucket) <= limit


@given(items_and_orders, caps, caps)
def test_no_bucket_could_have_taken_the_next_item(
    case: tuple[list[Item], list[int]], first: int, cap: int
) -> None:
    items, order = case
    buckets = assign_buckets(items, order, (first, cap))
    for kind in {kind for _, kind in items}:
        chain = [bucket for bucket in buckets if items[bucket[0]][1] == kind]
        for place, (bucket, following) in enumerate(itertools.pairwise(chain)):
            limit = cap if place else first
            held = sum(items[i][0] for i in bucket)
            assert held + items[following[0]][0] > limit


@given(items_and_orders, caps, caps)
def test_buckets_come_in_the_order_in_which_they_are_complete(
    case: tuple[list[Item], list[int]], first: int, cap: int
) -> None:
    items, order = case
    place = {index: n for n, index in enumerate(order)}
    buckets = assign_buckets(items, order, (first, cap))
    completed = [max(place[i] for i in bucket) for bucket in buckets]
    assert completed == sorted(completed)


def test_default_caps_are_1_and_25_mib_and_a_given_cap_holds_for_the_first_too() -> None:
    assert bucket_caps(None) == (1 << 20, 25 << 20)
    assert bucket_caps(2.5) == (5 << 19,)
    assert bucket_caps(1e-9) == (1,)


def test_a_list_of_caps_overrides_the_single_one_and_an_empty_list_is_none() -> None:
    assert bucket_caps(7, [1, 0.5]) == (1 << 20, 1 << 19)
    assert bucket_caps(None, (3,)) == (3 << 20,)
    assert bucket_caps(2, []) == (2 << 20,)
    assert bucket_caps(None, []) == (1 << 20, 25 << 20)


@given(items_and_orders, st.lists(caps, min_size=1, max_size=4))
def test_each_bucket_of_a_kind_has_its_cap_and_the_last_one_repeats(
    case: tuple[list[Item], list[int]], several: list[int]
) -> None:
    items, order = case
    buckets = assign_buckets(items, order, several)
    for kind in {kind for _, kind in items}:
        chain = [bucket for bucket in buckets if items[bucket[0]][1] == kind]
        for place, bucket in enumerate(chain):
            limit = several[min(place, len(several) - 1)]
            assert len(bucket) == 1 or sum(items[i][0] for i in bucket) <= limit


@pytest.mark.parametrize(
    ("cap", "kind", "text"),
    [
        (0, ArgumentError, "bucket_cap_mb is 0\n  expected: a size in MiB above 0"),
        (-1.5, ArgumentError, "bucket_cap_mb is -1.5"),
        (float("inf"), ArgumentError, "bucket_cap_mb is inf"),
        (float("nan"), ArgumentError, "bucket_cap_mb is nan"),
        ([0.1, 0], ArgumentError, "bucket_cap_mb_list[1] is 0\n  expected: a size in MiB above 0"),
        ([True], KindError, "bucket_cap_mb_list[0] must be a number"),
        ({25}, KindError, "bucket_cap_mb_list is of type set\n  expected: a list of sizes in MiB"),
        ("25", KindError, "bucket_cap_mb must be a number\n  expected: a size in MiB, or None"),
        (True, KindError, "bucket_cap_mb must be a number"),
    ],
)
def test_bad_caps_are_rejected(cap: object, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as error:
        # Type: ignore[arg-type].
        bucket_caps(*([None, cap] if isinstance(cap, (list, set)) else [cap]))
    assert text in str(error.value)


def test_an_item_tells_size_dtype_and_device() -> None:
    items = items_of([torch.zeros(2, 3), torch.zeros(5, dtype=torch.complex128), torch.ones(1)])
    assert [num_bytes for num_bytes, _ in items] == [24, 80, 4]
    assert items[0][1] == items[2][1] != items[1][1]


def test_gradients_that_are_sent_in_one_dtype_are_of_one_kind() -> None:
    items = items_of([torch.zeros(6), torch.zeros(5, dtype=torch.float64)], torch.bfloat16)
    assert [num_bytes for num_bytes, _ in items] == [12, 10]
    assert items[0][1] == items[1][1]


def test_a_sparse_gradient_travels_alone() -> None:
    items = items_of([torch.zeros(2)] * 4, alone={1, 2})
    assert assign_buckets(items, [3, 2, 1, 0], (1 << 20,)) == ((2,), (1,), (3, 0))


# -- what is sent when ----------------------------------------------------------------------------

layouts = items_and_orders.flatmap(
    lambda case: st.tuples(
        st.just(case),
        st.sets(st.sampled_from(case[1]) if case[1] else st.nothing()),
        st.sets(st.sampled_from(case[1]) if case[1] else st.nothing()),
        st.sampled_from(case[1]) if case[1] else st.none(),
    )
)


@given(layouts, caps)
def test_all_lie_in_one_bucket_each_and_trailing_ones_in_buckets_of_their_own_at_the_end(
    case: tuple[tuple[list[Item], list[int]], set[int], set[int], int | None], cap: int
) -> None:
    (items, order), deferred, delayed, behind = case
    laid = lay_out(items, order, (cap,), deferred=deferred, delayed=delayed, delayed_after=behind)
    assert sorted(i for bucket in laid for i in bucket.indices) == list(range(len(items)))
    assert [bucket.is_deferred for bucket in laid] == sorted(b.is_deferred for b in laid)
    for bucket in laid:
        assert bucket.is_deferred == (set(bucket.indices) <= deferred - delayed)
        assert len({items[i][1] for i in bucket.indices}) == 1


@given(layouts)
def test_delayed_ones_go_together_behind_the_bucket_that_they_wait_for(
    case: tuple[tuple[list[Item], list[int]], set[int], set[int], int | None],
) -> None:
    (items, order), deferred, delayed, behind = case
    laid = lay_out(items, order, (1,), deferred=deferred, delayed=delayed, delayed_after=behind)
    early = [bucket.indices for bucket in laid if not bucket.is_deferred]
    is_delayed = [set(bucket) <= delayed for bucket in early]
    kinds = {items[i][1] for i in delayed}
    assert sum(is_delayed) == len(kinds)  # whatever the cap
    if delayed:
        first = is_delayed.index(True)
        assert all(is_delayed[first : first + len(kinds)])
        places = [place for place, bucket in enumerate(early) if behind in {*bucket} - delayed]
        assert first == (places[0] + 1 if places else len(early) - len(kinds))


@given(st.lists(st.integers(1, 4), max_size=4), st.randoms(use_true_random=False), st.booleans())
def test_a_view_has_the_parameters_strides_where_they_are_dense(
    shape: list[int], random: object, has_gaps: bool
) -> None:
    dims = list(range(len(shape)))
    random.shuffle(dims)  # type: ignore[attr-defined]
    tensor = torch.zeros([shape[d] for d in dims]).permute(
        [dims.index(d) for d in range(len(dims))]
    )
    assert list(tensor.shape) == shape
    if has_gaps:
        tensor = torch.zeros([*shape, 2])[..., 0]
    stride = dense_stride(tensor.shape, tensor.stride())
    view = torch.zeros(tensor.numel()).as_strided(tensor.shape, stride)
    addresses = torch.arange(tensor.numel()).as_strided(view.shape, view.stride()).flatten()
    assert sorted(addresses.tolist()) == list(range(tensor.numel()))
    if not has_gaps:
        assert stride == tensor.stride()
    elif tensor.numel() > 1:
        assert stride == torch.zeros(shape).stride()


def test_an_empty_parameter_has_a_view_too() -> None:
    empty = torch.zeros(3, 0, 2)
    assert (
        torch.zeros(0).as_strided(empty.shape, dense_stride(empty.shape, empty.stride())).numel()
        == 0
    )
