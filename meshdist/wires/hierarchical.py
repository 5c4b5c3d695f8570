"""The wire of groups that span hosts: shared memory inside each host, Gloo between hosts.

What crosses the network is the least there is, over as many connections as every host has members
at least (``two_level``). 16-bit floats are added up in float32 inside a host; the hosts' sums are
rounded, and Gloo rounds at every step.

Gather, scatter and messages go over Gloo among all members: a receive from any member has to see
all messages in one place.

Calls are compared inside a host before they start. A collective that fails on one member frees the
others, whatever level they wait on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store

from ..reduce_ops import ReduceKind
from . import fallbacks, two_level
from .background import InOrder, Job
from .base import (
    REDUCING_VERBS,
    Communicator,
    MemberLost,
    MembersDisagree,
    Opening,
    Pending,
    Wire,
    WireAborted,
    WireFailure,
    WireRefused,
    WireTimeout,
    find_wire,
    get_wire,
    register_wire,
)
from .gloo import GlooCommunicator
from .host_places import HostPlaces
from .pending import Chain
from .shm import ShmCommunicator
from .two_level import Stages

__all__ = ["HierarchicalCommunicator", "HierarchicalWire"]

_OVER_ALL = frozenset({"gather", "scatter", "send", "recv"})
_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02


class _Levels:
    """The connections of one member, and whether they may be used.

    Args:
        places: where the members are.
        inside: shared memory with the members of this host; None where there are no others.
        across: Gloo among the owners at this member's place, one for each host; None if it is none.
        over_all: Gloo among all members.
    """

    def __init__(
        self,
        places: HostPlaces,
        inside: Communicator | None,
        across: Communicator | None,
        over_all: Communicator,
    ) -> None:
        self.places = places
        self.inside = inside
        self.across = across
        self.over_all = over_all
        self.is_aborted = False
        self.failure = ""
        self.queue = InOrder(self.release)

    def release(self) -> None:
        """Free whoever waits in any of them, on all members."""
        for level in (self.inside, self.across, self.over_all):
            if level is not None:
                level.abort()

    def close(self) -> None:
        """End them."""
        self.queue.end()
        for level in (self.inside, self.across, self.over_all):
            if level is not None:
                level.close()

    def perform(
        self, act: Callable[[Stages], None], timeout: timedelta, number: int | None
    ) -> None:
        """Do a collective, the caller's call ``number``; where it fails, free those who wait."""
        if self.is_aborted:
            raise WireAborted("aborted before")
        if self.failure:
            raise WireFailure(f"a collective failed before: {self.failure}")
        try:
            with torch.inference_mode():  # it may be a parameter, or an inference tensor
                act(Stages(self.places, self.inside, self.across, timeout))
        except (WireTimeout, MembersDisagree) as failure:  # the others learn it by themselves
            self.failure = str(failure)
            if isinstance(failure, MembersDisagree):
                failure.number = number
            raise
        except WireFailure as failure:
            self.failure = str(failure)
            self.release()
            if self.is_aborted:
                raise WireAborted(str(failure)) from None
            if isinstance(failure, MemberLost):
                raise MemberLost(str(failure), self.places.here[failure.member]) from None
            if isinstance(failure, WireAborted):
                raise WireFailure("a member of this host gave up in this call") from None
            raise


class _OverAll:
    """An operation of the communicator of all members."""

    __slots__ = ("pending",)

    def __init__(self, pending: Pending) -> None:
        self.pending = pending


class HierarchicalCommunicator(Communicator):
    """One member's part of a group that spans hosts.

    Args:
        opening: the group.
        levels: its connections.
        is_waiting: whether its collectives wait, instead of going on in the background.
    """

    def __init__(self, opening: Opening, levels: _Levels, *, is_waiting: bool = False) -> None:
        super().__init__("hierarchical", opening.rank, len(opening.ranks))
        self._levels = levels
        self._over_all = levels.over_all
        self._is_waiting = is_waiting
        self._waiting: Communicator = self
        if not is_waiting:
            self._waiting = HierarchicalCommunicator(opening, levels, is_waiting=True)

    @property
    def waiting(self) -> Communicator:
        return self._waiting

    @classmethod
    def support(cls, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        """Native where shared memory reduces it; what goes over Gloo alone is what Gloo does."""
        if verb in REDUCING_VERBS:
            return "native" if _reduces(dtype, op) else "built"
        if verb in _OVER_ALL:
            return GlooCommunicator.support(verb, device_type, dtype, op)
        return super().support(verb, device_type, dtype, op)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceKind, timeout: timedelta) -> Pending:
        if not _reduces(tensor.dtype, op):
            return fallbacks.all_reduce_by_gathering(self, tensor, op, timeout)
        return self._start(lambda stages: two_level.all_reduce(stages, tensor, op), timeout)

    def all_reduce_list(
        self, tensors: Sequence[torch.Tensor], op: ReduceKind, timeout: timedelta
    ) -> Pending:
        dtype = tensors[0].dtype
        is_alike = all(tensor.dtype is dtype for tensor in tensors)
        if len(tensors) == 1 or not is_alike or not _reduces(dtype, op):
            return super().all_reduce_list(tensors, op, timeout)
        return self._start(
            lambda stages: two_level.all_reduce_together(stages, tensors, op), timeout
        )

    def reduce(
        self, tensor: torch.Tensor, op: ReduceKind, root: int, timeout: timedelta
    ) -> Pending:
        if not _reduces(tensor.dtype, op):
            return super().reduce(tensor, op, root, timeout)
        return self._start(lambda stages: two_level.reduce(stages, tensor, op, root), timeout)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: timedelta) -> Pending:
        return self._start(lambda stages: two_level.broadcast(stages, tensor, root), timeout)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, timeout: timedelta) -> Pending:
        outputs = fallbacks.parts(output, [tensor.numel()] * self.size)
        return self._start(
            lambda stages: two_level.all_gather(stages, outputs, tensor, output), timeout
        )

    def all_gather_list(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout: timedelta
    ) -> Pending:
        return self._start(lambda stages: two_level.all_gather(stages, outputs, tensor), timeout)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceKind, timeout: timedelta
    ) -> Pending:
        inputs = fallbacks.parts(tensor, [output.numel()] * self.size)
        return self.reduce_scatter_list(output, inputs, op, timeout)

    def reduce_scatter_list(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: ReduceKind,
        timeout: timedelta,
    ) -> Pending:
        if not _reduces(output.dtype, op):
            return super().reduce_scatter_list(output, inputs, op, timeout)
        return self._start(
            lambda stages: two_level.reduce_scatter(stages, output, inputs, op), timeout
        )

    def gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        root: int,
        timeout: timedelta,
    ) -> Pending:
        return _OverAll(self._over_all.gather(outputs, tensor, root, timeout))

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        root: int,
        timeout: timedelta,
    ) -> Pending:
        return _OverAll(self._over_all.scatter(tensor, inputs, root, timeout))

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        timeout: timedelta,
    ) -> Pending:
        here = self._levels.places.here
        near_out, near_in = [outputs[k] for k in here], [inputs[k] for k in here]
        far_out, far_in = _without(outputs, here), _without(inputs, here)
        far = _OverAll(self._over_all.all_to_all(far_out, far_in, timeout))
        near = self._start(
            lambda stages: two_level.all_to_all_here(stages, near_out, near_in), timeout
        )
        return Chain([near, far])

    def barrier(self, timeout: timedelta, device: torch.device | None = None) -> Pending:
        return self._start(two_level.barrier, timeout)

    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout: timedelta) -> Pending:
        return _OverAll(self._over_all.send(tensor, peer, tag, timeout))

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, timeout: timedelta) -> Pending:
        return _OverAll(self._over_all.recv(tensor, peer, tag, timeout))

    def finish(self, pending: Pending, timeout: timedelta) -> None:
        kind = type(pending)
        if kind is Chain:
            self.finish_chain(pending, timeout)
        elif kind is _OverAll:
            self._over_all.finish(pending.pending, timeout)
        elif kind is Job:
            if not pending.is_over(timeout.total_seconds()):
                raise WireTimeout(f"not finished after {timeout.total_seconds():g} s")
            if pending.failure is not None:
                raise pending.failure

    def is_finished(self, pending: Pending) -> bool:
        kind = type(pending)
        if kind is Chain:
            return self.is_chain_finished(pending)
        if kind is _OverAll:
            return self._over_all.is_finished(pending.pending)
        return pending is None or bool(pending.is_over())

    def source(self, pending: Pending) -> int:
        if type(pending) is _OverAll:
            return self._over_all.source(pending.pending)
        return super().source(pending)

    def abort(self) -> None:
        self._levels.is_aborted = True
        self._levels.release()

    def leave(self) -> None:
        if self._levels.inside is not None:
            self._levels.inside.leave()

    def close(self) -> None:
        self._levels.close()

    def _start(self, act: Callable[[Stages], None], timeout: timedelta) -> Pending:
        """Do a collective now, or in the background, after those that are under way."""
        levels, number = self._levels, self.number
        if self._is_waiting and levels.queue.is_idle:
            levels.perform(act, timeout, None)
            return None
        return levels.queue.start(
            lambda: levels.perform(act, timeout, None if self._is_waiting else number)
        )


class HierarchicalWire(Wire):
    """Shared memory inside hosts and Gloo between them: CPU tensors."""

    name = "hierarchical"
    device_types = frozenset({"cpu"})
    stand_in = "gloo"
    communicator_kind = HierarchicalCommunicator

    def is_available(self) -> bool:
        """Whether shared memory is."""
        wire = find_wire("shm")
        return wire is not None and wire.is_available()

    def why_unavailable(self) -> tuple[str, str]:
        """Why shared memory is not, and what mends it."""
        shm = find_wire("shm")
        return super().why_unavailable() if shm is None else shm.why_unavailable()

    def open(self, opening: Opening) -> Communicator:
        """Open all levels; a group on one host gets shared memory's communicator.

        Raises WireRefused on every member where one host has no memory to share.
        """
        if opening.is_one_host:
            return get_wire("shm").open(opening)
        if len(opening.hosts) != len(opening.ranks):
            raise WireRefused("nobody knows on which hosts its ranks run")
        places = HostPlaces.of(opening.hosts, opening.rank)
        inside, refusal = None, ""
        if len(places.here) > 1:
            try:
                inside = get_wire("shm").open(
                    _among(opening, f"host {places.host}", places.here, is_one_host=True)
                )
            except WireRefused as refused:
                refusal = str(refused)
        gloo, across = get_wire("gloo"), None
        try:
            _agree(opening.store, places, refusal, opening.timeout)
            if places.local < places.num_owners:
                owners = tuple(members[places.local] for members in places.members)
                across = gloo.open(_among(opening, f"owners {places.local}", owners))
            over_all = gloo.open(_among(opening, "all", tuple(range(len(opening.ranks)))))
        except BaseException:
            for level in (inside, across):
                if level is not None:
                    level.close()
            raise
        return HierarchicalCommunicator(opening, _Levels(places, inside, across, over_all))


def _among(
    opening: Opening, part: str, members: tuple[int, ...], *, is_one_host: bool = False
) -> Opening:
    """The opening of a communicator among some of the members."""
    return replace(
        opening,
        store=PrefixStore(part, opening.store),
        ranks=tuple(opening.ranks[k] for k in members),
        rank=members.index(opening.rank),
        hosts=tuple(opening.hosts[k] for k in members),
        is_one_host=is_one_host,
        options=None,
    )


def _agree(store: Store, places: HostPlaces, refusal: str, timeout: timedelta) -> None:
    """Let every member know whether all hosts can share memory; raises where one cannot."""
    if places.local == 0:
        store.set(f"host {places.host} says", refusal or "yes")
    deadline = time.monotonic() + timeout.total_seconds()
    refusals = []
    for host in range(len(places.members)):
        key, pause = f"host {host} says", _PAUSE_S
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise WireTimeout("a host did not come")
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)
        said = store.get(key).decode()
        if said != "yes":
            refusals.append(said)
    if refusals:
        raise WireRefused("; ".join(refusals))


def _reduces(dtype: torch.dtype, op: ReduceKind) -> bool:
    """Whether shared memory reduces it as it is; what it lacks is gathered, and rounded once."""
    return ShmCommunicator.support("all_reduce", "cpu", dtype, op) == "native"


def _without(tensors: Sequence[torch.Tensor], members: Sequence[int]) -> list[torch.Tensor]:
    """``tensors``, with nothing in place of those of some members."""
    nothing = tensors[0].new_empty(0)
    return [nothing if k in members else tensor for k, tensor in enumerate(tensors)]


register_wire(HierarchicalWire())
