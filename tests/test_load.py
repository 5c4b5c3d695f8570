"""The load factor: 1 on an idle machine, more beside busy processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import load
from tests.load import is_within, load_factor


@pytest.mark.soak
def test_beside_busy_processes_everything_takes_longer() -> None:
    busy = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        for _ in range(2 * len(os.sched_getaffinity(0)))
    ]
    try:
        assert max(load_factor() for _ in range(50)) > 1.3
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_limit_is_as_many_times_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_factor() >= 1.0
    monkeypatch.setattr(load, "load_factor", lambda: 2.0)
    assert [is_within(seconds, 5.0) for seconds in (4.9, 9.9, 10.1)] == [True, True, False]
