"""What ``async_op=True`` gives: one verb in flight."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from ..errors import BackendError
from ..runtime.timeouts import check_timeout
from .base import Communicator, Pending, WireFailure

__all__ = ["Work"]

_UNSET = timedelta(0)


class Work:
    """One verb in flight. Until ``wait`` returns, leave its tensors alone.

    On CUDA ``wait()`` orders the current stream after the verb; the CPU goes on.
    """

    __slots__ = (
        "_communicator",
        "_done",
        "_error",
        "_explain",
        "_pending",
        "_result",
        "_settle",
        "_timeout",
    )

    def __init__(
        self,
        communicator: Communicator,
        pending: Pending,
        timeout: timedelta,
        explain: Callable[[WireFailure], Exception],
        result: Callable[[], list[Any]],
        settle: Callable[[], None] | None = None,
    ) -> None:
        self._communicator = communicator
        self._pending = pending
        self._timeout = timeout
        self._explain = explain
        self._result = result
        self._settle = settle
        self._done = False
        self._error: Exception | None = None

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        """Return True when the verb is done; zero means the group's timeout.

        Raises:
            CollectiveTimeoutError: not done in time; the group is broken then.
            AbortedError: the group was aborted.
            BackendError: the wire failed, for example because a member died.
        """
        if self._done:
            if self._error is not None:
                raise self._error
            return True
        if timeout:
            check_timeout(timeout)
        try:
            self._communicator.finish(self._pending, timeout or self._timeout)
        except WireFailure as failure:
            self._error = self._explain(failure)
            self._done = True
            raise self._error from None
        self._conclude()
        return True

    def is_completed(self) -> bool:
        """Whether the verb is done (on CUDA: enqueued), without waiting.

        Its results are in place then, as after ``wait``.
        """
        if not self._done and self._communicator.is_finished(self._pending):
            with suppress(Exception):  # told by exception() and wait()
                self.wait()
        return self._done

    def is_success(self) -> bool:
        """Whether the verb is done and did not fail."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """The error of a verb that is done, or None."""
        self.is_completed()
        return self._error

    def result(self) -> list[Any]:
        """Wait, and return the tensors that hold the verb's result."""
        self.wait()
        return self._result()

    def source_rank(self) -> int:
        """The group rank that a finished receive came from.

        Raises:
            BackendError: this is no receive.
        """
        try:
            return self._communicator.source(self._pending)
        except WireFailure as failure:
            raise BackendError(
                "only a receive has a source rank", fix="call it on the Work of irecv"
            ) from failure

    def synchronize(self) -> None:
        """The same as ``wait()``."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """A torch Future of the result's tensors; ``then`` chains callbacks."""
        return WorkFuture(self.result, self.is_completed)

    def _conclude(self) -> None:
        self._done = True
        if self._settle is not None:
            self._settle()
            self._settle = None


class WorkFuture(torch.futures.Future):  # type: ignore[type-arg]
    """A Future that is resolved by whoever first waits for it or asks about it.

    Simulated ranks cannot be called back from outside their turn, so resolution is by need.

    Args:
        resolve: waits, and returns the value.
        is_ready: whether ``resolve`` would not wait.
    """

    def __init__(self, resolve: Callable[[], Any], is_ready: Callable[[], bool]) -> None:
        super().__init__()
        self._resolve = resolve
        self._is_ready = is_ready

    def done(self) -> bool:
        """Whether the value, or the error, is there, without waiting."""
        if not super().done() and self._is_ready():
            self._settle()
        return super().done()

    def wait(self) -> Any:
        """Resolve, and return the value or raise the error."""
        self._settle()
        return super().wait()

    def value(self) -> Any:
        """Resolve, and return the value or raise the error."""
        self._settle()
        return super().value()

    def then(self, callback: Callable[[Any], Any]) -> WorkFuture:
        """A Future of ``callback(this)``, called once this one is resolved."""

        def chained() -> Any:
            self._settle()
            return callback(self)

        return WorkFuture(chained, self.done)

    def _settle(self) -> None:
        if super().done():
            return
        try:
            self.set_result(self._resolve())
        except Exception as error:
            self.set_exception(error)
