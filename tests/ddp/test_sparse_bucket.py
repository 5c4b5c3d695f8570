"""Sparse gradients: rows that differ by rank, ranks without any, and ranks with a dense one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from tests.pool import Pool

NUM_ROWS = 6
Run = Callable[..., list[Any]]


@pytest.fixture(params=["simulated", "gloo", "shm"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run(fn, num_ranks, *args)`` on simulated ranks, and on processes."""
    if request.param == "simulated":
        return lambda fn, num_ranks, *args: md.simulate(fn, num_ranks, args)
    pool: Pool = request.getfixturevalue("pool")
    backend = request.param
    return lambda fn, num_ranks, *args: pool.run(fn, num_ranks, *args, backend=backend)


class Tables(nn.Module):
    """Two sparse tables, and a dense layer if asked."""

    def __init__(self, has_dense: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Embedding(NUM_ROWS, 2, sparse=True)
        self.second = nn.EmbeddingBag(NUM_ROWS, 2, sparse=True, mode="sum")
        self.dense = nn.Linear(2, 1) if has_dense else None
        self.double()

    def forward(self, first: list[int], second: list[int], dense_too: bool) -> torch.Tensor:
        x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
        if first:
            x = x * self.first(torch.tensor(first)).sum(0, keepdim=True)
        if second:
            x = x * self.second(torch.tensor([second]))
        if dense_too:
            x = x + self.first.weight.sum(0) * 3
        return (x if self.dense is None else self.dense(x)).sum()


# By step and rank: rows of the first table, of the second, and whether the first is used densely.
Use = tuple[list[int], list[int], bool]
STEPS: dict[str, list[list[Use]]] = {
    "rows that differ by rank": [
        [([0, 1, 1], [2], False), ([1, 5], [2, 3], False), ([4], [0, 0], False)],
        [([3], [2, 5], False), ([3], [2], False), ([0, 1, 2, 3, 4, 5], [1], False)],
    ],
    "ranks without a gradient": [
        [([0], [1], False), ([], [2], False), ([4], [], False)],
        [([], [1], False), ([], [2], False), ([], [0], False)],
        [([2], [], False), ([2, 3], [2], False), ([1], [3], False)],
    ],
    "a rank with a dense one": [
        [([0], [1], False), ([1], [2], True), ([4], [5], False)],
        [([0], [1], False), ([], [2], False), ([4], [5], True)],
        [([0], [1], False), ([2], [2], False), ([4], [5], False)],
    ],
}


def gradients(model: nn.Module) -> list[Any]:
    found = [p.grad for p in model.parameters()]
    return [None if g is None else (g.is_sparse, g.to_dense().clone()) for g in found]


def train(steps: list[list[Use]], has_dense: bool, keeps: bool, options: Any) -> list[list[Any]]:
    model = md.DDP(Tables(has_dense), find_unused_parameters=True, **options)
    seen = []
    for uses in steps:
        if not keeps:
            model.zero_grad()
        model(*uses[md.get_rank()]).backward()
        seen.append(gradients(model))
    return seen


def oracle(steps: list[list[Use]], has_dense: bool, keeps: bool) -> list[list[Any]]:
    models = [Tables(has_dense) for _ in steps[0]]
    seen = []
    for uses in steps:
        for model, use in zip(models, uses, strict=True):
            if not keeps:
                model.zero_grad()
            model(*use).backward()
        for replicas in zip(*(model.parameters() for model in models), strict=True):
            found = [p.grad for p in replicas if p.grad is not None]
            if found:
                mean = sum(grad.to_dense() for grad in found) / len(models)
                is_sparse = all(grad.is_sparse for grad in found)
                for p in replicas:
                    p.grad = mean.to_sparse(1) if is_sparse else mean.clone()
        seen.append(gradients(models[0]))
    return seen


def assert_equal(found: list[list[list[Any]]], expected: list[list[Any]]) -> None:
    for seen in found:
        for number, (mine, theirs) in enumerate(zip(seen, expected, strict=True)):
            for index, (grad, right) in enumerate(zip(mine, theirs, strict=True)):
                where = (number, index)
                assert (grad is None) == (right is None), where
                if grad is not None:
                    assert grad[0] == right[0], where
                    torch.testing.assert_close(grad[1], right[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("what", [*STEPS])
@pytest.mark.parametrize("has_dense", [True, False])
@pytest.mark.parametrize("keeps", [False, True])
def test_every_row_is_the_mean_over_the_ranks(what: str, has_dense: bool, keeps: bool) -> None:
    steps = STEPS[what]
    expected = oracle(steps, has_dense, keeps)
    for options in ({}, {"bucket_cap_mb": 1e-6}, {"gradient_as_bucket_view": False}):
        assert_equal(md.simulate(train, 3, (steps, has_dense, keeps, options)), expected)


def test_processes_agree_on_rows_too(run: Run) -> None:
    steps = [step for several in STEPS.values() for step in several]
    assert_equal(run(train, 3, steps, True, False, {}), oracle(steps, True, False))


def test_torchs_wrapper_gives_the_same_gradients(pool: Pool, tmp_path: Any) -> None:
    def program() -> list[list[torch.Tensor]]:
        rank = md.get_rank()
        torch.distributed.init_process_group(
            "gloo", f"file://{tmp_path}/meeting", rank=rank, world_size=2
        )
        try:
            theirs = torch.nn.parallel.DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
            ours = md.DDP(nn.Embedding(4, 2, sparse=True))
            for model in (ours, theirs):
                (model(torch.tensor([rank, 3])).sum() * (1 + rank)).backward()
            both = [model.module.weight.grad.to_dense() for model in (ours, theirs)]
            del theirs, model
            return both
        finally:
            # Torch's reducer must not be what keeps torch's group alive, see test_data_parallel.
            gc.collect()
            torch.distributed.destroy_process_group()

    for ours, theirs in pool.run(program, 2):
        torch.testing.assert_close(ours, theirs)


def test_an_optimizer_for_sparse_gradients_steps_with_them() -> None:
    def program() -> torch.Tensor:
        model = md.DDP(Tables(has_dense=False))
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model([md.get_rank()], [5], False).backward()
            optimizer.step()
        return model.module.first.weight.detach()

    first, second = md.simulate(program, 2)
    assert torch.equal(first, second)
    torch.manual_seed(0)
    start = Tables(has_dense=False).first.weight.detach()
    has_moved = (first != start).any(1)
    assert has_moved.tolist() == [True, True, False, False, False, False]


def test_a_failed_backward_leaves_no_rank_waiting_for_rows() -> None:
    def program() -> tuple[str, list[Any]]:
        model = md.DDP(Tables(has_dense=True))
        use = ([md.get_rank()], [1], False)
        for _ in range(2):
            model.zero_grad()
            model(*use).backward()
        model.zero_grad()
        is_culprit = md.get_rank() == 1
        loss = model(*use)
        if is_culprit:
            loss.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError if is_culprit else md.errors.GradientError) as error:
            loss.backward()
        if is_culprit:
            with pytest.raises(md.errors.GradientError) as error:
                model(*use)
        assert gradients(model) == [None] * 4
        model(*use).backward()
        return str(error.value), gradients(model)

    expected = oracle([[([0], [1], False), ([1], [1], False)]], True, False)
    for text, grads in md.simulate(program, 2):
        assert "found:    rank 1: an exception was raised inside backward()\n" in text
        assert_equal([[grads]], expected)


class Optional(nn.Module):
    """Looks up rows, unless it is given none at all; its other weight is always used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, 2, sparse=True)
        self.other = nn.Parameter(torch.ones(1))

    def forward(self, rows: list[int] | None) -> torch.Tensor:
        total = self.other.sum()
        if rows is not None:
            total = total + self.table(torch.tensor(rows, dtype=torch.int64)).sum()
        return total


def test_a_gradient_without_rows_is_one_on_every_rank() -> None:
    def program() -> list[list[int] | None]:
        model = md.DDP(Optional(), find_unused_parameters=True)
        seen: list[list[int] | None] = []
        for rows in ([1], [], None):
            model.zero_grad()
            model(rows if md.get_rank() == 1 else None).backward()
            grad = model.module.table.weight.grad
            seen.append(None if grad is None else grad.coalesce().indices().flatten().tolist())
        return seen

    assert md.simulate(program, 2) == [[[1], [], None]] * 2
