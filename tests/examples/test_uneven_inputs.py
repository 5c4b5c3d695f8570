"""Training on uneven shards equals training one model on all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import meshdist as md
from tests.pool import Pool, places

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "uneven_inputs.py"


def test_it_checks_itself(pool: Pool) -> None:
    for ended in pool.start(SCRIPT, places(3), "--check", is_strict=True, has_teardown=False):
        assert ended.returncode == 0, ended.stderr
        if "difference" in ended.stdout:
            assert float(ended.stdout.split()[-1]) < 1e-9
            assert "mean loss over all shards: 0.0" in ended.stdout
            return
    raise AssertionError("no rank told the difference")


def test_a_wrong_result_is_told(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load("uneven_inputs")
    right = example.train_alone(3, 1)
    monkeypatch.setattr(example, "target", lambda x: x.sum(1, keepdim=True))
    wrong = example.train_alone(3, 1)
    assert not torch.allclose(right.weight, wrong.weight, atol=1e-3)


def test_it_learns_on_simulated_ranks(load: Callable[[str], ModuleType]) -> None:
    example = load("uneven_inputs")
    losses = [loss for _, loss in md.simulate(example.train, 2, (2,))]
    assert losses[0] == losses[1] < 0.01
