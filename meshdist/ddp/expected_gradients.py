"""Learn from past backwards which gradients the next backward will compute.

The first synchronized backward is observed: which gradients it computes, how often, in which order.
Later a bucket waits until its gradients have been added to as often as in the previous backward.
Decisions that all ranks share (order, deferred parameters) use only numbers that all ranks have
read. This module sends nothing and touches no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_BACKWARDS_TO_RETURN = 16
"""The number of consecutive backwards in which every rank must compute a deferred gradient before
it is sent early again: a new layout costs more than a few late buckets."""

_NEVER = 1 << 60


class ExpectedGradients:
    """The gradients of past backwards, and those expected of the next."""

    def __init__(self, num_parameters: int) -> None:
        self._num = num_parameters
        self.forget()

    def forget(self) -> None:
        """Reset to the state before the first backward."""
        self.expected = [1] * self._num  # counts in the previous backward, at least 1
        self.learned: tuple[int, ...] = ()  # counts in the observed backward
        self.order: list[int] = []  # order of first computation, while it is learned
        self.deferred: frozenset[int] = frozenset()  # equal on every rank
        self.is_learned = False  # whether a backward was observed; equal on every rank
        # Consecutive backwards in which all ranks had the gradient.
        self._streaks: dict[int, int] = {}

    def note_absence(self, order: Iterable[int]) -> None:
        """Send all buckets at the end of the next backward, in ``order`` if none was learned."""
        self.expected = [_NEVER] * self._num
        self.order = self.order or list(order)

    def backward_ends(self, counts: Sequence[int], computed: Sequence[bool]) -> None:
        """Expect ``counts`` per gradient next; until learned, also store which ``computed``."""
        if not self.is_learned or max(counts) > 1 or max(self.expected) > 1:
            self.expected = [max(count, 1) for count in counts]
        if not (self.is_learned and self.learned):
            self.learned = tuple(map(max, counts, map(int, computed)))

    def find_changes(
        self, counts: Sequence[int], computed: Sequence[bool]
    ) -> dict[int, tuple[int, int]]:
        """Return {index: (count now, count learned)} of gradients whose counts differ."""
        now = map(max, counts, map(int, computed))
        both = enumerate(zip(now, self.learned, strict=False))
        return {index: pair for index, pair in both if pair[0] != pair[1]}

    def update_deferred(self, not_everywhere: Iterable[int], *, may_move: bool) -> None:
        """Defer the parameters whose gradient some rank lacked recently.

        Args:
            not_everywhere: parameters whose gradient some rank lacked in this backward.
            may_move: whether deferred parameters may change.
        """
        self.is_learned = True
        if may_move:
            missing = frozenset(not_everywhere)
            streaks = {
                index: 0 if index in missing else self._streaks.get(index, 0) + 1
                for index in self.deferred | missing
            }
            self._streaks = {at: n for at, n in streaks.items() if n < _BACKWARDS_TO_RETURN}
            self.deferred = frozenset(self._streaks)

    def laid_order(self, expected: Iterable[int]) -> list[int]:
        """Return the indices in order of computation here, then the rest of ``expected``."""
        return list(dict.fromkeys([*self.order, *expected]))
