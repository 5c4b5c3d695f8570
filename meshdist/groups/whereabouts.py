"""The notes of ranks in join contexts to each other, beside the wires: no data left, or gone.

It goes through the store, under keys of this context alone; simulated ranks, which must be able to
look without letting others run, use a table of their scheduler.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..bootstrap.bounded_store import read_json
from ..bootstrap.world import World
from ..error_text import first_line
from ..errors import MeshdistError, StoreError
from ..wires.simulated.scheduler import find_rank_here

__all__ = ["Whereabouts"]


class Whereabouts:
    """Where the ranks of one join context are, as far as they have said.

    The members of a main group count their contexts alike. What concerns others is found where all
    of them have been in equally many contexts.
    """

    def __init__(self, world: World, main: str, members: Sequence[int]) -> None:
        self._world = world
        self._main = main
        self._members = members
        self._inside = f"join context {world.next_number(('join contexts', main))} of {main}"
        self._beyond = f"join context {world.next_number('join contexts')}"

    def join(self) -> None:
        """Say that this rank has no data left."""
        for context in (self._inside, self._beyond):
            self._say(f"{context}/joined/{self._world.rank}", "")

    def has_joined(self, rank: int) -> bool:
        """Whether a rank has no data left."""
        context = self._inside if rank in self._members else self._beyond
        return self._find(f"{context}/joined/{rank}") is not None

    def leave(self, labels: Sequence[str], error: BaseException) -> None:
        """Say to the members of communicators that this rank has left by an exception."""
        reason = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, MeshdistError) and error.found:
            reason += f": {error.found}"
        text = json.dumps({"rank": self._world.rank, "reason": reason})
        for label in labels:
            self._say(self._left(label), text)

    def find_left(self, label: str) -> dict[str, Any] | None:
        """Which member has left the context by an exception, and by which: ``rank``, ``reason``."""
        found = self._find(self._left(label))
        return None if found is None else {**found, "rank": int(found["rank"])}

    def _left(self, label: str) -> str:
        context = self._inside if label == self._main else self._beyond
        return f"{context}/left/{label}"

    def _say(self, key: str, text: str) -> None:
        here = find_rank_here()
        if here is not None:
            here.scheduler.tables.setdefault(key, text)
            return
        with suppress(StoreError):  # the others see that it is lost
            self._world.store.compare_set(key, "", text or "{}")

    def _find(self, key: str) -> Any:
        here = find_rank_here()
        if here is not None:
            text = here.scheduler.tables.get(key)
            return None if text is None else json.loads(text or "{}")
        with suppress(StoreError):
            if self._world.store.check([key]):
                return read_json(self._world.store, key, dict)
        return None
