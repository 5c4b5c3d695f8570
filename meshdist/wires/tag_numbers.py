"""Small numbers for large tags, which the first member that uses one draws for all."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.distributed import Store

from ..runtime.deadlines import Deadline, wait_until
from .failures import WireAborted, WireTimeout

__all__ = ["TagNumbers"]

_DRAWING_S = 10.0


class TagNumbers:
    """The numbers of one group's large tags, from 0, equal on all members; in the group's store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._numbers: dict[int, int] = {}
        self._numbering = threading.Lock()

    def number_of(self, tag: int, is_aborted: Callable[[], bool]) -> int:
        """The number of ``tag``.

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

        def check() -> None:
            if is_aborted():
                raise WireAborted("aborted while a tag was given its number")

        def is_drawn() -> bool:  # not by waiting in the store, which other threads need
            return bool(store.check([key]))

        if not wait_until(is_drawn, Deadline(_DRAWING_S), check):
            raise WireTimeout("the member that was to number a tag has not done so")
        return int(store.get(key))
