"""Runs a function in some processes that share one segment, and returns what each returned."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from meshdist.backends import native
from tests.inner import end_with_parent
from tests.load import load_factor
from tests.native.named_core import NamedCore

SLOT_BYTES = 128 * 1024
RING_BYTES = 64 * 1024

OK = native.STATUSES["OK"]


class RankError(Exception):
    """A rank raised, or was not done in time."""


class Killed:
    """What a rank that ended by a signal returned."""

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode


def _main(rank: int, parent: int, fd: int, pipe: Any, body: Callable[..., Any]) -> None:
    end_with_parent(parent)
    torch.set_num_threads(1)  # the ranks share two cores
    pids = pipe.recv()
    pidfds = [-1 if pid == os.getpid() else os.pidfd_open(pid) for pid in pids]
    try:
        communicator = NamedCore(fd, rank, pidfds)
        os.close(fd)
        pipe.send(("attached", None))
        pipe.recv()
        pipe.send(("returned", body(communicator)))
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))
    pipe.recv()  # stay until all are done, so that nobody is taken for dead
    os._exit(0)


def run_ranks(
    size: int,
    body: Callable[..., Any],
    *,
    slot_bytes: int = SLOT_BYTES,
    ring_bytes: int = RING_BYTES,
    is_crowded: bool | None = None,
    seconds: float = 30.0,
    meanwhile: Callable[[list[int]], None] | None = None,
) -> list[Any]:
    """Call ``body(communicator)`` in ``size`` forked processes; ``meanwhile(pids)`` runs here."""
    context = multiprocessing.get_context("fork")
    if is_crowded is None:
        is_crowded = size > (os.cpu_count() or 1)
    fd = native.create_segment(size, slot_bytes, ring_bytes, is_crowded)
    pipes, processes = [], []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_main, args=(rank, os.getpid(), fd, theirs, body))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        pids = [process.pid for process in processes]
        for pipe in pipes:
            pipe.send(pids)
        for pipe in pipes:
            _receive(pipe, time.monotonic() + seconds)
        for pipe in pipes:
            pipe.send("go")
        if meanwhile is not None:
            meanwhile(pids)
        end = time.monotonic() + seconds
        results = []
        for pipe, process in zip(pipes, processes, strict=True):
            try:
                results.append(_receive(pipe, end))
            except EOFError:
                process.join(5)
                results.append(Killed(process.exitcode))
        for pipe, process in zip(pipes, processes, strict=True):
            if process.is_alive():
                pipe.send("leave")
        for process in processes:
            process.join(5)
        return results
    finally:
        os.close(fd)
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in pipes:
            pipe.close()


def _receive(pipe: Any, end: float) -> Any:
    left = max(0.0, end - time.monotonic())
    if not pipe.poll(left) and not pipe.poll(left * (load_factor() - 1)):
        raise RankError("a rank did not answer in time")
    kind, value = pipe.recv()
    if kind == "raised":
        raise RankError(value)
    return value
