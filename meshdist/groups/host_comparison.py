"""Compare a group's calls, in shared memory or by rounds between hosts.

On one host, members share header tables (``FingerprintTables``), so that each call is compared
immediately. Between hosts, they all-gather the fingerprints of their calls since the last round
(``HostComparison``), at calls 1, 2, 4, 8, ... 256 and every 256th after. All members count the same
calls, so all start a round before the same call.

Worked example: member 2 passes MAX to call 6, the others SUM. The round before call 8 gathers

    call        5    6    7    8
    member 0    a    b    a    c
    member 1    a    b    a    c
    member 2    a    d    a    c      all members raise for call 6

A call that waits finishes its round before its data move. An asynchronous call only starts its
round, since it may return before the others call. A later round finishes that round, if it has
ended or the later call waits.

    >>> from types import SimpleNamespace as Stand
    >>> from meshdist.backends.requests import DONE
    >>> def start(gather):  # of three members, where this one is the first
    ...     row = gather.inputs[0].tolist()
    ...     other = [fingerprint + (at == 1) for at, fingerprint in enumerate(row)]
    ...     gather.outputs[0].copy_(torch.tensor([*row, *row, *(other if len(row) == 4 else row)]))
    ...     return DONE
    >>> comparison = HostComparison(Stand(size=3, start=start))
    >>> def call(number):
    ...     comparison.fingerprints[number % CHECK_EVERY] = 7
    ...     return is_due(number) and comparison.compare(number, "cpu", timedelta(1), waits=True)
    >>> [call(number) for number in range(1, 9)]
    [None, None, False, None, False, False, False, 6]
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from ..backends.communicator import Communicator
from ..backends.native_core import core
from ..backends.operation_args import OperationArgs
from ..backends.requests import Request
from ..bootstrap.timeout_store import read_jsons
from ..bootstrap.world import World
from ..checking.fingerprint_table import CHECK_EVERY, FingerprintTable
from ..checking.shared_flags import (
    FlagsAddress,
    Heartbeats,
    Regions,
    SharedFlags,
    SharedFlagsView,
    find_view,
    make_shared_words,
)
from ..errors import StoreError
from .control_messages import process_info_key

DISAGREEMENT = "disagreement"
"""The key, below a communicator's label, of the error on which its members have agreed."""


class FingerprintTables:
    """Factory of fingerprint tables: shared memory to compare calls.

    Args:
        words: this process's shared words; None before ``make_words``.
    """

    def __init__(self, world: World, words: SharedFlags | None = None) -> None:
        self._world = world
        self._words = words
        self._views: dict[int, SharedFlagsView | None] = {}

    def make_words(self) -> FlagsAddress | None:
        """Make this rank's shared words; return their address, None without system support."""
        self._words = make_shared_words()
        return None if self._words is None else self._words.address

    def make(
        self, label: str, ranks: tuple[int, ...], *, compares_messages: bool = True
    ) -> FingerprintTable | None:
        """Return a new header table, None if no other member is on this host."""
        key = _key_of(label)
        regions = Regions(lambda member: self._find_region(ranks[member], key))
        hosts = [self._world.hosts[rank] for rank in ranks]
        me = ranks.index(self._world.rank)
        new_log = core.MessageLog if compares_messages and core is not None else None
        return FingerprintTable.reserve(self._words, key, hosts, me, regions, new_log)

    def signs_of_life(self) -> Heartbeats:
        """Return the shared heartbeats of this rank and of its host's lower ranks."""
        hosts, me, key = self._world.hosts, self._world.rank, _key_of("heartbeats")
        lower = [rank for rank in range(me) if hosts[rank] == hosts[me]]
        regions = Regions(lambda member: self._find_region(lower[member], key))
        mine = None if self._words is None else self._words.reserve(key, 1)
        return Heartbeats(mine, regions, len(lower))

    def close(self) -> None:
        """Close this rank's shared words; forget other ranks' words."""
        self._views.clear()
        if self._words is not None:
            self._words.close()
            self._words = None

    def _find_region(self, rank: int, key: int) -> tuple[SharedFlagsView | None, int] | None:
        """Return (``rank``'s shared words, if in reach, ``key``); None without an address."""
        if rank not in self._views:
            store, hosts = self._world.store, self._world.hosts
            # All ranks of the host, which announce themselves as the world begins.
            others = set(range(len(hosts))) - {self._world.rank}
            ranks = [other for other in sorted(others) if hosts[other] == hosts[rank]]
            try:
                if not store.check(list(map(process_info_key, ranks))):
                    ranks = [rank]
                    if not store.check([process_info_key(rank)]):
                        return None
                addresses = read_jsons(store, list(map(process_info_key, ranks)), _parse)
            except StoreError:  # a group that does not otherwise need the store continues
                return None
            for other, address in zip(ranks, addresses, strict=True):
                self._views.setdefault(other, address and find_view(address))
        return self._views[rank], key

    def reaches(self, ranks: tuple[int, ...]) -> bool:
        """Return whether this rank can read the others' shared words in ``ranks``."""
        others = [rank for rank in ranks if rank != self._world.rank]
        return all((found := self._find_region(rank, 0)) and found[0] for rank in others)


def is_due(sequence: int) -> bool:
    """Return whether hosts compare their calls before call ``sequence``."""
    return not sequence % CHECK_EVERY or not sequence & (sequence - 1)


@dataclass(eq=False)
class HostComparison:
    """A member's part in comparing calls between hosts."""

    communicator: Communicator
    fingerprints: memoryview = field(
        default_factory=lambda: memoryview(bytearray(8 * CHECK_EVERY)).cast("Q")
    )
    """Those of the last calls, each at its number modulo ``CHECK_EVERY``; the core writes them."""
    last: int = 0
    """The last call of a round that this member has started."""
    _rounds: list[tuple[range, Request, torch.Tensor]] = field(default_factory=list)

    def compare(
        self, sequence: int, device: torch.device | str, timeout: timedelta, *, waits: bool
    ) -> int | None:
        """Start a round up to ``sequence``; finish rounds; return a differing call.

        Args:
            device: the fingerprints' device.
            waits: whether to wait up to ``timeout`` for all rounds, or only to poll them.

        Raises:
            BackendFailure: a round failed.
        """
        calls = range(self.last + 1, sequence + 1)
        mine = torch.tensor([self.fingerprints[n % CHECK_EVERY] for n in calls], device=device)
        all_of_them = mine.new_empty(self.communicator.size * len(calls))
        gather = OperationArgs("", "all_gather", [mine], [all_of_them]).as_own(timeout)
        gather.waits, self.last = waits, sequence
        self._rounds.append((calls, self.communicator.start(gather), all_of_them))
        return self.finish(timeout, waits=waits)

    def finish(self, timeout: timedelta, *, waits: bool = True) -> int | None:
        """Finish the started rounds; return the first differing call, or None."""
        while self._rounds and (waits or self._rounds[0][1].has_ended()):
            calls, request, all_of_them = self._rounds.pop(0)
            request.finish(timeout)
            rows = all_of_them.view(self.communicator.size, -1)
            if differing := (rows != rows[0]).any(0).nonzero().flatten().tolist():
                first: int = calls[differing[0]]
                return first
        return None


def _key_of(label: str) -> int:
    """Return the nonzero number under which members find the region ``label``."""
    digest = hashlib.sha1(label.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "little") | 1


def _parse(process_info: dict[str, Any]) -> FlagsAddress | None:
    address = process_info["words"]
    return None if address is None else FlagsAddress(*map(int, address))


def reason_of(disagreement: dict[str, str]) -> str:
    """Return a MismatchError's summary and ``found``, the reason of later collectives."""
    return f"{disagreement['summary']}: {disagreement['found']}"


def parse_disagreement(value: dict[str, str]) -> dict[str, str]:
    """Return a MismatchError's fields as texts; raise if ``value`` lacks any."""
    return {name: str(value[name]) for name in ("summary", "where", "expected", "found", "fix")}


def parse_abort(value: dict[str, Any]) -> dict[str, Any]:
    """Return an abort's checked message; raise if a field is missing or malformed."""
    texts: dict[str, Any] = {"rank": int(value["rank"]), "reason": str(value["reason"])}
    if value.get("disagreement"):
        texts["disagreement"] = parse_disagreement(value["disagreement"])
    return {**value, **texts, "labels": [str(label) for label in value["labels"]]}
