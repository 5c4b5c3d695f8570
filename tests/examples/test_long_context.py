"""Attention over a sequence that is cut: around a ring and by heads, as on one process."""

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
@pytest.mark.parametrize("method", ["ring", "ulysses"])
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
        (("--sequence", "36"), 4, "a sequence of 36 does not divide by 8"),
        (("--sequence", "0"), 1, "a sequence of 0 does not divide by 2"),
        (("--method", "ulysses", "--sequence", "9"), 2, "a sequence of 9 does not divide by 2"),
        (
            ("--method", "ulysses", "--sequence", "40"),
            5,
            "4 heads of keys cannot be cut over 5 ranks; --method ring",
        ),
    ],
)
def test_what_cannot_be_cut_is_rejected(
    pool: Pool, words: tuple[str, ...], num_ranks: int, text: str
) -> None:
    for ended in pool.start(SCRIPT, places(num_ranks), *words, is_strict=True, has_teardown=False):
        assert (ended.returncode, ended.stderr.strip()) == (1, text)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_of_attention(
    load: Callable[[str], ModuleType],
    num_ranks: int,
    method: str,
    is_causal: bool,
    dtype: torch.dtype,
) -> None:
    example = load("long_context")
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 4, h, 32, 16, dtype=dtype) for h in (2, 1, 1, 2))

    def attended(*given: torch.Tensor) -> torch.Tensor:
        flat = [x.expand_as(given[0]).flatten(1, 2) for x in given]
        return F.scaled_dot_product_attention(*flat, is_causal=is_causal).view_as(given[0])

    def derived(call: Callable[..., torch.Tensor], grad: torch.Tensor, *given: Any) -> list[Any]:
        leaves = [x.clone().requires_grad_() for x in given]
        value = call(*leaves)
        return [value.detach(), *torch.autograd.grad(value, leaves, grad)]

    def program() -> list[torch.Tensor]:
        with md.init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("cp",)):
            here = example.positions_of(32, num_ranks, md.get_rank(), method)
            mine = [x[..., here, :] for x in (grad, q, k, v)]
            return derived(lambda *x: example.METHODS[method](*x, "cp", is_causal), *mine)

    wanted = derived(attended, grad, q, k, v)
    limit = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.06}[dtype]
    for rank, found in enumerate(md.simulate(program, num_ranks)):
        here = example.positions_of(32, num_ranks, rank, method)
        for mine, its in zip(found, wanted, strict=True):
            assert mine.dtype == dtype
            torch.testing.assert_close(mine, its[..., here, :], rtol=limit, atol=limit)


def test_every_rank_of_a_ring_has_equal_work(load: Callable[[str], ModuleType]) -> None:
    example = load("long_context")
    held = [example.positions_of(32, 4, rank, "ring") for rank in range(4)]
    assert torch.cat(held).sort().values.tolist() == list(range(32))
    for me, queries in enumerate(held):
        for source, keys in enumerate(held):
            rows, columns, is_masked = example.meeting(me, source, 8, is_causal=True)
            seen = queries.unsqueeze(1) >= keys
            met = torch.zeros(8, 8, dtype=torch.bool)
            met[rows, columns] = True
            assert torch.equal(met & seen if is_masked else met, seen)
            assert met.sum() == (64 if me == source else 32)


def test_a_difference_is_told(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    example = load("long_context")

    def wrong(q: Any, k: Any, v: Any, axis: str, is_causal: bool) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q.flatten(1, 2), k.flatten(1, 2).repeat(1, 2, 1, 1), v.flatten(1, 2).repeat(1, 2, 1, 1)
        ).view_as(q)

    monkeypatch.setitem(example.METHODS, "ring", wrong)
    monkeypatch.setattr("sys.argv", ["long_context.py", "--check"])
    assert md.simulate(example.main, 2) == [1, 1]
    assert "difference from one process: " in capsys.readouterr().out
