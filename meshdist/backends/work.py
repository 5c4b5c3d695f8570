"""Represent one collective in flight: the result of ``async_op=True``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from threading import get_ident, main_thread
from typing import Any, NoReturn, TypeAlias

import torch
from torch._C._distributed_c10d import WorkResult  # type: ignore[attr-defined]

from ..arguments import check_timeout
from ..arrays import StreamPoint, cuda_devices, follow, record_event
from ..checking.call_sites import end_here, is_nested, run_unnested, under_way
from ..error_text import without_frames
from ..errors import BackendError, CollectiveTimeoutError, MeshdistError, NestedCollectiveError
from ..runtime.deadlines import Deadline, wait_until
from .futures import WorkFuture, find_deferral, get_watcher, watched_future
from .requests import BackendFailure, BackendTimeout, Chain, Request
from .simulated.scheduler import find_rank_here

__all__ = [
    "WatchedWork",
    "Work",
    "bound",
    "is_ready",
    "joined",
    "may_be_dropped",
]

_Step: TypeAlias = Callable[[timedelta], "bool | None"]

_MAIN_THREAD = main_thread().ident
_UNSET = timedelta(0)
_AT_ONCE = timedelta(milliseconds=1)


@dataclass(eq=False, repr=False, slots=True)
class Work:
    """Handle of a collective in flight. Do not use its tensors before ``wait`` returns.

    On NCCL, ``wait()`` blocks only the current CUDA stream: the collective may still run on the
    device. Call ``wait()`` again on each other stream that uses the result.

    Args:
        request: The started operation.
        timeout: The timeout of a wait without ``timeout=``.
        explain: Makes the error to raise from a backend's failure and ``note``.
        result: The result's tensors.
        copy_back: Copies the result to its destination at the end.
        operation, group: Their names in messages.
        is_transfer: Whether this is a send or receive, which has no future.
        sync_cupy: Returns arrays to their library, in each thread that has waited.
        note: The call's record number.
        warn_dropped: Called with ``note`` if the Work is collected before a wait, a poll that found
            it done, or a request of its future; None for no warning.
        user: The group, which the Work keeps alive.
        uses_streams: Whether streams may have to wait.
    """

    _request: Request
    _timeout: timedelta
    _explain: Callable[[BackendFailure, int], Exception]
    _result: list[Any]
    _copy_back: Callable[[], None] | None = None
    _operation: str = "operation"
    _group: str = "a group"
    _is_transfer: bool = False
    _sync_cupy: Callable[[], None] | None = None
    _note: int = 0
    _warn_dropped: Callable[[int], None] | None = None
    _user: object = None
    _uses_streams: bool = True
    # One thread at a time ends the collective.
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False)
    _done: bool = field(default=False, init=False)
    _error: Exception | None = field(default=None, init=False)
    _future: torch.futures.Future[list[Any]] | None = field(default=None, init=False)
    _ordered: list[StreamPoint] = field(default_factory=list, init=False)
    _deadline: Deadline | None = field(default=None, init=False)
    # Set in a StartedWork, and kept when it becomes a WatchedWork: a thread may be about to wait.
    _started: Any = field(init=False)

    def __repr__(self) -> str:
        """Return the operation and its state, without a poll."""
        state = "not known to be finished"
        if self._done:
            error = self._error
            state = "finished" if error is None else f"failed with {type(error).__name__}"
        return f"<Work: {self._operation} on {self._group}, {state}>"

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        """Wait for the collective, and return True.

        On NCCL, make the current stream wait; with ``timeout``, block until the device is done.

        Args:
            timeout: The longest wait; zero means the group's timeout.

        Raises:
            CollectiveTimeoutError: The collective is late; the group can no longer be used.
            AbortedError: The group was aborted.
            BackendError: The backend failed, for example because a rank died.
            NestedCollectiveError: A signal handler inside another collective waits for a collective
                that is not done.
        """
        self._warn_dropped = None
        try:
            if timeout:
                check_timeout(timeout)
            request: Any = self._request
            is_over = self._done
            is_plain = request.is_plain and not (timeout or is_over or self._copy_back)
            if is_plain and under_way[0] is None and get_ident() == _MAIN_THREAD:
                try:  # inline: a function would cost each wait a frame
                    under_way[0] = f"wait() of {self._operation}"
                    if request.on_stream:
                        with self._guard:
                            adds_to_stream = request.adds_to_stream
                            is_over = request.wait(0.0) == 0
                            if is_over and adds_to_stream:
                                self._ordered += map(record_event, cuda_devices(self._result))
                    elif not self._uses_streams:
                        is_over = request.wait(self._timeout.total_seconds()) == 0
                        self._done = is_over
                finally:
                    under_way[0] = None
            if not is_over:
                run_unnested(f"wait() of {self._operation}", self._go_on, timeout)
            if self._future is not None:
                self._complete()
            if self._error is not None:
                raise without_frames(self._error)  # so that a kept Work keeps no frames alive
            if self._ordered or self._sync_cupy is not None:
                self._order_streams()
            return True
        except MeshdistError as error:
            __tracebackhide__ = True
            end_here(error)
            raise

    def is_completed(self) -> bool:
        """Return whether the collective is done, without waiting.

        If True, the result is complete, as after ``wait``. A collective fails, and counts as done,
        if it still runs one timeout after the first call. On NCCL, query the device.
        """
        if self._poll():
            if self._future is not None:
                self._complete()
            if self._error is None:
                self._order_streams()
        return self._done

    def is_success(self) -> bool:
        """Return whether the collective is done and succeeded."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return the error of a finished collective, or None."""
        self.is_completed()
        return self._error

    def result(self) -> list[Any]:
        """Wait, and return the result's tensors."""
        self.wait()
        return self._result

    def source_rank(self) -> int:
        """Return the sender's group rank of a finished receive.

        Raises:
            BackendError: The Work is not a receive.
        """
        return self._request.source()

    def synchronize(self) -> None:
        """Wait, as ``wait()`` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Make later work on the current CUDA stream wait for the collective.

        Raises:
            BackendError: The result is on the CPU.
        """
        if not cuda_devices(self._result):
            raise BackendError(
                "block_current_stream() cannot order a stream after a collective on the CPU",
                expected="a collective on CUDA arrays",
                fix="call wait(), which returns when the result is complete",
            )
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """Return a torch Future of the result's tensors.

        It completes when the collective is done, even if no thread waits. Callbacks run in the
        thread that finds the collective done; on a simulated rank, after a wait or at its end; in a
        communication hook, when the reducer waits for the bucket. On NCCL the future is torch's
        own: complete immediately; callbacks run on streams that wait for the result.

        Raises:
            BackendError: The Work is a send or a receive.
        """
        if self._is_transfer:
            raise BackendError(
                "a send or a receive has no future",
                expected="the Work of a collective",
                fix="call wait() or is_completed() on the Work",
            )
        self._warn_dropped = None
        if self._is_in_flight_on_stream():
            return self._future_on_stream()
        with self._guard:
            is_new = self._future is None
            future = self._future = self._future or WorkFuture(
                self._wait_quietly,
                self.is_completed,
                *self._ordering_of_waits(),
            )
        deferral = find_deferral()
        if is_new and deferral is not None:
            deferral.add(future)
        elif is_new:
            self._start_deadline()
            if self._done:
                self._complete()
            else:
                (find_rank_here() or get_watcher()).watch(self._poll, self._complete_on_thread)
        return future

    def get_future_result(self) -> torch.futures.Future[int]:
        """Return a torch Future of the WorkResult's number; it never raises.

        SUCCESS is 0, TIMEOUT 1, and COMM_ERROR (any other failure) 2.

        Raises:
            BackendError: The Work is a send or a receive.
        """
        self._warn_dropped = None
        if self._is_transfer or not self._is_in_flight_on_stream():
            return self.get_future().then(lambda _: int(self._ending()))

        return watched_future(self._has_ended, lambda: int(self._ending()))

    def boxed(self) -> NoReturn:
        """Raise BackendError: torch's dispatcher boxes only torch's own Works."""
        raise BackendError(
            "a Work of meshdist cannot be boxed for torch's dispatcher",
            expected="a Work of torch.distributed, which is a C++ object",
            fix="pass the Work itself, or its get_future()",
        )

    @staticmethod
    def unbox(arg0: object) -> NoReturn:
        """Raise BackendError: see ``boxed``."""
        raise BackendError(
            "unbox() cannot return a Work of meshdist, because such a Work cannot be boxed",
            found=type(arg0).__name__,
            fix="unbox torch's objects with torch.distributed.Work.unbox",
        )

    def _complete(self) -> None:
        """Complete the future, once, with the finished collective's result or error."""
        if isinstance(self._future, WorkFuture):
            self._future.complete(self._result, self._error)

    def _ordering_of_waits(self) -> tuple[list[torch.device], Callable[[], None] | None]:
        """Return the devices on which torch orders a future's waits, or an ordering function."""
        # Other libraries' arrays need the function: torch would pickle them to look for tensors.
        if self._sync_cupy is None:
            return cuda_devices(self._result), None
        return [], self._order_streams

    def _complete_on_thread(self) -> None:
        """Complete the future in another thread; keep its current device."""
        devices = cuda_devices(self._result)
        with torch.cuda.device(devices[0]) if devices else nullcontext():
            self._complete()

    def _wait_quietly(self) -> None:
        try:
            self.wait()
        except Exception as error:  # the future reports it
            with self._guard:
                if not self._done:
                    self._fail(error)
            self._complete()

    def _is_in_flight_on_stream(self) -> bool:
        return self._request.on_stream and not (self._has_ended() and self._error is not None)

    def _future_on_stream(self) -> torch.futures.Future[list[Any]]:
        """Return a complete future whose streams wait for the collective."""
        # For other libraries' arrays, each wait orders their streams in its own thread.

        def finish(_: object) -> list[Any]:  # on the future's own streams
            self._go_on(_UNSET, self._finish)
            self._raise_error()
            return self._result

        with self._guard:
            if self._future is not None:
                return self._future
            enqueued = torch.futures.Future[None](devices=[*cuda_devices(self._result)])
            future = self._future = enqueued.then(finish)
            if self._sync_cupy is not None:
                future = self._future = WorkFuture(lambda: None, lambda: None, (), self.synchronize)
                future.complete(self._result)
        enqueued.set_result(None)
        return future

    def _has_ended(self) -> bool:
        """Return whether the collective is over, without a device query."""
        found = not self._done and self._ask(lambda _: self._request.has_ended())
        return self._done or bool(found)

    def _ask(self, step: _Step) -> bool | None:
        """Run ``step``, which never blocks, unless another thread holds the guard."""
        if not self._guard.acquire(blocking=False):
            return False
        try:
            return self._go_on(_UNSET, step, is_polled=True)
        finally:
            self._guard.release()

    def _go_on(
        self, timeout: timedelta, step: _Step | None = None, *, is_polled: bool = False
    ) -> bool | None:
        """Run ``step``, or wait; return its result, None once the collective has ended."""
        # A backend's error ends the collective, too. If it is polled, the caller holds the guard.
        if step is None:
            is_plain = self._copy_back is None and not self._uses_streams
            step = self._request.finish if is_plain else self._how_to_finish(timeout)
        timeout = timeout or self._timeout
        with threading.Lock() if is_polled else self._guard:
            try:
                if not self._done:
                    found = step(timeout)
                    self._done = found is None
                    return found
            except BackendFailure as failure:
                if is_polled and isinstance(failure, BackendTimeout):  # it is late
                    failure = BackendTimeout.after(timeout)
                failure.limit = timeout
                self._fail(self._explain(failure, self._note))
            except Exception as error:
                # A poll has no waiting caller: wait() and exception() report its failure. The error
                # of a signal handler, such as a nested collective, is not this collective's.
                is_own = is_polled or isinstance(error, MeshdistError)
                if not is_own or isinstance(error, NestedCollectiveError):
                    raise
                self._fail(error)
        return None

    def _how_to_finish(self, timeout: timedelta) -> _Step:
        """Return the step that waits for the device, or copies the result back."""
        if not timeout or not self._request.on_stream:
            return self._finish
        is_over = bool(wait_until(self._request.poll, Deadline(timeout)))
        return partial(self._finish, is_late=not is_over, is_over=is_over)

    def _finish(
        self, timeout: timedelta, *, is_late: bool = False, is_over: bool = False
    ) -> bool | None:
        """Finish the operation, without waiting if ``is_late``; return False if it runs on."""
        # On a stream, the collective has ended only if ``is_over``.
        request, copy_back = self._request, self._copy_back
        adds_to_stream = copy_back is not None or request.adds_to_stream
        if is_late and request.on_stream and not request.poll():
            raise BackendTimeout.after(timeout)  # the device is not done
        request.finish(_AT_ONCE if is_late else timeout)
        self._copy_back = None
        if copy_back is not None:
            try:
                copy_back()
            except Exception as failure:
                self._fail(failure)
                return None
        if adds_to_stream and self._uses_streams:
            self._ordered += map(record_event, cuda_devices(self._result))
        return None if is_over or not request.on_stream else False

    def _order_streams(self) -> None:
        """Make this thread's streams, also of other libraries, wait for the collective."""
        for point in self._ordered:
            follow(point)
        if self._sync_cupy is not None:
            self._sync_cupy()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._copy_back = None
        self._done = True

    def _poll(self) -> bool:
        """Finish the collective if over or late, without blocking; return whether it ended."""
        if not self._done and not is_nested():  # a handler may ask inside another collective
            self._ask(self._finish_if_over)
        return self._done

    def _finish_if_over(self, timeout: timedelta) -> bool | None:
        if self._request.poll():
            return self._finish(timeout, is_over=True)
        is_late = find_rank_here() is None and self._start_deadline().is_over
        return self._finish(timeout, is_late=True) if is_late else False  # no clock in simulate

    def _start_deadline(self) -> Deadline:
        """Return the deadline: one timeout after the first poll."""
        if self._deadline is None:
            self._deadline = Deadline(self._timeout)
        return self._deadline

    def _raise_error(self) -> None:
        if self._error is not None:
            raise without_frames(self._error)

    def _may_be_dropped(self) -> None:
        self._warn_dropped = None

    def _ending(self) -> WorkResult:
        if self._error is None:
            return WorkResult.SUCCESS
        is_late = isinstance(self._error, CollectiveTimeoutError)
        return WorkResult.TIMEOUT if is_late else WorkResult.COMM_ERROR


class WatchedWork(Work):
    """Work that warns if collected unfinished and without a wait."""

    __slots__ = ()

    def __del__(self) -> None:
        if self._warn_dropped is not None and not self._done:
            self._warn_dropped(self._note)


def is_ready(work: Work) -> bool:
    """Return whether a wait would return at once, without running other simulated ranks."""
    return work._done or work._request.is_ready()


def bound(work: Work, timeout: timedelta) -> None:
    """Set the timeout of the operation, and the default timeout of waits."""
    work._request.bound(timeout)  # first, since it makes the fields of a StartedWork
    work._timeout = timeout


def joined(works: Sequence[Work]) -> Work:
    """Return a Work that ends with all ``works``; each explains its own failure."""
    first = works[0]
    if len(works) == 1:
        return first
    names = first._operation, first._group
    dropped = first._note, first._warn_dropped
    parts = Chain([_OfWork(may_be_dropped(work)) for work in works])
    return WatchedWork(
        parts, first._timeout, first._explain, [], None, *names, False, None, *dropped
    )


def may_be_dropped(work: Work) -> Work:
    """Disable the warning of a Work that nothing waits for; return it."""
    work._may_be_dropped()
    return work


@dataclass(eq=False, slots=True)
class _OfWork(Request):
    """A Work as a Request that raises the Work's own error."""

    work: Work

    @property
    def on_stream(self) -> bool:
        return self.work._request.on_stream

    def finish(self, timeout: timedelta) -> None:
        self.work._go_on(_UNSET)
        self.work._raise_error()

    def poll(self) -> bool:
        return self.work._request.poll()

    def has_ended(self) -> bool:
        has_ended = self.work._has_ended()
        self.work._raise_error()
        return has_ended

    def bound(self, timeout: timedelta) -> None:
        bound(self.work, timeout)
