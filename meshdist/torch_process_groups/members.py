"""The other members of one of torch's groups, and how calls are compared as they start.

On a wire that does not compare calls by itself, as in meshdist's own groups the members on one host
write a header of each collective where the others can read it. Of two whose calls differ the later
one sees it at once; the other sees it while it waits, or at its next call.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from ..bootstrap.bounded_store import read_json
from ..checking.calls import GroupFacts, Note
from ..checking.header_table import WINDOW, HeaderTable
from ..checking.recorder import FORGOTTEN, Recorder
from ..checking.shared_words import Regions, SharedWordsView, WordsAddress, find_view
from ..error_text import grouped_text, ranks_text
from ..groups.failures import OtherMembers
from ..groups.signals import collect
from ..runtime.deadlines import Grace
from ..wires.failures import MembersDisagree
from ..wires.mpi.arrivals import words_of_process
from ..wires.registry import Opening

__all__ = ["Comparison", "MembersOfTorchGroup"]


class Comparison:
    """One member's part in the comparison of a group's calls.

    Args:
        opening: the group.
        recorder: has noted this member's calls.

    Attributes:
        table: in which members write their calls; None where this host has no memory for it, or
            the group has no other member there: then nothing is compared.
    """

    def __init__(self, opening: Opening, recorder: Recorder) -> None:
        self._ranks = opening.ranks
        self._store = opening.store
        self._recorder = recorder
        self._num_compared = 0
        words, key = words_of_process(), secrets.randbits(62) | 1
        size = len(opening.ranks)
        hosts = opening.hosts or ((0,) * size if opening.is_one_host else range(size))
        regions = Regions(self._find_region)
        self.table = HeaderTable.reserve(words, key, hosts, opening.rank, regions)
        if self.table is not None and words is not None:
            self._store.set(_key_of(opening.rank), json.dumps([key, words.address]))

    def compare_again(self, *, is_thorough: bool = True) -> None:
        """Compare once more the calls that not all members had reached.

        With ``is_thorough`` it goes on behind a call that a member has still not reached.

        Raises:
            MembersDisagree: another member has started another call in the place of one of them.
        """
        table, latest = self.table, self._recorder.sequence
        if table is None:
            return
        is_compared = True
        for number in range(max(self._num_compared, latest - WINDOW) + 1, latest + 1):
            differing = table.look_again(number)
            if differing:
                others = ranks_text(sorted(self._ranks[member] for member in differing))
                text = f"this member's call differs from that of {others}"
                raise MembersDisagree(text, number)
            is_compared = is_compared and differing is not None
            if is_compared:
                self._num_compared = number
            elif not is_thorough:
                return

    def close(self) -> None:
        """Compare nothing any more, and give the memory back."""
        table, self.table = self.table, None
        if table is not None:
            table.close()

    def _find_region(self, member: int) -> tuple[SharedWordsView | None, int] | None:
        if not self._store.check([_key_of(member)]):
            return None
        key, address = read_json(self._store, _key_of(member), _parse)
        return find_view(address), key


def _parse(value: tuple[int, list[Any]]) -> tuple[int, WordsAddress]:
    key, address = value
    return int(key), WordsAddress(*address)


def _key_of(member: int) -> str:
    """Where a member says in the store where its headers are."""
    return f"headers/{member}"


_ANSWERS_S = 1.0
_ABORT = "abort"


@dataclass
class MembersOfTorchGroup(OtherMembers):
    """The other members of a group of torch's.

    No thread of theirs answers questions. But all members see that their calls differ, and each
    writes its own into the store.
    """

    group: GroupFacts
    store: Store
    comparison: Comparison | None
    break_group: Callable[[str], None]

    def compare_again(self) -> None:
        if self.comparison is not None:
            self.comparison.compare_again()

    def find_abort(self) -> dict[str, Any] | None:
        with suppress(RuntimeError):  # the store is lost
            if self.store.check([_ABORT]):
                return read_json(self.store, _ABORT, _abort)
        return None

    def break_here(self, reason: str) -> None:
        self.break_group(reason)

    def give_up(self, reason: str) -> None:
        mine = {"rank": self.group.ranks[self.group.rank], "reason": reason}
        with suppress(RuntimeError):
            self.store.set(_ABORT, json.dumps(mine))
        self.break_here(reason)

    def agree_on_error(
        self, disagreement: dict[str, str], mine: Note | None, about: dict[str, Any]
    ) -> dict[str, str]:
        # Where the wire compares calls it does so before any data moves, and the group goes on.
        text = FORGOTTEN if mine is None else mine.text
        where, fix = disagreement["where"], disagreement["fix"]
        if "sequence" not in about:
            found = f"{self.group.here}: {text}"
        else:
            found = self._what_each_called(about["sequence"], text)
            if self.comparison is None:
                where += "; no data was moved"
            else:
                where += "; this member's tensors may have been written"
                fix += "; the group is broken now"
                self.break_here(disagreement["summary"])
        found = "\n".join(filter(None, (disagreement["found"], found)))
        return {**disagreement, "where": where, "found": found, "fix": fix}

    def _what_each_called(self, sequence: int, text: str) -> str:
        prefix = f"disagreement/{sequence}"
        texts = {self.group.rank: text}
        keys = {member: f"{prefix}/{member}" for member in range(len(self.group.ranks))}
        with suppress(RuntimeError):  # the store is lost: then each knows of its own call alone
            self.store.set(keys[self.group.rank], json.dumps(text))
            texts |= collect(self.store, keys, Grace(_ANSWERS_S), str)
        return grouped_text(
            (rank, texts.get(member, "has not reported"))
            for member, rank in enumerate(self.group.ranks)
        )


def _abort(value: dict[str, Any]) -> dict[str, Any]:
    """The message of a member that gives up; raises where it is none."""
    return {"rank": int(value["rank"]), "reason": str(value["reason"])}
