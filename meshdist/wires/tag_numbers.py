"""Small numbers for large tags, which the first member that uses one draws for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch.distributed import Store

from ..runtime.clock import clock
from .base import WireAborted, WireTimeout

__all__ = ["TagNumbers"]

_PAUSE_S = 0.00005
_DRAWING_S = 10.0


class TagNumbers:
    """The numbers of one group's large tags, from 0, equal on all members.

    Args:
        store: of the group alone.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._numbers: dict[int, int] = {}
        self._numbering = threading.Lock()

    def number_of(self, tag: int, is_aborted: Callable[[], bool]) -> int:
        """The number of ``tag``.

        Args:
            tag: any.
            is_aborted: whether nobody is to wait any more.

        Raises:
            WireAborted, WireTimeout: it has not got one.
            RuntimeError: the store is lost.
        """
        number = self._numbers.get(tag)
        if number is not None:
            return number
        with self._numbering:  # another thread may start a receive meanwhile
            number = self._numbers[tag] = self._drawn(f"tag/{tag}", is_aborted)
        return number

    def _drawn(self, key: str, is_aborted: Callable[[], bool]) -> int:
        store = self._store
        if store.add(f"{key}/users", 1) == 1:
            number = int(store.add("tags", 1)) - 1
            store.set(key, str(number))
            return number
        deadline = clock.now() + _DRAWING_S
        while not store.check([key]):  # not by waiting in the store, which other threads need
            if is_aborted():
                raise WireAborted("aborted while a tag was given its number")
            if clock.now() > deadline:
                raise WireTimeout("the member that was to number a tag has not done so")
            time.sleep(_PAUSE_S)
        return int(store.get(key))
