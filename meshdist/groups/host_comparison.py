"""Members compare their calls: in shared words on one host, beside the calls between hosts.

On one host a communicator's members share the tables of their headers (``HeaderTables``), so that
each call is compared as it is made. Between hosts they compare late, but always.

Each member keeps a rolling digest of its calls: the digest at call n is made of that at n - 1 and
the fingerprint of call n. The first member of a group writes its latest digests to the store; the
first member on each other host (a *leader*) reads them, and compares its own at the same numbers:

    member 0 (host A) at call 300 writes   the digests of the calls since it has last written
    member 4 (host B) at call 280 compares those up to 280, and the others once it is there

That is one request of each, whatever the number of hosts, at every 256th call and a second after
others, made by its signal thread; in large worlds less often, for the sake of the store's server.
Members also compare before a failure is explained, and as they leave. No call waits for it while
calls are equal; once they differ the next call waits until the error is made.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from ..bootstrap.bounded_store import await_key, read_jsons
from ..bootstrap.world import World
from ..checking.call_words import CallWords
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
from ..error_text import first_line, ranks_text
from ..errors import BackendError, MeshdistError, StoreError
from ..runtime.bounded_calls import BoundedCall
from ..runtime.deadlines import Grace, wait_until
from ..runtime.hosts import is_ending_by_exception
from ..wires.core import core
from ..wires.operations import MembersDisagree, WireAborted, WireFailure
from .signals import ask, card_key

_log = logging.getLogger("meshdist.groups")

DISAGREEMENT = "disagreement"
"""The key, below a communicator's label, of the error on which its members have agreed."""
NUM_DIGESTS = 1024
"""How many calls and digests a member keeps."""
_NUM_TOLD = 768  # at most; calls that go on meanwhile overwrite the oldest
_EVERY = 256
_INTERVAL_S = 0.875  # and an eighth until the signal thread looks: two of these are two seconds
_INTERVAL_PER_RANK_S = 0.001  # a thousand requests a second keep the server busy for 0.05 of it
# Of the part of the interval that is due to the ranks: calls wake no sooner than that again, else
# 2,048 leaders that make 4,000 calls a second would ask the server for 32,000 answers a second.
_LEAST_SHARE = 0.125
_ANSWER_S = 1.0
_LAST_S = 2.0
_DIFFERS_S = 10.0
_END = timedelta(seconds=20)  # a request to the store ends in a few seconds
_UNSET = "[0]"
_MASK = 0xFFFFFFFF  # what is told of a digest


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

    def make_call_words(self, label: str, ranks: tuple[int, ...]) -> CallWords | None:
        """Return the call words of a communicator, None without memory or with several hosts."""
        if self._words is None or self._world.spans_hosts(ranks):
            return None
        key = _key_of(f"calls/{label}")
        regions = Regions(lambda member: self._find_region(ranks[member], key))
        me = ranks.index(self._world.rank)
        with suppress(MemoryError):
            return CallWords(self._words, key, me, len(ranks), regions)
        return None

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


@dataclass(eq=False)
class HostComparison:
    """A member's part in comparing a communicator's calls with those of other hosts.

    Args:
        is_leader: whether this member compares for its host.
        wake: makes the signal thread call this object's ``look`` at once.
    """

    world: World
    label: str
    ranks: tuple[int, ...]
    is_leader: bool
    wake: Callable[[], object]

    def __post_init__(self) -> None:
        self.explain: Callable[..., MeshdistError]
        """Makes the error that all members raise; that of a group which uses the communicator."""
        self.is_told = False
        """Whether the program has seen an error of the communicator."""
        self.is_explained = threading.Event()
        self.last = 0
        """The number of the last call."""
        self.wake_at = _EVERY if self.is_leader else sys.maxsize
        """The call that wakes; none where that is done already."""
        self.differs = self._is_ahead = False
        self._digest = self._equal = self._written = self._before = 0  # up to which call
        self._read: tuple[int, ...] = (0,)
        self._digests = [0] * NUM_DIGESTS

    def enter(self, number: int, fingerprint: int) -> None:
        """Add call ``number`` to the rolling digest; wake ``look`` if due; wait if calls differ."""
        self._digest = self._digests[number % NUM_DIGESTS] = hash((self._digest, fingerprint))
        self.last = number
        if number >= self.wake_at:
            self.wake_at = sys.maxsize
            self.wake()
            if self.differs:  # more calls would push that call out of what members keep
                self.is_explained.wait(_END.total_seconds())

    def digests(self, number: int, after: int) -> list[int]:
        """Return the number of the first kept call past ``after``, and digests up to ``number``."""
        first = max(after + 1, self.last - _NUM_TOLD)
        kept = range(first, min(number, self.last) + 1)
        return [first, *(self._digests[n % NUM_DIGESTS] & _MASK for n in kept)]

    def tell(
        self, failure: WireFailure, note: int | None = None, *, is_seen: bool = True
    ) -> MeshdistError:
        """Return the explained error of ``failure``, and free the calls that wait for it.

        Args:
            note: the number of the call's note; None for the last call.
            is_seen: whether the caller raises the error.
        """
        self.is_told |= is_seen
        try:
            return self.explain(failure, note)
        finally:
            self.is_explained.set()

    def look(self) -> None:
        """Store digests of the calls as first member of the group, or compare with those stored."""
        number, store, key = self.last, self.world.store, f"{self.label}/calls"
        self.wake_at = number - number % _EVERY + _EVERY
        if self.world.rank == self.ranks[0]:
            if self._written < number:
                store.set(key, json.dumps(self.digests(number, self._before)))
                self._before, self._written = self._written, number
        elif self._equal < number:
            if not self._is_ahead:
                # It expects what no member writes: so it sets nothing, reads, and does not wait.
                self._read = tuple(json.loads(store.compare_set(key, _UNSET, _UNSET)))
            self._is_ahead = self._read[0] + len(self._read) - 2 > number
            self._compare(self._read)

    def compare_now(self) -> None:
        """Ask members on other hosts for their digests, and compare these with this member's.

        Raises:
            MembersDisagree: calls differ; so do ``look`` and ``compare_last``.
        """
        hosts, here = self.world.hosts, self.world.hosts[self.world.rank]
        others = tuple(rank for rank in self.ranks if hosts[rank] != here)
        about = {"label": self.label, "digests": [self.last, self._equal]}
        for answer in ask(self.world, others, about, patience_s=_ANSWER_S).values():
            self._compare(json.loads(answer["about"] or _UNSET))

    @property
    def uncompared(self) -> tuple[int, int] | None:
        """Return the first and last call not yet known to be equal, None if there are none."""
        # The first member's calls are those with which the others compare.
        is_owed = self.world.rank != self.ranks[0] and self._equal < self.last
        return (self._equal + 1, self.last) if is_owed else None

    def compare_last(self) -> None:
        """Compare digests with the leader that left first; store digests if this is first."""
        # Digests roll: the last alone tells whether calls differ, and the list, read then, where.
        if not self.is_leader:
            return
        store, key, rank = self.world.store, f"{self.label}/last", self.world.rank
        mine = [*self.digests(self.last, self.last - 1), rank]
        *theirs, first = json.loads(store.compare_set(key, "", json.dumps(mine)))
        if first == rank:
            store.set(f"{key}/list", json.dumps(self.digests(self.last, 0)))
        elif theirs[0] > self.last or self._digests[theirs[0] % NUM_DIGESTS] & _MASK != theirs[1]:
            if await_key(store, f"{key}/list", Grace(_ANSWER_S)):
                theirs = json.loads(store.get(f"{key}/list"))
            self._compare(theirs)

    def _compare(self, theirs: Sequence[int]) -> None:
        if not all(type(digest) is int for digest in theirs):
            raise ValueError("what no member writes")
        first, end = theirs[0], min(theirs[0] + len(theirs) - 2, self.last)
        for number in range(max(first, self._equal + 1), end + 1):
            if self._digests[number % NUM_DIGESTS] & _MASK == theirs[number - first + 1]:
                self._equal = number
            elif number > self.last - NUM_DIGESTS + 1:  # else a later call has overwritten it
                self.differs, self.wake_at = True, 0
                late = (self._equal + 1, self.last)
                raise MembersDisagree("calls of two hosts differ", number, late=late)


class HostComparisons:
    """The comparisons of a rank with other hosts, made on its signal thread.

    Args:
        wake: makes the signal thread call this object's ``look`` at once.
    """

    def __init__(self, world: World, wake: Callable[[], object]) -> None:
        self._world, self._wake = world, wake
        self._interval_s = max(_INTERVAL_S, world.size * _INTERVAL_PER_RANK_S)
        self._least_s = _LEAST_SHARE * (self._interval_s - _INTERVAL_S)
        self._next = self._next_woken = Grace(0.0)
        self._explaining: list[BoundedCall] = []
        self._is_stopped = False

    def make(self, label: str, ranks: tuple[int, ...], is_alone: bool) -> HostComparison | None:
        """Return the comparison of calls between hosts; None on one host or if simulated.

        Args:
            is_alone: whether this member compares its own calls; else the first member of its host
                does for all members there, whose header tables compare theirs.
        """
        hosts, rank = self._world.hosts, self._world.rank
        if not (self._world.has_processes and self._world.spans_hosts(ranks)):
            return None
        is_leader = is_alone or rank == next(peer for peer in ranks if hosts[peer] == hosts[rank])
        return HostComparison(self._world, label, ranks, is_leader, self._wake)

    def look(self, comparisons: Iterable[HostComparison | None]) -> None:
        """Run ``look`` of each comparison that is due or woken; explain differences by threads."""
        if is_due := self._next.is_over:
            self._next = Grace(self._interval_s)
        if may_wake := self._next_woken.is_over:
            self._next_woken = Grace(self._least_s)
        for member in comparisons:
            if self._is_stopped or member is None or member.differs or not member.is_leader:
                continue
            try:
                if is_due or (may_wake and member.wake_at == sys.maxsize):
                    member.look()
            except MembersDisagree as failure:
                # It asks other ranks, which may ask this one: the signal thread is to answer.
                explain = partial(member.tell, failure, is_seen=False)
                self._explaining.append(BoundedCall(explain, "differs"))
            except Exception as error:  # the store may answer later, and hold no junk
                _log.debug("calls are not compared across hosts now: %s", error)

    def stop(self) -> None:
        """Start no more explanations, and wait for the explanations that run."""
        self._is_stopped = True
        for explaining in self._explaining:
            with suppress(Exception):
                explaining.wait(_END)

    def compare_at_end(
        self,
        compared: Sequence[HostComparison],
        aborts: Mapping[str, dict[str, Any]],
        count: Callable[[str, tuple[int, ...]], object],
        find_abort: Callable[[str], object],
    ) -> MeshdistError | None:
        """Compare last calls across hosts within seconds; return an error not raised yet, or None.

        Args:
            compared: of the communicators that this rank leaves, those with calls.
            aborts: why a communicator is broken, by label; ``find_abort`` adds to it.
            count: counts this rank in the store, under a key, among members.
            find_abort: looks in the store why a communicator is broken.
        """
        # It waits two seconds at most for the other members.
        if not compared or self._world.process_id != os.getpid() or is_ending_by_exception():
            return None
        store = self._world.store
        fresh = [part for part in compared if part.label not in aborts]
        unknown: BackendError | None = None
        try:
            for part in fresh:
                try:
                    part.compare_last()
                except MembersDisagree as failure:
                    store.set(f"{part.label}/differs", "")  # others wait until all is explained
                    part.explain(failure)
                count(f"{part.label}/compared", part.ranks)
            keys = [key_of_all(f"{part.label}/compared") for part in fresh]
            wait_until(partial(store.check, keys), Grace(_LAST_S))
            for part in fresh:
                limit = Grace(_DIFFERS_S if store.check([f"{part.label}/differs"]) else 0)
                wait_until(partial(find_abort, part.label), limit)
        except StoreError as lost:
            unknown = self._uncompared(fresh, lost)
        except (ValueError, TypeError, LookupError):  # what no member writes
            pass
        for part in compared:
            if not part.is_told and aborts.get(part.label, {}).get("disagreement"):
                return part.tell(WireAborted("the group is broken"))
        return unknown

    def _uncompared(self, compared: list[HostComparison], lost: StoreError) -> BackendError | None:
        """Return the error of calls in ``compared`` that a lost store left uncompared, or None."""
        owed = [(part, part.uncompared) for part in compared if part.uncompared is not None]
        calls = ", ".join(f"{a} to {b} of {ranks_text(part.ranks)}" for part, (a, b) in owed)
        if not owed:
            return None
        return BackendError(
            "calls are not known to equal those of other hosts",
            where=f"rank {self._world.rank}, as it leaves",
            expected="a store that answers: where calls differ their numbers are wrong",
            found=f"calls {calls}: {first_line(lost)}",
            fix="look at how the process that serves the store has ended",
        )


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
