"""Casts that a typed context inserts: aliases whose backward is a psum.

A cast stands where an operand that is invariant over some axes meets others that are not. Forward
it is the operand itself: an alias that shares its memory and its version, reaches the operation
alone, and into which torch refuses to write. Backward it sums the gradient over the axes.

A tensor is cast once for each type that it lacks, and keeps the cast while it lives: three uses of
an activation cost one psum. Leaves, whose casts would keep them alive, are forgotten when a
backward has ended. Casts live by the tensor that they are of alone, never by the garbage collector,
which runs at other moments on other ranks: all ranks make the same casts.

A parameter that is used where values vary needs a cast, whose backward is one psum; for many small
parameters that is many small messages. So what was cast alone in one context is laid into buckets
at its end, in the order of the casts, which all ranks share; the next context casts a bucket as a
whole when it meets its first member. A leaf keeps its bucket for as long as it lives and is used,
so programs that alternate between models keep both.

A leaf that is held by a reference cycle dies when the garbage collector runs, which it does at
other moments on other ranks. So nothing here depends on whether one lives: the place of a leaf that
has died stays, on all ranks, and travels empty, until backwards have found it unused for a while.

Drawn case: leaves w, v and b of 2, 3 and 1 numbers meet x, which is 1 on rank 0 and 3 on rank 1.

    1st context    each leaf is cast as it meets x: 3 casts, and 3 psums in the backward;
                   at the end the leaves become one group, in the order of their casts
    2nd context    as w meets x all three are cast together: 1 cast, and 1 psum in the backward:

                 w      v        b    used
    rank 0       1 1    1 1 1    1    1 1 1
    rank 1       3 3    3 3 3    0    1 1 0    this time it did not use b: zeros stand in
    the sum      4 4    4 4 4    1    2 2 1    b gets the gradient 1, also on rank 1

Had no rank used b, the last number would be 0, b would get no gradient, and after 4 such backwards
it would leave the group. Here ``b.grad`` is 1 + 3 behind the first backward, then 1 more:

    >>> import meshdist as md; from .context import find_context
    >>> def program():
    ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    ...     x = md.annotate(torch.tensor(1.0 + 2 * md.get_rank()), varying="dp")
    ...     w, v, b = (torch.ones(n, requires_grad=True) for n in (2, 3, 1))
    ...     for last in (b, b if md.get_rank() == 0 else 1):
    ...         with md.typed(mesh):
    ...             md.lax.psum(sum((leaf * x).sum() for leaf in (w, v, last)), "dp").backward()
    ...             yield find_context().casts.count, b.grad.item()
    >>> md.simulate(lambda: [*program()], 2)
    [[(3, 4.0), (1, 5.0)], [(3, 4.0), (1, 5.0)]]
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch.autograd import Function

from ..collectives.flat_sums import reduce_together, sparse_psum
from ..collectives.torch_private import call_function
from ..functional.axis_types import kinds_in
from ..functional.linear_function import keep_line, note_complete
from ..functional.reducing import psum
from ..groups.process_group import ProcessGroup, resolve_group
from ..joining.shadow import find_shadow
from ..mesh.device_mesh import DeviceMesh
from .detail_checks import check_cast, is_checked
from .refusals import type_of, uneven_leaf

__all__ = ["BUCKET_BYTES", "UNUSED_BACKWARDS", "LeafGroup", "Casts", "LeafGroups", "LeafSlot"]

BUCKET_BYTES = 25 << 20
"""How large a bucket grows; DDP's are as large."""

UNUSED_BACKWARDS = 4
"""After how many backwards in a row that no rank used it in a leaf leaves its bucket."""

_Leaf = weakref.ref[torch.Tensor]


class LeafSlot:
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
        """Return whether ``leaf``, which has this place, can still be cast at it."""
        return (
            leaf.requires_grad
            and leaf.is_leaf
            and not leaf._backward_hooks
            and not self.is_alone
            and leaf.numel() == self.size
            and _nature(leaf) == self.nature
        )


class LeafGroup:
    """Places whose leaves are cast together."""

    def __init__(self) -> None:
        self.places: list[LeafSlot] = []

    def note_use(self, places: Sequence[LeafSlot], is_used: Sequence[bool]) -> None:
        """Take out what has been unused for long: told after each backward, alike on all ranks."""
        for place, used in zip(places, is_used, strict=True):
            place.num_unused = 0 if used else place.num_unused + 1
            if place.num_unused >= UNUSED_BACKWARDS and place in self.places:
                self.places.remove(place)


class LeafGroups:
    """The leaves that were cast over the axes of one mesh."""

    def __init__(self) -> None:
        self._bucket_of: dict[tuple[int, str], tuple[LeafGroup, LeafSlot, _Leaf]] = {}
        self._alone: dict[int, _Leaf] = {}

    def find_bucket(self, leaf: torch.Tensor, missing: str) -> LeafGroup | None:
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

    def place(self, leaf: torch.Tensor, missing: str) -> LeafSlot:
        """The place of a leaf that is cast alone, for ``learn``."""
        is_alone = (
            id(leaf) in self._alone
            or leaf.layout is not torch.strided
            or bool(leaf._backward_hooks)
        )
        return LeafSlot(leaf, missing, is_alone=is_alone)

    def leave_alone(self, place: LeafSlot) -> None:
        """Let the leaf of ``place``, whose gradient is sparse, never share a bucket."""
        place.is_alone = True
        leaf = place.leaf()
        if leaf is not None:
            alone, key = self._alone, id(leaf)
            alone[key] = weakref.ref(leaf, lambda _: alone.pop(key, None))

    def learn(self, cast: Iterable[LeafSlot]) -> None:
        """Lay leaves that were cast alone into buckets, in their order."""
        open_buckets: dict[tuple[object, ...], tuple[LeafGroup, int]] = {}
        for place in cast:
            if place.is_alone:
                continue
            key = (place.missing, *place.nature)
            bucket, size = open_buckets.get(key, (LeafGroup(), 0))
            if bucket.places and size + place.num_bytes > BUCKET_BYTES:
                bucket, size = LeafGroup(), 0
            open_buckets[key] = bucket, size + place.num_bytes
            self._add(place, bucket)

    def _add(self, place: LeafSlot, bucket: LeafGroup) -> None:
        bucket.places.append(place)
        leaf = place.leaf()
        if leaf is not None:
            buckets, key = self._bucket_of, (id(leaf), place.missing)
            end = weakref.ref(leaf, lambda _: buckets.pop(key, None))
            buckets[key] = bucket, place, end


def _nature(leaf: torch.Tensor) -> tuple[object, ...]:
    """The properties that the members of a bucket share."""
    return leaf.dtype, leaf.device, leaf.layout, type_of(leaf)


class Casts:
    """The casts of one context; ``count`` is how many nodes of autograd were made."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.count = 0
        self._mesh = mesh
        self._buckets = mesh.caches.of(LeafGroups)
        self._groups: dict[str, ProcessGroup] = {}
        self._kept: dict[int, dict[str, _Kept]] = {}
        self._owners: dict[int, weakref.ref[torch.Tensor] | torch.Tensor] = {}
        self._order: list[LeafSlot] = []
        self._noted: dict[tuple[int, str], LeafSlot] = {}

    @property
    def num_kept(self) -> int:
        """How many tensors have a cast now."""
        return len(self._kept)

    def cast(self, x: torch.Tensor, missing: str) -> torch.Tensor:
        """``x`` with the kinds ``missing`` over axes along which it is invariant, for one use."""
        kept = self._kept.get(id(x))
        if kept is not None:
            found = kept.get(missing)
            if found is not None and found.is_of(x):
                return found.alias
        group = self._groups.get(missing)
        if group is None:
            group = self._groups[missing] = self._group(missing)
        self.count += 1
        if is_checked():
            check_cast(x, group, self._mesh)
        if not x.is_leaf:
            alias = call_function(_Cast, x, group, None, None)
            self._keep(x, missing, alias)
            return alias
        return self._cast_leaf(x, missing, group)

    def _cast_leaf(self, leaf: torch.Tensor, missing: str, group: ProcessGroup) -> torch.Tensor:
        bucket = self._buckets.find_bucket(leaf, missing)
        if bucket is None:
            place = self._buckets.place(leaf, missing)
            self._note(leaf, place)
            alias = call_function(_Cast, leaf, group, self._buckets, place)
            self._keep(leaf, missing, alias)
            return alias
        places = tuple(bucket.places)
        members = [self._member(place) for place in places]
        living = [one for one in members if one is not None]
        is_living = tuple(one is not None for one in members)
        aliases: Any = call_function(
            _CastTogether, living[0], group, bucket, places, is_living, *living[1:]
        )
        for one, alias in zip(living, aliases, strict=True):
            self._keep(one, missing, alias)
        return self._kept[id(leaf)][missing].alias

    def _member(self, place: LeafSlot) -> torch.Tensor | None:
        """The leaf to cast at a place of a bucket; None: its place stays empty."""
        leaf = place.leaf()
        is_cast = leaf is None or not place.fits(leaf) or self._has(leaf, place.missing)
        return None if is_cast else leaf

    def _note(self, leaf: torch.Tensor, place: LeafSlot) -> None:
        """Remember, once, that ``leaf`` was cast alone."""
        key = (id(leaf), place.missing)
        before = self._noted.get(key)
        if before is None or before.leaf() is not leaf:
            self._noted[key] = place
            self._order.append(place)

    def find_leaf_over(self, axes: Container[str]) -> torch.Tensor | None:
        """A leaf that has been made varying over one of ``axes`` since the last backward."""
        for key, one in self._owners.items():
            if isinstance(one, torch.Tensor):
                for missing in self._kept[key]:
                    if any(k == "V" and axis in axes for axis, k in kinds_in(missing).items()):
                        return one
        return None

    def refuse_leaves_in_uneven_loop(self, verb: str) -> None:
        """Raise where a leaf's gradient is summed over ranks some of which may have no data."""
        loop = find_shadow(self._mesh.world)
        if loop is None:
            return
        for key, one in self._owners.items():
            if not isinstance(one, torch.Tensor):
                continue
            for missing in self._kept[key]:
                together = {*self._groups[missing].ranks} & {*loop.group.ranks}
                if len(together) > 1:
                    raise uneven_leaf(one, missing, self._mesh, verb)

    def _has(self, leaf: torch.Tensor, missing: str) -> bool:
        found = self._kept.get(id(leaf), {}).get(missing)
        return found is not None and found.is_of(leaf)

    def _keep(self, x: torch.Tensor, missing: str, alias: torch.Tensor) -> None:
        key = id(x)
        if key not in self._owners:
            kept, owners = self._kept, self._owners

            def forget(_: object) -> None:
                kept.pop(key, None)
                owners.pop(key, None)

            owners[key] = x if x.is_leaf else weakref.ref(x, forget)
            kept[key] = {}
        self._kept[key][missing] = _Kept(x, alias)

    def _group(self, missing: str) -> ProcessGroup:
        axes = kinds_in(missing)
        return resolve_group(
            self._mesh[tuple(axis for axis in self._mesh.axis_names if axis in axes)]
        )

    def forget_leaves(self) -> None:
        """Let go of leaves, at the end of a backward: their casts are made anew."""
        for key in [key for key, one in self._owners.items() if isinstance(one, torch.Tensor)]:
            del self._owners[key], self._kept[key]

    def close(self) -> None:
        """Let go of all, and learn which leaves belong together."""
        self._buckets.learn(self._order)
        self._order.clear()
        self._noted.clear()
        self._kept.clear()
        self._owners.clear()


class _Kept:
    """The cast of a tensor as it was."""

    __slots__ = ("_was_at", "_was_leaf", "alias")

    def __init__(self, x: torch.Tensor, alias: torch.Tensor) -> None:
        self.alias = alias
        self._was_at = x._version
        self._was_leaf = x.is_leaf

    def is_of(self, x: torch.Tensor) -> bool:
        """Return whether it still is: ``.data =`` and ``detach_`` leave the version as it was."""
        if x._version != self._was_at or x.is_leaf is not self._was_leaf:
            return False
        return x.layout is not torch.strided or self.alias.is_set_to(x)


def _alias(x: torch.Tensor) -> torch.Tensor:
    """A view of the memory of ``x`` that does not keep ``x`` itself alive."""
    apart = x.detach()
    return apart.view_as(apart)


def _sums(parts: list[torch.Tensor], group: ProcessGroup) -> list[torch.Tensor]:
    """The sums over the group of one-dim parts, by one message."""
    if torch.is_grad_enabled():
        total = psum(torch.cat(parts), group)
        return [*total.split([len(part) for part in parts])]
    return reduce_together(parts, group)


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad if grad.layout is torch.strided else grad.to_dense()


class _Cast(Function):
    """One tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: ProcessGroup,
        buckets: LeafGroups | None,
        place: LeafSlot | None,
    ) -> torch.Tensor:
        ctx.group = group
        keep_line(ctx, x, group)
        ctx.buckets = buckets
        ctx.place = place
        return _alias(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        note_complete(ctx, ctx.group, is_sum=True)
        if grad.layout is torch.sparse_coo:
            if ctx.place is not None:
                ctx.buckets.leave_alone(ctx.place)
            return sparse_psum(grad, ctx.group), None, None, None
        return psum(grad, ctx.group), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        return tangent.view_as(tangent)


class _CastTogether(Function):
    """The leaves of a bucket: one flat psum, with a number for each that says whether it is used.

    What no rank uses has no gradient, as on one device. A place without a leaf, which may have one
    on other ranks, travels as an unused one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        first: torch.Tensor,
        group: ProcessGroup,
        bucket: LeafGroup,
        places: tuple[LeafSlot, ...],
        is_living: tuple[bool, ...],
        *others: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        leaves = (first, *others)
        ctx.set_materialize_grads(False)
        ctx.group = group
        ctx.bucket, ctx.places, ctx.is_living = bucket, places, is_living
        ctx.shapes = [one.shape for one in leaves]
        ctx.like = first.detach().new_empty(0)
        return tuple(map(_alias, leaves))

    @staticmethod
    def backward(ctx: Any, *living: torch.Tensor | None) -> Any:
        like: torch.Tensor = ctx.like
        given = iter(living)
        grads = [next(given) if is_living else None for is_living in ctx.is_living]
        sizes = [place.size for place in ctx.places]
        used = like.new_tensor([grad is not None for grad in grads])
        parts = [
            like.new_zeros(size) if grad is None else _dense(grad).reshape(-1)
            for grad, size in zip(grads, sizes, strict=True)
        ]
        *sums, num_users = _sums([*parts, used], ctx.group)
        is_used = [True] * len(grads)
        if any(grad is None for grad in grads):
            is_used = num_users.detach().ne(0).tolist()
        ctx.bucket.note_use(ctx.places, is_used)
        found = [
            one if used_somewhere else None
            for one, used_somewhere, is_living in zip(sums, is_used, ctx.is_living, strict=True)
            if is_living
        ]
        first, *others = (
            None if one is None else one.view(shape)
            for one, shape in zip(found, ctx.shapes, strict=True)
        )
        return first, None, None, None, None, *others
