"""Save in the background: the program continues once its values are copied to host memory.

Each rank's thread writes its part. The next save, a load, or the end of the world waits for it.
"""

from __future__ import annotations

import logging
import threading
from functools import cache

import torch

from ..bootstrap.world import World
from ..collectives.torch_private import hidden_from_modes
from ..error_text import without_frames
from .save_jobs import SaveJob

_log = logging.getLogger("meshdist.checkpoint")


class PendingSave:
    """A save that may still be running, returned by ``save_async``."""

    def __init__(self, path: str, job: SaveJob | None = None) -> None:
        self.path = path
        """The folder of the checkpoint, once it is complete."""
        self._job = job
        """The save; None after ``wait``."""
        self._error: Exception | None = None
        self._thread = threading.Thread(target=_write, args=(job,), name="meshdist-checkpoint")
        if job is not None:
            self._thread.start()
            if job.members.world is not None and job.members.world.is_simulated:
                self._thread.join()  # one simulated rank runs at a time

    @property
    def done(self) -> bool:
        """Return whether this rank has finished writing, successfully or not; no communication."""
        return not self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Return whether ``wait`` has raised an error."""
        return self._error is not None

    @hidden_from_modes
    def wait(self) -> None:
        """Wait until the checkpoint is complete and on disk on all ranks; collective.

        Raises:
            CheckpointError: a rank failed to write its part or to complete the checkpoint.
            GroupClosedError: the world was closed earlier.
        """
        if self._job is not None:
            self._thread.join()
            try:
                self._job.end()
            except Exception as error:
                # Keep a copy without frames, to avoid a reference cycle.
                self._error = without_frames(error)
            self._job = None
        if self._error is not None:
            raise without_frames(self._error)

    def finalize(self) -> None:
        """Wait until this rank has written its part; raise its error unless ``wait`` has."""
        if self._job is not None:
            self._thread.join()
            self._job.raise_error()


def _write(job: SaveJob) -> None:
    job.write()
    if job.error is not None:  # the program may call wait() much later, or never
        _log.error("meshdist: rank %d could not save its part: %s", job.members.rank, job.error)


class Staging:
    """The last asynchronous save of a world or process, and its reusable host memory."""

    def __init__(self) -> None:
        self._slot: dict[str, torch.Tensor] = {}
        """The reusable host memory, by array name."""
        self._pending: PendingSave | None = None

    def finalize(self) -> None:
        """Settle the last save, if any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finalize()

    def start(self, job: SaveJob) -> PendingSave:
        """Copy this rank's arrays, and start a save in a thread."""
        try:
            job.pieces = self._slot = _host_copies(job.views(), self._slot)
        except Exception as error:  # for example, out of memory: all ranks raise it later
            job.error = error
        self._pending = PendingSave(job.final, job)
        return self._pending


def _host_copies(
    views: dict[str, torch.Tensor], slot: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return host copies of ``views``, in the memory of ``slot`` if it fits."""
    copies, streams = {}, []
    for name, view in views.items():
        copied = slot.get(name)
        if copied is None or copied.shape != view.shape or copied.dtype != view.dtype:
            copied = torch.empty(
                view.shape, dtype=view.dtype, device="cpu", pin_memory=view.is_cuda
            )
        copies[name] = copied
        if view.is_cuda:
            # Use a separate stream, to overlap with the program's kernels.
            stream = torch.cuda.Stream(view.device)
            stream.wait_stream(torch.cuda.current_stream(view.device))
            with torch.cuda.stream(stream):
                copied.copy_(view, non_blocking=True)
            streams.append(stream)
        else:
            copied.copy_(view)
    for stream in streams:
        stream.synchronize()
    return copies


def staging_of(world: World | None) -> Staging:
    """Return the asynchronous saves of ``world``, or of this process."""
    if world is None:
        return _staging_alone()
    if world.saves is None:
        world.saves = Staging()
        world.closers.append(world.saves.finalize)
    staging: Staging = world.saves
    return staging


@cache
def _staging_alone() -> Staging:
    return Staging()
