"""The terms under which a wire opens a group's connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store

__all__ = ["Opening"]


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
