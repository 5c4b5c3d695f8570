"""What joinables do in a join context on ranks that have no data left."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = ["JoinHook", "ReplicaHook"]


class JoinHook:
    """What a joinable does on a rank that has no data left. Both methods do nothing here."""

    def main_hook(self) -> None:
        """Call what the joinable calls in one step on ranks with data; once for each of theirs.

        Calls that it leaves out are answered without it.
        """

    def post_hook(self, is_last_joiner: bool) -> None:
        """Bring all ranks to one state, after the last has joined; runs on all of them.

        Args:
            is_last_joiner: whether this rank was among the last to join.
        """


class ReplicaHook(JoinHook, ABC):
    """A hook that takes part in what its joinable announces, or owns, step by step."""

    @abstractmethod
    def begin(self, context: Any, joinable: Any) -> None:
        """The context begins, in which ``joinable`` is."""

    @abstractmethod
    def end(self) -> None:
        """The context ends; post-hooks follow."""

    def take_part(self, what: str, at_work: Sequence[bool]) -> None:
        """Take part in what the joinable does on the ranks with data.

        Args:
            what: it does.
            at_work: which members have data, by their place in the group.
        """
