"""One backward: its reductions are started in bucket order, and waited for in bucket order.

A ``Backward`` is made at its first sign, when outputs have their gradients, and dropped once every
rank's part is averaged: nothing of it is set back for the next one. A backward that raised midway
is still there afterwards; the next forward, or check, completes it with zeros.
"""

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
from .graph_tasks import NO_TASK
from .logging_data import Timing
from .parting import Parting

__all__ = ["Backward", "Sending"]

_LOCAL_HOOKS = ("noop_hook", "post_localSGD_hook")  # replicas part, as is meant


class Sending:
    """Averages over one group, for one backward after another.

    Attributes:
        buckets: all of them.
        group: over whose members.
        parting: compares the replicas, if anything does.
        hook: what averages buckets in place of an all-reduce, if anything.
        failure: why the members are no longer in step, if so.
        calls_inside: a context for the calls of one backward.
        timing: of a sampled iteration, else None.
    """

    def __init__(self, buckets: BucketList, group: ProcessGroup, parting: Parting | None) -> None:
        self.buckets = buckets
        self.group = group
        self.hook: RegisteredHook | None = None
        self.failure: Exception | None = None
        self.calls_inside: Callable[[], AbstractContextManager[None]] = nullcontext
        self.timing: Timing | None = None
        self.parting = parting
        self._op = ReduceOp.AVG

    def change_group(self, group: ProcessGroup) -> None:
        """Average over ``group`` from now on, also by a hook whose state is None."""
        self.group = group
        if self.hook is not None:
            self.hook.group = group
        if self.parting is not None:
            self.parting.count_anew()

    def find_scale(self, device: torch.device) -> float | None:
        """By what gradients are multiplied as they are copied; None where the wire averages.

        Nothing is multiplied for a communication hook.
        """
        communicator = self.group.open_channel(device.type).communicator
        averages = communicator.averages_at_once or self.hook is not None
        self._op = ReduceOp.AVG if averages else ReduceOp.SUM
        return None if averages else 1.0 / self.group.size()

    def start(self, bucket: AnyBucket, number: int) -> Pending:
        """Start the reduction of the bucket at place ``number``."""
        if self.hook is not None and not isinstance(bucket, InPlaceBucket):
            return self._call_hook(self.hook, bucket, number)
        return bucket if isinstance(bucket, SparseBucket) else self.average(bucket.sent)

    def average(self, sent: torch.Tensor) -> Pending:
        """Start the average of a tensor."""
        with self.calls_inside():
            return start_reduction(sent, self._op, self.group)

    def backward_ends(self) -> None:
        """All has been averaged: compare replicas where that is due."""
        if self.timing is not None:
            self.timing.mark("backward_comm_time_end")
        if self.parting is not None:  # in a join context ranks without data are behind
            averages = self.hook is None or self.hook.name not in _LOCAL_HOOKS
            meant = averages and self.calls_inside is nullcontext
            self.parting.backward_ends(self.group, is_compared=meant)

    def _call_hook(
        self, hook: RegisteredHook, bucket: Bucket | SparseBucket, number: int
    ) -> Pending:
        is_last = bucket is self.buckets.all[-1]
        args = bucket.members, bucket.views, number, is_last, self.group
        try:
            with self.calls_inside():
                return hook.start(GradBucket(bucket.flat, *args))
        except Exception as failure:  # after which verbs of the hook's, no other rank knows
            self.failure = without_frames(failure)
            raise


class Backward:
    """One backward that is averaged, or zeros in place of a backward.

    Args:
        sending: over which group, and how.
        task: the number that autograd has given it; ``NO_TASK`` where zeros stand in.
        has_graph: whether its gradients could be differentiated again.

    Attributes:
        is_open: whether a gradient has come.
        is_running: says whether it has not ended, nor raised.
        late: the parameters whose gradient came after its bucket had gone.
        num_started: how many buckets have gone.
    """

    def __init__(self, sending: Sending, task: int = NO_TASK, *, has_graph: bool = False) -> None:
        self._sending = sending
        self.task = task
        self.has_graph = has_graph
        self.is_open = False
        self.is_running: Callable[[], bool] = bool
        self.late: list[int] = []
        self.num_started = 0
        self._behind_work: Pending | None = None  # of the numbers behind, where they do not ride

    def rest(self) -> Sequence[AnyBucket]:
        """The buckets that have not gone."""
        return self._sending.buckets.all[self.num_started :]

    def start(self, bucket: AnyBucket) -> None:
        """Start the reduction of the next bucket."""
        if not self.num_started and self._sending.timing is not None:
            self._sending.timing.mark("backward_comm_time_start")
        bucket.work = self._sending.start(bucket, self.num_started)
        self.num_started += 1

    def start_rest(self) -> None:
        """Start the reductions of all buckets that have not gone."""
        rest, buckets = self.rest(), self._sending.buckets
        for bucket in rest:
            self.start(bucket)
        if rest and (self._sending.hook is not None or not buckets.rides):
            self._behind_work = self._sending.average(buckets.behind)

    def wait(self) -> None:
        """Wait for all buckets."""
        sending = self._sending
        try:
            for bucket in sending.buckets.all:
                assert bucket.work is not None
                with sending.calls_inside():  # of a sparse bucket, or a hook's callbacks
                    bucket.work.wait()
            if self._behind_work is not None:
                self._behind_work.wait()
        except Exception as failure:
            sending.failure = without_frames(failure)
            raise
        sending.backward_ends()
