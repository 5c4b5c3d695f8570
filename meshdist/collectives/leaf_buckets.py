"""Which leaves a mesh has seen cast one after the other: they are cast, and reduced, together.

A parameter that is used where values vary needs a cast, whose backward is one psum; for many small
parameters that is many small messages. So what was cast alone in one context is laid into buckets
at its end, in the order of the casts, which all ranks share; the next context casts a bucket as a
whole when it meets its first member. A leaf keeps its bucket for as long as it lives, so programs
that alternate between models keep both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from .type_errors import type_of

__all__ = ["BUCKET_BYTES", "LeafBuckets"]

BUCKET_BYTES = 25 << 20
"""How large a bucket grows; DDP's are as large."""

_Leaf = weakref.ref[torch.Tensor]


class LeafBuckets:
    """What one mesh remembers of the leaves cast over its axes."""

    def __init__(self) -> None:
        self._bucket_of: dict[tuple[int, str], list[_Leaf]] = {}
        self._alone: dict[int, _Leaf] = {}

    def members(self, leaf: torch.Tensor, missing: str) -> list[torch.Tensor]:
        """The leaves to cast together with ``leaf``, itself among them, in their order.

        Those that have died, were frozen, or have become others since are left out; and those with
        hooks, which torch would call with None for a member that no rank has used.
        """
        bucket = () if leaf._backward_hooks else self._bucket_of.get((id(leaf), missing), ())
        found = [one for one in (ref() for ref in bucket) if one is not None]
        if not any(one is leaf for one in found):  # its id was another's before
            return [leaf]
        return [one for one in found if one is leaf or self._fits(one, leaf)]

    def _fits(self, other: torch.Tensor, leaf: torch.Tensor) -> bool:
        return (
            other.requires_grad
            and other.is_leaf
            and id(other) not in self._alone
            and not other._backward_hooks
            and _nature(other) == _nature(leaf)
        )

    def leave_alone(self, leaf: torch.Tensor) -> None:
        """Let ``leaf``, whose gradient is sparse, never share a bucket."""
        alone, key = self._alone, id(leaf)
        alone[key] = weakref.ref(leaf, lambda _: alone.pop(key, None))

    def learn(self, cast: Iterable[tuple[_Leaf, str]]) -> None:
        """Lay leaves that were cast alone into buckets: with their order, and what they missed."""
        open_buckets: dict[tuple[object, ...], tuple[list[_Leaf], int]] = {}
        for ref, missing in cast:
            leaf = ref()
            if leaf is None or id(leaf) in self._alone or (id(leaf), missing) in self._bucket_of:
                continue
            if leaf.layout is not torch.strided:
                continue
            key = (missing, *_nature(leaf))
            bucket, size = open_buckets.get(key, ([], 0))
            if bucket and size + leaf.nbytes > BUCKET_BYTES:
                bucket, size = [], 0
            open_buckets[key] = bucket, size + leaf.nbytes
            self._add(leaf, missing, bucket)

    def _add(self, leaf: torch.Tensor, missing: str, bucket: list[_Leaf]) -> None:
        buckets, key = self._bucket_of, (id(leaf), missing)
        bucket.append(weakref.ref(leaf, lambda _: buckets.pop(key, None)))
        buckets[key] = bucket


def _nature(leaf: torch.Tensor) -> tuple[object, ...]:
    """What the members of a bucket share."""
    return leaf.dtype, leaf.device, leaf.layout, type_of(leaf)
