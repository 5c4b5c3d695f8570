"""Links: constants by backend, and what is given in their place."""

from __future__ import annotations

import pytest

from meshdist.errors import ArgumentError, AxisError, KindError
from meshdist.mesh.layout import Layout
from meshdist.sharding.routes import DEFAULT_LINK, Link, default_link, links_of, slowest

MESH = Layout.from_shape((2, 4), ("dp", "tp"))
DEFAULTS = (DEFAULT_LINK, DEFAULT_LINK)


def test_a_link_that_leaves_the_host_is_no_quicker() -> None:
    for backend in ("shm", "simulated", "gloo", "mpi", "nccl", "xccl"):
        inside, between = (default_link(backend, spans_hosts=spans) for spans in (False, True))
        assert inside.latency_s <= between.latency_s
        assert inside.bytes_per_s >= between.bytes_per_s
    assert default_link("of-others", spans_hosts=True) == default_link("gloo", spans_hosts=True)


def test_links_are_given_for_all_axes_or_by_axis() -> None:
    quick = Link(0, 1e12)
    assert links_of(MESH, None, DEFAULTS) == DEFAULTS
    assert links_of(MESH, quick, DEFAULTS) == (quick, quick)
    assert links_of(MESH, {"tp": quick}, DEFAULTS) == (DEFAULT_LINK, quick)
    assert links_of(MESH, {0: quick}, DEFAULTS) == (quick, DEFAULT_LINK)
    assert links_of(MESH, {}, DEFAULTS) == DEFAULTS


def test_a_group_is_as_slow_as_its_slowest_axis() -> None:
    links = (Link(1, 10), Link(2, 20), Link(9, 1))
    assert slowest(links, (0, 1)) == Link(2, 10)
    assert slowest(links, (1,)) == Link(2, 20)


@pytest.mark.parametrize(
    "numbers", [(-1, 1), (0, 0), (0, -5), (float("nan"), 1), (float("inf"), 1)]
)
def test_impossible_links_are_rejected(numbers):
    with pytest.raises(ArgumentError, match="a Link needs a finite latency") as caught:
        Link(*numbers)
    assert caught.value.found == f"latency_s={numbers[0]}, bytes_per_s={numbers[1]}"


def test_other_things_are_no_links() -> None:
    with pytest.raises(KindError) as caught:
        links_of(MESH, 5, DEFAULTS)
    assert str(caught.value) == (
        "links must be one Link, or a mapping from axes to Links\n"
        "  where:    argument links\n"
        "  found:    int"
    )
    with pytest.raises(KindError, match="the link of axis 'tp' is not a Link"):
        links_of(MESH, {"tp": 1e9}, DEFAULTS)
    with pytest.raises(AxisError, match="no axis 'pp' in the mesh"):
        links_of(MESH, {"pp": DEFAULT_LINK}, DEFAULTS)
