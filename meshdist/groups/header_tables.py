"""The tables of one rank's communicators, shared with the other members on its host."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from typing import Any

from ..bootstrap.bounded_store import read_json
from ..bootstrap.world import World
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
from .announcement_table import AnnouncementTable

__all__ = ["HeaderTables"]


class HeaderTables:
    """Makes header and announcement tables; none where this rank has no shared words."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._words: SharedWords | None = None
        self._views: dict[int, SharedWordsView | None] = {}

    def publish(self) -> None:
        """Make this rank's shared words, and show the others where they lie."""
        self._words = make_shared_words()
        address = None if self._words is None else self._words.address
        self._world.store.set(_address_key(self._world.rank), json.dumps(address))

    def make(self, label: str, ranks: tuple[int, ...]) -> HeaderTable | None:
        """The table of a new communicator; None where no other member is on this host."""
        key = _key_of(label)
        regions = Regions(lambda member: self._find_region(ranks[member], key))
        hosts = [self._world.hosts[rank] for rank in ranks]
        me = ranks.index(self._world.rank)
        new_log = None if core is None else core.MessageLog
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
            store, key_of_rank = self._world.store, _address_key(rank)
            try:
                if not store.check([key_of_rank]):
                    return None
                address = read_json(store, key_of_rank, _parse)
            except StoreError:  # a group that needs the store for nothing else goes on
                return None
            self._views[rank] = address and find_view(address)
        return self._views[rank], key


def _key_of(label: str) -> int:
    """A region's key: equal in every member's words, never 0."""
    digest = hashlib.sha1(label.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "little") | 1


def _parse(value: list[Any] | None) -> WordsAddress | None:
    return None if value is None else WordsAddress(*map(int, value))


def _address_key(rank: int) -> str:
    return f"shared words/{rank}"
