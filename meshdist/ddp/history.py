"""Which gradients a backward is expected to bring: learned from the backwards before it.

The first synchronised backward is only watched: which gradients came, how often, in which order.
From then on a bucket waits for as many arrivals as the backward before had. What is decided for all
ranks alike (the order, and which parameters trail) follows from what all of them have read.

This module is pure: it sends nothing and touches no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["History"]

_BACKWARDS_TO_RETURN = 16
"""So often a trailing parameter must have come on every rank, in a row, to be sent early again: to
lay buckets anew costs more than some late ones."""

_NEVER = 1 << 60


class History:
    """Which gradients backwards have brought, and which are expected of the next.

    Attributes:
        expected: how often each gradient came here in the backward before, at least once.
        learned: how often each one came in the backward that was watched; empty without.
        order: in which they came here first while that is learned.
        by_count: those that cannot be seen to have come by looking at ``.grad``: they came more
            than once, without a gradient, or before the model's outputs had theirs.
        trailing: those that some rank lacked; equal on every rank.
        is_learned: whether a whole backward has been watched; equal on every rank.
    """

    def __init__(self, num_parameters: int) -> None:
        self._num = num_parameters
        self.forget()

    def forget(self) -> None:
        """Learn everything anew."""
        self.expected = [1] * self._num
        self.learned: tuple[int, ...] = ()
        self.order: list[int] = []
        self.by_count: set[int] = set()
        self.trailing: frozenset[int] = frozenset()
        self.is_learned = False
        self._streaks: dict[int, int] = {}

    def is_absent(self, order: Iterable[int]) -> None:
        """Learn in the order given that this rank has no backward, and await its next one's end."""
        self.expected = [_NEVER] * self._num
        self.by_count.update(range(self._num))
        self.order = self.order or list(order)

    def note_first(self, index: int, count: int) -> None:
        """A gradient came for the ``count``-th time in a backward that is watched."""
        self.order.append(index)
        if count > 1:
            self.by_count.add(index)

    def backward_ends(self, counts: Sequence[int], came: Sequence[bool]) -> None:
        """Expect as many arrivals as this backward had; those without a hook are not counted."""
        if not self.is_learned or max(counts) > 1 or max(self.expected) > 1:
            self.expected = [max(count, 1) for count in counts]
        if not (self.is_learned and self.learned):
            self.learned = tuple(map(max, counts, map(int, came)))

    def changes(self, counts: Sequence[int], came: Sequence[bool]) -> dict[int, tuple[int, int]]:
        """How often each gradient came now, and in the backward from which all was learned.

        Only those that differ; none on a rank that had no backward then.
        """
        now = map(max, counts, map(int, came))
        both = enumerate(zip(now, self.learned, strict=False))
        return {index: pair for index, pair in both if pair[0] != pair[1]}

    def settle(self, not_everywhere: Iterable[int], *, may_move: bool) -> None:
        """Take what all ranks have read of a backward.

        The parameters ``not_everywhere``, whose gradient some rank lacked, trail if ``may_move``.
        """
        self.is_learned = True
        if may_move:
            missing = frozenset(not_everywhere)
            streaks = {
                index: 0 if index in missing else self._streaks.get(index, 0) + 1
                for index in self.trailing | missing
            }
            self._streaks = {at: n for at, n in streaks.items() if n < _BACKWARDS_TO_RETURN}
            self.trailing = frozenset(self._streaks)

    def laid_order(self, expected: Iterable[int]) -> list[int]:
        """Return every index once: as gradients came here, and then those that did not."""
        return list(dict.fromkeys([*self.order, *expected]))
