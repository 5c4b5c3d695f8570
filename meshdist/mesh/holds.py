"""Ranks that hold the clocks of all ranks, since somebody debugs there.

A hold is an entry in a table in the store, which whoever comes late reads, too. It ends when its
rank takes it out, with its limit, or when the rank gives no sign of life for ten seconds: a rank
that was killed in a debugger holds nobody.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from uuid import uuid4

from torch.distributed import Store

from ..runtime.clock import clock

__all__ = ["Holds", "add_hold", "remove_hold"]

_TABLE = "clock/holds"
_SILENT_S = 10.0


@dataclass
class _Hold:
    """One hold, as another process knows it; its times are real."""

    rank: int
    end: float
    heard: float
    beat: int = -1
    is_over: bool = False


class Holds:
    """The holds that stop this process's clock; for one thread.

    Args:
        store: where the table is.
        rank: this rank, which shows that it lives as long as one of its own holds lasts.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._holds: dict[str, _Hold] = {}

    def read(self) -> None:
        """Stop the clock, or let it go, as the table says."""
        table = _read(self._store)[0]
        for name in self._holds.keys() - table.keys():
            clock.go(name)
            del self._holds[name]
        now = time.monotonic()
        for name in table.keys() - self._holds.keys():
            rank, limit_s = table[name]
            self._holds[name] = _Hold(rank, now + limit_s, now)
            clock.stop(name)

    def check(self) -> None:
        """Let the clock go where a hold has lasted too long, or its rank has ended."""
        now = time.monotonic()
        for name, hold in self._holds.items():
            if hold.is_over:
                continue
            beat = int(self._store.add(f"clock/{name}/beat", int(hold.rank == self._rank)))
            if beat != hold.beat:
                hold.beat, hold.heard = beat, now
            if now > hold.end or now > hold.heard + _SILENT_S:
                clock.go(name)
                hold.is_over = True

    def release(self) -> None:
        """Let the clock go; the table is not looked at any more."""
        for name in self._holds:
            clock.go(name)
        self._holds.clear()


def add_hold(store: Store, rank: int, limit_s: float) -> str:
    """Enter a hold of ``rank`` into the table, for ``limit_s`` at most; returns its name."""
    name = uuid4().hex
    _change(store, name, (rank, limit_s))
    return name


def remove_hold(store: Store, name: str) -> None:
    """Take a hold out of the table."""
    _change(store, name, None)


def _read(store: Store) -> tuple[dict[str, tuple[int, float]], str]:
    """The table, and its text."""
    text = store.get(_TABLE).decode() if store.check([_TABLE]) else ""
    return json.loads(text) if text else {}, text


def _change(store: Store, name: str, hold: tuple[int, float] | None) -> None:
    while True:
        table, before = _read(store)
        table.pop(name, None)
        if hold is not None:
            table[name] = hold
        after = json.dumps(table)
        if store.compare_set(_TABLE, before, after).decode() == after:
            return
