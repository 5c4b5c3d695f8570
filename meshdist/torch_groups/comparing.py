"""Calls compared as they start, on a wire that does not compare them by itself.

As in meshdist's own groups the members on one host write a header of each collective where the
others can read it. Of two whose calls differ the later one sees it at once; the other sees it while
it waits, or at its next call.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch

from ..error_text import ranks_text
from ..mesh.channel import header_of
from ..runtime.boards import BoardAddress, BoardView, find_view
from ..runtime.clock import clock
from ..runtime.ledger import CHECK_EVERY, WINDOW, Ledger
from ..wires.base import MembersDisagree, Opening, WireAborted, WireTimeout
from ..wires.mpi_link import shared_board
from .calls import Call

__all__ = ["Comparison"]

_PAUSE_S = 0.001
_ANY = torch.Size()


class Comparison:
    """One member's part in the comparison of a group's calls.

    Args:
        opening: the group. Where this host has no memory for it, or the group has no other member
            there, nothing is compared.
        is_broken: whether the group cannot be used any more.
    """

    def __init__(self, opening: Opening, is_broken: Callable[[], bool]) -> None:
        self._ranks = opening.ranks
        self._store = opening.store
        self._is_broken = is_broken
        self._views: dict[int, tuple[BoardView, int] | None] = {}
        self._entering = threading.Lock()
        self._latest = 0
        self._num_settled = 0
        self._noted: dict[int, Call] = {}
        self._ledger: Ledger | None = None
        self._board = shared_board()
        self._key = secrets.randbits(62) | 1
        size = len(opening.ranks)
        hosts = opening.hosts or ((0,) * size if opening.is_one_host else tuple(range(size)))
        mine = hosts[opening.rank]
        others = [one for one in range(size) if one != opening.rank and hosts[one] == mine]
        if self._board is None or not others:
            return
        try:
            region = self._board.reserve(self._key, Ledger.num_words(size))
        except MemoryError:
            return
        place = {"key": self._key, **self._board.address.to_json()}
        self._store.set(_key_of(opening.rank), json.dumps(place))
        self._ledger = Ledger(
            region, opening.rank, others, size, self._find_region, self._is_current, self._is_alive
        )

    def enter(self, call: Call, timeout: timedelta) -> None:
        """Note a numbered collective that this member is about to start, and compare it.

        Raises:
            MembersDisagree: another member has started another call in its place, or in that of an
                earlier one.
            WireTimeout: a member is more than a thousand calls behind for too long.
        """
        ledger = self._ledger
        if ledger is None:
            return
        number, (sent, taken) = call.number, call.sizes
        data = [(_ANY if sent else x.shape, x.dtype) for x in call.tensors]
        header = header_of(call.verb, tuple(data), call.op, call.peer, is_uneven=bool(sent))
        if sent or not number % CHECK_EVERY:
            self._wait_for_the_slowest(ledger, call, timeout)
        self._noted[number] = call.without_tensors()
        self._noted.pop(number - WINDOW, None)
        with self._entering:  # several threads may use the group
            differing = ledger.enter(number, header, sent, taken)
            self._latest = max(self._latest, number)
        if differing:
            raise self._disagreement(number, differing)
        self._look(ledger, is_thorough=False)

    def look(self) -> None:
        """Compare once more the calls to which not all members had come.

        Raises:
            MembersDisagree: as for ``enter``.
        """
        ledger = self._ledger
        if ledger is not None:
            self._look(ledger, is_thorough=True)

    def noted(self, number: int) -> Call | None:
        """The call of this number, if it is kept: as long as not all members have come to it."""
        return self._noted.get(number)

    def close(self) -> None:
        """Compare nothing any more, and give the memory back."""
        ledger, self._ledger = self._ledger, None
        if ledger is not None and self._board is not None:
            ledger.close()
            self._board.release(self._key)

    def _look(self, ledger: Ledger, *, is_thorough: bool) -> None:
        """Compare what is not settled; unless thoroughly, up to a call that waits for a member."""
        is_settled = True
        for number in range(max(self._num_settled, self._latest - WINDOW) + 1, self._latest + 1):
            differing = ledger.look_again(number)
            if differing:
                raise self._disagreement(number, differing)
            is_settled = is_settled and differing is not None
            if is_settled:
                self._num_settled = number
                self._noted.pop(number, None)
            elif not is_thorough:
                return

    def _disagreement(self, number: int, differing: list[int]) -> MembersDisagree:
        who = ranks_text(sorted(self._ranks[member] for member in differing))
        return MembersDisagree(f"this member's call differs from that of {who}", number)

    def _wait_for_the_slowest(self, ledger: Ledger, call: Call, timeout: timedelta) -> None:
        deadline = clock.now() + timeout.total_seconds()
        while (member := ledger.find_behind(call.number, bool(call.sizes[0]))) is not None:
            self.look()
            if self._is_broken():
                raise WireAborted("aborted while waiting")
            if clock.now() > deadline:
                raise WireTimeout(f"rank {self._ranks[member]} is too many calls behind")
            time.sleep(_PAUSE_S)

    def _find_region(self, member: int, num_words: int) -> memoryview | None:
        if member not in self._views:
            if not self._store.check([_key_of(member)]):
                return None
            place = json.loads(self._store.get(_key_of(member)))
            view = find_view(BoardAddress.from_json(place))
            self._views[member] = None if view is None else (view, place["key"])
        found = self._views[member]
        return None if found is None else found[0].find(found[1], num_words)

    def _is_current(self, member: int) -> bool:
        found = self._views.get(member)
        return found is not None and found[0].has(found[1])

    def _is_alive(self, member: int) -> bool:
        found = self._views.get(member)
        return found is not None and found[0].is_kept() and found[0].has(found[1])


def _key_of(member: int) -> str:
    """Where a member tells the others where its headers are."""
    return f"headers/{member}"
