"""The table of the ranks that pause the clocks of all ranks, because they are being debugged.

The table lies in the store, where ranks that join late read it, too. A pause ends when its rank
takes it out of the table, at its limit, or when the rank shows no sign of life for ten seconds: a
rank that was killed in a debugger stops no clock for good.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import Store

from ..bootstrap.bounded_store import read_json, read_number
from ..runtime.deadlines import Grace, clock

__all__ = ["PausedClocks", "change_pause"]

_TABLE = "clock/pauses"
_SILENCE_S = 10.0


@dataclass
class _Pause:
    """One pause, as another process sees it."""

    rank: int
    limit: Grace
    num_beats: int = -1
    silence: Grace = field(default_factory=lambda: Grace(_SILENCE_S))


class PausedClocks:
    """The pauses of this process's clock that the table lists; for one thread.

    Args:
        store: where the table is.
        rank: this rank, which renews its sign of life as long as one of its own pauses lasts.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._pauses: dict[str, _Pause | None] = {}  # None for those that are over

    def read(self) -> None:
        """Pause the clock or resume it, as the table says."""
        table = _read(self._store)[0]
        for name in self._pauses.keys() - table.keys():
            clock.resume(name)
            del self._pauses[name]
        for name in table.keys() - self._pauses.keys():
            rank, limit_s = table[name]
            self._pauses[name] = _Pause(rank, Grace(limit_s))
            clock.pause(name)

    def check(self) -> None:
        """Resume the clock where a pause has lasted too long, or its rank has ended."""
        for name, pause in self._pauses.items():
            if pause is None:
                continue
            key = f"clock/{name}/beat"
            is_mine = pause.rank == self._rank
            beats = self._store.add(key, 1) if is_mine else read_number(self._store, key)
            if beats != pause.num_beats:
                pause.num_beats, pause.silence = beats, Grace(_SILENCE_S)
            if pause.limit.is_over or pause.silence.is_over:
                clock.resume(name)
                self._pauses[name] = None

    def release(self) -> None:
        """Resume the clock, and stop reading the table."""
        for name in self._pauses:
            clock.resume(name)
        self._pauses.clear()


def _read(store: Store) -> tuple[dict[str, tuple[int, float]], str]:
    """The table, and its text."""
    if not store.check([_TABLE]):
        return {}, ""
    text = store.get(_TABLE).decode(errors="replace")
    return read_json(store, _TABLE, _parse), text


def _parse(table: dict[str, Any]) -> dict[str, tuple[int, float]]:
    return {name: (int(rank), float(limit_s)) for name, (rank, limit_s) in table.items()}


def change_pause(store: Store, name: str, pause: tuple[int, float] | None) -> None:
    """Enter a pause, its rank and its longest time, into the table; None takes it out."""
    while True:
        table, before = _read(store)
        table.pop(name, None)
        if pause is not None:
            table[name] = pause
        after = json.dumps(table)
        if store.compare_set(_TABLE, before, after) == after.encode():
            return
