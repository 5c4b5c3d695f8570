"""Training with a sharded sequence, around a ring and by heads, as on one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshdist as md
from tests.pool import Pool, places

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "long_context.py"


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("method", ["ring", "heads"])
@pytest.mark.parametrize("more", [(), ("--no-causal",)])
def test_it_checks_itself(pool: Pool, num_ranks: int, method: str, more: tuple[str, ...]) -> None:
    words = ("--method", method, "--check", *more)
    ended = pool.start(SCRIPT, places(num_ranks), *words, is_strict=True, has_teardown=False)
    assert [one.returncode for one in ended] == [0] * num_ranks, ended
    (said,) = [one.stdout for one in ended if one.stdout]
    assert said.startswith(f"cp={num_ranks}, {method}: loss 3.7")
    assert float(said.split()[-1]) < 1e-11


@pytest.mark.parametrize(
    ("words", "num_ranks", "text"),
    [
        (("--sequence", "36"), 4, "a sequence of 36 tokens does not divide into 8 equal parts"),
        (("--method", "heads", "--sequence", "40"), 5, "4 heads of k and v do not divide by 5"),
    ],
)
def test_what_does_not_divide_raises(
    pool: Pool, words: tuple[str, ...], num_ranks: int, text: str
) -> None:
    for ended in pool.start(SCRIPT, places(num_ranks), *words, is_strict=True, has_teardown=False):
        assert ended.returncode == 1
        assert text in ended.stderr


def test_a_difference_is_told(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    example = load("long_context")

    def wrong(q: Any, k: Any, v: Any, axis: Any, **_: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    monkeypatch.setattr(md.attention, "context_parallel", wrong)
    monkeypatch.setattr("sys.argv", ["long_context.py", "--check"])
    assert md.simulate(example.main, 2) == [1, 1]
    assert "difference from one process: " in capsys.readouterr().out
