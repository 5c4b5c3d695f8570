"""What a wrapper was asked for: the record that the reducer reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["ReductionOptions"]


@dataclass(frozen=True)
class ReductionOptions:
    """How gradients are reduced.

    Args:
        caps: of the first bucket, of the second, ..., in bytes; the last repeats.
        as_views: whether ``.grad`` is a view into its bucket, or a copy.
        finds_unused: whether a rank may lack any gradient in any backward.
        is_static: whether all backwards are promised to bring what the first one brought.
        skips_unused: whether what no rank had in the first backward is never sent.
        delayed: indices of the parameters that are sent together, behind the bucket of
        delayed_behind: this one.
        sparse: indices of those whose gradients are sparse.
        dtype: in which gradients are sent; None for the parameters' own.
    """

    caps: tuple[int, ...]
    as_views: bool = True
    finds_unused: bool = False
    is_static: bool = False
    skips_unused: bool = False
    delayed: frozenset[int] = frozenset()
    delayed_behind: int | None = None
    sparse: frozenset[int] = frozenset()
    dtype: torch.dtype | None = None

    @property
    def may_lack(self) -> bool:
        """Whether missing gradients are no error by themselves."""
        return self.finds_unused or self.is_static

    @property
    def may_move(self) -> bool:
        """Whether parameters move between early and trailing buckets once arrivals are learned."""
        return self.finds_unused and not (self.is_static or self.skips_unused)
