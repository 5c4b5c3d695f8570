"""The notes by which ranks in join contexts tell each other that they have joined, or have left.

Notes go through the store, under keys of this context alone. Simulated ranks use a table of their
scheduler, since a rank that looks must not let others run.

Calls that ranks without data cannot answer are refused here, too, on every member alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from ..bootstrap.bounded_store import read_json
from ..bootstrap.world import World
from ..checking.calls import Call, get_call
from ..error_text import first_line, ranks_text
from ..errors import JoinError, MeshdistError, StoreError
from ..groups.channel import Channel
from ..verb_table import VERBS, WIRE_VERBS
from ..wires.simulated.scheduler import find_rank_here
from .statements import Statement


class Whereabouts:
    """Notes in the store on which ranks of a join context have joined or left.

    Args:
        main: the label of the communicator of the main group.
        members: the ranks of the main group.
    """

    def __init__(self, world: World, main: str, members: Sequence[int]) -> None:
        self._world = world
        self._main = main
        self._members = members
        # The members of a main group count their contexts alike. Notes for other ranks are found
        # where all of them have been in equally many contexts.
        self._inside = self._name(main, world.next_number(("join contexts", main)))
        self._beyond = f"join context {world.next_number('join contexts')}"
        self._refusal: JoinError | None = None
        self._say(_key_of(world.rank), json.dumps({"context": self._inside}), is_new=False)

    def is_ahead(self, ranks: Sequence[int], labels: Iterable[str]) -> bool:
        """Return whether any of ``ranks`` is already in the next context of any of ``labels``."""
        # A later context is the next of a group of this rank's, which one of the labels names. Rank
        # 4 waits in that of the world; ranks 0 to 3, in loops of their own, come to it later:
        #     rank 0:  for x in uneven(data, pair)  |  for x in uneven(data)
        #     rank 4:  for x in uneven(data)
        last = self._world.last_number
        later = [self._name(label, last(("join contexts", label)) + 1) for label in labels]
        notes = filter(None, map(self._find, map(_key_of, ranks)))
        return any(note["context"] in later for note in notes)

    def join(self) -> None:
        """Write in the store that this rank has no data left."""
        for context in (self._inside, self._beyond):
            self._say(f"{context}/joined/{self._world.rank}", "")

    def has_joined(self, rank: int) -> bool:
        """Return whether a rank has noted that it has no data left."""
        context = self._inside if rank in self._members else self._beyond
        return self._find(f"{context}/joined/{rank}") is not None

    def refuse(self, refusal: JoinError) -> None:
        """Keep ``refusal`` as the reason that others read if this rank leaves."""
        self._refusal = refusal

    def reason_of(self, error: BaseException) -> str:
        """Return the text of ``error``, or of the error given to ``refuse``, for other ranks."""
        error = self._refusal or error
        reason = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, MeshdistError) and error.found:
            reason += f": {error.found}"
        return reason

    def leave(self, labels: Sequence[str], reason: str) -> None:
        """Write in the store why this rank makes no more calls on ``labels``."""
        text = json.dumps({"rank": self._world.rank, "reason": reason})
        for label in labels:
            self._say(self._left(label), text)

    def find_left(self, label: str) -> dict[str, Any] | None:
        """Return {"rank", "reason"} of a member that left by an exception, or None."""
        found = self._find(self._left(label))
        return None if found is None else {**found, "rank": int(found["rank"])}

    @staticmethod
    def _name(main: str, number: int) -> str:
        return f"join context {number} of {main}"

    def _left(self, label: str) -> str:
        context = self._inside if label == self._main else self._beyond
        return f"{context}/left/{label}"

    def _say(self, key: str, text: str, *, is_new: bool = True) -> None:
        """Store a text under a key; with ``is_new`` unless there is a text already."""
        here = find_rank_here()
        if here is not None:
            tables = here.scheduler.tables
            tables[key] = tables.get(key, text) if is_new else text
            return
        with suppress(StoreError):  # the others see by themselves that it is lost
            if is_new:
                self._world.store.compare_set(key, "", text or "{}")
            else:
                self._world.store.set(key, text)

    def _find(self, key: str) -> Any:
        here = find_rank_here()
        if here is not None:
            text = here.scheduler.tables.get(key)
            return None if text is None else json.loads(text or "{}")
        with suppress(StoreError):
            if self._world.store.check([key]):
                return read_json(self._world.store, key, dict)
        return None


def _key_of(rank: int) -> str:
    return f"join context of rank {rank}"


_SOURCED_VERBS = frozenset(
    verb.name
    for verb in VERBS.values()
    if any(WIRE_VERBS[name].root == "from" for name in verb.wire_verbs)
)
"""The public verbs whose root gives the data that the others take."""


def has_source(call: Call) -> bool:
    """Return whether a call's root gives the data, and so must have data."""
    return call.verb in _SOURCED_VERBS and call.root is not None


def find_call(channel: Channel, said: Sequence[Statement], *, is_strict: bool) -> Statement | None:
    """Return the statement of members with data, None if all have joined; or raise JoinError.

    Args:
        is_strict: whether JoinError is raised as soon as a member has joined and others have not.
    """
    going = next((statement for statement in said if not statement.has_joined), None)
    ranks = channel.group.ranks
    if going is None:
        hooks = next((statement.call for statement in said if statement.call.verb), None)
        if hooks is not None:
            raise JoinError(
                f"{hooks.text} is called on ranks that have joined alone",
                where=_where(channel),
                expected="in a hook only calls that ranks with data make, too",
                fix="call in main_hook what the joinable calls in one step, in this order",
            )
        return None
    joined = [rank for rank, statement in zip(ranks, said, strict=True) if statement.has_joined]
    if is_strict and joined:
        me = ranks[channel.group.rank]
        raise JoinError(
            f"rank {me} has no data left, and others have"
            if me in joined
            else "a rank has no data left, and this one has",
            where=_where(channel),
            expected="equally many steps on every rank: throw_on_early_termination is true",
            found=f"{ranks_text(joined)} joined first",
        )
    call = going.call
    if call.root is not None and has_source(call):
        source = said[call.root]
        if source.has_joined and source.call.header != call.header:
            raise JoinError(
                f"{call.text} cannot come from rank {ranks[call.root]}, which has no data left",
                where=_where(channel),
                expected="a source that goes on as long as any rank does",
                found=f"{ranks_text(joined)} joined",
                fix="let another rank be the source, or call it outside of the join context",
            )
    return going


def message_refusal(channel: Channel, verb: str, tensor: Any, rank: int) -> JoinError:
    """Return the error of a message that is for, or from, a rank without data."""
    return JoinError(
        f"{get_call(verb, tensor).text}: rank {rank} has no data left",
        where=_where(channel),
        expected="messages between ranks that go on",
        fix="exchange by a collective, such as all_to_all, or outside of the join context",
    )


def _where(channel: Channel) -> str:
    return f"{channel.group.here}, {channel.group.name}"
