"""Where the members of a group that spans hosts are, against a loop over hosts."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from meshdist.wires.hierarchical.two_level import HostPlaces
from tests.inner import cuts

HOSTS = st.lists(st.integers(0, 3), min_size=1, max_size=9)


@given(HOSTS, st.data())
def test_members_are_sorted_by_host_and_found_again(hosts: list[int], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(hosts) - 1))
    places = HostPlaces.of(hosts, rank)
    in_order = list(dict.fromkeys(hosts))
    assert places.members == tuple(
        tuple(k for k, host in enumerate(hosts) if host == one) for one in in_order
    )
    assert places.here[places.local] == rank
    assert places.members[places.host] == places.here
    assert sorted(places.by_host) == list(range(len(hosts)))
    for member, host in enumerate(hosts):
        found, local = places.find(member)
        assert in_order[found] == host and places.members[found][local] == member


@given(HOSTS)
def test_every_member_passes_through_one_owner_of_its_own_host(hosts: list[int]) -> None:
    places = HostPlaces.of(hosts, 0)
    assert places.num_owners == min(hosts.count(host) for host in set(hosts))
    piles = [places.pile(owner) for owner in range(places.num_owners)]
    assert sorted(k for pile in piles for ks in pile for k in ks) == list(range(len(hosts)))
    for pile in piles:
        assert len(pile) == len(places.members)
        for members, passing in zip(places.members, pile, strict=True):
            assert passing and set(passing) <= set(members)


@given(st.integers(0, 100), st.integers(1, 9))
def test_cuts_are_as_even_as_can_be(count: int, num_parts: int) -> None:
    sizes = cuts(count, num_parts)
    assert len(sizes) == num_parts and sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_a_member_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="there is no member 2"):
        HostPlaces.of((0, 1), 0).find(2)
