"""Wait for collectives that the native core has started."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from ..runtime.fork_safe_locks import ForkSafeLock
from .work import WatchedWork, Work

_UNSET = timedelta(0)
_unfolding = ForkSafeLock(threading.RLock)  # a signal's handler may ask for another Work meanwhile


class StartedWork(Work):
    """Work of a native call; any use but a plain ``wait`` changes its class."""

    # It holds only its result, its user and the native request, which keeps all other fields. If a
    # program needs those, it becomes a WatchedWork.

    __slots__ = ()

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        """Wait for the collective and return True, or raise, like ``Work.wait``."""
        if timeout is _UNSET and self._started.wait_plainly():
            return True
        StartedWork._unfold(self)  # another thread may have changed its class by now
        return self.wait(timeout)

    def __getattr__(self, name: str) -> Any:
        StartedWork._unfold(self)
        return getattr(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Become a WatchedWork, which has the fields to copy; return how to copy it."""
        StartedWork._unfold(self)
        return self.__reduce_ex__(protocol)

    def _may_be_dropped(self) -> None:
        self._started.may_be_dropped()

    def _unfold(self) -> None:
        """Become a WatchedWork, unless another thread has changed the class."""
        with _unfolding.current:
            if type(self) is StartedWork:
                fields, is_done = self._started.leave_work(self._result, self._user)
                Work.__init__(self, *fields)
                self._done = is_done
                self.__class__ = WatchedWork  # type: ignore[assignment]
