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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch

from ...runtime.deadlines import Deadline
from ...verb_table import WIRE_VERBS, Form
from ..communicator import Communicator, Explain
from ..operations import Chain, Operation, QueuedOperation, WireAborted, WireFailure, WorkerQueue
from ..prepared import PreparedCall, Tensors, writing


@dataclass(eq=False, slots=True)
class _Queued(Operation):
    """An operation that starts when its copies are complete, for which ``begin`` waits."""

    communicator: StagedCommunicator
    begin: Callable[[], Operation]
    job: QueuedOperation | None = field(default=None, init=False)
    started: Operation | None = field(default=None, init=False)

    def run(self) -> None:
        """Start the operation, on the queue's thread."""
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


class StagedCommunicator(Communicator):
    """Communicator of CUDA tensors, which runs the verbs of ``host`` on copies in host memory."""

    ways: ClassVar[Mapping[str, str]] = {}  # all are the host's
    wants_senders = True

    def __init__(self, host: Communicator) -> None:
        super().__init__(host.wire, host.rank, host.size)
        self.host = host
        self.is_over = False
        self._queue = WorkerQueue(self.abort)
        self._queueing = threading.Lock()
        self._failure: WireFailure | None = None  # since which nothing starts any more

    def start(self, prepared: PreparedCall) -> Operation:
        """Start the host's call on copies, queued if earlier calls or the copies are not done."""
        verb, outputs = WIRE_VERBS[prepared.way], prepared.outputs
        sent, is_written = prepared.inputs, bool(outputs)
        if verb.takes is Form.IN_PLACE:
            is_root = self.rank == prepared.root
            sent = outputs if is_root or verb.root != "from" else ()
            is_written = not verb.root or is_root == (verb.root == "to")
            given = taken = _down(sent) if sent else _places(outputs)
        else:
            given, taken = _down(sent), _places(outputs)
        events = _events(sent)
        if verb.takes is verb.gives is Form.NONE and torch.cuda.is_initialized():
            events = [_event(torch.cuda.current_device())]
        then = partial(_copy, outputs, taken) if is_written else None
        host = prepared.by(
            *(prepared.way, given, taken, prepared.op, prepared.root),
            *(prepared.sizes, prepared.tag),
        )
        with self._queueing:  # another thread may receive
            is_next = self._queue.is_idle
            if not is_next or (events and not prepared.waits):
                # The thread has to start others, too.
                queued = _Queued(self, partial(self._begin, host.as_async(), events, then))
                queued.job = self._queue.start(queued.run)
                return queued
        return self._begin(host, events, then)

    def has_sent_itself(self, tag: int) -> bool:
        return self.host.has_sent_itself(tag)

    def batch(self, explain: Explain) -> AbstractContextManager[None]:
        return self.host.batch(explain)

    def wait_for(self, condition: Callable[[], bool], timeout: timedelta) -> None:
        self.host.wait_for(condition, timeout)

    def watch(self, explain: Explain) -> None:
        self.host.watch(explain)

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

    def _begin(
        self, prepared: PreparedCall, events: Sequence[Any], then: Callable[[], None] | None
    ) -> Operation:
        """Wait for ``events``, then start the host's call; ``then`` copies its result back."""
        try:
            for event in events:
                event.synchronize()
            if self._failure is not None:
                raise self._failure
            return Chain([self.host.start(prepared)], then)
        except BaseException as error:  # of a signal's handler, too
            self._fail(error)
            if isinstance(error, RuntimeError):  # of the device
                raise WireFailure(f"{error}") from None
            raise

    def _fail(self, error: BaseException) -> None:
        """Refuse all later calls with ``error``, since this member has left out a call."""
        if not isinstance(error, WireFailure):
            error = WireFailure(f"an earlier call did not start: {type(error).__name__}: {error}")
        self._failure = self._failure or error


def _places(tensors: Tensors) -> list[torch.Tensor]:
    """Return host memory for each tensor, pinned where it lies on a GPU."""
    return [torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda) for x in tensors]


def _down(tensors: Tensors) -> list[torch.Tensor]:
    """Return copies of ``tensors`` in host memory, complete once ``_events(tensors)`` are."""
    copies = _places(tensors)
    _copy(copies, tensors)
    return copies


def _copy(outputs: Tensors, sources: Tensors) -> None:
    """Queue a copy of each source into its output, on the current streams."""
    with writing():
        for output, source in zip(outputs, sources, strict=True):
            output.copy_(source, non_blocking=True)
            if output.is_cuda:  # this may be another thread, with another stream
                output.record_stream(torch.cuda.current_stream(output.device))


def _events(tensors: Tensors) -> list[torch.cuda.Event]:
    """Return the events that are reached when all that was queued for the tensors is complete."""
    return [_event(device) for device in {x.device for x in tensors if x.is_cuda}]


def _event(device: torch.device | int) -> torch.cuda.Event:
    """Return an event at the end of a device's current stream; to wait for it takes no core."""
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event
