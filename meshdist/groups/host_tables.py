"""The tables of one rank's communicators, shared with the other members on its host."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Any

from ..bootstrap.bounded_store import read_jsons
from ..bootstrap.world import World
from ..checking.announcement_table import AnnouncementTable
from ..checking.header_table import HeaderTable
from ..checking.shared_words import (
    Regions,
    SharedWords,
    SharedWordsView,
    SignsOfLife,
    WordsAddress,
    find_view,
    make_shared_words,
)
from ..errors import StoreError
from ..wires.core import core
from .signals import card_key

__all__ = ["HeaderTables"]


class HeaderTables:
    """Makes header and announcement tables; none where this rank has no shared words.

    Args:
        words: those of this process, where it has some before ``make_words``.
    """

    def __init__(self, world: World, words: SharedWords | None = None) -> None:
        self._world = world
        self._words = words
        self._views: dict[int, SharedWordsView | None] = {}

    def make_words(self) -> WordsAddress | None:
        """Make this rank's shared words; return where they lie, for its announcement."""
        self._words = make_shared_words()
        return None if self._words is None else self._words.address

    def make(
        self, label: str, ranks: tuple[int, ...], *, compares_messages: bool = True
    ) -> HeaderTable | None:
        """The table of a new communicator; None where no other member is on this host."""
        key = _key_of(label)
        regions = Regions(lambda member: self._find_region(ranks[member], key))
        hosts = [self._world.hosts[rank] for rank in ranks]
        me = ranks.index(self._world.rank)
        new_log = core.MessageLog if compares_messages and core is not None else None
        return HeaderTable.reserve(self._words, key, hosts, me, regions, new_log)

    def make_for_announcements(
        self, label: str, ranks: tuple[int, ...]
    ) -> AnnouncementTable | None:
        """The announcement table of a communicator; None where members are on several hosts."""
        if self._words is None or self._world.spans_hosts(ranks):
            return None
        key = _key_of(f"announcements/{label}")
        regions = Regions(lambda member: self._find_region(ranks[member], key))
        me = ranks.index(self._world.rank)
        with suppress(MemoryError):
            return AnnouncementTable(self._words, key, me, len(ranks), regions)
        return None

    def signs_of_life(self) -> SignsOfLife:
        """Those of the ranks of this host."""
        hosts, me, key = self._world.hosts, self._world.rank, _key_of("signs of life")
        lower = [rank for rank in range(me) if hosts[rank] == hosts[me]]
        regions = Regions(lambda member: self._find_region(lower[member], key))
        mine = None if self._words is None else self._words.reserve(key, 1)
        return SignsOfLife(mine, regions, len(lower))

    def close(self) -> None:
        """End this rank's part in all tables."""
        self._views.clear()
        if self._words is not None:
            self._words.close()
            self._words = None

    def _find_region(self, rank: int, key: int) -> tuple[SharedWordsView | None, int] | None:
        """The region under ``key`` of a rank of this host; None while it is not known yet."""
        if rank not in self._views:
            store, hosts = self._world.store, self._world.hosts
            # All of the host at once, which have announced themselves as the world began.
            others = set(range(len(hosts))) - {self._world.rank}
            ranks = [one for one in sorted(others) if hosts[one] == hosts[rank]]
            try:
                if not store.check(list(map(card_key, ranks))):
                    ranks = [rank]
                    if not store.check([card_key(rank)]):
                        return None
                addresses = read_jsons(store, list(map(card_key, ranks)), _parse)
            except StoreError:  # a group that needs the store for nothing else goes on
                return None
            for one, address in zip(ranks, addresses, strict=True):
                self._views.setdefault(one, address and find_view(address))
        return self._views[rank], key

    def reaches(self, ranks: tuple[int, ...]) -> bool:
        """Whether this rank could read the words of all the others of ``ranks``, on this host."""
        others = [rank for rank in ranks if rank != self._world.rank]
        return all((found := self._find_region(rank, 0)) and found[0] for rank in others)


def _key_of(label: str) -> int:
    """A region's key: equal in every member's words, never 0."""
    digest = hashlib.sha1(label.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "little") | 1


def _parse(card: dict[str, Any]) -> WordsAddress | None:
    address = card["words"]
    return None if address is None else WordsAddress(*map(int, address))
