"""Where the members of a group that spans hosts are: numbers alone, equal on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["HostPlaces"]


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
        """How many members every host has at least: so many can exchange parts across hosts."""
        return min(map(len, self.members))

    @property
    def by_host(self) -> tuple[int, ...]:
        """All members, those of the first host first."""
        return tuple(member for members in self.members for member in members)

    def find(self, member: int) -> tuple[int, int]:
        """The host of ``member``, and its place among those of that host."""
        for host, members in enumerate(self.members):
            if member in members:
                return host, members.index(member)
        raise ValueError(f"there is no member {member}")

    def pile(self, owner: int) -> tuple[tuple[int, ...], ...]:
        """For each host the members whose results pass through the owners at place ``owner``.

        Example:
            >>> HostPlaces.of((0, 0, 0, 1, 1), 0).pile(0)
            ((0, 2), (3,))
        """
        return tuple(members[owner :: self.num_owners] for members in self.members)
