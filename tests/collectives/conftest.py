"""What the collectives' tests share."""

from __future__ import annotations

import pytest

import meshdist as md


@pytest.fixture(params=["simulated", "gloo"])
def on_ranks(request: pytest.FixtureRequest):
    """Runs ``fn(*args)`` on ``size`` ranks over one backend and returns the results by rank."""
    if request.param == "simulated":
        return lambda fn, size, *args: md.simulate(fn, size, args=args)
    pool = request.getfixturevalue("pool")
    return lambda fn, size, *args: pool.run(fn, size, *args)
