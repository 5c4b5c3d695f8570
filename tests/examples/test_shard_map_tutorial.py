"""The tutorial on shard_map: each mapped function has the value and gradients of one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import meshdist as md
from tests.pool import Pool, places

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "shard_map_tutorial.py"
NAMES = [
    "rows",
    "partial_sums",
    "scattered partial sums",
    "gathered rows",
    "around a ring",
    "ring attention",
    "experts",
    "pipeline",
]


def test_it_checks_itself(pool: Pool) -> None:
    ended = pool.start(SCRIPT, places(2), "--check", is_strict=True, has_teardown=False)
    assert [one.returncode for one in ended] == [0, 0], ended
    (said,) = [one.stdout for one in ended if one.stdout]
    lines = re.findall(r"^(.+?) +difference (\S+)$", said, re.MULTILINE)
    assert [name for name, _ in lines] == NAMES
    assert all(float(off) < 1e-12 for _, off in lines)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_on_other_numbers_of_ranks(load: Callable[[str], ModuleType], size: int) -> None:
    example = load("shard_map_tutorial")

    def program() -> float:
        with md.init_device_mesh("cpu", (size,), mesh_dim_names=("i",)):
            return max(float(example.difference(row, size)) for row in example.ROWS)

    assert max(md.simulate(program, size)) < 1e-12


def test_a_difference_is_told(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load("shard_map_tutorial")
    wrong = example.ROWS[0]._replace(alone=lambda a, b: a @ b + 1)
    monkeypatch.setattr(example, "ROWS", (wrong,))
    assert md.simulate(example.main, 2, (["--check"],)) == [1, 1]
    assert md.simulate(example.main, 2, ([],)) == [0, 0]


def test_experts_get_different_numbers_of_tokens(load: Callable[[str], ModuleType]) -> None:
    example = load("shard_map_tutorial")
    tokens = torch.randn(25, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert len(set(example.experts_of(tokens, 4).bincount(minlength=4).tolist())) > 1
