"""Collectives of a group that spans hosts, stage by stage: inside hosts, across them, inside.

A tensor is cut into as many parts as every host has members at least: each part has an owner on
every host, and its owners exchange it among themselves. A small tensor goes whole, by one owner.
Everything here waits, and writes into the tensors that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from datetime import timedelta
from typing import Any

import torch

from ...dtypes import DTYPES
from ...reduce_ops import ReduceKind, ReduceOp
from ...runtime.deadlines import Deadline
from .. import built_verbs
from ..built_verbs import divide
from ..communicator import Communicator
from ..prepared import PreparedCall, Tensors, cuts, packed, parts, parts_like, write, write_all


@dataclass(frozen=True)
class HostPlaces:
    """The members of a group by host, as member ``rank`` sees them.

    Args:
        members: for each host its members' places in the group, in group order; hosts in the order
            in which they first appear.
        host: this member's host.
        local: this member's place among those of its host.
    """

    members: tuple[tuple[int, ...], ...]
    host: int
    local: int

    @staticmethod
    def of(hosts: Sequence[int], rank: int) -> HostPlaces:
        """Group the members by host; ``hosts[k]`` is the host of member k.

        Example:
            >>> HostPlaces.of((7, 4, 7), 2)
            HostPlaces(members=((0, 2), (1,)), host=0, local=1)
        """
        by_host: dict[int, list[int]] = {}
        for member, host in enumerate(hosts):
            by_host.setdefault(host, []).append(member)
        mine = by_host[hosts[rank]]
        return HostPlaces(
            tuple(map(tuple, by_host.values())),
            list(by_host).index(hosts[rank]),
            mine.index(rank),
        )

    @property
    def here(self) -> tuple[int, ...]:
        """The members on this member's host."""
        return self.members[self.host]

    @property
    def num_owners(self) -> int:
        """The size of the smallest host: so many members of each host exchange across hosts."""
        return min(map(len, self.members))

    @property
    def by_host(self) -> tuple[int, ...]:
        """All members, those of the first host first."""
        return tuple(member for members in self.members for member in members)

    def find(self, member: int) -> tuple[int, int]:
        """Return the index of the host of ``member``, and its place among that host's members."""
        for host, members in enumerate(self.members):
            if member in members:
                return host, members.index(member)
        raise ValueError(f"there is no member {member}")

    def pile(self, owner: int) -> tuple[tuple[int, ...], ...]:
        """Return, for each host, the members whose data its member number ``owner`` exchanges.

        Example:
            >>> HostPlaces.of((0, 0, 0, 1, 1), 0).pile(0)
            ((0, 2), (3,))
        """
        return tuple(members[owner :: self.num_owners] for members in self.members)


_WHOLE_BYTES = 2 * 1024 * 1024
"""Smaller tensors go whole: an all-reduce of 1 MiB on two hosts of two ranks then takes 0.6 of
the time, and of 8 MiB in parts 0.7 (ranks of one machine over loopback)."""

_ROUNDED = 1 << 18
"""So many narrow floats cross in two rounds; of fewer, a round costs more than bytes."""

_LEAST = timedelta(milliseconds=1)


@dataclass(eq=False)
class Stages:
    """State of a collective that runs inside hosts, then across hosts, within a timeout.

    Args:
        inside: the communicator of this host's members; None where there are no others.
        across: that of the members at this member's place of each host; None if a host has none.
        timeout: for all stages together.
    """

    places: HostPlaces
    _inside: Communicator | None
    _across: Communicator | None
    timeout: InitVar[timedelta]

    def __post_init__(self, timeout: timedelta) -> None:
        self.size = len(self.places.by_host)
        self._deadline = Deadline(timeout)

    def inside(self, way: str, inputs: Tensors, outputs: Tensors, **more: Any) -> None:
        """Do verb ``way`` among this host's members, if several; ``more`` goes to PreparedCall."""
        if self._inside is not None:
            self._do(self._inside, PreparedCall("", way, inputs, outputs, **more))

    def across(self, way: str, inputs: Tensors, outputs: Tensors, **more: Any) -> None:
        """Do the verb ``way`` among the members that have this member's number on their host."""
        assert self._across is not None
        self._do(self._across, PreparedCall("", way, inputs, outputs, **more))

    def exchange_reducing(
        self, output: torch.Tensor, tensor: torch.Tensor, sizes: Sequence[int], op: ReduceKind
    ) -> None:
        """Reduce-scatter parts of ``sizes`` elements across hosts; write this host's ``output``."""
        assert self._across is not None
        call = PreparedCall("", "reduce_scatter_list", (), (), op=op)
        call.as_own(max(self._deadline.left, _LEAST))
        started = built_verbs.reduce_scatter_by_exchange(self._across, call, output, tensor, sizes)
        started.finish(call.timeout)

    def all_reduce_across(self, result: torch.Tensor, part: torch.Tensor, op: ReduceKind) -> None:
        """All-reduce ``part`` with its like on other hosts; write it, rounded, to ``result``."""
        if part.dtype is result.dtype or part.numel() < _ROUNDED:
            self.across("all_reduce", [part], [part], op=_step(op))
            self.average(part, op)
            _round_into(result, part)
            return
        # A large part crosses in float32, and comes back rounded: 6 bytes an element, not 8.
        sizes, host = cuts(part.numel(), len(self.places.members)), self.places.host
        results, mine = parts(result, sizes), part.new_empty(sizes[host])
        self.exchange_reducing(mine, part, sizes, _step(op))
        self.average(mine, op)
        results[host].copy_(mine)
        self.across("all_gather_list", [results[host]], results)

    def spread(self, whole: torch.Tensor, num_parts: int) -> None:
        """Give this host's members all of ``whole``, whose parts the first ``num_parts`` hold."""
        if num_parts == 1:
            self.inside("broadcast", [whole], [whole], root=0)
        else:
            mine = self.parts(whole, num_parts)
            self.inside("all_gather_list", [mine[self.places.local]], mine)

    def num_parts(self, whole: torch.Tensor) -> int:
        """Return in how many parts ``whole`` crosses hosts: 1 if small, else ``num_owners``."""
        num_bytes = whole.numel() * whole.element_size()
        return 1 if num_bytes < _WHOLE_BYTES else self.places.num_owners

    def parts(self, whole: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
        """Return ``whole`` cut for this host's members: ``num_parts`` parts, then empty parts."""
        others = len(self.places.here) - num_parts
        return list(whole.split(cuts(whole.numel(), num_parts) + [0] * others))

    def average(self, total: torch.Tensor, op: ReduceKind) -> None:
        """Divide ``total``, a sum over all members, in place if ``op`` is a mean."""
        if op == ReduceOp.AVG:
            divide(total, self.size)

    def _do(self, level: Communicator, call: PreparedCall) -> None:
        call.as_own(max(self._deadline.left, _LEAST))
        level.start(call).finish(call.timeout)


def all_reduce_list(stages: Stages, prepared: PreparedCall) -> None:
    """Reduce tensors as one tensor inside each host, then across hosts, and spread inside."""
    tensors, op, local = prepared.outputs, _op(prepared), stages.places.local
    tensor = tensors[0] if len(tensors) == 1 else packed(tensors)
    whole = _summable(tensor, op)
    num_parts = stages.num_parts(whole)
    parts = stages.parts(whole, num_parts)
    if num_parts == 1:
        stages.inside("reduce", [whole], [whole], op=_step(op), root=0)
    else:
        stages.inside("reduce_scatter_list", parts, [parts[local]], op=_step(op))
    result = tensor.view(-1)
    if local < num_parts:
        stages.all_reduce_across(stages.parts(result, num_parts)[local], parts[local], op)
    stages.spread(result, num_parts)
    if tensor is not tensors[0]:
        write_all(tensors, parts_like(tensor, tensors))


def reduce(stages: Stages, prepared: PreparedCall) -> None:
    """Reduce on each host to its first members, then to the root's host; gather on the root."""
    (tensor,), op, places = prepared.outputs, _op(prepared), stages.places
    root_host, root_local = places.find(prepared.root or 0)
    is_root = places.host == root_host and places.local == root_local
    whole = _summable(tensor, op)
    num_parts = stages.num_parts(whole)
    parts = stages.parts(whole, num_parts)
    is_at_root = False
    if num_parts == 1:
        owner = root_local if root_local < places.num_owners else 0
        is_owner, is_at_root = places.local == owner, owner == root_local
        mine = whole.clone() if is_owner and not is_root else whole
        stages.inside("reduce", [mine], [mine], op=_step(op), root=owner)
    else:
        is_owner = places.local < num_parts
        mine = torch.empty_like(parts[places.local])
        stages.inside("reduce_scatter_list", parts, [mine], op=_step(op))
    if is_owner:
        stages.across("reduce", [mine], [mine], op=_step(op), root=root_host)
        if places.host == root_host:
            stages.average(mine, op)
    if places.host == root_host and not is_at_root:
        gives = [whole.new_empty(0)] * len(places.here)
        takes = parts if is_root else list(gives)
        if is_owner:
            gives[root_local] = mine
        stages.inside("all_to_all", gives, takes)
    if is_root:
        _round_into(tensor, whole)


def broadcast(stages: Stages, prepared: PreparedCall) -> None:
    """Broadcast on the root's host, send across from its first members, and spread elsewhere."""
    places, whole = stages.places, prepared.outputs[0].view(-1)
    root_host, root_local = places.find(prepared.root or 0)
    num_parts = stages.num_parts(whole)
    if places.host == root_host:
        stages.inside("broadcast", [whole], [whole], root=root_local)
    if places.local < num_parts:
        mine = [stages.parts(whole, num_parts)[places.local]]
        stages.across("broadcast", mine, mine, root=root_host)
    if places.host != root_host:
        stages.spread(whole, num_parts)


def all_gather_list(stages: Stages, prepared: PreparedCall) -> None:
    """Gather inside each host, exchange between hosts, and spread inside."""
    outputs, (tensor,), places = prepared.outputs, prepared.inputs, stages.places
    whole, order, is_in_place = outputs[0].view(-1), places.by_host, False
    if len(outputs) == 1:  # the whole, in one tensor
        outputs = parts(whole, [tensor.numel()] * stages.size)
        is_in_place = list(order) == sorted(order)
    if not is_in_place:
        whole = tensor.new_empty(_numel(outputs))
    of_hosts = whole.split([_numel([outputs[k] for k in members]) for members in places.members])
    here = parts_like(of_hosts[places.host], [outputs[k] for k in places.here])
    if len(here) == 1:
        here[0].copy_(tensor.view(-1))
    else:
        stages.inside("all_gather_list", [tensor.view(-1)], here)
    num_parts = stages.num_parts(whole)
    if places.local < num_parts:
        mine = [stages.parts(whole, num_parts)[places.local] for whole in of_hosts]
        stages.across("all_gather_list", [mine[places.host]], mine)
    for host, of_host in enumerate(of_hosts):
        if host != places.host:
            stages.spread(of_host, num_parts)
    if not is_in_place:
        in_order = [outputs[member] for member in order]
        write_all(in_order, parts_like(whole, in_order))


def reduce_scatter_list(stages: Stages, prepared: PreparedCall) -> None:
    """Reduce in each host onto its ``num_owners`` first members, then across; deal out parts."""
    (output,), op, places = prepared.outputs, _op(prepared), stages.places
    num_owners, here, local = places.num_owners, places.here, places.local
    whole, inputs = _summable(output, op), [_summable(part, op) for part in prepared.inputs]
    nothing = whole.new_empty(0)
    piles = [places.pile(owner) for owner in range(num_owners)]
    packs = [packed([inputs[k] for members in pile for k in members]) for pile in piles]
    packs += [nothing] * (len(here) - num_owners)
    mine = packs[local]
    stages.inside("reduce_scatter_list", packs, [mine], op=_step(op))
    all_own = len(here) == num_owners
    gives, takes = [nothing] * len(here), [nothing] * len(here)
    if local < num_owners:
        pile = piles[local]
        sizes = [_numel([inputs[k] for k in members]) for members in pile]
        got = whole if all_own else whole.new_empty(sizes[places.host])
        stages.exchange_reducing(got, mine, sizes, _step(op))
        stages.average(got, op)
        members = pile[places.host]
        for member, part in zip(
            members, parts_like(got, [inputs[k] for k in members]), strict=True
        ):
            gives[here.index(member)] = part
    if not all_own:
        takes[local % num_owners] = whole
        stages.inside("all_to_all", gives, takes)
    _round_into(output, whole)


def all_to_all(stages: Stages, prepared: PreparedCall) -> None:
    """Exchange the parts for this host's members alone; the caller sends those for other hosts."""
    outputs, inputs = prepared.outputs, prepared.inputs
    if len(outputs) == 1:
        outputs[0].view(-1).copy_(inputs[0].view(-1))
    else:
        stages.inside("all_to_all", inputs, outputs)


def barrier(stages: Stages, _: PreparedCall) -> None:
    """Meet inside each host, then across hosts, then inside each host again."""
    stages.inside("barrier", (), ())
    if stages.places.local == 0:
        stages.across("barrier", (), ())
    stages.inside("barrier", (), ())


STAGED: dict[str, Callable[[Stages, PreparedCall], None]] = {
    "all_reduce": all_reduce_list,
    "all_reduce_list": all_reduce_list,
    "reduce": reduce,
    "broadcast": broadcast,
    "all_gather": all_gather_list,
    "all_gather_list": all_gather_list,
    "reduce_scatter_list": reduce_scatter_list,
    "all_to_all": all_to_all,
    "barrier": barrier,
}
"""The verbs of a communicator that are done in stages."""


def _op(prepared: PreparedCall) -> ReduceKind:
    assert prepared.op is not None
    return prepared.op


def _summable(tensor: torch.Tensor, op: ReduceKind) -> torch.Tensor:
    """Return ``tensor`` flat; narrow floats as a wider copy, unless ``op`` is MIN or MAX."""
    facts = DTYPES[tensor.dtype]
    is_exact = facts.is_whole or facts.wide is None or op in (ReduceOp.MIN, ReduceOp.MAX)
    return tensor.view(-1) if is_exact else tensor.view(-1).to(facts.wide)


def _round_into(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy ``whole`` into ``tensor`` if their dtypes differ; else it is the same memory."""
    if whole.dtype is not tensor.dtype:
        write(tensor, whole)


def _step(op: ReduceKind) -> ReduceKind:
    """Return the op that each level runs: SUM for a mean, else ``op``."""
    return ReduceOp.SUM if op == ReduceOp.AVG else op


def _numel(tensors: Tensors) -> int:
    return sum(tensor.numel() for tensor in tensors)
