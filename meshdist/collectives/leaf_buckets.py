"""Which leaves a mesh has seen cast one after the other: they are cast, and reduced, together.

A parameter that is used where values vary needs a cast, whose backward is one psum; for many small
parameters that is many small messages. So what was cast alone in one context is laid into buckets
at its end, in the order of the casts, which all ranks share; the next context casts a bucket as a
whole when it meets its first member. A leaf keeps its bucket for as long as it lives and is used,
so programs that alternate between models keep both.

A leaf that is held by a reference cycle dies when the garbage collector runs, which it does at
other moments on other ranks. So nothing here depends on whether one lives: the place of a leaf that
has died stays, on all ranks, and travels empty, until backwards have found it unused for a while.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch

from .type_errors import type_of

__all__ = ["BUCKET_BYTES", "UNUSED_BACKWARDS", "Bucket", "LeafBuckets", "Place"]

BUCKET_BYTES = 25 << 20
"""How large a bucket grows; DDP's are as large."""

UNUSED_BACKWARDS = 4
"""After how many backwards in a row that no rank used it in a leaf leaves its bucket."""

_Leaf = weakref.ref[torch.Tensor]


class Place:
    """A leaf's place in an order of casts, and then in a bucket.

    Args:
        leaf: is not kept alive.
        missing: what its cast adds.
        is_alone: whether it must never share a bucket.

    Attributes:
        size: how many elements it has.
        nature: what it shares with the other members of a bucket.
        num_unused: the backwards in a row that have not used it, on any rank.
    """

    def __init__(self, leaf: torch.Tensor, missing: str, *, is_alone: bool) -> None:
        self.leaf = weakref.ref(leaf)
        self.missing = missing
        self.size = leaf.numel()
        self.num_bytes = leaf.nbytes if leaf.layout is torch.strided else 0
        self.nature = _nature(leaf)
        self.is_alone = is_alone
        self.num_unused = 0

    def fits(self, leaf: torch.Tensor) -> bool:
        """Whether ``leaf``, which has this place, can still be cast at it."""
        return (
            leaf.requires_grad
            and leaf.is_leaf
            and not leaf._backward_hooks
            and not self.is_alone
            and leaf.numel() == self.size
            and _nature(leaf) == self.nature
        )


class Bucket:
    """Places whose leaves are cast together."""

    def __init__(self) -> None:
        self.places: list[Place] = []

    def note_use(self, places: Sequence[Place], is_used: Sequence[bool]) -> None:
        """Take out what has been unused for long: told after each backward, alike on all ranks."""
        for place, used in zip(places, is_used, strict=True):
            place.num_unused = 0 if used else place.num_unused + 1
            if place.num_unused >= UNUSED_BACKWARDS and place in self.places:
                self.places.remove(place)


class LeafBuckets:
    """The leaves that were cast over the axes of one mesh."""

    def __init__(self) -> None:
        self._bucket_of: dict[tuple[int, str], tuple[Bucket, Place, _Leaf]] = {}
        self._alone: dict[int, _Leaf] = {}

    def find_bucket(self, leaf: torch.Tensor, missing: str) -> Bucket | None:
        """The bucket to cast together with ``leaf``; None where it is cast alone.

        Leaves with hooks are cast alone: torch would call those with None for a member that no
        rank has used.
        """
        found = self._bucket_of.get((id(leaf), missing))
        if found is None:
            return None
        bucket, place, _ = found
        is_there = place.leaf() is leaf and place in bucket.places
        return bucket if is_there and place.fits(leaf) else None

    def place(self, leaf: torch.Tensor, missing: str) -> Place:
        """The place of a leaf that is cast alone, for ``learn``."""
        is_alone = (
            id(leaf) in self._alone
            or leaf.layout is not torch.strided
            or bool(leaf._backward_hooks)
        )
        return Place(leaf, missing, is_alone=is_alone)

    def leave_alone(self, place: Place) -> None:
        """Let the leaf of ``place``, whose gradient is sparse, never share a bucket."""
        place.is_alone = True
        leaf = place.leaf()
        if leaf is not None:
            alone, key = self._alone, id(leaf)
            alone[key] = weakref.ref(leaf, lambda _: alone.pop(key, None))

    def learn(self, cast: Iterable[Place]) -> None:
        """Lay leaves that were cast alone into buckets, in their order."""
        open_buckets: dict[tuple[object, ...], tuple[Bucket, int]] = {}
        for place in cast:
            if place.is_alone:
                continue
            key = (place.missing, *place.nature)
            bucket, size = open_buckets.get(key, (Bucket(), 0))
            if bucket.places and size + place.num_bytes > BUCKET_BYTES:
                bucket, size = Bucket(), 0
            open_buckets[key] = bucket, size + place.num_bytes
            self._add(place, bucket)

    def _add(self, place: Place, bucket: Bucket) -> None:
        bucket.places.append(place)
        leaf = place.leaf()
        if leaf is not None:
            buckets, key = self._bucket_of, (id(leaf), place.missing)
            end = weakref.ref(leaf, lambda _: buckets.pop(key, None))
            buckets[key] = bucket, place, end


def _nature(leaf: torch.Tensor) -> tuple[object, ...]:
    """The properties that the members of a bucket share."""
    return leaf.dtype, leaf.device, leaf.layout, type_of(leaf)
