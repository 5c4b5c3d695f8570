"""Run collectives as kernels on device streams: NCCL, and XCCL with the same interface.

A start enqueues the kernel, and a wait blocks the current stream, not the host. So no wait detects
a member that never calls: a thread checks all works (``watch``) ten times a second, and aborts the
communicator of a failed or late call. It uses c10d's state, because a device query would invalidate
another thread's CUDA graph capture. NCCL ends the kernels of an aborted communicator as if done, so
success must be recorded before.

If the caller waits immediately, the collective runs on the current stream without a work (c10d's
``asyncOp=False``) or events. For these calls the thread asks c10d's watchdog, which sees every
kernel and is configured to end nothing.

Source on c10d: ProcessGroupNCCL.cpp and .hpp of pytorch 2.8 to 2.13.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import WorkResult  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from ...checking.call_sites import is_of_handler
from ...errors import MeshdistError
from ...runtime.deadlines import Deadline, wait_until
from ...runtime.hosts import is_ending_by_exception
from ...runtime.timeout_calls import TimeoutCall, keep_thread, watch
from ..communicator import Communicator, Explain
from ..operation_args import OperationArgs
from ..requests import (
    DONE,
    BackendAborted,
    BackendFailure,
    BackendTimeout,
    Request,
    complete,
    failure_of,
    reject_to_complete,
)
from .communicator import CLOSED, C10dCommunicator
from .dtype_fallbacks import NCCL

if TYPE_CHECKING:
    from ..native import FastPath

_log = logging.getLogger("meshdist.nccl")

ENDS_LATER = timedelta(seconds=1)
"""How much longer c10d's own timeout is, so that meshdist reports a late call first."""

_NOTICED_LATER = timedelta(seconds=0.25)
"""How much later c10d's future may be done than its work: c10d's watchdog polls every 0.1 s."""

_ABORT_S = timedelta(seconds=30)

_OF_LISTS = frozenset({"all_gather_list", "reduce_scatter_list"})


is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
"""Whether a CUDA graph is capturing the current stream."""


class DeviceResult:
    """Outcome of a work on a device; does not keep tensors alive."""

    # It does not hold the work, which keeps the tensors' memory.

    result: Any
    """c10d's future of it."""
    limit: timedelta
    """Its timeout, which the watchdog counts from its first check."""
    note: int | None
    """The number of the call's record."""
    # Most works keep these class attributes, which cost a call nothing.
    deadline: Deadline | None = None
    is_good: bool = False
    """Whether it has succeeded."""
    error: MeshdistError | None = None
    """The error that explains why it failed, if it was the first to fail."""

    def bound(self, limit: timedelta) -> None:
        """Set a new timeout, which starts at the next ``look``."""
        self.limit, self.deadline = limit, None

    def look(self) -> BackendFailure | None:
        """Update ``is_good``; return the failure of a failed or late work, else None."""
        if self.result.done():
            result = WorkResult(self.result.value())
            if result == WorkResult.SUCCESS:
                self.is_good = True
                return None
            if result != WorkResult.TIMEOUT:
                return BackendFailure("c10d reports that communication failed")
        if self.deadline is None:
            self.deadline = Deadline(self.limit + _NOTICED_LATER)
        return BackendTimeout.after(self.limit) if self.deadline.is_over else None


class EnqueuedWork(Request):
    """Request for c10d's ``work`` on a stream; ``outcome`` records its end.

    Args:
        communicator: watches it, unless a CUDA graph is captured.
        limit: its timeout.
        then: enqueues the operations that complete the result.
        note: the call's record number.
    """

    __slots__ = ("adds_to_stream", "communicator", "outcome", "then", "work")

    is_plain = True
    on_stream = True
    adds_to_stream: bool

    def __init__(
        self,
        communicator: EnqueueingCommunicator,
        limit: timedelta,
        work: Any,
        then: Callable[[], None] | None,
        note: int | None,
    ) -> None:
        self.communicator, self.work, self.then = communicator, work, then
        self.adds_to_stream = then is not None
        self.outcome = outcome = DeviceResult()
        try:
            outcome.result = work.get_future_result()
        except RuntimeError:  # XCCL
            outcome.result = _PolledResult(work)
        outcome.limit, outcome.note = limit, note
        if communicator.is_on_cuda and is_capturing():
            outcome.is_good = True  # nothing runs now
        else:
            communicator.outcomes.add(outcome)

    def wait(self, seconds: float) -> int:
        """Make the current stream wait, whatever ``seconds``; return 0, or 1 if that fails."""
        communicator = self.communicator
        if communicator.is_aborted or communicator.explaining.locked():
            return 1
        try:
            self.work.wait()
        except RuntimeError as error:
            if is_of_handler(error):
                raise
            return 1
        if communicator.is_aborted or communicator.explaining.locked():
            return 1
        if (then := self.then) is not None:  # inlines ``complete``
            self.then = reject_to_complete
            then()
            self.then, self.adds_to_stream = None, False
        return 0

    def finish(self, timeout: timedelta) -> None:
        self.communicator.finish_work(self, timeout)
        if self.then is not None:
            complete(self)
            self.adds_to_stream = False

    def poll(self) -> bool:
        return self.is_completed()

    def has_ended(self) -> bool:
        return self.communicator.has_ended(self)

    def bound(self, timeout: timedelta) -> None:
        self.outcome.bound(timeout)

    def is_completed(self) -> bool:
        """Query the device; return whether the work is done or failed."""
        return self.outcome.is_good or self.communicator.is_aborted or self.work.is_completed()

    def _source_rank(self) -> int:
        return int(self.work._source_rank())


class EnqueueingCommunicator(C10dCommunicator):
    """Communicator over NCCL or XCCL; ``timeout`` bounds connecting and closing."""

    arithmetic = NCCL
    gathers_uneven = True
    on_stream = True
    averages_at_once = True
    operation_kind = EnqueuedWork

    def __init__(
        self,
        backend: str,
        rank: int,
        size: int,
        process_group: Any,
        device_type: str,
        timeout: timedelta,
    ) -> None:
        super().__init__(backend, rank, size, process_group)
        self._device_type = device_type
        self.is_on_cuda = device_type == "cuda"
        self._timeout = timeout
        self._reports_errors = _reports_errors(process_group)
        self._process_id = os.getpid()
        self._device: torch.device | None = None
        self._explain: Explain | None = None
        self.outcomes: set[DeviceResult] = set()
        # Held while a failure's error is made, so that a wait for the work raises that error.
        self.explaining = threading.Lock()
        self._unraised: MeshdistError | None = None
        self._last_call: TimeoutCall | None = None
        keep_thread()
        watch(self)

    def connect(self, device: torch.device) -> None:
        if self._device is not None:
            return

        def check() -> None:
            if self.is_aborted or self.torch_group is CLOSED:
                raise BackendAborted("aborted while the ranks were connecting")

        check()
        connect = partial(self.torch_group.eager_connect_single_device, device)
        try:
            TimeoutCall(connect, "connect").wait(self._timeout, check)
        except TimeoutError as late:
            raise BackendTimeout(f"the ranks did not connect: {late}") from None
        except RuntimeError as error:
            raise failure_of(error) from None
        self._device = device

    def watch(self, explain: Explain) -> None:
        self._explain = explain

    def take_error(self) -> MeshdistError | None:
        with self.explaining:
            error, self._unraised = self._unraised, None
        return error

    def _barrier(self, prepared: OperationArgs) -> Request:
        options = c10d.BarrierOptions()
        options.timeout = self.own_timeout(prepared.timeout)
        device = prepared.device or self._device
        current = torch.get_device_module(self._device_type).current_device
        options.device_ids = [current() if device is None else device.index]
        options.asyncOp = True  # a blocking barrier would wait for the stream without a timeout
        return self._request(prepared, self._call("barrier", options))

    def fast_path(
        self, entry: Any, explain: Explain, timeout: timedelta, works: tuple[Any, ...]
    ) -> FastPath | None:
        # XCCL returns a work for each call, and may lack collectives, which Python composes.
        return super().fast_path(entry, explain, timeout, works) if self._reports_errors else None

    def finish_work(self, work: EnqueuedWork, timeout: timedelta) -> None:
        self._check_outcome(work.outcome)
        super().finish_work(work.work, timeout)
        self._check_outcome(work.outcome)

    def bound_work(self, work: EnqueuedWork, timeout: timedelta) -> None:
        work.outcome.bound(timeout)

    def has_ended(self, work: EnqueuedWork) -> bool:
        self._check_outcome(work.outcome)
        return work.outcome.is_good

    def look(self) -> None:
        """Check all works in flight; if any failed or is late, log its error and abort."""
        group = self.torch_group
        if self.is_aborted or group is CLOSED:
            return
        for outcome in tuple(self.outcomes):
            failure = outcome.look()
            if failure is not None:
                self._fail(failure, outcome.limit, outcome)
                return
            if outcome.is_good:
                self.outcomes.discard(outcome)
        if self._reports_errors and (failure := self._find_failure(group)) is not None:
            self._fail(failure, self._timeout)

    def abort(self) -> None:
        self.abort_together([self])

    @classmethod
    def abort_together(cls, communicators: Sequence[Communicator]) -> None:
        # One abort may wait for the device, on which another communicator's kernel hangs.
        ours = [each for each in communicators if isinstance(each, cls)]
        groups = {each: group for each in ours if (group := each._cut_off()) is not None}
        if groups:
            call = TimeoutCall(partial(_abort_groups, list(groups.values())), "abort")
            for communicator in groups:
                communicator._last_call = call

    def leave(self) -> None:
        if not self.is_aborted and self._process_id == os.getpid():
            self._shut_down()

    def close(self) -> None:
        group = self.torch_group
        if group is CLOSED:
            return
        if self._process_id != os.getpid():  # its threads, and CUDA, exist only in the parent
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        else:
            if is_ending_by_exception():  # other members may never make the calls in flight
                self.abort()
            if self.is_aborted:
                self._wait_for_last_call(_ABORT_S)
            else:
                self._shut_down()
        self.torch_group = CLOSED
        self.is_aborted = True  # operations that have not ended by now never will

    def _shut_down(self) -> None:
        """Run c10d's shutdown once; wait for kernels up to the timeout."""
        if self._last_call is not None:
            return
        self._last_call = TimeoutCall(self.torch_group.shutdown, "shutdown")
        if self._wait_for_last_call(self._timeout):
            for outcome in tuple(self.outcomes):
                outcome.is_good = outcome.look() is None

    def _wait_for_last_call(self, limit: timedelta) -> bool:
        """Wait up to ``limit`` for the shutdown or abort; return whether it succeeded."""
        call = wait_until(lambda: self._last_call, Deadline(limit))  # an abort may just begin
        try:
            if call is not None:
                call.wait(limit)
        except (TimeoutError, RuntimeError) as error:
            _log.warning(
                "rank %d failed to close its group on %s: %s", self.rank, self.backend, error
            )
            return False
        return True

    def _cut_off(self) -> Any:
        """Mark as aborted, so that waits fail; return c10d's group, None if already marked."""
        group = self.torch_group
        if self.is_aborted or group is CLOSED:
            return None
        for outcome in tuple(self.outcomes):
            outcome.look()
        self.is_aborted = True
        self.outcomes.clear()
        self._mailbox.abort()
        return group

    def _fail(
        self, failure: BackendFailure, limit: timedelta, outcome: DeviceResult | None = None
    ) -> None:
        """Log the error of ``failure`` in ``outcome``'s work, keep it for waits, and abort."""
        failure.limit, error = limit, None
        with self.explaining:
            try:
                note = None if outcome is None else outcome.note
                error = failure if self._explain is None else self._explain(failure, note)
                if isinstance(error, MeshdistError):
                    self._unraised = error
                    if outcome is not None:
                        outcome.error = error
            finally:
                self.abort()
        _log.error("%s", error)

    def _find_failure(self, group: Any) -> BackendFailure | None:
        """Return the failure that c10d's watchdog has found, or None."""
        found = group.get_error().name
        if found == "SUCCESS":
            return None
        if found == "TIMEOUT":
            return BackendTimeout.after(self._timeout)
        return BackendFailure(f"{self.backend.upper()} reports {found}")

    def _check_outcome(self, outcome: DeviceResult) -> None:
        """Raise the error of a work that an abort interrupted."""
        if outcome.is_good or not (self.is_aborted or self.explaining.locked()):
            return
        with self.explaining:  # the watchdog may be about to say why
            pass
        if not self.is_aborted:  # another thread has only taken the error
            return
        error = outcome.error
        if error is None:
            raise BackendAborted("aborted while running on the device")
        if self._unraised is error:
            self._unraised = None
        raise error.with_traceback(None)

    def _is_async(self, prepared: OperationArgs) -> bool:
        # Only c10d bounds calls without a work, with the timeout of the group. A list's collective
        # may be split into several, whose end c10d detects only on its own stream.
        leaves_none = prepared.waits and self._reports_errors and prepared.timeout == self._timeout
        return not leaves_none or prepared.backend_operation in _OF_LISTS

    def _request(self, prepared: OperationArgs, work: Any, note: int | None = None) -> Request:
        if work is None:
            return DONE
        number = prepared.number if note is None else note
        started = EnqueuedWork(self, prepared.timeout, work, None, number)
        if not prepared.waits:
            return started
        started.finish(prepared.timeout)
        return DONE

    def _started(self, work: Any, prepared: OperationArgs) -> EnqueuedWork:
        return EnqueuedWork(self, prepared.timeout, work, None, prepared.number)


@dataclass(eq=False, slots=True)
class _PolledResult:
    """Result of a work without a c10d future; ``done`` polls the device."""

    work: Any

    def done(self) -> bool:
        return bool(self.work.is_completed())

    def value(self) -> int:
        return int(WorkResult.SUCCESS)


def _reports_errors(group: Any) -> bool:
    """Return whether c10d's watchdog reports its errors."""
    try:
        group.get_error()
    except (AttributeError, RuntimeError):  # XCCL, or an older torch
        return False
    return True


def _abort_groups(groups: Sequence[Any]) -> None:
    """Abort process groups in parallel threads, as one group of NCCL calls; log failures."""
    first = groups[0]
    has_groups = hasattr(first, "_group_start")
    if has_groups:
        first._group_start()
    try:
        for call in [TimeoutCall(group.abort, "abort") for group in groups]:
            try:
                call.wait(_ABORT_S)
            except (TimeoutError, RuntimeError) as error:
                _log.error("failed to abort a process group: %s", error)
    finally:
        if has_groups:
            first._group_end()
