"""Implement torch's Work and futures on meshdist's Work.

Torch's reducer waits for futures in C++, which cannot call Python methods. So a thread of the group
waits for its collectives in starting order. A separate thread completes each future, because a
callback may wait for another future.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as torch_distributed
from torch._C._profiler import _RecordFunctionFast

from ..backends.requests import DONE, WorkerQueue
from ..backends.simulated.scheduler import find_rank_here
from ..backends.work import Work
from ..collectives.torch_private import ENDS_RECORDS_ANYWHERE

_UNSET = timedelta(0)
_PATIENCE_S = 1.0

_completing: WeakSet[threading.Thread] = WeakSet()


class TorchWork(torch_distributed.Work):
    """A torch Work of several collectives; without ``works``, it is done.

    Args:
        recordings: threads that end the profiler's records; a wait awaits them, too.
        num_blocks: if not 0, each result tensor is split into so many blocks, as by Gloo.
    """

    def __init__(
        self,
        works: Sequence[Work],
        result: list[Any],
        completer: WorkerQueue,
        recordings: Sequence[threading.Thread] = (),
        num_blocks: int = 0,
    ) -> None:
        super().__init__()
        self._works = works
        self._result = result
        self._completer = completer
        self._future: torch.futures.Future[Any] | None = None
        self._recordings = recordings
        self._num_blocks = num_blocks

    @classmethod
    def joined(cls, parts: Sequence[TorchWork], completer: WorkerQueue) -> TorchWork:
        """Return a Work of several, whose result lists all results.

        Args:
            completer: its thread waits for the collectives once the Work's future is requested.
        """
        works = [work for part in parts for work in part._works]
        recordings = [thread for part in parts for thread in part._recordings]
        return cls(works, [x for part in parts for x in part._blocks()], completer, recordings)

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        """Wait for all collectives, each up to ``timeout`` (zero: the group's)."""
        try:
            for work in self._works:
                work.wait(timeout)
            return True
        finally:
            for thread in self._recordings:
                thread.join()

    def end_with(self, records: list[Any], is_async: bool) -> None:
        """End the profiler's ``records`` with the collective, or at an async call's start."""
        # A thread that ends the record holds its last reference, so the profiler sees that the
        # collective ran in the background. torch 2.11 drops such a record, so it ends there when
        # the async call has started. A simulated rank has one thread.
        if not ENDS_RECORDS_ANYWHERE or find_rank_here() is not None:
            return self._record(records, () if is_async else self._works)
        thread = threading.Thread(target=self._record, args=(records, self._works), daemon=True)
        self._recordings = [thread]
        thread.start()

    def _record(self, records: list[Any], works: Sequence[Any]) -> None:
        try:
            with suppress(Exception):  # wait() raises it
                for work in works:
                    work.wait()
        finally:
            end_records(records)

    def synchronize(self) -> None:
        """Wait, as ``wait()`` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether all collectives are done or have failed, without waiting."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all collectives have succeeded."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        """Return the first failed collective's error, or None."""
        return next(filter(None, (work.exception() for work in self._works)), None)

    def result(self) -> list[Any]:
        """Wait, and return the result's tensors."""
        self.wait()
        return self._blocks()

    def _blocks(self) -> list[Any]:
        # Create the views only on request: most callers do not read the result.
        if not self._num_blocks:
            return self._result
        return [
            x for whole in self._result for x in torch.atleast_1d(whole).chunk(self._num_blocks)
        ]

    def source_rank(self) -> int:
        """Return the group rank of a finished receive's sender; else raise BackendError."""
        for work in self._works:
            return work.source_rank()
        return DONE.source()  # raises, because this is not a receive

    _source_rank = source_rank  # the name that torch's front end calls

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a Future of the result's tensors; its errors become RuntimeErrors."""
        if self._future is None:
            done: torch.futures.Future[None] = torch.futures.Future()
            # C++ raises the exception of a callback, but not a Future's own exception.
            self._future = done.then(self._outcome)
            # torch's C++ would wait, and no other thread may complete it
            if find_rank_here() is not None:
                with suppress(Exception):  # the callback raises it
                    self.wait()
            if self.is_completed():
                done.set_result(None)
            else:
                self._completer.start(lambda: self._complete(done))
        return self._future

    def _complete(self, done: torch.futures.Future[None]) -> None:
        with suppress(Exception):  # the callback raises it
            self.wait()
        thread = threading.Thread(target=done.set_result, args=(None,), daemon=True)
        thread.start()
        _completing.add(thread)

    def _outcome(self, _: object) -> list[Any]:
        error = self.exception()
        if error is not None:
            raise error
        return self._blocks()


@atexit.register
def _await_callbacks() -> None:
    """Wait for callbacks before the interpreter exits, which would end their threads."""
    for thread in list(_completing):
        thread.join(_PATIENCE_S)


def begin_record(op_name: str, given: Sequence[Any]) -> list[Any]:
    """Begin a torch profiler record with tensor shapes, for ``end_with``."""
    records = [_RecordFunctionFast(op_name, list(tensors_of(given)))]
    records[0].__enter__()
    return records


def end_records(records: list[Any]) -> None:
    """End and drop the profiler's ``records`` that have not ended."""
    # If a record outlives its profiler (a traceback can keep it alive), it writes to freed memory.
    while records:
        records.pop().__exit__(None, None, None)


def tensors_of(given: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments and nested lists."""
    for argument in given:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors_of(argument)
