"""Saves that do not wait: the program goes on as soon as its values are copied.

Two slots of host memory are kept: values are copied to the free slot while the other is written. A
thread writes, and commits through the store, so that the program's groups stay the program's.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from functools import cache, partial

import torch

from ..bootstrap.world import World
from ..error_text import without_frames
from ..errors import CheckpointError
from .members import Members, MembersInStore
from .save_jobs import SaveJob


class PendingSave:
    """A save that may still be under way: what ``save_async`` returns."""

    def __init__(self, path: str, *, is_there: bool = False) -> None:
        self.path = path
        """The folder that will be there."""
        self._has_ended = threading.Event()
        if is_there:
            self._has_ended.set()
        self._error: BaseException | None = None
        self.was_raised = False
        """Whether ``wait`` has raised its failure."""

    @property
    def done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._has_ended.is_set()

    def wait(self) -> None:
        """Return once the checkpoint is whole and on disk.

        Raises:
            CheckpointError: it failed, on every rank, whichever rank's disk it was.
        """
        self._has_ended.wait()
        if self._error is not None:
            self.was_raised = True
            # A copy: else this object would hold the error, whose frames hold this object.
            raise without_frames(self._error)

    def fails_anew(self) -> bool:
        """Wait for the save; return whether it failed, and ``wait`` has not raised that yet."""
        self._has_ended.wait()
        return self.has_failed and not self.was_raised

    @property
    def has_failed(self) -> bool:
        """Return whether it has ended with an error."""
        return self._error is not None

    def run(self, job: SaveJob, messages: Members | MembersInStore) -> None:
        """Finish ``job``, with ``messages`` between its ranks; keep any error for ``wait``."""
        try:
            job.finish(messages)
        except BaseException as error:
            self._error = error
        self._has_ended.set()

    def report(self) -> None:
        """Wait for the save; print its error unless ``wait`` raised it."""
        self._has_ended.wait()
        if self._error is not None and not self.was_raised:
            sys.excepthook(type(self._error), self._error, self._error.__traceback__)


def settle(pending: PendingSave | None, members: Members) -> None:
    """Wait for ``pending``; raise its error on all members unless all have done so; collective."""
    # Members may differ in whether they have raised it: the first calls ``wait``, say, to report
    # how the save went, and goes on. Each by itself would then raise here, or begin the next save,
    # which waits for the others. So the first raises it once more, with them.
    if not members.has_any(pending is not None and pending.fails_anew()):
        return
    if pending is not None:
        pending.wait()
    raise CheckpointError(
        f"{members.call}: an earlier save of other ranks has failed",
        expected="a save that begins on every rank, or on none",
        fix="save again",
    )


class Staging:
    """The asynchronous saves of a world or process, each after the save before."""

    def __init__(self) -> None:
        self._slots: list[dict[str, torch.Tensor]] = [{}, {}]
        """The host memory that is kept, by names of arrays."""
        self._pending: PendingSave | None = None
        self._messages: list[MembersInStore] = []

    def close(self) -> None:
        """Wait for the last save; raise its error unless it has been raised."""
        pending = self._take()
        if pending is not None and pending.fails_anew():
            pending.wait()

    def settle(self, members: Members) -> None:
        """Wait for the last save; raise its error unless all have raised it; collective."""
        settle(self._take(), members)

    def _take(self) -> PendingSave | None:
        pending, self._pending = self._pending, None
        if pending is not None:
            atexit.unregister(pending.report)
        return pending

    def start(self, job: SaveJob, world: World | None) -> PendingSave:
        """Copy this rank's arrays, wait for the previous save, return a save that a thread makes.

        Args:
            world: None in a process without a world; simulated ranks have saved on return.
        """
        # All ranks are here, so that they have read how the save before the last has ended.
        while len(self._messages) > 1:
            self._messages.pop(0).forget()
        try:
            job.pieces = self._slots[0] = _host_copies(job.views(), self._slots[0])
        except Exception as error:  # such as a lack of memory, on this rank: all will raise it
            job.error = error
        try:
            self._slots.reverse()
            self.settle(job.members)
        except BaseException:
            job.drop()
            raise
        pending = PendingSave(job.final)
        messages: Members | MembersInStore = job.members
        if world is not None and world.is_simulated:
            pending.run(job, messages)  # simulated ranks have no threads beside them
        else:
            if world is not None:
                messages = MembersInStore(world, job.members, os.path.basename(job.path))
                self._messages.append(messages)
            run = partial(pending.run, job, messages)
            threading.Thread(target=run, name="meshdist-checkpoint").start()
        self._pending = pending
        atexit.register(pending.report)
        return pending


def _host_copies(
    views: dict[str, torch.Tensor], slot: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return copies of ``views`` on the host, in the memory of ``slot`` if it fits."""
    copies, streams = {}, []
    for name, view in views.items():
        kept = slot.get(name)
        if kept is None or kept.shape != view.shape or kept.dtype != view.dtype:
            kept = torch.empty(view.shape, dtype=view.dtype, device="cpu", pin_memory=view.is_cuda)
        copies[name] = kept
        if view.is_cuda:
            # On a stream of its own, so that kernels of the program run meanwhile.
            stream = torch.cuda.Stream(view.device)
            stream.wait_stream(torch.cuda.current_stream(view.device))
            with torch.cuda.stream(stream):
                kept.copy_(view, non_blocking=True)
            streams.append(stream)
        else:
            kept.copy_(view)
    for stream in streams:
        stream.synchronize()
    return copies


def staging_of(world: World | None) -> Staging:
    """Return the asynchronous saves of ``world``, of this process for None."""
    if world is None:
        return _staging_alone()
    if world.saves is None:
        world.saves = Staging()
        world.closers.append(world.saves.close)
    assert isinstance(world.saves, Staging)
    return world.saves


@cache
def _staging_alone() -> Staging:
    return Staging()
