"""Shared memory by which members of one host compare their calls, and what aborts say.

Between hosts calls are compared at debug level DETAIL alone, by a round before data moves.
"""

from __future__ import annotations

import hashlib
from typing import Any

from ..bootstrap.bounded_store import read_jsons
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
from .signals import card_key

DISAGREEMENT = "disagreement"
"""The key, below a communicator's label, of the error on which its members have agreed."""


class HeaderTables:
    """Maker of header tables and call words, the shared memory by which members compare calls.

    Args:
        words: this process's shared words; None until ``make_words`` makes some.
    """

    def __init__(self, world: World, words: SharedWords | None = None) -> None:
        self._world = world
        self._words = words
        self._views: dict[int, SharedWordsView | None] = {}

    def make_words(self) -> WordsAddress | None:
        """Make this rank's shared words; return their address, None if the system has none."""
        self._words = make_shared_words()
        return None if self._words is None else self._words.address

    def make(
        self, label: str, ranks: tuple[int, ...], *, compares_messages: bool = True
    ) -> HeaderTable | None:
        """Return a new communicator's header table, None if no other member is on this host."""
        key = _key_of(label)
        regions = Regions(lambda member: self._find_region(ranks[member], key))
        hosts = [self._world.hosts[rank] for rank in ranks]
        me = ranks.index(self._world.rank)
        new_log = core.MessageLog if compares_messages and core is not None else None
        return HeaderTable.reserve(self._words, key, hosts, me, regions, new_log)

    def signs_of_life(self) -> SignsOfLife:
        """Return the heartbeats in shared words of this rank and of its host's lower ranks."""
        hosts, me, key = self._world.hosts, self._world.rank, _key_of("signs of life")
        lower = [rank for rank in range(me) if hosts[rank] == hosts[me]]
        regions = Regions(lambda member: self._find_region(lower[member], key))
        mine = None if self._words is None else self._words.reserve(key, 1)
        return SignsOfLife(mine, regions, len(lower))

    def close(self) -> None:
        """Close this rank's shared words, and forget its views of other ranks' words."""
        self._views.clear()
        if self._words is not None:
            self._words.close()
            self._words = None

    def _find_region(self, rank: int, key: int) -> tuple[SharedWordsView | None, int] | None:
        """Return (a rank's shared words, if in reach, ``key``); None till its address is known."""
        if rank not in self._views:
            store, hosts = self._world.store, self._world.hosts
            # All of the host at once, which have announced themselves as the world began.
            others = set(range(len(hosts))) - {self._world.rank}
            ranks = [other for other in sorted(others) if hosts[other] == hosts[rank]]
            try:
                if not store.check(list(map(card_key, ranks))):
                    ranks = [rank]
                    if not store.check([card_key(rank)]):
                        return None
                addresses = read_jsons(store, list(map(card_key, ranks)), _parse)
            except StoreError:  # a group that needs the store for nothing else goes on
                return None
            for other, address in zip(ranks, addresses, strict=True):
                self._views.setdefault(other, address and find_view(address))
        return self._views[rank], key

    def reaches(self, ranks: tuple[int, ...]) -> bool:
        """Return whether this rank can read the shared words of all others in ``ranks``."""
        others = [rank for rank in ranks if rank != self._world.rank]
        return all((found := self._find_region(rank, 0)) and found[0] for rank in others)


def _key_of(label: str) -> int:
    """Return the number, never 0, under which all members find the region called ``label``."""
    digest = hashlib.sha1(label.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "little") | 1


def _parse(card: dict[str, Any]) -> WordsAddress | None:
    address = card["words"]
    return None if address is None else WordsAddress(*map(int, address))


def key_of_all(key: str) -> str:
    """Return the key that is set once all ranks have been counted under ``key``."""
    return f"{key}/all"


def reason_of(disagreement: dict[str, str]) -> str:
    """Return summary and finding of an AgreementError as text: why later verbs are refused."""
    return f"{disagreement['summary']}: {disagreement['found']}"


def parse_disagreement(value: dict[str, str]) -> dict[str, str]:
    """Return the fields of an AgreementError as texts; raise if ``value`` lacks any."""
    return {name: str(value[name]) for name in ("summary", "where", "expected", "found", "fix")}


def parse_abort(value: dict[str, Any]) -> dict[str, Any]:
    """Return an abort's message with its fields checked; raise if any is missing or malformed."""
    texts: dict[str, Any] = {"rank": int(value["rank"]), "reason": str(value["reason"])}
    if value.get("disagreement"):
        texts["disagreement"] = parse_disagreement(value["disagreement"])
    return {**value, **texts, "labels": [str(label) for label in value["labels"]]}
