"""The wire of groups that span hosts: shared memory inside each host, Gloo between hosts.

What crosses the network is the least there is, over as many connections as every host has members
at least (``two_level``). 16-bit floats are added up in float32 on both levels, and rounded once.

Gather, scatter and messages go over Gloo among all members: a receive from any member has to see
all messages in one place.

Calls are compared inside a host before they start. A collective that fails on one member frees the
others, whatever level they wait on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch

from ...reduce_ops import ReduceKind
from ...runtime.deadlines import Deadline, wait_until
from ...verb_table import REDUCING_VERBS
from ..built_verbs import BUILT, all_reduce_by_gathering
from ..c10d.gloo import GlooCommunicator
from ..communicator import Communicator
from ..operations import (
    DONE,
    Chain,
    Interrupted,
    MemberGaveUp,
    MemberLost,
    MembersDisagree,
    Operation,
    QueuedOperation,
    WireAborted,
    WireFailure,
    WireRefused,
    WireTimeout,
    WorkerQueue,
)
from ..prepared import PreparedCall, Tensors, writing
from ..registry import Needs, Opening, Wire, get_wire, register_wire
from ..shm.communicator import ShmCommunicator, ShmWire
from .two_level import STAGED, HostPlaces, Stages

_OVER_ALL = frozenset({"gather", "scatter", "send", "recv"})


class HierarchicalCommunicator(Communicator):
    """Part of one member in a group that spans hosts.

    Args:
        inside: shared memory with the members of this host; None where there are no others.
        across: Gloo among the members at this member's place of each host; None if a host has none.
        over_all: Gloo among all members.
    """

    ways: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(STAGED, "_stages"),
        **dict.fromkeys(_OVER_ALL, "_go_over_all"),
        "all_to_all": "_all_to_all",
    }

    def __init__(
        self,
        opening: Opening,
        places: HostPlaces,
        inside: Communicator | None,
        across: Communicator | None,
        over_all: Communicator,
    ) -> None:
        super().__init__("hierarchical", opening.rank, len(opening.ranks))
        self._places = places
        self._inside = inside
        self._across = across
        self._over_all = over_all
        self._levels = [level for level in (inside, across, over_all) if level is not None]
        self._is_aborted = False
        self._failure = ""
        self._queue = WorkerQueue(self._release)

    @classmethod
    def support(cls, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        if verb in REDUCING_VERBS:
            return ShmCommunicator.support(verb, "cpu", dtype, op)
        if verb in _OVER_ALL:
            return GlooCommunicator.support(verb, device_type, dtype, op)
        return super().support(verb, device_type, dtype, op)

    def _stages(self, prepared: PreparedCall) -> Operation:
        """Run a call if the caller waits and none is queued, else queue it; return what runs."""
        if prepared.op is not None and not _reduces(prepared):
            return BUILT.get(prepared.way, all_reduce_by_gathering)(self, prepared)
        perform = partial(self._perform, prepared)
        failed = partial(self._failed, prepared)
        if not (prepared.waits and self._queue.is_idle):
            return self._queue.start(perform, failed)
        job = QueuedOperation(perform, failed)
        job.run()
        job.finish(prepared.timeout)
        return DONE

    def _go_over_all(self, prepared: PreparedCall) -> Operation:
        return self._over_all.start(prepared)

    def _all_to_all(self, prepared: PreparedCall) -> Operation:
        outputs, inputs, here = prepared.outputs, prepared.inputs, self._places.here
        near_out, near_in = [outputs[k] for k in here], [inputs[k] for k in here]
        far_out, far_in = _without(outputs, here), _without(inputs, here)
        # Started without waiting: the part inside the host, which compares the calls, is first.
        far = self._over_all.start(prepared.by("all_to_all", far_in, far_out).as_async())
        near = self._stages(prepared.by("all_to_all", near_in, near_out))
        return Chain([near, far])

    def abort(self) -> None:
        self._is_aborted = True
        self._release()

    def leave(self) -> None:
        if self._inside is not None:
            self._inside.leave()

    def close(self) -> None:
        self._queue.end()
        for level in self._levels:
            level.close()

    def _release(self) -> None:
        """Abort all levels, which frees the threads that wait there, on all members."""
        for level in self._levels:
            level.abort()

    def _perform(self, prepared: PreparedCall) -> None:
        """Run a collective in stages; raise WireFailure if a call failed before, or aborted."""
        if self._is_aborted:
            raise WireAborted("aborted before")
        if self._failure:
            raise WireFailure(f"a collective failed before: {self._failure}")
        stages = Stages(self._places, self._inside, self._across, prepared.timeout)
        with writing():
            STAGED[prepared.way](stages, prepared)

    def _failed(self, prepared: PreparedCall, failure: BaseException) -> BaseException:
        """Release the members that wait in a failed collective; return the error to raise."""
        if self._failure or not isinstance(failure, WireFailure):
            return failure
        self._failure = text = str(failure)
        if isinstance(failure, MembersDisagree):
            failure.number = prepared.sequence
        if isinstance(failure, (WireTimeout, MembersDisagree, Interrupted)):
            return failure  # the others will learn it
        self._release()
        if self._is_aborted:
            return WireAborted(text)
        if isinstance(failure, MemberLost):
            return MemberLost(text, self._places.here[failure.member])
        if isinstance(failure, MemberGaveUp):
            return MemberGaveUp(text, self._places.here[failure.member])
        if isinstance(failure, WireAborted):
            return WireFailure("a member of this host gave up in this call")
        return failure


class HierarchicalWire(Wire):
    """Shared memory inside hosts and Gloo between them: CPU tensors."""

    name = "hierarchical"
    device_types = frozenset({"cpu"})
    replacement = "gloo"
    communicator_kind = HierarchicalCommunicator

    def is_available(self) -> bool:
        return ShmWire().is_available()

    def why_unavailable(self) -> tuple[str, str]:
        return ShmWire().why_unavailable()

    def needs(self, opening: Opening) -> Needs:
        if opening.is_one_host:
            return get_wire("shm").needs(opening)
        num_here = opening.hosts.count(opening.hosts[opening.rank])
        num_peers = 2 * (num_here - 1) + len(set(opening.hosts)) - 1 + len(opening.ranks) - 1
        return Needs(num_peers, 4)

    def open(self, opening: Opening) -> Communicator:
        """Open all levels; raise WireRefused on every member where a host shares no memory."""
        if opening.is_one_host:  # shared memory's own communicator serves it
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
            _agree(opening, places, refusal)
            if places.local < places.num_owners:
                owners = tuple(members[places.local] for members in places.members)
                across = gloo.open(_among(opening, f"owners {places.local}", owners))
            over_all = gloo.open(_among(opening, "all", tuple(range(len(opening.ranks)))))
        except BaseException:
            for level in (inside, across):
                if level is not None:
                    level.close()
            raise
        return HierarchicalCommunicator(opening, places, inside, across, over_all)


def _among(
    opening: Opening, part: str, members: tuple[int, ...], *, is_one_host: bool = False
) -> Opening:
    """Return ``opening`` for ``members`` alone, with store keys below ``part``."""
    return opening.below(
        part,
        ranks=tuple(opening.ranks[k] for k in members),
        rank=members.index(opening.rank),
        hosts=tuple(opening.hosts[k] for k in members),
        is_one_host=is_one_host,
        options=None,
    )


def _agree(opening: Opening, places: HostPlaces, refusal: str) -> None:
    """Wait until all hosts share memory; raise WireRefused on every member if a host cannot.

    Args:
        refusal: why this member cannot, or "".
    """
    store, deadline = opening.store, Deadline(opening.timeout)
    if places.local == 0:
        store.set(f"host {places.host} says", refusal or "yes")
    keys = [f"host {host} says" for host in range(len(places.members))]
    if not wait_until(partial(store.check, keys), deadline, opening.check_present):
        raise WireTimeout("a host did not come")
    if refusals := [said.decode() for said in store.multi_get(keys) if said != b"yes"]:
        raise WireRefused("; ".join(refusals))


def _reduces(prepared: PreparedCall) -> bool:
    """Return whether shared memory reduces the tensors as they are, ungathered and unconverted."""
    op, dtypes = prepared.op, {output.dtype for output in prepared.outputs}
    assert op is not None
    support = ShmCommunicator.support(prepared.way, "cpu", prepared.outputs[0].dtype, op)
    return len(dtypes) == 1 and support == "native"


def _without(tensors: Tensors, members: Sequence[int]) -> list[torch.Tensor]:
    """Return a list of ``tensors`` with empty tensors in the places ``members``."""
    nothing = tensors[0].new_empty(0)
    return [nothing if k in members else tensor for k, tensor in enumerate(tensors)]


register_wire(HierarchicalWire())
