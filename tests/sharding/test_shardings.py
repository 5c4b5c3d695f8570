"""Shardings taken apart and put together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from meshdist.mesh.layout import Layout
from meshdist.mesh.partition_spec import P
from meshdist.mesh.spec import NamedSharding, sharding_of
from meshdist.sharding.descriptions import array_type

MESH = Layout.from_shape((2, 3, 1), ("dp", "tp", "one"))


@given(
    st.sampled_from(
        [
            (P(), {}),
            (P("dp", None), {}),
            (P(None, ("tp", "dp")), {}),
            (P("tp", unreduced={"dp"}), {0: (0, 4, 1)}),
            (P(None, "dp", reduced={"tp", "one"}), {1: (2, 2)}),
        ]
    )
)
def test_put_together_again_it_lies_equally(case: tuple[P, dict[int, Any]]) -> None:
    spec, sizes = case
    given_sharding = NamedSharding(MESH, spec, shard_sizes=sizes)
    placement = given_sharding.placement((5, 4))
    found = sharding_of(MESH, placement.dims, unreduced=spec.unreduced, reduced=spec.reduced)
    assert found.placement((5, 4)) == placement
    assert None not in found.spec.partitions[-1:]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (P(), True),
        (P(reduced={"dp"}), True),
        (P("one", unreduced=set()), True),
        (P(unreduced={"one"}), True),
        (P("tp"), False),
        (P(unreduced={"dp"}), False),
    ],
)
def test_who_holds_the_whole(spec: P, expected: bool) -> None:
    assert NamedSharding(MESH, spec).is_fully_replicated is expected


def test_types_as_text() -> None:
    spec = P(("dp", "one"), unreduced={"tp"})
    assert array_type("int8", (0, 4), NamedSharding(MESH, spec)) == "int8[0@(dp,one), 4]{U:tp}"
    assert array_type("int8", (), NamedSharding(MESH, P())) == "int8[]"
