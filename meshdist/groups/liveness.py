"""Track which ranks reached a synchronization point and which have exited.

Members count themselves in the store (``bootstrap/arrival_counters``); the last member sets a key
that the others await. It may be killed before that, so waiting members also check the count.

Worked example: rank 1 of three is killed after it was counted, as the last.

    rank 0                        rank 1                 rank 2
    0.0 += 0b001: 001                                    0.0 += 0b100: 101
    waits for "all"               0.0 += 0b010: 111      waits for "all"
    looks after a second: 111     is killed                   |
    sets "all", and returns                              returns

    >>> from collections import Counter
    >>> numbers, counts = Counter(), arrival_counter_of((0, 1, 2), (0, 0, 0))
    >>> def add(key, amount):
    ...     numbers[key] += amount
    ...     return numbers[key]
    >>> [counts.count(add, "opened", rank)[1] for rank in (0, 2, 1)], bin(numbers["opened/0.0"])
    ([False, False, True], '0b111')
    >>> counts.find_absent(numbers.__getitem__, ["opened"])  # so a look finds all of them
    []
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from ..bootstrap.arrival_counters import arrival_counter_of
from ..bootstrap.timeout_store import await_key, read_number
from ..bootstrap.world import World
from ..error_text import ranks_text
from ..errors import StoreError
from ..runtime.deadlines import Deadline, Looks
from ..runtime.hosts import IN_GOOD_ORDER
from .agreement import Agreement
from .control_messages import Endings

_DONE = timedelta(seconds=30)


@dataclass(frozen=True)
class Liveness:
    """Arrival counts in the store, by synchronization point."""

    world: World
    endings: Endings

    def patience_of_server(self) -> timedelta | None:
        """Return 30 s on the rank that hosts the store, else None."""
        return _DONE if self.world.server == self.world.rank else None

    def count(self, key: str, members: tuple[int, ...], patience: timedelta | None = None) -> bool:
        """Count this rank; return whether all arrived or a missing rank exited in ``patience``.

        Args:
            patience: None: do not wait; only the last rank returns True.
        """
        # If a member of this host has exited, no member waits any longer.
        store, all_key, rank = self.world.store, _key_of_all(key), self.world.rank
        counts, read = arrival_counter_of(members, self.world.hosts), partial(read_number, store)
        num_arrived, is_last = counts.count(store.add, key, rank)
        if is_last:
            store.set(all_key, "")
            return True
        if not patience:
            return False

        def look() -> None:
            if absent := counts.block_of(rank).find_absent(read, [key]):
                is_over = bool(self.endings.find_all(absent))
            else:
                is_over = not counts.find_absent(read, [key], most=1)
            if is_over:
                store.set(all_key, "")

        # If only the rank that hosts the store waits, it looks first.
        looks = Looks(len(members), 1 if self.patience_of_server() else num_arrived)
        limit = Deadline(min(patience, self.world.timeout or patience))
        return await_key(store, all_key, limit, lambda: looks.take(look))

    def finish(self, call: str, members: Collection[int]) -> None:
        """Count this rank as done with ``call``; the store's host waits for all."""
        # The rank that hosts the store returns once all have arrived or exited, because it may exit
        # right after the call. It deletes one key for each 60 members.
        world, key = self.world, f"{call}/finished"
        is_outside = world.rank not in members  # when the call had ended for them
        if world.server is None or not world.has_processes or len(members) < 2 or is_outside:
            return
        with suppress(StoreError):  # the next call that needs the store raises
            patience = self.patience_of_server()
            self.count(key, tuple(sorted(members)), patience)
            if patience is not None:
                names = arrival_counter_of(tuple(sorted(members)), world.hosts).names()
                for old in (_key_of_all(key), *(f"{key}/{name}" for name in names)):
                    world.store.delete_key(old)

    def make_search(self, agreement: Agreement, ranks: tuple[int, ...]) -> Callable[[], str]:
        """Return a function that names ``ranks`` that exited before arrival, or returns ""."""
        looks, read = Looks(len(ranks), 1), partial(read_number, self.world.store)
        counts = arrival_counter_of(agreement.members, self.world.hosts)
        key = key_of_opened(agreement)  # the search lives as long as the open communicators
        known = ""

        def look() -> str:
            ended = self.endings.find_all(ranks)
            # A member that has connected may exit normally before the others connect.
            exited = {rank for rank, how in ended.items() if how in IN_GOOD_ORDER}
            absent = counts.find_absent(read, [key], exited)
            lost = (ended.keys() - exited).union(absent)
            return f"{ranks_text(lost)} can no longer join" if lost else ""

        def search() -> str:
            nonlocal known  # else a second thread of the opening would wait for the next look
            known = known or looks.take(look) or ""
            return known

        return search


def key_of_opened(agreement: Agreement) -> str:
    """Return the key that counts connected members."""
    return f"{agreement.name}/opened"


def _key_of_all(key: str) -> str:
    """Return the key that is set once all ranks are counted under ``key``."""
    return f"{key}/all"
