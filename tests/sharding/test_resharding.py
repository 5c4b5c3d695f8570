"""Resharding against slices of whole arrays."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings

import meshdist as md
from tests.pool import Pool
from tests.sharding.reshard_cases import Lie, check_move, move, transitions


@settings(max_examples=150)
@given(transitions())
def test_values_and_gradients(case: Any) -> None:
    sizes, shape, source, target = case
    args = (sizes, shape, source, target, 1)
    results = md.simulate(move, math.prod(sizes), args=args)
    check_move(*args, results)
