"""Which gradients a backward is expected to bring: learned from the backwards before it.

The first synchronised backward is only watched: which gradients came, how often, in which order.
From then on a bucket waits for as many arrivals as the backward before had. What is decided for all
ranks alike (the order, and which parameters trail) follows from what all of them have read.

This module is pure: it sends nothing and touches no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_BACKWARDS_TO_RETURN = 16
"""So often a trailing parameter must have come on every rank, in a row, to be sent early again: to
lay buckets anew costs more than some late ones."""

_NEVER = 1 << 60


class ExpectedGradients:
    """The gradients that backwards have brought, and those that are expected of the next."""

    def __init__(self, num_parameters: int) -> None:
        self._num = num_parameters
        self.forget()

    def forget(self) -> None:
        """Reset to the state before the first backward."""
        self.expected = [1] * self._num  # arrivals in the backward before, and at least 1
        self.learned: tuple[int, ...] = ()  # arrivals in the backward that was watched
        self.order: list[int] = []  # of the first arrivals, while it is learned
        self.deferred: frozenset[int] = frozenset()  # equal on every rank
        self.is_learned = False  # whether a whole backward was watched; equal on every rank
        self._streaks: dict[int, int] = {}  # backwards in a row in which a gradient was everywhere

    def note_absence(self, order: Iterable[int]) -> None:
        """Let the next backward send all buckets at its end, by ``order`` if none was learned."""
        self.expected = [_NEVER] * self._num
        self.order = self.order or list(order)

    def backward_ends(self, counts: Sequence[int], came: Sequence[bool]) -> None:
        """Expect ``counts`` arrivals per gradient next; until learned, note also which ``came``."""
        if not self.is_learned or max(counts) > 1 or max(self.expected) > 1:
            self.expected = [max(count, 1) for count in counts]
        if not (self.is_learned and self.learned):
            self.learned = tuple(map(max, counts, map(int, came)))

    def find_changes(
        self, counts: Sequence[int], came: Sequence[bool]
    ) -> dict[int, tuple[int, int]]:
        """Return {index: (arrivals now, arrivals learned)} of gradients where these differ."""
        now = map(max, counts, map(int, came))
        both = enumerate(zip(now, self.learned, strict=False))
        return {index: pair for index, pair in both if pair[0] != pair[1]}

    def settle(self, not_everywhere: Iterable[int], *, may_move: bool) -> None:
        """Update which parameters trail: those whose gradient some rank lacked lately.

        Args:
            not_everywhere: the parameters whose gradient some rank lacked in this backward.
            may_move: whether parameters may begin or cease to trail.
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
        """Return the indices in the order of arrival here, then the rest of ``expected``."""
        return list(dict.fromkeys([*self.order, *expected]))
