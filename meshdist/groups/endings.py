"""How ranks of a world have ended, or left it, as the others see it.

A rank that leaves in good order, or by an exception, writes so to the store. One that is killed
cannot, but processes of one host see that its process has ended.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from ..bootstrap.bounded_store import read_json, read_number
from ..bootstrap.world import World
from ..errors import StoreError
from ..runtime.endings import IN_GOOD_ORDER
from ..runtime.hosts import ProcessCard, is_alive, is_stopped, my_card

__all__ = ["Endings", "card_key"]

_NUM_LEFT = "ended"


class Endings:
    """The endings of one world's ranks, as one of them sees them; none where they are simulated."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cards: dict[int, ProcessCard] = {}
        self._left: dict[int, tuple[str, dict[str, int]]] = {}

    def announce(self, **more: Any) -> None:
        """Show the others of this host which process this rank is, and what else they need."""
        card = {**my_card().to_json(), **more}
        self._world.store.set(card_key(self._world.rank), json.dumps(card))

    def leave(self, how: str, num_calls: dict[str, int]) -> None:
        """Tell the others how this rank leaves, and its collectives by communicator's label."""
        with suppress(StoreError):
            self._world.store.set(_ending_key(self._world.rank), json.dumps([how, num_calls]))
            self._world.store.add(_NUM_LEFT, 1)

    def find(self, rank: int, label: str = "") -> str:
        """How a rank has left the world; "" where it has not, for all that is seen here."""
        return self.find_all((rank,), label).get(rank, "")

    def find_all(self, ranks: Collection[int], label: str = "") -> dict[int, str]:
        """How those of ``ranks`` left the world that did, as in "has ended"; one request if none.

        With a communicator's ``label`` an end in good order tells how many collectives it called.

        Raises:
            StoreError: the store is lost.
        """
        store, found = self._world.store, dict[int, str]()
        if not self._world.has_processes:
            return found
        for rank in ranks:  # first: what a process has left behind is there when it ends
            if (card := self._find_card(rank)) is not None and is_alive(card) is False:
                found[rank] = "has ended"
        has_more = read_number(store, _NUM_LEFT) > len(self._left)
        for rank in ranks:
            if has_more and rank not in self._left and store.check([key := _ending_key(rank)]):
                self._left[rank] = read_json(store, key, lambda it: (str(it[0]), dict(it[1])))
            if rank in self._left:
                how, counts = self._left[rank]
                if how in IN_GOOD_ORDER and (number := counts.get(label)) is not None:
                    how += f"; it made {number} collective{'s' * (number != 1)} on this group"
                found[rank] = how
        return found

    def is_stopped(self, rank: int) -> bool:
        """Whether a rank of this host is seen to be stopped, so that it answers nothing."""
        card = self._find_card(rank) if self._world.has_processes else None
        return card is not None and is_stopped(card)

    def _find_card(self, rank: int) -> ProcessCard | None:
        world = self._world
        if world.hosts[rank] != world.hosts[world.rank]:
            return None
        if rank not in self._cards and world.store.check([card_key(rank)]):
            self._cards[rank] = read_json(world.store, card_key(rank), ProcessCard.from_json)
        return self._cards.get(rank)


def _ending_key(rank: int) -> str:
    return f"ended/{rank}"


def card_key(rank: int) -> str:
    """Under which ``announce`` writes."""
    return f"process/{rank}"
