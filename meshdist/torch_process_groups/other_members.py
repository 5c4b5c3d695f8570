"""What the other members of one of torch's groups say when their calls differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed import Store

from ..checking.calls import Call, GroupFacts
from ..checking.recorder import FORGOTTEN
from ..error_text import grouped_text
from ..groups.failures import OtherMembers
from ..runtime.deadlines import Grace, wait_until
from .comparing import Comparison

__all__ = ["MembersOfTorchGroup"]

_ANSWERS_S = 1.0


class MembersOfTorchGroup(OtherMembers):
    """The other members of a group of torch's.

    No thread of theirs answers questions. But all members see that their calls differ, and each
    writes its own into the store.

    Args:
        group: whose members they are.
        store: whose keys belong to the group.
        comparison: compares the calls; None where the wire does, before any data moves.
        break_group: ends this member's part in the group, given why.
    """

    def __init__(
        self,
        group: GroupFacts,
        store: Store,
        comparison: Comparison | None,
        break_group: Callable[[str], None],
    ) -> None:
        self._group = group
        self._store = store
        self._comparison = comparison
        self._break_group = break_group

    def compare_again(self) -> None:
        if self._comparison is not None:
            self._comparison.compare_again()

    def break_here(self, reason: str) -> None:
        self._break_group(reason)

    def agree_on_error(
        self, disagreement: dict[str, str], mine: Call | None, about: dict[str, Any]
    ) -> dict[str, str]:
        # Where the wire compares calls it does so before any data moves, and the group goes on.
        text = FORGOTTEN if mine is None else mine.text
        where, fix = disagreement["where"], disagreement["fix"]
        if "sequence" not in about:
            found = f"{self._group.here}: {text}"
        else:
            found = self._what_each_called(about["sequence"], text)
            if self._comparison is None:
                where += "; no data was moved"
            else:
                where += "; this member's tensors may have been written"
                fix += "; the group is broken now"
                self.break_here(disagreement["summary"])
        found = "\n".join(filter(None, (disagreement["found"], found)))
        return {**disagreement, "where": where, "found": found, "fix": fix}

    def _what_each_called(self, sequence: int, text: str) -> str:
        prefix = f"disagreement/{sequence}"
        texts = {self._group.rank: text}

        def all_have_written() -> bool:
            for member in set(range(len(self._group.ranks))) - texts.keys():
                key = f"{prefix}/{member}"
                if self._store.check([key]):
                    texts[member] = json.loads(self._store.get(key))
            return len(texts) == len(self._group.ranks)

        with suppress(RuntimeError):  # the store is lost: then each knows of its own call alone
            self._store.set(f"{prefix}/{self._group.rank}", json.dumps(text))
            wait_until(all_have_written, Grace(_ANSWERS_S))
        return grouped_text(
            (rank, texts.get(member, "has not reported"))
            for member, rank in enumerate(self._group.ranks)
        )
