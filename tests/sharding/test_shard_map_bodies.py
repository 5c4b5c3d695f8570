"""Random bodies of collectives, typed, against one device: values and gradients to the bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given

import meshdist as md
from tests.operations.cases import BACKENDS
from tests.pool import Pool
from tests.sharding.shard_map_bodies import Body, bodies, expected, found


def check(results: list[Any], body: Body) -> None:
    wanted = expected(body)
    for result in results:
        for mine, whole in zip(result, wanted, strict=True):
            assert torch.equal(mine, whole), body


@given(bodies())
def test_random_bodies(body: Body) -> None:
    check(md.simulate(found, math.prod(body.sizes), (body,)), body)


@given(bodies())
def test_random_bodies_of_sharded_arrays(body: Body) -> None:
    check(md.simulate(found, math.prod(body.sizes), (body, True)), body)


LONG = Body(
    (2, 2),
    (8, 8),
    (("a",), ("b",)),
    (
        ("scale",),
        ("roll", 0, "a"),
        ("swap", 0, 1, "a"),
        ("product",),
        ("gather", 1, "a"),
        ("cut", 0, "a"),
        ("closed",),
        ("scatter", 1, 0, "b"),
    ),
    (("a", "b"), ()),
)
UNEVEN = Body((3,), (7, 4), ((), ("a",)), (("scale",), ("sum", 0), ("closed",)), ((), ("a",)))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("body", [LONG, UNEVEN], ids=["even", "uneven"])
def test_on_backends(backend: str, body: Body, pool: Pool) -> None:
    for is_sharded in (False, True):
        check(BACKENDS[backend](pool, found, math.prod(body.sizes), body, is_sharded), body)
