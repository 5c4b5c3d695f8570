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
    """The arrivals of the running backward, and those that are expected.

    Attributes:
        counts: of the running backward, how often each gradient has come here.
        expected: how often each one came here in the backward before, at least once.
        order: in which they came here first while arrivals are learned.
        by_count: those that cannot be seen to have come by looking at ``.grad``: they came more
            than once, without a gradient, or before the model's outputs had theirs.
        trailing: those that some rank lacked; equal on every rank.
        is_learned: whether a whole backward has been watched; equal on every rank.
    """

    def __init__(self, num_parameters: int) -> None:
        self._num = num_parameters
        self.counts = [0] * num_parameters
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

    def backward_begins(self) -> None:
        """Count anew."""
        self.counts[:] = [0] * self._num

    def note_first(self, index: int) -> None:
        """While arrivals are learned: a gradient came."""
        self.counts[index] += 1
        self.order.append(index)
        if self.counts[index] > 1:
            self.by_count.add(index)

    def backward_ends(self, came: Sequence[bool]) -> None:
        """Expect as many arrivals as this backward had; those without a hook are not counted."""
        if not self.is_learned or max(self.counts) > 1 or max(self.expected) > 1:
            self.expected = [max(count, 1) for count in self.counts]
        if not (self.is_learned and self.learned):
            counts = zip(self.counts, came, strict=True)
            self.learned = tuple(max(count, int(has_come)) for count, has_come in counts)

    def changes(self, came: Sequence[bool]) -> list[int]:
        """Return what came otherwise than in the backward from which all was learned.

        Nothing on a rank that had none then.
        """
        if not self.learned:
            return []
        return [
            index
            for index, (count, has_come, learned) in enumerate(
                zip(self.counts, came, self.learned, strict=True)
            )
            if max(count, int(has_come)) != learned
        ]

    def settle(self, not_everywhere: Iterable[int], *, may_move: bool) -> bool:
        """Take what all ranks have read of a backward; return whether buckets change by it.

        The parameters ``not_everywhere``, whose gradient some rank lacked, trail if ``may_move``.
        """
        missing = frozenset(not_everywhere)
        was_learned, self.is_learned = self.is_learned, True
        if not may_move:
            return False
        self._streaks = {
            index: 0 if index in missing else self._streaks.get(index, 0) + 1
            for index in self.trailing | missing
        }
        trailing = frozenset(
            index for index, streak in self._streaks.items() if streak < _BACKWARDS_TO_RETURN
        )
        self._streaks = {index: self._streaks[index] for index in trailing}
        has_changed = trailing != self.trailing
        self.trailing = trailing
        return was_learned and has_changed

    def laid_order(self, expected: Iterable[int]) -> list[int]:
        """Return every index once: as gradients came here, and then those that did not."""
        return list(dict.fromkeys([*self.order, *expected]))
