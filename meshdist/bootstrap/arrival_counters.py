"""Count the members that reached a point in the store: each sets a bit of its block's number.

A block has at most 60 members of one host. The member that completes a block sets its bit in a
number for 60 blocks, and so on up to a single number. So most members make a single request, and a
few numbers show which members are missing.

Example: members 0, 1, 2 on host 0 form block "0.0", and 3, 4 on host 1 block "1.0". After 0, 2, 3
and 4 have arrived, the blocks hold 0b101 and 0b11, and "1:0" holds 0b10: member 1 is missing.
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
    """Counter of members in a number of the store.

    Args:
        name: the number's key, below the count's key.
        parts: counters of subsets; each sets its bit once all its members have arrived. A block has
            none: each member sets a bit.
    """

    name: str
    ranks: tuple[int, ...]
    parts: tuple[ArrivalCounter, ...] = ()

    def count(self, add: Callable[[str, int], int], key: str, rank: int) -> tuple[int, bool]:
        """Count ``rank`` under ``key``; return its block's count and whether all have arrived."""
        position, num_arrived = 0, 0
        if self.parts:
            position = next(at for at, part in enumerate(self.parts) if rank in part.ranks)
            num_arrived, is_complete = self.parts[position].count(add, key, rank)
            if not is_complete:
                return num_arrived, False
        else:
            position = self.ranks.index(rank)
        number = add(f"{key}/{self.name}", 1 << position)
        return num_arrived or number.bit_count(), number == (1 << len(self.parts or self.ranks)) - 1

    def find_absent(
        self,
        read: Callable[[str], int],
        keys: Iterable[str],
        among: Collection[int] | None = None,
        most: float = math.inf,
    ) -> list[int]:
        """Return the members (in ``among``, if given) that are not counted under any of ``keys``.

        Args:
            most: stop reading blocks after finding this many.
        """
        candidates = self.ranks if among is None else set(among).intersection(self.ranks)
        if not candidates:
            return []
        arrived = 0
        for key in keys:
            arrived |= read(f"{key}/{self.name}")
        if not self.parts:
            return [
                r for at, r in enumerate(self.ranks) if r in candidates and not arrived >> at & 1
            ]
        absent: list[int] = []
        for at, part in enumerate(self.parts):
            if not arrived >> at & 1 and len(absent) < most:
                absent += part.find_absent(read, keys, among, most - len(absent))
        return sorted(absent)

    def block_of(self, rank: int) -> ArrivalCounter:
        return next((part.block_of(rank) for part in self.parts if rank in part.ranks), self)

    def names(self) -> Iterator[str]:
        yield self.name
        for part in self.parts:
            yield from part.names()


@lru_cache(16)  # programs create equal groups repeatedly
def arrival_counter_of(members: tuple[int, ...], hosts: tuple[int, ...]) -> ArrivalCounter:
    """Return the counter of ``members`` in blocks by host; ``hosts[r]`` is rank r's host."""
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
    """Return a short digest of ranks, equal in every process."""
    return digest_of(repr(tuple(ranks)))


def digest_of(text: str) -> str:
    """Return a short digest, equal in every process."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:16]
