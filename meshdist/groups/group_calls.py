"""Create and query process groups with torch's functions.

Unlike in torch, only a group's members wait: on other ranks a call returns immediately and is
optional.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch

from ..arguments import check_timeout, find_integers, get_integer
from ..backends.backend_names import backends_in, parse_backends
from ..backends.registry import get_backend
from ..bootstrap.world import World, find_world, get_usable_world
from ..checking.call_sites import never_nested
from ..error_text import ranks_text
from ..errors import ArgumentError, KindError, LengthError, NotInGroupError
from .communicators import get_registry
from .process_group import NON_GROUP_MEMBER, ProcessGroup, resolve_group, world_group

__all__ = [
    "GroupMember",
    "get_global_rank",
    "get_group_rank",
    "get_process_group_ranks",
    "group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
]


class _MemberKinds(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:  # torch's name
        """The group of all ranks, or None before initialization."""
        world = find_world()
        return None if world is None else world_group(world)


class GroupMember(metaclass=_MemberKinds):
    """``GroupMember.WORLD`` is the world; outsiders of a new group get ``NON_GROUP_MEMBER``."""

    NON_GROUP_MEMBER = NON_GROUP_MEMBER


class group(metaclass=_MemberKinds):  # torch's name
    """``group.WORLD`` is the group of all ranks."""


@never_nested
def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> ProcessGroup | Any:
    """Create a process group of ``ranks``. Collective over its members only.

    Args:
        ranks: Global ranks (None: all).
        timeout: The timeout of collectives (None: the backend's default).
        backend: As in ``init_process_group`` (None: the world's).
        pg_options: Options of the backend.
        use_local_synchronization: Ignored: members never wait for other ranks.
        group_desc: The name in messages.
        device_id: The device of the group's NCCL backend, which then connects immediately.
        sort_ranks: Whether to sort the ranks.

    Returns:
        A new group; outside it, ``GroupMember.NON_GROUP_MEMBER``.

    Raises:
        ArgumentError: ``ranks`` is empty, or has duplicates or ranks outside the world.
        MismatchError: Members passed different arguments.
        CollectiveTimeoutError: A member is late; the text names it.
    """
    world = get_usable_world()
    members = _checked_ranks(world, ranks, sort_ranks=sort_ranks)
    check_timeout(timeout)
    _check_device_id(device_id)
    if group_desc is not None and not isinstance(group_desc, str):
        raise KindError(
            "group_desc must be a str",
            found=f"{group_desc!r}",
            fix="pass a string, or leave it out",
        )
    backends = backends_in(world, world.backends if backend is None else parse_backends(backend))
    if world.rank not in members:
        return NON_GROUP_MEMBER
    name = group_desc or f"group of {ranks_text(members)}"
    definition = {"text": name, "ranks": members, "backends": backends}
    default = max(get_backend(backend_name).default_timeout for backend_name in backends.values())
    made = ProcessGroup(
        world,
        members,
        name=name,
        backends=None if backend is None else backends,
        timeout=timeout or default,
        options=pg_options,
        is_private=True,
        desc=group_desc or "undefined",
        device=device_id,
    )
    limit = timeout or world.timeout or default
    with get_registry(world).opening() as agree:
        made.open_all(agree(members, "group", definition, limit, lack=made.reserve_resources()))
    return made


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[ProcessGroup | Any]]:
    """Split a group, in rank order, into subgroups of ``group_size``.

    Args:
        group_size: A divisor of the group's size (None: the number of CUDA devices).
        group: The group to split (None: the world).
        timeout, backend, pg_options, group_desc: As in ``new_group``.

    Returns:
        This rank's subgroup, and a list with every subgroup or ``NON_GROUP_MEMBER``.

    Raises:
        ArgumentError: The size does not divide the group, or it is None without a CUDA device.
        MismatchError, CollectiveTimeoutError: As for ``new_group``.
    """
    parent = resolve_group(group)
    if group_size is None:
        if not torch.cuda.is_available():
            raise ArgumentError(
                "new_subgroups needs group_size because there is no CUDA device to count",
                fix="pass group_size",
            )
        group_size = torch.cuda.device_count()
    group_size = get_integer(group_size, "group_size")
    if group_size < 1 or parent.size() % group_size:
        raise ArgumentError(
            f"subgroups of {group_size} do not divide a group of {parent.size()} ranks",
            expected=f"a divisor of {parent.size()}",
            fix="use new_subgroups_by_enumeration for uneven subgroups",
        )
    lists = [
        list(parent.ranks[start : start + group_size])
        for start in range(0, parent.size(), group_size)
    ]
    return _open_subgroups(lists, timeout, backend, pg_options, group_desc, sort_ranks=False)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[ProcessGroup | Any]]:
    """Create the listed subgroups, which must not overlap and may omit ranks.

    Args:
        ranks_per_subgroup_list: The global ranks of each subgroup.
        timeout, backend, pg_options, group_desc: As in ``new_group``.

    Returns:
        This rank's subgroup or None, and a list with every subgroup or ``NON_GROUP_MEMBER``.

    Raises:
        ArgumentError: The list is empty, or a rank is in two subgroups.
        MismatchError, CollectiveTimeoutError: As for ``new_group``.
    """
    lists = _checked_lists(ranks_per_subgroup_list, "ranks_per_subgroup_list")
    if not lists:
        raise ArgumentError("the list of subgroups is empty", fix="pass at least one list of ranks")
    world = get_usable_world()
    seen: set[int] = set()
    for ranks in lists:
        _checked_ranks(world, ranks, sort_ranks=True)
        if repeated := seen.intersection(ranks):
            raise ArgumentError(
                f"{ranks_text(sorted(repeated))} is in more than one subgroup",
                expected="subgroups that do not overlap",
                fix="call new_group once for each group that overlaps",
            )
        seen.update(ranks)
    return _open_subgroups(lists, timeout, backend, pg_options, group_desc, sort_ranks=True)


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Split a group into the listed parts, in the given rank order.

    Args:
        parent_pg: The group to split (None: the world).
        split_ranks: The group ranks of each part, which must not overlap.
        timeout, pg_options, group_desc, backend: As in ``new_group``.

    Returns:
        This rank's part, or None if it is in no part.

    Raises:
        ArgumentError: No parts, an empty part, or a rank in two parts or outside the parent.
        MismatchError, CollectiveTimeoutError: As for ``new_group``.
    """
    parent = resolve_group(parent_pg)
    parts = _checked_lists([] if split_ranks is None else split_ranks, "split_ranks")
    if not parts:
        raise ArgumentError(
            "split_ranks is empty", fix="pass one list of parent-group ranks for each part"
        )
    if not all(parts):
        raise ArgumentError(
            "split_ranks has an empty part", found=str(split_ranks), fix="remove the empty lists"
        )
    seen: list[int] = [rank for part in parts for rank in part]
    wrong = [rank for rank in seen if not 0 <= rank < parent.size()]
    if wrong or len(set(seen)) != len(seen):
        raise ArgumentError(
            f"split_ranks {split_ranks} does not split a group of {parent.size()} ranks",
            expected=f"ranks of the parent group, 0 to {parent.size() - 1}, each at most once",
            fix="pass ranks of the parent group, not global ranks",
        )
    lists = [[parent.ranks[rank] for rank in part] for part in parts]
    mine, _ = _open_subgroups(lists, timeout, backend, pg_options, group_desc, sort_ranks=False)
    return mine


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Return the group rank of ``global_rank``.

    Raises:
        NotInGroupError: ``global_rank`` is not a member.
    """
    target = resolve_group(group)
    global_rank = get_integer(global_rank, "get_group_rank: global_rank")
    if global_rank not in target.ranks:
        raise NotInGroupError(
            f"global rank {global_rank} is not in {target.name}",
            expected=f"a rank of the group: {ranks_text(target.ranks)}",
            fix="pass the global rank of a member of the group",
        )
    return target.ranks.index(global_rank)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Return the global rank of ``group_rank``.

    Raises:
        NotInGroupError: The group has no such rank.
    """
    target = resolve_group(group)
    group_rank = get_integer(group_rank, "get_global_rank: group_rank")
    if not 0 <= group_rank < target.size():
        raise NotInGroupError(
            f"{target.name} has no group rank {group_rank}",
            expected=f"0 to {target.size() - 1}",
            fix="pass a rank of the group, not a global rank",
        )
    return target.ranks[group_rank]


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """Return ``group``'s global ranks, in group order; None means the world."""
    return list((world_group() if group is None else resolve_group(group)).ranks)


def _open_subgroups(
    lists: list[list[int]],
    timeout: timedelta | None,
    backend: str | None,
    pg_options: Any,
    group_desc: str | None,
    *,
    sort_ranks: bool,
) -> tuple[ProcessGroup | None, list[ProcessGroup | Any]]:
    """Create a group of each list; return this rank's group or None, and all groups."""
    groups = [
        new_group(ranks, timeout, backend, pg_options, group_desc=group_desc, sort_ranks=sort_ranks)
        for ranks in lists
    ]
    return next((group for group in groups if isinstance(group, ProcessGroup)), None), groups


def _check_device_id(device_id: object) -> None:
    if device_id is None:
        return
    if not isinstance(device_id, torch.device):
        raise KindError(
            f"device_id must be a torch.device, not {device_id!r}",
            fix="pass a device, for example torch.device('cuda', 0)",
        )
    if device_id.type != "cpu" and device_id.index is None:
        raise ArgumentError(
            f"device_id={device_id} has no index", fix=f"pass an index, for example {device_id}:0"
        )


def _checked_lists(lists: Sequence[Sequence[int]], argument: str) -> list[list[int]]:
    with suppress(TypeError):
        found = [_find_ranks(ranks) for ranks in lists]
        if None not in found:
            return cast("list[list[int]]", found)
    raise KindError(
        f"{argument} must be a list of lists of ranks, not {lists!r}",
        expected="for example [[0, 1], [2, 3]]",
    )


def _find_ranks(given: Iterable[Any]) -> list[int] | None:
    """Return ``given`` as a list of integers, or None if it is none."""
    with suppress(TypeError):
        return find_integers(list(given))
    return None


def _checked_ranks(
    world: World, ranks: Sequence[int] | None, *, sort_ranks: bool
) -> tuple[int, ...]:
    if ranks is None:
        return tuple(range(world.size))
    members = _find_ranks(ranks)
    if members is None:
        raise KindError(
            f"ranks must be a sequence of integers, not {ranks!r}",
            found=type(ranks).__name__,
            fix="pass for example [0, 1], or None for all ranks",
        )
    wrong = [rank for rank in members if not 0 <= rank < world.size]
    if not members or wrong or len(set(members)) != len(members):
        what = "is empty" if not members else "names a rank twice"
        if wrong:
            what = f"names {ranks_text(wrong)}, outside the world"
        raise (ArgumentError if members else LengthError)(
            f"the list of ranks {what}",
            where=f"rank {world.rank} of {world.size}",
            expected=f"different ranks from 0 to {world.size - 1}",
            found=str(members),
            fix="pass each global rank of the group once, or None for all ranks",
        )
    return tuple(sorted(members) if sort_ranks else members)
