"""What stands in for an accelerator on the CPU: its work is done when an event is awaited.

So a rank's backward returns before its all-reduces have ended, as over NCCL, and what the host may
not read yet is 7 there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.ddp import buckets, status_flags
from meshdist.ddp.device_streams import DeferredReader, GradientStreams, StatusReader
from tests.inner import flat_sums

CPU = torch.device("cpu")


class Accelerator:
    """One rank's, with one stream; it has the names of ``torch.cuda``."""

    def __init__(self) -> None:
        self.enqueued: list[Callable[[], Any]] = []
        self.told: list[str] = []

    def current_stream(self, device: torch.device) -> str:
        return f"stream of {device}"

    def Event(self) -> Event:
        return Event(self)

    def pinned(self, count: int) -> Any:
        return PinnedMemory(self, count)

    def synchronize(self) -> None:
        while self.enqueued:
            self.enqueued.pop(0)()


class Event:
    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def record(self, stream: str) -> None:
        self.accelerator.told.append(f"record on {stream}")

    def synchronize(self) -> None:
        self.accelerator.told.append("synchronize")
        self.accelerator.synchronize()


class PinnedMemory:
    def __init__(self, accelerator: Accelerator, count: int) -> None:
        self.accelerator = accelerator
        self.values = torch.full((count,), 7.0)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
        self.accelerator.told.append(f"copy, {non_blocking=}")

        def copy() -> None:
            self.values = source.clone()

        self.accelerator.enqueued.append(copy)

    def tolist(self) -> list[float]:
        return self.values.tolist()

    def __getitem__(self, part: slice) -> torch.Tensor:
        return self.values[part]


class EnqueuedWork:
    """A Work whose wait makes the device wait, not the host."""

    def __init__(self, accelerator: Accelerator, work: Any) -> None:
        self.accelerator = accelerator
        self.work = work

    def wait(self) -> bool:
        self.accelerator.enqueued.append(self.work.wait)
        return True

    def _may_be_dropped(self) -> None:
        self.work._may_be_dropped()


@contextmanager
def in_place_of_the_cpu() -> Iterator[Callable[[], Accelerator]]:
    """Let reducers take the CPU for each rank's accelerator, which this gives."""
    of_rank: dict[int, Accelerator] = {}
    all_reduce = flat_sums.all_reduce

    def here() -> Accelerator:
        return of_rank.setdefault(md.get_rank(), Accelerator())

    def enqueue(*args: Any, **kwargs: Any) -> EnqueuedWork:
        return EnqueuedWork(here(), all_reduce(*args, **kwargs))

    def reader_for(device: torch.device, count: int) -> StatusReader:
        return DeferredReader(device, here(), here().pinned(count))

    def streams_for(device: torch.device) -> Callable[[], GradientStreams]:
        return lambda: GradientStreams(device, here())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_sums, "all_reduce", enqueue)
        patch.setattr(buckets, "streams_for", streams_for)
        patch.setattr(status_flags, "reader_for", reader_for)
        yield here
