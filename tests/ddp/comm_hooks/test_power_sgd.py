"""PowerSGD of whole buckets: exact where the rank suffices, and nothing is lost in the long run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.ddp.comm_hooks.registered_hooks import RegisteredHook


def state_of(rank: int, **options: Any) -> Any:
    return md.comm_hooks.PowerSGDState(None, rank, start_powerSGD_iter=2, **options)


def steps(state: Any, gradient: torch.Tensor, count: int) -> list[torch.Tensor]:
    """What some steps give that all have this gradient here."""
    world, found = md.group.WORLD, []
    registered = RegisteredHook(state, md.comm_hooks.batched_powerSGD_hook, world)
    for _ in range(count):
        x = gradient.clone()
        registered.start(md.GradBucket(x, [x], [x], 0, True, world)).wait()
        found.append(x)
    return found


def gradient(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def mean(num_ranks: int, numel: int) -> torch.Tensor:
    return sum(gradient(rank, numel) for rank in range(num_ranks)) / num_ranks  # type: ignore[return-value]


@pytest.mark.parametrize("numel", [1, 2, 15, 16, 17, 100])
def test_a_rank_as_large_as_the_matrix_gives_the_mean(numel: int) -> None:
    """The first two steps are plain all-reduces, the third is compressed."""

    def program() -> list[torch.Tensor]:
        return steps(state_of(10), gradient(md.get_rank(), numel), 3)

    one, other = md.simulate(program, 2)
    for x, y in zip(one, other, strict=True):
        assert torch.equal(x, y)
        torch.testing.assert_close(x, mean(2, numel), rtol=1e-4, atol=1e-5)


def test_what_one_step_leaves_out_comes_later() -> None:
    def program(feeds_back: bool) -> float:
        found = steps(state_of(1, use_error_feedback=feeds_back), gradient(md.get_rank(), 100), 60)[
            2:
        ]
        return float((sum(found) / len(found) - mean(2, 100)).norm() / mean(2, 100).norm())

    with_feedback, without = (md.simulate(program, 2, (one,))[0] for one in (True, False))
    assert with_feedback < 0.2 < without


@pytest.mark.parametrize("warm_start", [False, True])
def test_the_state_is_kept_as_torch_keeps_it(warm_start: bool) -> None:
    def program() -> None:
        state = state_of(2, warm_start=warm_start)
        first, second = steps(state, gradient(md.get_rank(), 50), 4)[2:]
        assert not torch.equal(first, second)
        assert state.iter == 4 and state.process_group is None
        assert state.error_dict[0].shape == (64,)
        assert bool(state.q_memory_dict) == bool(state.p_memory_dict) == warm_start
        rate, before, after = state.compression_stats()
        assert (before, after) == (2 * 50, 2 * 2 * 8 * 2) and rate == before / after

    md.simulate(program, 2)


def test_random_numbers_of_the_program_are_left_alone() -> None:
    def program() -> float:
        torch.manual_seed(3)
        steps(state_of(2), gradient(md.get_rank(), 50), 4)
        return float(torch.rand(()).item())

    torch.manual_seed(3)
    assert md.simulate(program, 2) == [torch.rand(()).item()] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_and_zeros(dtype: torch.dtype) -> None:
    def program() -> None:
        for value in (0.0, 1.0):
            x = steps(state_of(1), torch.full((16,), value, dtype=dtype), 3)[-1]
            assert x.dtype is dtype
            torch.testing.assert_close(x.float(), torch.full((16,), value), rtol=0.02, atol=0)

    md.simulate(program, 2)


def test_an_empty_bucket() -> None:
    def program() -> int:
        return sum(x.numel() for x in steps(state_of(1), torch.empty(0), 4))

    assert md.simulate(program, 2) == [0, 0]
