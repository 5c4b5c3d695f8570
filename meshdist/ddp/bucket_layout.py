"""Assign parameters to buckets and lay the buckets out in memory.

A bucket holds parameters of one dtype and device: one flat tensor, one all-reduce. Large buckets
need fewer calls, but small buckets start earlier. So the first bucket is small.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch

from ..arguments import get_number
from ..collectives.flat_sums import Item, assign_buckets, items_of, start_reduction
from ..collectives.shared_buffers import flat_memory
from ..dtypes import dtype_name
from ..errors import ArgumentError, KindError
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceOp
from .buckets import Averaging, Bucket, Flat, Pending
from .expected_gradients import ExpectedGradients
from .extra_axis_groups import ExtraAxisGroups
from .gradient_errors import GradientErrors
from .status_flags import Ending, StatusFlags
from .unbucketed_gradients import InPlace, Sparse

_MIB = 1024 * 1024

# From this size on, a separate message costs less than the copy of the gradient.
_IN_PLACE_BYTES = 8 * 1024 * 1024


def bucket_caps(
    bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return the checked caps in bytes; the last applies to all further buckets."""
    if bucket_cap_mb_list is not None and (
        isinstance(bucket_cap_mb_list, str) or not isinstance(bucket_cap_mb_list, Sequence)
    ):
        raise KindError(
            f"bucket_cap_mb_list is of type {type(bucket_cap_mb_list).__name__}",
            expected="a list of sizes in MiB, or None",
            fix="pass for example bucket_cap_mb_list=[1, 25]",
        )
    if bucket_cap_mb_list:
        return tuple(
            _cap_bytes(f"bucket_cap_mb_list[{index}]", cap)
            for index, cap in enumerate(bucket_cap_mb_list)
        )
    if bucket_cap_mb is None:
        return _MIB, 25 * _MIB
    return (_cap_bytes("bucket_cap_mb", bucket_cap_mb),)


def _cap_bytes(what: str, cap_mb: float) -> int:
    expected, fix = "a size in MiB, or None", "pass for example bucket_cap_mb=25"
    cap_mb = get_number(cap_mb, what, expected=expected, fix=fix)
    if not cap_mb > 0 or not math.isfinite(cap_mb):
        raise ArgumentError(
            f"{what} is {cap_mb}",
            expected="a size in MiB above 0, or None for 25 with a first bucket of 1",
            fix="pass a small number such as 0.001 for one parameter per bucket",
        )
    return max(1, int(cap_mb * _MIB))


class LaidBucket(NamedTuple):
    """A bucket's parameters, in expected order; if deferred, sent last."""

    indices: tuple[int, ...]
    is_deferred: bool = False


def lay_out(
    items: Sequence[Item],
    order: Sequence[int],
    caps: Sequence[int],
    *,
    deferred: Collection[int] = (),
    delayed: Collection[int] = (),
    delayed_after: int | None = None,
) -> tuple[LaidBucket, ...]:
    """Return all buckets in sending order, equal on every rank.

    Args:
        items, order, caps: as in ``assign_buckets``; every index is in ``order``.
        deferred: indices whose gradient some rank may lack; they get separate buckets, sent last.
        delayed: indices sent together, each kind in one bucket, right after the bucket that
            contains ``delayed_after``, even if they are in ``deferred``.
        delayed_after: an index; if None, the delayed buckets follow all that are not deferred.

    Example:
        >>> items = [(4, "f32")] * 4
        >>> lay_out(items, [3, 2, 1, 0], (8,), deferred={3}, delayed={0}, delayed_after=2)
        ... # doctest: +NORMALIZE_WHITESPACE
        (LaidBucket(indices=(2, 1), is_deferred=False),
         LaidBucket(indices=(0,), is_deferred=False), LaidBucket(indices=(3,), is_deferred=True))
    """
    apart = {*deferred, *delayed}
    early = list(assign_buckets(items, [i for i in order if i not in apart], caps))
    if delayed:
        together = assign_buckets(items, [i for i in order if i in delayed], (sys.maxsize,))
        before = [number for number, bucket in enumerate(early) if delayed_after in bucket]
        number = before[0] + 1 if before else len(early)
        early[number:number] = together
    last = assign_buckets(items, [i for i in order if i in deferred and i not in delayed], caps)
    return (*map(LaidBucket, early), *(LaidBucket(bucket, True) for bucket in last))


@dataclass(frozen=True)
class ReductionOptions:
    """Options of a reduction of gradients.

    Args:
        caps: bucket sizes in bytes; the last repeats.
        as_views: whether ``.grad`` is a view into its bucket.
        finds_unused: whether a rank may lack any gradient in any backward.
        is_static: whether all backwards compute the same gradients.
        skips_unused: whether gradients missing on all ranks in the first backward are never sent.
        delayed: indices sent together, after the bucket of ``delayed_after``.
        sparse: indices of parameters with sparse gradients.
        dtype: of sent gradients; None for the parameters' dtype.
    """

    caps: tuple[int, ...]
    as_views: bool = True
    finds_unused: bool = False
    is_static: bool = False
    skips_unused: bool = False
    delayed: frozenset[int] = frozenset()
    delayed_after: int | None = None
    sparse: frozenset[int] = frozenset()
    dtype: torch.dtype | None = None

    def shared(self, names: Sequence[str]) -> dict[str, object]:
        """Return the settings that must be equal on every rank, by DDP's argument names.

        Example:
            >>> options = ReductionOptions(caps=(1 << 20,), delayed=frozenset({1}))
            >>> shared = options.shared(["head", "tail"])
            >>> shared["bucket_cap_mb"], shared["delay_all_reduce_named_params"]
            ([1.0], ['tail'])
        """
        after = self.delayed_after
        return {
            "bucket_cap_mb": [cap / (1 << 20) for cap in self.caps],
            "find_unused_parameters": self.finds_unused,
            "static_graph": self.is_static,
            "skip_all_reduce_unused_params": self.skips_unused,
            "delay_all_reduce_named_params": [names[index] for index in sorted(self.delayed)],
            "param_to_hook_all_reduce": None if after is None else names[after],
            "mixed_precision.reduce_dtype": None if self.dtype is None else dtype_name(self.dtype),
            "sparse gradients": [names[index] for index in sorted(self.sparse)],
        }

    @property
    def may_lack(self) -> bool:
        """Return whether missing gradients are no error."""
        return self.finds_unused or self.is_static

    @property
    def may_move(self) -> bool:
        """Return whether the deferred parameters may still change."""
        return self.finds_unused and not (self.is_static or self.skips_unused)


class ReductionTerms(NamedTuple):
    """The inputs of a bucket layout."""

    parameters: Sequence[torch.nn.Parameter]
    group: ProcessGroup
    options: ReductionOptions
    gradient_errors: GradientErrors
    order: Sequence[int]
    extra_groups: ExtraAxisGroups


@dataclass(frozen=True, eq=False)
class BucketLayout:
    """An immutable assignment of gradients to buckets, with their memory.

    Args:
        deferred: parameters whose gradient some rank may lack.
        is_learned: whether buckets are in the order of computation.
        buckets: in sending order.
        unsent: parameters whose gradient no rank had at first, without a bucket.
        status_flags: averaged over the union of all groups.
        flags_average: starts their average; None if they are sent with the last bucket.
    """

    terms: ReductionTerms
    deferred: frozenset[int]
    is_learned: bool
    buckets: tuple[Bucket, ...]
    unsent: frozenset[int]
    status_flags: StatusFlags
    flags_average: Callable[[torch.Tensor], Pending] | None

    def fits(self, expected_gradients: ExpectedGradients) -> bool:
        """Return whether order and deferred parameters match ``expected_gradients``."""
        return (self.is_learned, self.deferred) == (
            expected_gradients.is_learned,
            expected_gradients.deferred,
        )

    @cached_property
    def positions(self) -> dict[int, tuple[int, int]]:
        """The bucket number and slot of each sent parameter."""
        return {
            index: (number, slot)
            for number, bucket in enumerate(self.buckets)
            for slot, index in enumerate(bucket.indices)
        }

    def is_hooked(self, bucket: Bucket) -> bool:
        """Return whether a communication hook would average this bucket."""
        return bucket.averaging.group is self.terms.group


# Collective once the order is learned: the buckets are then in memory shared by the group.
@torch.no_grad()
def lay(
    terms: ReductionTerms,
    expected_gradients: ExpectedGradients,
    *,
    has_hook: bool,
    before: Iterable[Bucket] = (),
) -> BucketLayout:
    """Return a layout in new memory; gradients in buckets of ``before`` move with their values.

    Args:
        has_hook: whether a communication hook averages unscaled gradients.
    """
    parameters, group, options, _, order, extra_groups = terms
    old_views = {
        index: view
        for bucket in before
        for index, view in zip(bucket.indices, bucket.views, strict=True)
        if parameters[index].grad is view
    }
    device_type = parameters[0].device.type
    averagings = {}
    for over in (group, *extra_groups.groups.values(), extra_groups.all_ranks):
        at_once = over.open_device_group(device_type).communicator.averages_at_once
        at_once = at_once or (has_hook and over is group)
        op, scale = (ReduceOp.AVG, None) if at_once else (ReduceOp.SUM, 1.0 / over.size())
        averagings[over] = Averaging(over, scale, partial(start_reduction, op=op, group=over))
    of_each = [
        averagings[extra_groups.groups.get(index, group)] for index in range(len(parameters))
    ]
    unsent = expected_gradients.deferred if options.skips_unused else frozenset[int]()
    # If the backend shares memory or divides itself, buckets save more than they cost.
    in_place = {
        index
        for index, parameter in enumerate(parameters)
        if of_each[index].scale is not None
        and options.dtype is None
        and parameter.nbytes >= _IN_PLACE_BYTES
    }
    # Parameters of other groups are in separate buckets, sent after the rest.
    items = [
        (num_bytes, (kind, extra_groups.groups.get(index)))
        for index, (num_bytes, kind) in enumerate(
            items_of(parameters, options.dtype, options.sparse | in_place)
        )
    ]
    own = [index for index in order if index not in extra_groups.groups]
    # Experts differ in size between ranks, and so in their number of buckets. With the buckets of a
    # group next to each other, ranks that share several groups still use them in one order. The
    # status flags are sent with the last bucket if its group has all ranks.
    numbers_of = {over: n for n, over in enumerate(dict.fromkeys(extra_groups.groups.values()))}
    numbers_of[extra_groups.all_ranks] = len(numbers_of)
    others = sorted(extra_groups.groups, key=lambda i: (numbers_of[extra_groups.groups[i]], i))
    laid = lay_out(
        items,
        [index for index in (*own, *others) if index not in unsent],
        options.caps,
        deferred=(expected_gradients.deferred | {*extra_groups.groups}) - unsent,
        delayed=options.delayed - {*extra_groups.groups},
        delayed_after=options.delayed_after,
    )
    num_flags, of_flags = len(Ending) + len(parameters), averagings[extra_groups.all_ranks]
    buckets = []
    for indices, is_deferred in laid:
        is_last = indices is laid[-1].indices
        is_deferred = is_deferred or is_last or not expected_gradients.is_learned
        index = indices[0]
        first, averaging = parameters[index], of_each[index]
        if index in options.sparse or index in in_place:
            copy_mode = Sparse() if index in options.sparse else InPlace()
            bucket = Bucket.of_one(index, first, copy_mode, averaging, is_deferred=is_deferred)
            buckets.append(bucket)
            continue
        num = num_flags * (is_last and averaging is of_flags)
        bucket = _flat_bucket(
            terms, expected_gradients, indices, averaging, num, is_deferred=is_deferred
        )
        for member, index, view in zip(bucket.members, bucket.indices, bucket.views, strict=True):
            if index in old_views:
                member.grad = view.copy_(old_views[index])
        buckets.append(bucket)
    last = buckets[-1]
    holds_flags = isinstance(last.copy_mode, Flat) and last.averaging is of_flags
    is_in_bucket = holds_flags and not (has_hook and of_flags.group is group)
    numbers = (
        last.sent[len(last.flat) :]
        if holds_flags
        else torch.empty(num_flags, device=last.sent.device)
    )
    status_flags = StatusFlags(numbers, 1.0 if of_flags.scale is None else of_flags.scale)
    if holds_flags:
        last.status_flags = status_flags
    for bucket in buckets:
        bucket.note_users()
    return BucketLayout(
        terms,
        expected_gradients.deferred,
        expected_gradients.is_learned,
        tuple(buckets),
        unsent,
        status_flags,
        None if is_in_bucket else of_flags.start,
    )


def _flat_bucket(
    terms: ReductionTerms,
    expected_gradients: ExpectedGradients,
    indices: Sequence[int],
    averaging: Averaging,
    num_flags: int,
    *,
    is_deferred: bool,
) -> Bucket:
    """Return a bucket in new memory, followed by ``num_flags`` numbers."""
    parameters, options, gradient_errors = terms.parameters, terms.options, terms.gradient_errors
    first, is_learned = parameters[indices[0]], expected_gradients.is_learned
    dtype, device = options.dtype or first.dtype, first.device
    count = sum(parameters[index].numel() for index in indices) + num_flags
    return Bucket.of_several(
        indices,
        parameters,
        flat_memory(count, dtype, device, averaging.group)
        if is_learned
        else torch.empty(count, dtype=dtype, device=device),
        averaging,
        as_views=options.as_views,
        is_deferred=is_deferred,
        gradient_errors=gradient_errors,
    )
