"""Buckets of one gradient, which is sent as autograd has made it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..collectives.torch_private import storage_uses
from .buckets import dense_stride
from .flat_bucket import Pending

__all__ = ["InPlaceBucket", "SingleBucket"]


class SingleBucket:
    """One gradient with the methods of ``Bucket``, and memory of its own only in its backward."""

    at_once = (False,)
    is_hooked = (True,)
    as_views = False
    streams = None
    taken = frozenset[int]()
    local = ()

    def __init__(
        self, index: int, parameters: Sequence[torch.nn.Parameter], *, is_trailing: bool
    ) -> None:
        self.indices = (index,)
        self.members = [parameters[index]]
        self.views = [self.members[0].detach()]  # of its shape; gradients never lie there
        self.device = parameters[index].device
        self.is_trailing = is_trailing
        self._mine: torch.Tensor | None = None
        self.average: torch.Tensor | None = None
        """The result of the reduction; None where no rank had a gradient."""
        self.reset()

    def reset(self) -> None:
        """Be ready for the next backward."""
        self.work: Pending | None = None
        self.num_pending = 1
        self.must_wait = self.is_trailing
        self._mine = self.average = None

    def hook_all(self) -> None:
        """Nothing to do: its hook tells what comes, and it is read on the stream that waits."""

    forward_ends = backward_begins = await_streams = hook_all

    def find_missing(self) -> list[int]:
        """No slots: its hook tells."""
        return []

    find_late = find_missing

    def move_in_early(self) -> bool:
        """Take the gradient as it is."""
        self.move_in_rest()
        return True

    def move_in(self, slot: int) -> None:
        """Take the gradient as it is."""
        self.move_in_rest()

    def move_in_rest(self) -> None:
        """Take the gradient as it is."""
        self._mine = self.members[0].grad

    def clear(self) -> None:
        """Send nothing of what is here."""
        self._mine = None

    def scale_average(self, factor: float) -> None:
        """Multiply the average."""
        if self.average is not None:
            self.average = self.average * factor

    def hand_out(self, is_used: Sequence[bool] | None, *, is_complete: bool) -> None:
        """Let ``.grad`` be the average."""
        index = self.indices[0]
        if self.average is not None and (is_complete or is_used is None or is_used[index]):
            self.members[0].grad = self.average


class InPlaceBucket(SingleBucket):
    """One large dense gradient, averaged where it lies.

    Where ranks share no memory, to copy it into a bucket would only cost time and memory. It is
    copied all the same where its memory is not its own: autograd lets a gradient share memory with
    that of a view, or of another parameter, which a backward may still read.
    """

    def __init__(
        self,
        index: int,
        parameters: Sequence[torch.nn.Parameter],
        *,
        is_trailing: bool,
        scale: float,
    ) -> None:
        super().__init__(index, parameters, is_trailing=is_trailing)
        self._scale = scale
        self._stride = dense_stride(self.views[0].shape, self.views[0].stride())

    @property
    def sent(self) -> torch.Tensor:
        """The tensor to sum, once in a backward; zeros where there is no gradient."""
        if self.average is None:
            mine = self._mine
            if mine is not None and mine.stride() == self._stride and _has_own_memory(mine):
                self.average = mine.mul_(self._scale)
            else:
                apart = self.views[0].new_empty_strided(self.views[0].shape, self._stride)
                self.average = (
                    apart.zero_() if mine is None else torch.mul(mine, self._scale, out=apart)
                )
        return self.average


def _has_own_memory(gradient: torch.Tensor) -> bool:
    """Whether no other tensor lies in the memory of ``gradient``, which a parameter holds."""
    return storage_uses(gradient) == 1
