"""What tests of several rooms share."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from torch import distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.long_tests import mark_long
from tests.pool import QUICK_NAMES, Pool
from tests.two_hosts import TwoHosts, two_hosts_of

collect_ignore = ["conformance"]  # torch's tests, which `make torch-conformance` runs

os.environ.update({**QUICK_NAMES, **os.environ})
# Without buffers a line and its end are written one by one: lines of ranks that share a pipe mix.
os.environ.pop("PYTHONUNBUFFERED", None)

# A busy machine makes one example slow now and then, which is no fault of the code.
hypothesis.settings.register_profile("meshdist", deadline=None, max_examples=25)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=300)
hypothesis.settings.load_profile("meshdist")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave long tests whose law another test holds to `make soak`."""
    mark_long(items)


def pytest_collection_finish() -> None:
    """Keep modules and tests out of searches for cycles: each took half a second, now nothing."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes: ``pool.run(fn, 4, *args)`` gives the results by rank."""
    with Pool() as workers:
        yield workers


@pytest.fixture
def two_hosts(pool: Pool) -> TwoHosts:
    """Worker processes on two hosts: ``two_hosts.run(fn, 4, *args)`` has two ranks on each."""
    return two_hosts_of(pool)


@pytest.fixture(autouse=True)
def debug_level() -> Iterator[None]:
    """Gives the next test the debug level that this one was given."""
    before = distributed.get_debug_level()
    yield
    distributed.set_debug_level(before)


@pytest.fixture
def hangup() -> Iterator[None]:
    """Lets SIGHUP end what the test starts; with nohup it would not."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
