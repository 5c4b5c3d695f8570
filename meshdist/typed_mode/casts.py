"""Insert the casts of a typed context: aliases whose backward is a psum.

A context casts an operand that is invariant over some axes if the other operands are not. The cast
is an alias with the same memory and version; only the operation sees it, and torch does not allow
writing to it. Its backward sums the gradient over the axes.

A tensor keeps its casts, so three uses of an activation cost one psum. The casts of a leaf, which
would keep it alive, are dropped after each backward.

A psum per parameter would send many small messages. So when a context ends, it groups the leaves
that it cast alone into buckets, in the order of the casts. The next context casts a whole bucket at
its first use of any of these leaves. A leaf keeps its bucket as long as it exists and is used, so
programs that alternate between models keep both.

All ranks must insert the same casts, but the garbage collector runs at different times on each
rank. So the slot of a freed leaf stays on all ranks and sends zeros, until several backwards have
not used it.

Worked example: leaves w, v and b of 2, 3 and 1 numbers meet x, which is 1 on rank 0, 3 on rank 1.

    1st context    each leaf is cast as it meets x: 3 casts, and 3 psums in the backward;
                   at the end the leaves become one group, in the order of their casts
    2nd context    as w meets x all three are cast together: 1 cast, and 1 psum in the backward:

                 w      v        b    used
    rank 0       1 1    1 1 1    1    1 1 1
    rank 1       3 3    3 3 3    0    1 1 0    here b is unused and sends zeros
    the sum      4 4    4 4 4    1    2 2 1    b gets the gradient 1, also on rank 1

If no rank used b, the last number would be 0 and b would get no gradient; after 4 such backwards it
would leave the group. ``b.grad`` is 1 + 3 after the first backward, then 1 more:

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

from ..annotations.axis_types import kinds_in, type_of
from ..collectives.flat_sums import reduce_together, sparse_psum
from ..collectives.torch_private import call_function, version_of
from ..functional.linear_function import keep_line, note_complete
from ..functional.reductions import psum
from ..groups.process_group import ProcessGroup, resolve_group
from ..mesh.device_mesh import DeviceMesh
from .detail_checks import check_cast, is_checked

BUCKET_BYTES = 25 << 20
"""The largest size of a bucket, as in DDP."""

UNUSED_BACKWARDS = 4
"""A leaf leaves its bucket after so many backwards in a row in which no rank has used it."""

_Leaf = weakref.ref[torch.Tensor]


class LeafSlot:
    """A leaf's index in the order of casts or in a bucket; it does not keep the leaf alive.

    Args:
        missing: the type that its cast adds.
        is_alone: whether it must never share a bucket.
    """

    def __init__(self, leaf: torch.Tensor, missing: str, *, is_alone: bool) -> None:
        self.leaf = weakref.ref(leaf)
        self.missing = missing
        self.size = leaf.numel()
        self.num_bytes = leaf.nbytes if leaf.layout is torch.strided else 0
        self.nature = _nature(leaf)
        self.is_alone = is_alone
        self.num_unused = 0  # Consecutive backwards in which no rank used the leaf.

    def fits(self, leaf: torch.Tensor) -> bool:
        """Return whether a bucket can cast the leaf: it is unchanged and has no hooks."""
        return (
            leaf.requires_grad
            and leaf.is_leaf
            and not leaf._backward_hooks
            and not self.is_alone
            and leaf.numel() == self.size
            and _nature(leaf) == self.nature
        )


class LeafGroup:
    """Slots of leaves that share a cast and the message that reduces their gradients."""

    def __init__(self) -> None:
        self.slots: list[LeafSlot] = []

    def note_use(self, slots: Sequence[LeafSlot], is_used: Sequence[bool]) -> None:
        """Count a backward for each slot, and drop unused slots, equally on all ranks."""
        for slot, used in zip(slots, is_used, strict=True):
            slot.num_unused = 0 if used else slot.num_unused + 1
            if slot.num_unused >= UNUSED_BACKWARDS and slot in self.slots:
                self.slots.remove(slot)


class LeafGroups:
    """The buckets of leaves for a mesh."""

    def __init__(self) -> None:
        self._bucket_of: dict[tuple[int, str], tuple[LeafGroup, LeafSlot, _Leaf]] = {}
        self._alone: dict[int, _Leaf] = {}

    def find_bucket(self, leaf: torch.Tensor, missing: str) -> LeafGroup | None:
        """Return the bucket to cast with ``leaf`` to kinds ``missing``, or None."""
        found = self._bucket_of.get((id(leaf), missing))
        if found is None:
            return None
        bucket, slot, _ = found
        is_there = slot.leaf() is leaf and slot in bucket.slots
        return bucket if is_there and slot.fits(leaf) else None

    def new_slot(self, leaf: torch.Tensor, missing: str) -> LeafSlot:
        """Return a slot of a leaf whose cast adds ``missing``."""
        # In a bucket, torch would call the hooks of an unused leaf with None.
        is_alone = (
            id(leaf) in self._alone
            or leaf.layout is not torch.strided
            or bool(leaf._backward_hooks)
        )
        return LeafSlot(leaf, missing, is_alone=is_alone)

    def leave_alone(self, slot: LeafSlot) -> None:
        """Keep a leaf with a sparse gradient out of buckets from now on."""
        slot.is_alone = True
        leaf = slot.leaf()
        if leaf is not None:
            alone, key = self._alone, id(leaf)
            alone[key] = weakref.ref(leaf, lambda _: alone.pop(key, None))

    def learn(self, cast: Iterable[LeafSlot]) -> None:
        """Put leaves that were cast alone into new buckets, in the order of casts."""
        open_buckets: dict[tuple[object, ...], tuple[LeafGroup, int]] = {}
        for slot in cast:
            if slot.is_alone:
                continue
            key = (slot.missing, *slot.nature)
            bucket, size = open_buckets.get(key, (LeafGroup(), 0))
            if bucket.slots and size + slot.num_bytes > BUCKET_BYTES:
                bucket, size = LeafGroup(), 0
            open_buckets[key] = bucket, size + slot.num_bytes
            self._add(slot, bucket)

    def _add(self, slot: LeafSlot, bucket: LeafGroup) -> None:
        bucket.slots.append(slot)
        leaf = slot.leaf()
        if leaf is not None:
            buckets, key = self._bucket_of, (id(leaf), slot.missing)
            dies = weakref.ref(leaf, lambda _: buckets.pop(key, None))
            buckets[key] = bucket, slot, dies


def _nature(leaf: torch.Tensor) -> tuple[object, ...]:
    """Return (dtype, device, layout, type), which all leaves of a bucket share."""
    return leaf.dtype, leaf.device, leaf.layout, type_of(leaf)


class Casts:
    """The casts of one typed context; ``count`` is their number of autograd nodes."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.count = 0
        self._mesh = mesh
        self._buckets = mesh.caches.of(LeafGroups)
        self._groups: dict[str, ProcessGroup] = {}
        self._cached: dict[int, dict[str, _CachedCast]] = {}
        self._tensors: dict[int, weakref.ref[torch.Tensor] | torch.Tensor] = {}
        self._order: list[LeafSlot] = []
        self._noted: dict[tuple[int, str], LeafSlot] = {}

    @property
    def num_cached(self) -> int:
        """Return the number of tensors with a cast."""
        return len(self._cached)

    def cast(self, x: torch.Tensor, missing: str) -> torch.Tensor:
        """Return an alias of ``x`` with kinds ``missing`` ("V:tp"), cached until ``x`` changes."""
        cached = self._cached.get(id(x))
        if cached is not None:
            found = cached.get(missing)
            if found is not None and found.is_of(x):
                return found.alias
        group = self._groups.get(missing)
        if group is None:
            over = kinds_in(missing)
            axes = tuple(axis for axis in self._mesh.axis_names if axis in over)
            group = self._groups[missing] = resolve_group(self._mesh[axes])
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
            slot = self._buckets.new_slot(leaf, missing)
            self._note(leaf, slot)
            alias = call_function(_Cast, leaf, group, self._buckets, slot)
            self._keep(leaf, missing, alias)
            return alias
        slots = tuple(bucket.slots)
        members = [self._member(slot) for slot in slots]
        living = [member for member in members if member is not None]
        is_living = tuple(member is not None for member in members)
        aliases: Any = call_function(
            _CastTogether, living[0], group, bucket, slots, is_living, *living[1:]
        )
        for member, alias in zip(living, aliases, strict=True):
            self._keep(member, missing, alias)
        return self._cached[id(leaf)][missing].alias

    def _member(self, slot: LeafSlot) -> torch.Tensor | None:
        """Return the slot's leaf if its bucket must cast it, else None."""
        leaf = slot.leaf()
        if leaf is None or not slot.fits(leaf):
            return None
        cached = self._cached.get(id(leaf), {}).get(slot.missing)
        return None if cached is not None and cached.is_of(leaf) else leaf

    def _note(self, leaf: torch.Tensor, slot: LeafSlot) -> None:
        """Append the slot of a leaf cast alone to the order of casts, once."""
        key = (id(leaf), slot.missing)
        before = self._noted.get(key)
        if before is None or before.leaf() is not leaf:
            self._noted[key] = slot
            self._order.append(slot)

    def find_leaf_over(self, axes: Container[str]) -> torch.Tensor | None:
        """Return a leaf cast to varying over ``axes`` since the last backward, or None."""
        for key, leaf in self._tensors.items():
            if isinstance(leaf, torch.Tensor):
                for missing in self._cached[key]:
                    if any(k == "V" and axis in axes for axis, k in kinds_in(missing).items()):
                        return leaf
        return None

    def _keep(self, x: torch.Tensor, missing: str, alias: torch.Tensor) -> None:
        key = id(x)
        if key not in self._tensors:
            cached, tensors = self._cached, self._tensors

            def forget(_: object) -> None:
                cached.pop(key, None)
                tensors.pop(key, None)

            tensors[key] = x if x.is_leaf else weakref.ref(x, forget)
            cached[key] = {}
        self._cached[key][missing] = _CachedCast(x, alias)

    def forget_leaves(self) -> None:
        for key in [key for key, x in self._tensors.items() if isinstance(x, torch.Tensor)]:
            del self._tensors[key], self._cached[key]

    def close(self) -> None:
        """Drop all casts; group leaves that were cast alone for the next context."""
        self._buckets.learn(self._order)
        self._order.clear()
        self._noted.clear()
        self._cached.clear()
        self._tensors.clear()


class _CachedCast:
    """A cast, and the tensor's version when it was made."""

    __slots__ = ("_was_at", "_was_leaf", "alias")

    def __init__(self, x: torch.Tensor, alias: torch.Tensor) -> None:
        self.alias = alias
        self._was_at = version_of(x)
        self._was_leaf = x.is_leaf

    def is_of(self, x: torch.Tensor) -> bool:
        """Return whether ``x`` is unchanged since the cast."""
        # `.data =` and `detach_` do not change the version.
        if version_of(x) != self._was_at or x.is_leaf is not self._was_leaf:
            return False
        return x.layout is not torch.strided or self.alias.is_set_to(x)


def _alias(x: torch.Tensor) -> torch.Tensor:
    """Return a view of the memory of ``x`` without history; does not keep ``x`` alive."""
    apart = x.detach()
    return apart.view_as(apart)


class _Cast(Function):
    """The autograd function of a tensor's cast."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: ProcessGroup,
        buckets: LeafGroups | None,
        slot: LeafSlot | None,
    ) -> torch.Tensor:
        ctx.group = group
        keep_line(ctx, x, group)
        ctx.buckets = buckets
        ctx.slot = slot
        return _alias(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        note_complete(ctx, ctx.group, is_sum=True)
        if grad.layout is torch.sparse_coo:
            if ctx.slot is not None:
                ctx.buckets.leave_alone(ctx.slot)
            return sparse_psum(grad, ctx.group), None, None, None
        return psum(grad, ctx.group), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        return tangent.view_as(tangent)


class _CastTogether(Function):
    """The autograd function of a bucket's cast; its backward is one flat psum."""

    @staticmethod
    def forward(
        ctx: Any,
        first: torch.Tensor,
        group: ProcessGroup,
        bucket: LeafGroup,
        slots: tuple[LeafSlot, ...],
        is_living: tuple[bool, ...],
        *others: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        leaves = (first, *others)
        ctx.set_materialize_grads(False)
        ctx.group = group
        ctx.bucket, ctx.slots, ctx.is_living = bucket, slots, is_living
        ctx.shapes = [leaf.shape for leaf in leaves]
        ctx.like = first.detach().new_empty(0)
        return tuple(map(_alias, leaves))

    @staticmethod
    def backward(ctx: Any, *living: torch.Tensor | None) -> Any:
        like: torch.Tensor = ctx.like
        given = iter(living)
        grads = [next(given) if is_living else None for is_living in ctx.is_living]
        sizes = [slot.size for slot in ctx.slots]
        # A leaf that no rank used must get no gradient, as on one device. So each rank sends a flag
        # for each slot: whether it used the leaf. A slot without a leaf is unused.
        used = like.new_tensor([grad is not None for grad in grads])
        parts = [
            like.new_zeros(size) if grad is None else grad.to_dense().reshape(-1)
            for grad, size in zip(grads, sizes, strict=True)
        ]
        if torch.is_grad_enabled():
            total = psum(torch.cat([*parts, used]), ctx.group)
            *sums, num_users = total.split([*sizes, len(used)])
        else:
            *sums, num_users = reduce_together([*parts, used], ctx.group)
        is_used = [True] * len(grads)
        if any(grad is None for grad in grads):
            is_used = num_users.detach().ne(0).tolist()
        ctx.bucket.note_use(ctx.slots, is_used)
        found = [
            total if used_somewhere else None
            for total, used_somewhere, is_living in zip(sums, is_used, ctx.is_living, strict=True)
            if is_living
        ]
        first, *others = (
            None if total is None else total.view(shape)
            for total, shape in zip(found, ctx.shapes, strict=True)
        )
        return first, None, None, None, None, *others
