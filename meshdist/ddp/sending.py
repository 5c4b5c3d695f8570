"""The reductions of one backward: started in bucket order, waited for in bucket order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ..collectives.flat_sums import start_reduction
from ..error_text import without_frames
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceOp
from .bucket_list import AnyBucket, BucketList, InPlaceBucket, SparseBucket
from .comm_hooks.bucket import GradBucket
from .comm_hooks.registered import RegisteredHook
from .flat_bucket import Bucket, Pending
from .logging_data import Timing
from .parting import Parting

__all__ = ["Sending"]

_LOCAL_HOOKS = ("noop_hook", "post_localSGD_hook")  # replicas part, as is meant


class Sending:
    """Starts and awaits what is averaged over one group.

    Attributes:
        num_started: how many buckets have gone in this backward.
        hook: what averages buckets in place of an all-reduce, if anything.
        failure: why the members are no longer in step, if so.
        calls_inside: a context for the calls of one backward.
        timing: of a sampled iteration, else None.
    """

    def __init__(self, buckets: BucketList, group: ProcessGroup, parting: Parting | None) -> None:
        self._list = buckets
        self._group = group
        self.num_started = 0
        self.hook: RegisteredHook | None = None
        self.failure: Exception | None = None
        self.calls_inside: Callable[[], AbstractContextManager[None]] = nullcontext
        self.timing: Timing | None = None
        self._parting = parting
        self._behind_work: Pending | None = None  # of the numbers behind, where they do not ride
        self._op = ReduceOp.AVG

    def change_group(self, group: ProcessGroup) -> None:
        """Average over ``group`` from now on, also by a hook whose state is None."""
        self._group = group
        if self.hook is not None:
            self.hook.group = group
        if self._parting is not None:
            self._parting.count_anew()

    def find_scale(self, device: torch.device) -> float | None:
        """By what gradients are multiplied as they are copied; None where the wire averages.

        Nothing is multiplied for a communication hook.
        """
        communicator = self._group.open_channel(device.type).communicator
        averages = communicator.averages_at_once or self.hook is not None
        self._op = ReduceOp.AVG if averages else ReduceOp.SUM
        return None if averages else 1.0 / self._group.size()

    def rest(self) -> Sequence[AnyBucket]:
        """The buckets that have not gone."""
        return self._list.all[self.num_started :]

    def start(self, bucket: AnyBucket) -> None:
        """Start the reduction of the next bucket."""
        if self.timing is not None and not self.num_started:
            self.timing.mark("backward_comm_time_start")
        if self.hook is not None and not isinstance(bucket, InPlaceBucket):
            bucket.work = self._call_hook(self.hook, bucket)
        elif isinstance(bucket, SparseBucket):
            bucket.work = bucket
        else:
            bucket.work = self._average(bucket.sent)
        self.num_started += 1

    def start_rest(self) -> None:
        """Start the reductions of all buckets that have not gone."""
        rest = self.rest()
        for bucket in rest:
            self.start(bucket)
        if rest and (self.hook is not None or not self._list.rides):
            self._behind_work = self._average(self._list.behind)

    def wait(self) -> None:
        """Wait for all buckets, and begin anew."""
        try:
            for bucket in self._list.all:
                assert bucket.work is not None
                with self.calls_inside():  # of a sparse bucket, or a hook's callbacks
                    bucket.work.wait()
            if self._behind_work is not None:
                self._behind_work.wait()
                self._behind_work = None
        except Exception as failure:
            self.failure = without_frames(failure)
            raise
        if self.timing is not None:
            self.timing.mark("backward_comm_time_end")
        self.num_started = 0
        if self._parting is not None:  # in a join context ranks without data are behind
            averages = self.hook is None or self.hook.name not in _LOCAL_HOOKS
            meant = averages and self.calls_inside is nullcontext
            self._parting.backward_ends(self._group, is_compared=meant)

    def _call_hook(self, hook: RegisteredHook, bucket: Bucket | SparseBucket) -> Pending:
        is_last = bucket is self._list.all[-1]
        args = bucket.members, bucket.views, self.num_started, is_last, self._group
        try:
            with self.calls_inside():
                return hook.start(GradBucket(bucket.flat, *args))
        except Exception as failure:  # after which verbs of the hook's, no other rank knows
            self.failure = without_frames(failure)
            raise

    def _average(self, sent: torch.Tensor) -> Pending:
        with self.calls_inside():
            return start_reduction(sent, self._op, self._group)
