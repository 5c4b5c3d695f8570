"""A mixture of experts on a mesh trains as on one process."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import meshdist as md
from tests.pool import Pool, places

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "mixture_of_experts.py"


@pytest.mark.parametrize(
    ("num_ranks", "words", "said"),
    [
        (1, (), "dp=1, ep=1, 6 experts by a product for each:"),
        (2, (), "dp=1, ep=2, 6 experts by a product for each:"),
        (4, (), "dp=2, ep=2, 6 experts by a product for each:"),
        (
            4,
            ("--capacity", "1.1", "--experts", "7"),
            "dp=2, ep=2, 7 experts by a product for each:",
        ),
        (4, ("--ep", "4", "--experts", "3"), "dp=1, ep=4, 3 experts by a product for each:"),
    ],
)
def test_it_checks_itself(pool: Pool, num_ranks: int, words: tuple[str, ...], said: str) -> None:
    ended = pool.start(
        SCRIPT, places(num_ranks), "--check", *words, is_strict=True, has_teardown=False
    )
    assert [one.returncode for one in ended] == [0] * num_ranks, ended
    (text,) = [one.stdout for one in ended if one.stdout]
    first, losses, last = text.splitlines()
    assert first == said
    assert float(losses.split()[1]) > float(losses.split()[3])
    assert float(last.split()[-1]) < 1e-13


def test_one_product_for_all_experts_is_used_where_torch_has_it(pool: Pool) -> None:
    ended = pool.start(SCRIPT, places(2), is_strict=True, has_teardown=False)
    assert [one.returncode for one in ended] == [0, 0], ended
    (text,) = [one.stdout for one in ended if one.stdout]
    how = "grouped_mm" if hasattr(torch.nn.functional, "grouped_mm") else "a product for each"
    assert text.startswith(f"dp=1, ep=2, 6 experts by {how}:\n")


def test_both_ways_to_multiply_agree(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load("mixture_of_experts")
    torch.manual_seed(1)
    rows, counts = torch.randn(9, example.WIDTH), torch.tensor([4, 0, 5])

    def program() -> list[Any]:
        ep = md.init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        torch.manual_seed(2)
        experts = example.Experts(3, ep)
        experts(rows, counts).square().sum().backward()
        return [experts(rows, counts).detach(), experts.up.grad, experts.down.grad]

    (grouped,) = md.simulate(program, 1)
    monkeypatch.setattr(example, "has_grouped_mm", lambda dtype: False)
    (apart,) = md.simulate(program, 1)
    torch.testing.assert_close(grouped, apart, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("words", "num_ranks", "text"),
    [
        (("--ep", "3"), 4, "4 ranks do not divide by --ep 3, or 240 by them"),
        (("--chosen", "7"), 1, "a token cannot choose 7 of 6 experts"),
    ],
)
def test_what_cannot_be_cut_is_rejected(
    pool: Pool, words: tuple[str, ...], num_ranks: int, text: str
) -> None:
    for ended in pool.start(SCRIPT, places(num_ranks), *words, is_strict=True, has_teardown=False):
        assert (ended.returncode, ended.stderr.strip()) == (1, text)


def test_the_check_finds_gradients_that_are_not_divided(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    example, wrap = load("mixture_of_experts"), md.DDP

    def over_dp(model: torch.nn.Module, device_mesh: md.DeviceMesh, experts_over: str) -> Any:
        """Average experts over dp only, without division."""
        return wrap(model, device_mesh=device_mesh["dp"])

    monkeypatch.setattr(md, "DDP", over_dp)
    monkeypatch.setattr("sys.argv", ["mixture_of_experts.py", "--check"])
    assert md.simulate(example.main, 4) == [1] * 4


def test_a_capacity_drops_the_last_tokens(load: Callable[[str], ModuleType]) -> None:
    example = load("mixture_of_experts")
    options = argparse.Namespace(experts=3, chosen=1, capacity=None)

    def program() -> Any:
        ep = md.init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        chosen = torch.tensor([[0], [1], [0], [0], [2]])
        return example.Mixture(options, ep).limited(chosen, 2).flatten().tolist()

    assert md.simulate(program, 1) == [[0, 1, 0, -1, 2]]
