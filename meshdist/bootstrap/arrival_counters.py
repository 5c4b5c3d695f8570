"""Members counted in the store: each sets its bit in the number of its block.

A block is at most 60 members of one host. The member that completes a block sets the block's bit in
a number for 60 blocks, and so on up to one number for all. So a member counts itself by one request
as a rule, and a few numbers tell who is missing: numbers below a bit that is set need no reading.

Example: members 0, 1, 2 on host 0 and 3, 4 on host 1 are the blocks "0.0" and "1.0". When 0, 2, 3
and 4 have come, these hold 0b101 and 0b11, and "1:0", for both, 0b10: member 1 is missing.

And short names of members, and of what they count themselves for, for keys of the store.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

_MOST = 60  # bits that any store can add


@dataclass(frozen=True, eq=False)
class ArrivalCounter:
    """Members that are counted in one number of the store.

    Args:
        name: the number's, below a key.
        parts: arrival counters of some members each, which set a bit of the number once all of
            these have come; none in a block, where each member sets a bit.
    """

    name: str
    ranks: tuple[int, ...]
    parts: tuple[ArrivalCounter, ...] = ()

    def count(self, add: Callable[[str, int], int], key: str, rank: int) -> tuple[int, bool]:
        """Count ``rank`` under ``key``; return how many of its block came, and if all members did.

        Args:
            add: adds to a number in the store, and returns the sum.
        """
        place, num_come = 0, 0
        if self.parts:
            place = next(at for at, part in enumerate(self.parts) if rank in part.ranks)
            num_come, is_whole = self.parts[place].count(add, key, rank)
            if not is_whole:
                return num_come, False
        else:
            place = self.ranks.index(rank)
        number = add(f"{key}/{self.name}", 1 << place)
        return num_come or number.bit_count(), number == (1 << len(self.parts or self.ranks)) - 1

    def find_absent(
        self,
        read: Callable[[str], int],
        keys: Iterable[str],
        among: Collection[int] | None = None,
        most: float = math.inf,
    ) -> list[int]:
        """Return the members, or those in ``among``, that are counted under none of ``keys``.

        Args:
            read: returns a number in the store.
            most: once so many are found no more blocks are read.
        """
        asked = self.ranks if among is None else set(among).intersection(self.ranks)
        if not asked:
            return []
        come = 0
        for key in keys:
            come |= read(f"{key}/{self.name}")
        if not self.parts:
            return [r for at, r in enumerate(self.ranks) if r in asked and not come >> at & 1]
        absent: list[int] = []
        for at, part in enumerate(self.parts):
            if not come >> at & 1 and len(absent) < most:
                absent += part.find_absent(read, keys, among, most - len(absent))
        return sorted(absent)

    def block_of(self, rank: int) -> ArrivalCounter:
        """Return the block in which ``rank`` sets a bit."""
        return next((part.block_of(rank) for part in self.parts if rank in part.ranks), self)

    def names(self) -> Iterator[str]:
        """Yield the store names of this arrival counter's number and of the numbers of all
        ``parts``."""
        yield self.name
        for part in self.parts:
            yield from part.names()


@lru_cache(16)  # programs repeat groups
def arrival_counter_of(members: tuple[int, ...], hosts: tuple[int, ...]) -> ArrivalCounter:
    """Return the arrival counter of ``members`` in blocks by host; ``hosts[r]`` is that of rank r."""
    by_host: dict[int, list[int]] = {}
    for rank in members:
        by_host.setdefault(hosts[rank], []).append(rank)
    counts = [
        ArrivalCounter(f"{host}.{start // _MOST}", tuple(ranks[start : start + _MOST]))
        for host, ranks in by_host.items()
        for start in range(0, len(ranks), _MOST)
    ]
    level = 0
    while len(counts) > 1:
        level += 1
        by_most = [counts[start : start + _MOST] for start in range(0, len(counts), _MOST)]
        counts = [
            ArrivalCounter(
                f"{level}:{at}", tuple(rank for part in parts for rank in part.ranks), tuple(parts)
            )
            for at, parts in enumerate(by_most)
        ]
    return counts[0]


def digest_of_ranks(ranks: Sequence[int]) -> str:
    """Return a short name for a list of ranks, equal in every process."""
    return digest_of(repr(tuple(ranks)))


def digest_of(text: str) -> str:
    """Return a short name for a text, equal in every process."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:16]
