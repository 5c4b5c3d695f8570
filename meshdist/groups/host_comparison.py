"""Groups that span hosts compare their calls beside them: late, but always.

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

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from ..bootstrap.bounded_store import await_key
from ..bootstrap.world import World
from ..errors import MeshdistError
from ..runtime.bounded_calls import BoundedCall
from ..runtime.deadlines import Grace
from ..wires.failures import MembersDisagree, WireFailure
from .signals import ask

__all__ = ["NUM_DIGESTS", "HostComparison", "HostComparisons"]

_log = logging.getLogger("meshdist.groups")

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
_END = timedelta(seconds=20)  # a request to the store ends in a few seconds
_UNSET = "[0]"
_MASK = 0xFFFFFFFF  # what is told of a digest


@dataclass(eq=False)
class HostComparison:
    """One member's part in comparing a communicator's calls with those of other hosts.

    Args:
        is_leader: whether this member compares for its host.
        wake: lets ``look`` be called at once.
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
        """Add the next call, with the fingerprint of its header."""
        self._digest = self._digests[number % NUM_DIGESTS] = hash((self._digest, fingerprint))
        self.last = number
        if number >= self.wake_at:
            self.wake_at = sys.maxsize
            self.wake()
            if self.differs:  # more calls would push that call out of what members keep
                self.is_explained.wait(_END.total_seconds())

    def digests(self, number: int, after: int) -> list[int]:
        """The first call behind ``after`` that is kept, its digest, and so on up to ``number``."""
        first = max(after + 1, self.last - _NUM_TOLD)
        kept = range(first, min(number, self.last) + 1)
        return [first, *(self._digests[n % NUM_DIGESTS] & _MASK for n in kept)]

    def tell(
        self, failure: WireFailure, note: int | None = None, *, is_seen: bool = True
    ) -> MeshdistError:
        """As ``explain``, of a failure in the program's call, or of which it knows nothing yet."""
        self.is_told |= is_seen
        try:
            return self.explain(failure, note)
        finally:
            self.is_explained.set()

    def look(self) -> None:
        """Compare as far as this member has come; a later call wakes again."""
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
        """Compare with what members on other hosts answer, leaders or not: these may have ended.

        Raises:
            MembersDisagree: calls differ; ``look`` and ``compare_last`` raise it, too.
        """
        hosts, here = self.world.hosts, self.world.hosts[self.world.rank]
        others = tuple(rank for rank in self.ranks if hosts[rank] != here)
        about = {"label": self.label, "digests": [self.last, self._equal]}
        for answer in ask(self.world, others, about, patience_s=_ANSWER_S).values():
            self._compare(json.loads(answer["about"] or _UNSET))

    @property
    def uncompared(self) -> tuple[int, int] | None:
        """The first and the last call that this member does not know to be equal, if any.

        The first member's are those with which the others compare.
        """
        is_owed = self.world.rank != self.ranks[0] and self._equal < self.last
        return (self._equal + 1, self.last) if is_owed else None

    def compare_last(self) -> None:
        """Compare with the leader that has come here first, as this member leaves.

        Digests roll: the last one alone tells whether calls differ, and its list, read then, where.
        """
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
    """One rank's comparisons with other hosts, made on its signal thread.

    Args:
        wake: lets the signal thread call ``look`` at once.
    """

    def __init__(self, world: World, wake: Callable[[], object]) -> None:
        self._world, self._wake = world, wake
        self._interval_s = max(_INTERVAL_S, world.size * _INTERVAL_PER_RANK_S)
        self._least_s = _LEAST_SHARE * (self._interval_s - _INTERVAL_S)
        self._next = self._next_woken = Grace(0.0)
        self._explaining: list[BoundedCall] = []
        self._is_stopped = False

    def make(self, label: str, ranks: tuple[int, ...], is_alone: bool) -> HostComparison | None:
        """The comparison of a new communicator; None where its members are on one host.

        Args:
            is_alone: whether no other member compares its calls with this member's.
        """
        hosts, rank = self._world.hosts, self._world.rank
        if not (self._world.has_processes and self._world.spans_hosts(ranks)):
            return None
        is_leader = is_alone or rank == next(peer for peer in ranks if hosts[peer] == hosts[rank])
        return HostComparison(self._world, label, ranks, is_leader, self._wake)

    def look(self, comparisons: Iterable[HostComparison | None]) -> None:
        """Let members look that are woken, and all of them where the interval is over."""
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
        """Begin to explain nothing more, and let end what is being explained."""
        self._is_stopped = True
        for explaining in self._explaining:
            with suppress(Exception):
                explaining.wait(_END)
