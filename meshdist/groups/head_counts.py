"""Members counted in the store: each sets its bit in the number of its block.

A block is at most 60 members of one host. So a member counts itself by one request, however many
members there are, and a number tells who of a block has come.

Example: members 0, 1, 2 on host 0 and 3, 4 on host 1 are the blocks "0.0" and "1.0". When 0, 2 and
3 have come, they hold 0b101 and 0b01: members 1 and 4 are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["Block", "Blocks", "blocks_of"]

_MOST = 60  # bits that any store can add


@dataclass(frozen=True)
class Block:
    """Some members of one host; ``name`` is that of their number below a key."""

    name: str
    ranks: tuple[int, ...]

    @property
    def whole(self) -> int:
        """The number once all have come."""
        return (1 << len(self.ranks)) - 1

    def bit(self, rank: int) -> int:
        """What ``rank`` adds to the number."""
        return 1 << self.ranks.index(rank)

    def find_absent(self, read: Callable[[str], int], keys: Iterable[str]) -> list[int]:
        """Those that have come under none of ``keys``; ``read`` reads a number in the store."""
        come = 0
        for key in keys:
            come |= read(f"{key}/{self.name}")
        return [rank for place, rank in enumerate(self.ranks) if not come >> place & 1]


Blocks = tuple[Block, ...]


@lru_cache(16)
def blocks_of(members: tuple[int, ...], hosts: tuple[int, ...]) -> Blocks:
    """The blocks of ``members``; ``hosts`` is each rank's. Kept, since programs repeat groups."""
    by_host: dict[int, list[int]] = {}
    for rank in members:
        by_host.setdefault(hosts[rank], []).append(rank)
    return tuple(
        Block(f"{host}.{start // _MOST}", tuple(ranks[start : start + _MOST]))
        for host, ranks in by_host.items()
        for start in range(0, len(ranks), _MOST)
    )
