"""How gradients are reduced, and which travel together: assignment of parameters to buckets.

A bucket holds parameters of one dtype and device, so that it can be one flat tensor and one
all-reduce. Small buckets start early, large ones waste fewer calls: hence a small first bucket,
which is ready while most of the backward is still to come.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from ..arguments import get_number
from ..collectives.flat_sums import Item, assign_buckets
from ..dtypes import dtype_name
from ..errors import ArgumentError, KindError

__all__ = [
    "LaidBucket",
    "ReductionOptions",
    "bucket_caps",
    "lay_out",
]

_MIB = 1024 * 1024


def bucket_caps(
    bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return the caps in bytes: of the first bucket, of the second, ...; the last one repeats.

    Without either argument they are 1 MiB and 25 MiB. A single cap holds for the first bucket too.
    A list overrides it, unless it is empty.

    Raises:
        KindError: a cap is no number, or the list none.
        ArgumentError: a cap is not above zero, or not finite.
    """
    if bucket_cap_mb_list is not None and (
        isinstance(bucket_cap_mb_list, str) or not isinstance(bucket_cap_mb_list, Sequence)
    ):
        raise KindError(
            f"bucket_cap_mb_list is of type {type(bucket_cap_mb_list).__name__}",
            expected="a list of numbers of MiB, or None",
            fix="pass for example bucket_cap_mb_list=[1, 25]",
        )
    if bucket_cap_mb_list:
        return tuple(
            _cap_bytes(f"bucket_cap_mb_list[{place}]", cap)
            for place, cap in enumerate(bucket_cap_mb_list)
        )
    if bucket_cap_mb is None:
        return _MIB, 25 * _MIB
    return (_cap_bytes("bucket_cap_mb", bucket_cap_mb),)


def _cap_bytes(what: str, cap_mb: float) -> int:
    expected, fix = "a number of MiB, or None", "pass for example bucket_cap_mb=25"
    cap_mb = get_number(cap_mb, what, expected=expected, fix=fix)
    if not cap_mb > 0 or not math.isfinite(cap_mb):
        raise ArgumentError(
            f"{what} is {cap_mb}",
            expected="a number of MiB above zero, or None for 25 with a first bucket of 1",
            fix="pass a small number such as 0.001 for one parameter a bucket",
        )
    return max(1, int(cap_mb * _MIB))


@dataclass(frozen=True)
class LaidBucket:
    """Which gradients one bucket holds, and when it is sent.

    Args:
        indices: of its parameters, in the order in which they are expected.
        is_trailing: whether it waits for the end of the backward, since some rank may lack a
            gradient of it.
    """

    indices: tuple[int, ...]
    is_trailing: bool = False


def lay_out(
    items: Sequence[Item],
    order: Sequence[int],
    caps: Sequence[int],
    *,
    trailing: Collection[int] = (),
    delayed: Collection[int] = (),
    delayed_behind: int | None = None,
) -> tuple[LaidBucket, ...]:
    """Return all buckets in the order in which they are sent, equal on every rank.

    Args:
        items, order, caps: as in ``assign_buckets``; every index is in ``order``.
        trailing: indices that some rank may lack: in buckets of their own, sent last.
        delayed: indices whose gradients are sent together, as soon as
        delayed_behind: this one's has come, so behind its bucket.

    Example:
        >>> items = [(4, "f32")] * 4
        >>> lay_out(items, [3, 2, 1, 0], (8,), trailing={3}, delayed={0}, delayed_behind=2)
        ... # doctest: +NORMALIZE_WHITESPACE
        (LaidBucket(indices=(2, 1), is_trailing=False),
         LaidBucket(indices=(0,), is_trailing=False), LaidBucket(indices=(3,), is_trailing=True))
    """
    apart = {*trailing, *delayed}
    early = list(assign_buckets(items, [i for i in order if i not in apart], caps))
    if delayed:
        together = assign_buckets(items, [i for i in order if i in delayed], (sys.maxsize,))
        places = [place for place, bucket in enumerate(early) if delayed_behind in bucket]
        place = places[0] + 1 if places else len(early)
        early[place:place] = together
    last = assign_buckets(items, [i for i in order if i in trailing and i not in delayed], caps)
    return (*map(LaidBucket, early), *(LaidBucket(bucket, True) for bucket in last))


@dataclass(frozen=True)
class ReductionOptions:
    """How gradients are reduced.

    Args:
        caps: of the first bucket, of the second, ..., in bytes; the last repeats.
        as_views: whether ``.grad`` is a view into its bucket, or a copy.
        finds_unused: whether a rank may lack any gradient in any backward.
        is_static: whether all backwards are promised to bring what the first one brought.
        skips_unused: whether what no rank had in the first backward is never sent.
        delayed: indices of the parameters that are sent together, behind the bucket of
        delayed_behind: this one.
        sparse: indices of those whose gradients are sparse.
        dtype: in which gradients are sent; None for the parameters' own.
    """

    caps: tuple[int, ...]
    as_views: bool = True
    finds_unused: bool = False
    is_static: bool = False
    skips_unused: bool = False
    delayed: frozenset[int] = frozenset()
    delayed_behind: int | None = None
    sparse: frozenset[int] = frozenset()
    dtype: torch.dtype | None = None

    def shared(self, names: Sequence[str]) -> dict[str, object]:
        """The settings that must be equal on every rank, by the wrapper's arguments.

        Example:
            >>> options = ReductionOptions(caps=(1 << 20,), delayed=frozenset({1}))
            >>> shared = options.shared(["head", "tail"])
            >>> shared["bucket_cap_mb"], shared["delay_all_reduce_named_params"]
            ([1.0], ['tail'])
        """
        behind = self.delayed_behind
        return {
            "bucket_cap_mb": [cap / (1 << 20) for cap in self.caps],
            "find_unused_parameters": self.finds_unused,
            "static_graph": self.is_static,
            "skip_all_reduce_unused_params": self.skips_unused,
            "delay_all_reduce_named_params": [names[index] for index in sorted(self.delayed)],
            "param_to_hook_all_reduce": None if behind is None else names[behind],
            "mixed_precision.reduce_dtype": None if self.dtype is None else dtype_name(self.dtype),
            "sparse gradients": [names[index] for index in sorted(self.sparse)],
        }

    @property
    def may_lack(self) -> bool:
        """Whether missing gradients are no error by themselves."""
        return self.finds_unused or self.is_static

    @property
    def may_move(self) -> bool:
        """Whether parameters move between early and trailing buckets once arrivals are learned."""
        return self.finds_unused and not (self.is_static or self.skips_unused)
