"""How ranks of a world have ended, or left it, as the others see it.

A rank that leaves in good order, or by an exception, writes so to the store. One that is killed
cannot, but processes of one host see that its process has ended.
"""

from __future__ import annotations

import json
from contextlib import suppress

from ..bootstrap.bounded_store import read_json
from ..bootstrap.world import World
from ..errors import StoreError
from ..runtime.endings import IN_GOOD_ORDER
from ..runtime.hosts import ProcessCard, is_alive, is_stopped, my_card

__all__ = ["Endings"]


class Endings:
    """The endings of one world's ranks, as one of them sees them; none where they are simulated."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cards: dict[int, ProcessCard] = {}

    def announce(self) -> None:
        """Show the others of this host which process this rank is."""
        self._world.store.set(_card_key(self._world.rank), json.dumps(my_card().to_json()))

    def leave(self, how: str, num_calls: dict[str, int]) -> None:
        """Tell the others how this rank leaves, and its collectives by communicator's label."""
        with suppress(StoreError):
            self._world.store.set(_ending_key(self._world.rank), json.dumps([how, num_calls]))

    def find(self, rank: int, label: str = "") -> str:
        """How a rank has left the world, as in "has ended"; "" where it has not, for all one sees.

        With a communicator's ``label`` an end in good order tells how many collectives it called.

        Raises:
            StoreError: the store is lost.
        """
        world = self._world
        if not world.has_processes:
            return ""
        key = _ending_key(rank)
        if world.store.check([key]):
            how, counts = read_json(world.store, key, lambda it: (str(it[0]), dict(it[1])))
            if how in IN_GOOD_ORDER and (number := counts.get(label)) is not None:
                how += f"; it made {number} collective{'' if number == 1 else 's'} on this group"
            return how
        card = self._find_card(rank)
        return "has ended" if card is not None and is_alive(card) is False else ""

    def is_stopped(self, rank: int) -> bool:
        """Whether a rank of this host is seen to be stopped, so that it answers nothing."""
        card = self._find_card(rank) if self._world.has_processes else None
        return card is not None and is_stopped(card)

    def _find_card(self, rank: int) -> ProcessCard | None:
        world = self._world
        if world.hosts[rank] != world.hosts[world.rank]:
            return None
        if rank not in self._cards and world.store.check([_card_key(rank)]):
            self._cards[rank] = read_json(world.store, _card_key(rank), ProcessCard.from_json)
        return self._cards.get(rank)


def _ending_key(rank: int) -> str:
    return f"ended/{rank}"


def _card_key(rank: int) -> str:
    return f"process/{rank}"
