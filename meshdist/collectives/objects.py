"""torch's verbs on Python objects: pickled, sent as bytes, unpickled.

Unpickling can run any code, so these verbs trust all members of the group. Each call takes two
rounds, sizes and then bytes. The bytes travel through host memory where the group serves CPU
tensors, else through the current CUDA device, or through ``device``. A tensor in an object comes
back with its values on the device index that it had at its sender.

Every call blocks. An object that cannot be pickled is one error on all members, and one that cannot
be unpickled an error where it arrives; the group is good for the next call after both. A call that
fails leaves its lists as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from ..error_text import grouped_text
from ..errors import AgreementError, BackendError, KindError
from ..mesh.groups import ProcessGroup, resolve_group
from ..wires.base import Communicator, Pending
from .checks import check_list, check_no_list, find_peer, get_peer, get_root
from .instruments import verb
from .parcels import Parcel, raise_unpicklable, unpack
from .point_to_point import Message, check_not_me, start_together
from .running import run

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]

_MARK = int.from_bytes(b"objects\0", "little")
"""The first number of every list of objects that is sent, so that nothing else is taken for one."""


@verb
def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Every member's list holds all members' objects, in group order.

    Args:
        object_list: a list of as many entries as the group has members; all are replaced.
        obj: anything that can be pickled.
        group: as in ``all_reduce``.

    Cost: the pickled bytes, p - 1 times, per rank.

    Raises:
        KindError: an object cannot be pickled, on whichever member; or no list.
        ArgumentError: a list of another length.
        BackendError: what a member sent cannot be unpickled here.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     found = [None] * md.get_world_size()
        ...     md.all_gather_object(found, {"rank": md.get_rank()})
        ...     return found
        >>> md.simulate(program, 2)[0]
        [{'rank': 0}, {'rank': 1}]
    """
    name = "all_gather_object"
    target = resolve_group(group)
    slots = _slots(object_list, "object_list", target, name, target.size())
    rounds = _Rounds(name, target)
    parcel = Parcel([obj], ["obj"])
    sizes = rounds.agree(parcel)
    parts = rounds.all_gather_bytes(parcel.data, sizes)
    slots[:] = [rounds.unpack(part, member)[0] for member, part in enumerate(parts)]


@verb
def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
) -> None:
    """The destination's list holds all members' objects, in group order.

    Args:
        obj: anything that can be pickled.
        object_gather_list: on the destination a list of as many entries as the group has members,
            all of which are replaced; None or [] on the others.
        dst: the destination's global rank (0 if neither is given); or
        group_dst: its rank in the group.
        group: as in ``all_reduce``.

    Raises:
        KindError: an object cannot be pickled, on whichever member; or no list.
        ArgumentError: a list of another length, or on a rank that is not the destination.
        BackendError: what a member sent cannot be unpickled here.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     found = [None, None] if md.get_rank() == 0 else None
        ...     md.gather_object("ab"[md.get_rank()], found, dst=0)
        ...     return found
        >>> md.simulate(program, 2)
        [['a', 'b'], None]
    """
    name, argument = "gather_object", "object_gather_list"
    target = resolve_group(group)
    root = get_root(target, dst, group_dst, name, "dst")
    is_root = root == target.rank()
    if is_root:
        slots = _slots(object_gather_list, argument, target, name, target.size(), "destination")
    else:
        check_no_list(object_gather_list, argument, name, "destination", target, root)
    rounds = _Rounds(name, target, root=root)
    parcel = Parcel([obj], ["obj"])
    sizes = rounds.agree(parcel)
    sent = [0] * target.size()
    sent[root] = parcel.data.numel()
    parts = rounds.exchange(parcel.data, sent, sizes if is_root else [0] * target.size())
    if is_root:
        slots[:] = [rounds.unpack(part, member)[0] for member, part in enumerate(parts)]


@verb
def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: torch.device | None = None,
    group_src: int | None = None,
) -> None:
    """Every member's list holds the source's objects.

    Args:
        object_list: on the source what is sent, on the others a list of the same length, whose
            entries are replaced.
        src: the source's global rank (0 if neither is given); or
        group: as in ``all_reduce``.
        device: through which the bytes travel; equal in type on all members.
        group_src: the source's rank in the group.

    Raises:
        AgreementError: the members' lists have different lengths; on all members.
        KindError: an object cannot be pickled, on all members; or no list.
        BackendError: what the source sent cannot be unpickled here.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     objects = ["foo", 12, {1: 2}] if md.get_rank() == 0 else [None, None, None]
        ...     md.broadcast_object_list(objects, src=0)
        ...     return objects
        >>> md.simulate(program, 2)[1]
        ['foo', 12, {1: 2}]
    """
    name = "broadcast_object_list"
    target = resolve_group(group)
    root = get_root(target, src, group_src, name, "src")
    is_root = root == target.rank()
    objects = _given(object_list, "object_list", name, is_written=not is_root)
    rounds = _Rounds(name, target, device, root)
    parcel = Parcel(objects, _entries("object_list", objects)) if is_root else Parcel([], [])
    sizes = rounds.agree(parcel, len(objects))
    data = parcel.data if is_root else rounds.empty(sizes[root])
    arrived = rounds.broadcast(data)
    if not is_root:
        object_list[:] = rounds.unpack(arrived, root)


@verb
def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
) -> None:
    """The first entry of every member's output list is its own of the source's objects.

    Args:
        scatter_object_output_list: a list of at least one entry; the first is replaced.
        scatter_object_input_list: on the source one object per member; ignored on the others.
        src: the source's global rank (0 if neither is given); or
        group: as in ``all_reduce``.
        group_src: the source's rank in the group.

    Raises:
        KindError: an object cannot be pickled, on all members; or no list.
        ArgumentError: an empty output list; not one object per member.
        BackendError: what the source sent cannot be unpickled here.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     mine = [None]
        ...     md.scatter_object_list(mine, ["a", "b"] if md.get_rank() == 0 else None, src=0)
        ...     return mine
        >>> md.simulate(program, 2)
        [['a'], ['b']]
    """
    name, argument = "scatter_object_list", "scatter_object_input_list"
    target = resolve_group(group)
    size = target.size()
    root = get_root(target, src, group_src, name, "src")
    slots = _slots(scatter_object_output_list, "scatter_object_output_list", target, name)
    parcels = []
    if root == target.rank():
        objects = check_list(scatter_object_input_list, argument, target, name, size, role="source")
        entries = _entries(argument, objects)
        parcels = [Parcel([x], [entry]) for x, entry in zip(objects, entries, strict=True)]
    rounds = _Rounds(name, target, root=root)
    sizes = rounds.tell_sizes(parcels)
    sent = sizes if parcels else [0] * size
    taken = [0] * size
    taken[root] = sizes[target.rank()]
    data = torch.cat([parcel.data for parcel in parcels]) if parcels else rounds.empty(0)
    slots[0] = rounds.unpack(rounds.exchange(data, sent, taken)[root], root)[0]


@verb
def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Any = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send objects to one member, which calls ``recv_object_list`` with a list of this length.

    Args:
        object_list: what is sent.
        dst: the receiver's global rank; or
        group: who may be named.
        device: through which the bytes travel; equal in type on both sides.
        group_dst: the receiver's rank in the group. One of the two is required.
        use_batch: send as ``batch_isend_irecv`` does; equal on both sides.

    Raises:
        AgreementError: the receiver's list has another length; on both sides.
        KindError: an object cannot be pickled, on both sides; or no list.
        ArgumentError: the receiver is this rank; none or two receivers are named.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     if md.get_rank() == 0:
        ...         return md.send_object_list(["foo", 12], dst=1)
        ...     objects = [None, None]
        ...     return md.recv_object_list(objects, src=0), objects
        >>> md.simulate(program, 2)[1]
        (0, ['foo', 12])
    """
    name = "send_object_list"
    target = resolve_group(group)
    peer = get_peer(target, dst, group_dst, name, "dst")
    check_not_me(target, peer, name)
    objects = _given(object_list, "object_list", name, is_written=False)
    line = _Line(name, target, device, use_batch)
    parcel = Parcel(objects, _entries("object_list", objects))
    line.send(line.numbers(_MARK, len(objects), parcel.stated), peer)
    (num_taken,) = line.receive(line.numbers(0), peer, is_answer=True)[0].view(torch.int64).tolist()
    if parcel.is_failure or num_taken == len(objects):
        line.send(parcel.data.to(line.device), peer)
    if parcel.is_failure:
        raise_unpicklable([(target.world.rank, parcel.data)], name, parcel.error)
    _check_same_length(len(objects), target.world.rank, num_taken, target.ranks[peer], target)


@verb
def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Receive objects from one member, or from any; return the sender's global rank.

    Args:
        object_list: a list as long as the sender's, whose entries are replaced.
        src: the sender's global rank; or
        group: who may be named.
        device: through which the bytes travel; equal in type on both sides.
        group_src: the sender's rank in the group; neither means any member.
        use_batch: receive as ``batch_isend_irecv`` does; equal on both sides.

    Raises:
        AgreementError: the sender's list has another length; on both sides.
        KindError: an object cannot be pickled, on both sides; or no list.
        ArgumentError: the sender is this rank, or two senders are named.
        BackendError: what the sender sent cannot be unpickled here, or is no list of objects.
    """
    name = "recv_object_list"
    target = resolve_group(group)
    peer = find_peer(target, src, group_src, name, "src")
    check_not_me(target, peer, name)
    num_taken = len(_given(object_list, "object_list", name, is_written=True))
    line = _Line(name, target, device, use_batch)
    numbers, source = line.receive(line.numbers(0, 0, 0), peer)
    mark, num_sent, stated = numbers.view(torch.int64).tolist()
    sender = target.ranks[source]
    if mark != _MARK:
        raise BackendError(
            f"recv_object_list received what is no list of objects from rank {sender}",
            where=f"rank {target.world.rank}, {target.name}",
            fix=f"let rank {sender} call send_object_list",
        )
    line.send(line.numbers(num_taken), source, is_answer=True)
    if stated >= 0:
        _check_same_length(num_sent, sender, num_taken, target.world.rank, target)
    data, _ = line.receive(torch.empty(abs(stated), dtype=torch.uint8, device=line.device), source)
    if stated < 0:
        raise_unpicklable([(sender, data)], "send_object_list")
    object_list[:] = unpack(data, sender, name, target)
    return sender


class _Rounds:
    """The rounds of one call among all members; all of them bear the verb's name.

    Args:
        verb: its public name.
        target: the group.
        device: where the caller wants the bytes to travel, or None.
        root: the place of the verb's source or destination, or None.
    """

    def __init__(
        self, verb: str, target: ProcessGroup, device: Any = None, root: int | None = None
    ) -> None:
        self.verb = verb
        self.target = target
        self.root = root
        self.device = _find_device(target, device, verb)
        self.channel = target.channel(self.device.type)

    def agree(self, parcel: Parcel, length: int = 0) -> list[int]:
        """Return how many bytes each member has.

        Raises:
            KindError: a member has failed to pickle. AgreementError: the members' lengths differ.
        """
        mine = torch.tensor([parcel.stated, length], device=self.device)
        everyones = mine.new_empty(2 * self.target.size())
        self.channel.enter(self.verb, mine, None, self.root)
        self._run(lambda wire, timeout: wire.all_gather(everyones, mine, timeout))
        stated, lengths = everyones.view(-1, 2).t().tolist()
        ranks = self.target.ranks
        if min(stated) < 0:
            told = parcel.data if parcel.is_failure else self.empty(0)
            texts = self.all_gather_bytes(told, [max(0, -size) for size in stated])
            failed = [(rank, text) for rank, text in zip(ranks, texts, strict=True) if len(text)]
            raise_unpicklable(failed, self.verb, parcel.error)
        if len(set(lengths)) > 1:
            told_lengths = [(rank, f"{n} entries") for rank, n in zip(ranks, lengths, strict=True)]
            raise _other_length(self.verb, self.target, grouped_text(told_lengths))
        return list(stated)

    def tell_sizes(self, parcels: Sequence[Parcel]) -> list[int]:
        """Return how many bytes the source, which has ``parcels``, has for each member.

        Raises:
            KindError: the source has failed to pickle.
        """
        assert self.root is not None
        failure = next((parcel for parcel in parcels if parcel.is_failure), None)
        stated = [parcel.stated for parcel in parcels] or [0] * self.target.size()
        if failure is not None:
            stated = [failure.stated] * len(parcels)
        sizes: list[int] = self.broadcast(torch.tensor(stated, device="cpu")).tolist()
        if sizes[0] < 0:
            text = self.broadcast(self.empty(-sizes[0]) if failure is None else failure.data)
            source = self.target.ranks[self.root]
            cause = None if failure is None else failure.error
            raise_unpicklable([(source, text)], self.verb, cause)
        return sizes

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Room for bytes."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the root's tensor; ``tensor`` is like it in dtype and size."""
        root = self.root
        assert root is not None
        there = tensor.to(self.device)
        self.channel.enter(self.verb, there, None, root)
        self._run(lambda wire, timeout: wire.broadcast(there, root, timeout))
        return there.cpu()

    def all_gather_bytes(self, data: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return every member's bytes, ``sizes`` of them."""
        there = data.to(self.device)
        parts = [there.new_empty(size) for size in sizes]
        sent = [there.numel()] * self.target.size()
        self.channel.enter(self.verb, there, None, self.root, sent, sizes)
        self._run(lambda wire, timeout: wire.all_gather_list(parts, there, timeout))
        return [part.cpu() for part in parts]

    def exchange(
        self, data: torch.Tensor, sent: Sequence[int], taken: Sequence[int]
    ) -> list[torch.Tensor]:
        """Send each member its part of ``data``, and return what came from each."""
        there = data.to(self.device)
        whole = there.new_empty(sum(taken))
        self.channel.enter(self.verb, there, None, self.root, sent, taken)
        self._run(lambda wire, timeout: wire.all_to_all_single(whole, there, taken, sent, timeout))
        return list(whole.cpu().split(list(taken)))

    def _run(self, start: Callable[[Communicator, timedelta], Pending]) -> None:
        run(self.channel, self.verb, start, [], False)

    def unpack(self, data: torch.Tensor, member: int) -> list[Any]:
        """Return the objects that ``member`` sent."""
        return unpack(data, self.target.ranks[member], self.verb, self.target)


class _Line:
    """The messages of one call between two members."""

    def __init__(self, verb: str, target: ProcessGroup, device: Any, use_batch: bool) -> None:
        self.verb = verb
        self.target = target
        self.use_batch = use_batch
        self.device = _find_device(target, device, verb)

    def numbers(self, *values: int) -> torch.Tensor:
        """Whole numbers to send, or room for them.

        In a dtype that programs hardly send, since wires take what has the dtype and size of a
        tensor that waits.
        """
        return torch.tensor(values, dtype=torch.int64, device=self.device).view(torch.uint64)

    def send(self, tensor: torch.Tensor, peer: int, *, is_answer: bool = False) -> None:
        """Send to a member."""
        message = Message(self.verb, self.target, peer, tensor, is_send=True, is_answer=is_answer)
        self._run(message)

    def receive(
        self, tensor: torch.Tensor, peer: int | None, *, is_answer: bool = False
    ) -> tuple[torch.Tensor, int]:
        """Return what has come into ``tensor``, in host memory, and from which member."""
        message = Message(self.verb, self.target, peer, tensor, is_send=False, is_answer=is_answer)
        self._run(message)
        return tensor.cpu(), message.source()

    def _run(self, message: Message) -> None:
        if self.use_batch:
            start_together([message])
        else:
            message.start()
        message.finish()


def _find_device(target: ProcessGroup, given: Any, verb: str) -> torch.device:
    """Where the bytes of objects travel."""
    if given is None:
        if "cpu" in target.backends:
            return torch.device("cpu")
        given = next(iter(target.backends))
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise KindError(
            f"{verb}: {given!r} is not a device", expected="for example torch.device('cuda', 0)"
        ) from error
    target.wire_name(device.type)  # raises where nothing serves it
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _given(given: Any, argument: str, verb: str, *, is_written: bool) -> Sequence[Any]:
    """Return ``given`` if it is a list, of any length; a tuple will do to read from."""
    if isinstance(given, list if is_written else (list, tuple)):
        return given
    raise KindError(
        f"{verb}: {argument} must be a list",
        expected="a list, whose entries are replaced" if is_written else "a list or tuple",
        found=type(given).__name__,
    )


def _slots(
    given: Any,
    argument: str,
    target: ProcessGroup,
    verb: str,
    length: int | None = None,
    role: str = "",
) -> list[Any]:
    """Return ``given`` if it is a list of ``length`` entries (None: at least one) to replace."""
    check_list(given, argument, target, verb, length, role=role)
    _given(given, argument, verb, is_written=True)
    return given  # type: ignore[no-any-return]


def _entries(argument: str, objects: Sequence[Any]) -> list[str]:
    return [f"{argument}[{place}]" for place in range(len(objects))]


def _other_length(verb: str, target: ProcessGroup, found: str) -> AgreementError:
    return AgreementError(
        f"{verb}: the members' lists of objects have different lengths",
        where=target.name,
        expected="as many entries on every rank as its source has; nothing was sent",
        found=found,
        fix="give receivers [None] * n; where n is not known, send the list as one object: "
        "[objects]",
    )


def _check_same_length(
    num_sent: int, sender: int, num_taken: int, receiver: int, target: ProcessGroup
) -> None:
    """Raise one and the same error on both sides of a message, where their lists differ."""
    if num_sent != num_taken:
        told = [(sender, f"sends {num_sent} entries"), (receiver, f"takes {num_taken}")]
        found = "\n".join(f"rank {rank} {text}" for rank, text in told)
        raise _other_length("send_object_list", target, found)
