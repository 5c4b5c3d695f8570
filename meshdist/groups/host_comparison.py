"""Groups that span hosts compare their calls beside them: late, but always.

Each member keeps a rolling digest of its calls: the digest at call n is made of that at n - 1 and
the fingerprint of call n. The first member of a group writes its latest digests to the store; the
first member on each other host (a *leader*) reads them, and compares its own at the same numbers:

    member 0 (host A) at call 300 writes   the digests of the calls since it has last written
    member 4 (host B) at call 280 compares those up to 280, and the others once it is there

That is one request of each, whatever the number of hosts, at every 256th call and a second after
others. Members also compare before a failure is explained, and as they leave. No call waits for it.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from weakref import WeakSet

from ..bootstrap.world import World
from ..errors import MeshdistError, StoreError
from ..wires.failures import MembersDisagree, WireFailure
from .signals import ask

__all__ = ["NUM_DIGESTS", "ComparingThread", "HostComparison"]

_log = logging.getLogger("meshdist.groups")

NUM_DIGESTS = 1024
"""How many calls and digests a member keeps."""
_NUM_TOLD = 768  # of these; calls that go on meanwhile overwrite the oldest
_EVERY = 256
_INTERVAL_S = 1.0
_INTERVAL_PER_RANK_S = 0.001  # a thousand requests a second keep the server busy for 0.05 of it
_PAUSE = 0.02  # between two looks, in intervals
_ANSWER_S = 1.0
_END_S = 20.0  # a request to the store ends in a few seconds
_UNSET = "[0]"


class HostComparison:
    """One member's part in comparing a communicator's calls with those of other hosts.

    Args:
        wake: lets the thread look within an interval, or at once where it waits for that already.
        is_leader: whether this member compares for its host.
    """

    explain: Callable[..., MeshdistError]
    """Makes the error that all members raise; that of a group which uses the communicator."""
    is_told = False
    """Whether the program has seen an error of the communicator."""
    last = 0
    """The number of the last call."""
    _digest = _equal = _written = _before = 0  # up to which call; _before: written before
    _read: tuple[int, ...] = (0,)
    _is_ahead = _differs = False

    def __init__(
        self,
        world: World,
        label: str,
        ranks: tuple[int, ...],
        wake: Callable[[], None],
        is_leader: bool,
    ) -> None:
        self.label = label
        self.ranks = ranks
        self.wake_at = 1 if is_leader else sys.maxsize
        self._world = world
        self._wake = wake
        self._is_leader = is_leader
        self.is_explained = threading.Event()
        self._digests = [0] * NUM_DIGESTS

    def enter(self, number: int, fingerprint: int) -> None:
        """Add the next call, with the fingerprint of its header."""
        self._digest = digest = hash((self._digest, fingerprint)) & 0xFFFFFFFF
        self._digests[number % NUM_DIGESTS] = digest
        self.last = number
        if number >= self.wake_at:
            if self._differs:  # more calls would push the one in question out of what members keep
                self.is_explained.wait(_END_S)
            self.wake_at = sys.maxsize
            self._wake()

    def digests(self, number: int, after: int) -> list[int]:
        """The first call behind ``after`` that is kept, its digest, and so on up to ``number``."""
        first = max(after + 1, self.last - _NUM_TOLD)
        kept = range(first, min(number, self.last) + 1)
        return [first, *(self._digests[n % NUM_DIGESTS] for n in kept)]

    def tell(self, failure: WireFailure, note: int | None = None) -> MeshdistError:
        """As ``explain``, of a failure in the program's call."""
        self.is_told = True
        try:
            return self.explain(failure, note)
        finally:
            self.is_explained.set()

    def look(self) -> None:
        """Compare as far as this member has come; then a later call wakes the thread again."""
        number, store, key = self.last, self._world.store, f"{self.label}/calls"
        if self._world.rank == self.ranks[0]:
            if self._written < number:
                store.set(key, json.dumps(self.digests(number, self._before)))
                self._before, self._written = self._written, number
        elif self._equal < number:
            if not self._is_ahead:
                # It expects what no member writes: so it sets nothing, reads, and does not wait.
                self._read = tuple(json.loads(store.compare_set(key, _UNSET, _UNSET)))
            self._is_ahead = self._read[0] + len(self._read) - 2 > number
            self._compare(self._read)
        self.wake_at = max(self._equal + 1, self._written + 1, self._read[0])
        if self.last >= self.wake_at:  # set before, since a call may have come meanwhile
            self._wake()

    def compare_now(self) -> None:
        """Compare with what members on other hosts answer, leaders or not: these may have ended.

        Raises:
            MembersDisagree: calls differ; ``look`` and ``compare_last`` raise it, too.
        """
        hosts, here = self._world.hosts, self._world.hosts[self._world.rank]
        others = tuple(rank for rank in self.ranks if hosts[rank] != here)
        about = {"label": self.label, "digests": [self.last, self._equal]}
        for answer in ask(self._world, others, about, patience_s=_ANSWER_S).values():
            self._compare(json.loads(answer["about"] or _UNSET))

    def compare_last(self) -> None:
        """Compare with the leader that has come here first, as this member leaves."""
        if self._is_leader:
            mine = json.dumps(self.digests(self.last, 0))
            self._compare(json.loads(self._world.store.compare_set(f"{self.label}/last", "", mine)))

    def _compare(self, theirs: Sequence[int]) -> None:
        first, end = theirs[0], min(theirs[0] + len(theirs) - 2, self.last)
        for number in range(max(first, self._equal + 1), end + 1):
            if self._digests[number % NUM_DIGESTS] == theirs[number - first + 1]:
                self._equal = number
            elif number > self.last - NUM_DIGESTS + 1:  # else a later call has overwritten it
                self._differs, self.wake_at = True, 0
                late = (self._equal + 1, self.last)
                raise MembersDisagree("calls of two hosts differ", number, late=late)


class ComparingThread:
    """The thread on which one rank compares its calls with other hosts'; runs from the first on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._comparisons: WeakSet[HostComparison] = WeakSet()
        self._woken = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, label: str, ranks: tuple[int, ...], is_alone: bool) -> HostComparison | None:
        """Compare the calls of a new communicator, where its members are on several hosts.

        Args:
            is_alone: whether no other member compares its calls with this one's.
        """
        hosts, rank = self._world.hosts, self._world.rank
        if not (self._world.has_processes and self._world.spans_hosts(ranks)):
            return None
        is_leader = is_alone or rank == next(one for one in ranks if hosts[one] == hosts[rank])
        made = HostComparison(self._world, label, ranks, self._woken.set, is_leader)
        if is_leader:
            self._comparisons.add(made)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="meshdist-hosts", daemon=True
                )
                self._thread.start()
        return made

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._woken.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def _run(self) -> None:
        interval_s = max(_INTERVAL_S, self._world.size * _INTERVAL_PER_RANK_S)
        while not self._stopped.is_set():
            self._woken.wait()  # until a call is made that is not compared
            self._woken.clear()
            for one in list(self._comparisons):
                one.wake_at = one.last - one.last % _EVERY + _EVERY
            self._woken.wait(interval_s)
            self._woken.clear()
            for one in list(self._comparisons):
                try:
                    one.look()
                except MembersDisagree as failure:
                    self._comparisons.discard(one)
                    one.explain(failure)
                    one.is_explained.set()
                except (StoreError, ValueError, TypeError) as error:  # it may answer later
                    _log.debug("calls are not compared across hosts now: %s", error)
                    self._woken.set()
            self._stopped.wait(interval_s * _PAUSE)
