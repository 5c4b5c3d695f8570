"""The options of a wrapper: the record that the reducer reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..dtypes import dtype_name

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

    def shared(self, names: Sequence[str]) -> dict[str, object]:
        """The settings that must be equal on every rank, by the wrapper's arguments.

        Example:
            >>> options = ReductionOptions(caps=(1 << 20,), delayed=frozenset({1}))
            >>> shared = options.shared(["head", "tail"])
            >>> shared["bucket_cap_mb"], shared["delay_all_reduce_named_params"]
            ([1.0], ['tail'])
        """
        behind = self.delayed_behind
        return {
            "bucket_cap_mb": [cap / (1 << 20) for cap in self.caps],
            "find_unused_parameters": self.finds_unused,
            "static_graph": self.is_static,
            "skip_all_reduce_unused_params": self.skips_unused,
            "delay_all_reduce_named_params": [names[index] for index in sorted(self.delayed)],
            "param_to_hook_all_reduce": None if behind is None else names[behind],
            "mixed_precision.reduce_dtype": None if self.dtype is None else dtype_name(self.dtype),
            "sparse gradients": [names[index] for index in sorted(self.sparse)],
        }

    @property
    def may_lack(self) -> bool:
        """Whether missing gradients are no error by themselves."""
        return self.finds_unused or self.is_static

    @property
    def may_move(self) -> bool:
        """Whether parameters move between early and trailing buckets once arrivals are learned."""
        return self.finds_unused and not (self.is_static or self.skips_unused)
