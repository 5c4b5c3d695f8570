"""CUDA tensors over an MPI that knows host memory alone: by way of pinned copies.

A verb queues its copies to host memory on the caller's stream and goes on. A thread starts MPI's
operations when their copies are complete, in the order of the calls, as MPI demands of all members.
A verb whose caller waits starts here where nothing is queued before it. Results are copied back on
the stream of the thread that finishes a verb, and the host does not wait for that.

Pinned memory comes from torch's allocator, which keeps blocks that are dropped, and hands them out
again when the copies from and to them are done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from ...reduce_ops import ReduceKind
from ...runtime.deadlines import Deadline
from ..communicator import Communicator, handed_to
from ..failures import WireAborted, WireFailure
from ..operations import Chain, Job, Operation, Terms, WorkerQueue

__all__ = ["StagedCommunicator"]


@dataclass(eq=False, slots=True)
class _Queued(Operation):
    """An operation that starts when its copies are complete, for which ``begin`` waits."""

    communicator: StagedCommunicator
    begin: Callable[[], Operation]
    job: Job | None = field(default=None, init=False)
    started: Operation | None = field(default=None, init=False)

    def run(self) -> None:
        """Start it; for the queue's thread."""
        self.started = self.begin()

    def finish(self, timeout: timedelta) -> None:
        assert self.job is not None
        deadline = Deadline(timeout)
        self.communicator.wait_for(self.job.poll, timeout)
        self.job.finish(deadline.left)  # raises why it has not started
        assert self.started is not None
        self.started.finish(deadline.left)

    def poll(self) -> bool:
        assert self.job is not None
        if not self.job.poll():
            return self.communicator.is_over
        return self.started is None or self.started.poll()

    def source(self) -> int:
        return Operation.source(self) if self.started is None else self.started.source()


def _staged(verb: str) -> Any:
    """A verb that writes its first argument and reads its second, by way of host memory."""

    def start(self: StagedCommunicator, output: Any, data: Any, *more: Any) -> Operation:
        result, copy = _places(output), _down(data)
        then = partial(_copy, output, result)
        return self.start(verb, _events(data), then, result, copy, *more)

    return start


class StagedCommunicator(Communicator):
    """The verbs of ``host``, for tensors on a device; ``is_over`` once it was aborted or closed."""

    wants_senders = True
    holds_callers = True

    def __init__(self, host: Communicator) -> None:
        super().__init__(host.wire, host.rank, host.size)
        self.host = host
        self.is_over = False
        self._queue = WorkerQueue(self.abort)
        self._queueing = threading.Lock()
        self._failure: WireFailure | None = None  # since which nothing starts any more

    all_gather = _staged("all_gather")
    all_gather_list = _staged("all_gather_list")
    all_to_all = _staged("all_to_all")
    all_to_all_single = _staged("all_to_all_single")
    gather = _staged("gather")
    reduce_scatter = _staged("reduce_scatter")
    reduce_scatter_list = _staged("reduce_scatter_list")
    scatter = _staged("scatter")

    def all_reduce(self, tensor: torch.Tensor, op: ReduceKind, terms: Terms) -> Operation:
        copy = _down(tensor)
        then = partial(_copy, tensor, copy)
        return self.start("all_reduce", _events(tensor), then, copy, op, terms)

    def reduce(self, tensor: torch.Tensor, op: ReduceKind, root: int, terms: Terms) -> Operation:
        copy = _down(tensor)
        then = partial(_copy, tensor, copy) if self.rank == root else None
        return self.start("reduce", _events(tensor), then, copy, op, root, terms)

    def broadcast(self, tensor: torch.Tensor, root: int, terms: Terms) -> Operation:
        if self.rank == root:
            copy = _down(tensor)
            return self.start("broadcast", _events(tensor), None, copy, root, terms)
        result = _places(tensor)
        return self.start("broadcast", (), partial(_copy, tensor, result), result, root, terms)

    def barrier(self, terms: Terms, device: torch.device | None = None) -> Operation:
        here = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        return self.start("barrier", [_event(one) for one in here], None, terms)

    def send(self, tensor: torch.Tensor, peer: int, tag: int, terms: Terms) -> Operation:
        copy = _down(tensor)
        return self.start("send", _events(tensor), None, copy, peer, tag, terms)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, terms: Terms) -> Operation:
        result = _places(tensor)
        return self.start("recv", (), partial(_copy, tensor, result), result, peer, tag, terms)

    has_sent_itself = handed_to("host", "has_sent_itself")
    batch = handed_to("host", "batch")
    wait_for = handed_to("host", "wait_for")
    watch = handed_to("host", "watch")

    def abort(self) -> None:
        self.is_over = True
        self._fail(WireAborted("the communicator was aborted"))
        self.host.abort()

    def leave(self) -> None:
        self._queue.end()  # others may wait for what is queued
        self.host.leave()

    def close(self) -> None:
        self._queue.end()
        self.is_over = True
        self._fail(WireFailure("the communicator was closed"))
        self.host.close()

    def start(
        self,
        verb: str,
        events: Sequence[Any],
        then: Callable[[], None] | None,
        *arguments: Any,
    ) -> Operation:
        """Start a verb of the host, once ``events`` and all calls before it allow that; ``then``
        copies its result to the device.
        """
        *others, terms = arguments
        with self._queueing:  # another thread may receive
            is_next = self._queue.is_idle
            if not is_next or (events and not terms.waits):
                later = terms._replace(waits=False)  # the thread has to start others, too
                begin = partial(self._begin, verb, events, then, *others, later)
                queued = _Queued(self, begin)
                queued.job = self._queue.start(queued.run)
                return queued
        return self._begin(verb, events, then, *arguments)

    def _begin(
        self,
        verb: str,
        events: Sequence[Any],
        then: Callable[[], None] | None,
        *arguments: Any,
    ) -> Operation:
        try:
            for event in events:
                event.synchronize()
            if self._failure is not None:
                raise self._failure
            return Chain([getattr(self.host, verb)(*arguments)], then)
        except BaseException as error:  # of a signal's handler, too
            self._fail(error)
            if isinstance(error, RuntimeError):  # of the device
                raise WireFailure(f"{error}") from None
            raise

    def _fail(self, error: BaseException) -> None:
        """Let nothing start any more: this member has left out a call that the others make."""
        if not isinstance(error, WireFailure):
            error = WireFailure(f"an earlier call did not start: {type(error).__name__}: {error}")
        self._failure = self._failure or error


def _places(x: Any) -> Any:
    """Host memory for a tensor, or each of several, pinned where they lie on a GPU."""
    if isinstance(x, torch.Tensor):
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return [_places(one) for one in x]


def _down(x: Any) -> Any:
    """Copies in host memory, complete when ``_events(x)`` are reached."""
    copies = _places(x)
    _copy(copies, x)
    return copies


def _copy(output: Any, data: Any) -> None:
    """Queue copies of one tensor, or of each of several, on the current streams."""
    outputs, sources = _listed(output), _listed(data)
    with torch.inference_mode():  # they may be parameters, or inference tensors
        for one, source in zip(outputs, sources, strict=True):
            one.copy_(source, non_blocking=True)
            if one.is_cuda:  # this may be another thread, with another stream
                one.record_stream(torch.cuda.current_stream(one.device))


def _events(x: Any) -> list[torch.cuda.Event]:
    """The events that are reached when all that was queued for ``x`` so far is complete."""
    return [_event(device) for device in {one.device for one in _listed(x) if one.is_cuda}]


def _event(device: torch.device | int) -> torch.cuda.Event:
    """An event at the end of a device's current stream; to wait for it takes no core."""
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _listed(x: Any) -> list[torch.Tensor]:
    return [x] if isinstance(x, torch.Tensor) else list(x)
