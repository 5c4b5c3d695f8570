"""The words of the other members of one of torch's groups when their calls differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from ..bootstrap.bounded_store import read_json
from ..checking.calls import Call, GroupFacts
from ..checking.recorder import FORGOTTEN
from ..error_text import grouped_text
from ..groups.failures import OtherMembers
from ..groups.signal_thread import collect
from ..runtime.deadlines import Grace
from .comparing import Comparison

__all__ = ["MembersOfTorchGroup"]

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
        self, disagreement: dict[str, str], mine: Call | None, about: dict[str, Any]
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
            collect(self.store, keys, texts, Grace(_ANSWERS_S), str)
        return grouped_text(
            (rank, texts.get(member, "has not reported"))
            for member, rank in enumerate(self.group.ranks)
        )


def _abort(value: dict[str, Any]) -> dict[str, Any]:
    """The message of a member that gives up; raises where it is none."""
    return {"rank": int(value["rank"]), "reason": str(value["reason"])}
