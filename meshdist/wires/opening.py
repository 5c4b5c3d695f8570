"""The terms under which a wire opens a group's connection, and what that takes of the process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, Store

from ..runtime.hosts import find_thread_lack, make_descriptor_room

__all__ = ["Needs", "Opening", "find_lack"]

_MORE = 12  # descriptors, which the opening of any groups needs for a moment


@dataclass(frozen=True)
class Opening:
    """The terms under which a wire opens a communicator, equal on all members but for ``rank``.

    Args:
        store: a store whose keys belong to this communicator alone.
        make_torch_store: returns the same keys on a connection of its own, for classes of torch's
            that use a store in threads of theirs.
        ranks: the members' global ranks, in group order.
        rank: this member's place in ``ranks``.
        device_type: the device type of the tensors that it will carry.
        timeout: bounds the opening, and each operation that names none.
        is_one_host: whether all members run on one host.
        options: the wire's own options, or None.
        name: what messages call the group that opens it.
        num_local: how many ranks of the world run on this host.
        hosts: the number of each member's host; () where that is not known.
        look: called now and then, by a wire that does not compare calls, while a caller waits;
            raises WireFailure where that is in vain. None where calls are not compared for it.
    """

    store: Store
    make_torch_store: Callable[[], Store]
    ranks: tuple[int, ...]
    rank: int
    device_type: str
    timeout: timedelta
    is_one_host: bool = True
    options: Any = None
    name: str = ""
    num_local: int = 1
    hosts: tuple[int, ...] = ()
    look: Callable[[], None] | None = None

    def below(self, prefix: str, **changes: Any) -> Opening:
        """This opening, with other keys, which begin with ``prefix``, and with ``changes``."""
        return replace(
            self,
            store=PrefixStore(prefix, self.store),
            make_torch_store=lambda: PrefixStore(prefix, self.make_torch_store()),
            **changes,
        )


class Needs(NamedTuple):
    """How many descriptors and threads one member's part of a group takes while it opens."""

    descriptors: int
    threads: int


def find_lack(needs: Mapping[str, Needs]) -> str:
    """Why this process cannot open the groups that need so much, by their names; or "".

    Where 20 of 1,024 files are open, ``{"axis 'dp'": Needs(2047, 2)}`` gives "1004 more files can
    be opened of about 2059 needed; the limit is 1024 (axis 'dp': 2047)", if that limit is hard.
    """
    descriptors, threads = (sum(of[i] for of in needs.values()) for i in (0, 1))
    lacks = make_descriptor_room(descriptors + _MORE), find_thread_lack(threads)
    for kind, lack in enumerate(lacks if descriptors or threads else ()):
        if lack:
            return f"{lack} ({', '.join(f'{name}: {of[kind]}' for name, of in needs.items())})"
    return ""
