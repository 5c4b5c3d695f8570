"""What a picture of a mesh shows; the pictures' own tests look at it drawn."""

from __future__ import annotations

import pytest

from meshdist.errors import MeshError, NotInGroupError
from meshdist.mesh.layout import Layout
from meshdist.mesh.view import indices_shown
from meshdist.mesh.visualize import draw, draw_svg


@pytest.mark.parametrize(
    ("size", "limit", "kept", "shown"),
    [
        (3, 3, None, (0, 1, 2)),
        (5, 4, None, (0, 1, None, 4)),
        (11, 5, 8, (0, None, 8, 9, 10)),  # an ellipsis would be as long as 9
        (9, 3, 5, (0, None, 5, None, 8)),
        (9, 6, 8, (0, 1, 2, 3, None, 8)),
    ],
)
def test_the_indices_shown(size, limit, kept, shown):
    assert indices_shown(size, limit, kept) == shown


@pytest.mark.parametrize("make", [draw, draw_svg])
def test_errors(make):
    layout = Layout.from_shape((2, 4), ("dp", "tp"))
    with pytest.raises(NotInGroupError) as outside:
        make(layout, highlight_rank=8)
    assert str(outside.value) == (
        "the mesh does not contain rank 8, which highlight_rank names\n  where:    mesh (dp=2, "
        "tp=4)"
    )
    for hosts in (["a"] * 7, dict.fromkeys(range(7), "a")):
        with pytest.raises(MeshError) as missing:
            make(layout, hosts=hosts)
        assert str(missing.value) == (
            "hosts has no entry for rank 7\n"
            "  where:    mesh (dp=2, tp=4)\n"
            "  expected: a host for every rank of the mesh, by rank\n"
            "  found:    7 hosts"
        )
