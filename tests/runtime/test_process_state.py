"""Random generators and the default dtype: each simulated rank has its own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.inner import Scheduler
from tests.wires.simulated.waits import pass_round


def draws() -> list[Any]:
    """Numbers of every kind; an odd count of normals leaves half a pair behind."""
    return [
        torch.randn(3).tolist(),
        torch.normal(0.0, 1.0, (1,)).item(),
        float(np.random.normal()),
        np.random.randint(0, 1000, 3).tolist(),
        random.gauss(0.0, 1.0),
        random.randrange(1000),
    ]


def test_equal_seeds_draw_as_in_a_process_of_their_own() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    alone = [draws() for _ in range(4)]
    arrived: dict[int, int] = {}

    def body(rank: int) -> list[Any]:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        drawn = []
        for _ in range(4):
            drawn.append(draws())
            pass_round(arrived, rank, 3)
        return drawn

    assert Scheduler[list[Any]](3).run(body) == [alone] * 3


def test_ranks_begin_as_after_seeding_with_their_number() -> None:
    def body(rank: int) -> list[Any]:
        return draws()

    expected = []
    for rank in range(3):
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        expected.append(draws())
    assert Scheduler[list[Any]](3).run(body) == expected


@pytest.mark.parametrize("fails", [False, True])
def test_the_caller_keeps_its_own_state(fails: bool) -> None:
    def body(rank: int) -> None:
        draws()
        torch.set_default_dtype(torch.float64)
        np.random.set_state(np.random.RandomState(3).get_state())
        if fails:
            raise ValueError

    def prepare() -> None:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        np.random.normal()

    prepare()
    expected = draws()
    prepare()
    if fails:
        with pytest.raises(ValueError):  # noqa: PT011 - the text is not the point
            Scheduler[None](2).run(body)
    else:
        Scheduler[None](2).run(body)
    assert draws() == expected
    assert torch.get_default_dtype() is torch.float32


def test_numpy_state_can_be_taken_set_and_replaced_inside_a_rank() -> None:
    arrived: dict[int, int] = {}

    def body(rank: int) -> tuple[list[float], list[float]]:
        np.random.seed(7)
        np.random.normal()
        state = np.random.get_state()
        first = np.random.normal(size=3).tolist()
        pass_round(arrived, rank, 2)
        np.random.set_state(state)
        pass_round(arrived, rank, 2)
        second = np.random.normal(size=3).tolist()
        assert first == second
        np.random.set_bit_generator(np.random.PCG64(rank))
        third = np.random.normal(size=1).tolist()
        pass_round(arrived, rank, 2)
        return first, third + np.random.normal(size=2).tolist()

    first, second = Scheduler[Any](2).run(body)
    reference = np.random.RandomState(7)
    reference.normal()
    assert first[0] == second[0] == reference.normal(size=3).tolist()
    for rank, (_, drawn) in enumerate([first, second]):
        own = np.random.RandomState(np.random.PCG64(rank))
        assert drawn == [own.normal(), *own.normal(size=2)]


def test_default_dtype_belongs_to_the_rank() -> None:
    arrived: dict[int, int] = {}

    def body(rank: int) -> list[torch.dtype]:
        seen = [torch.get_default_dtype()]
        if rank == 1:
            torch.set_default_dtype(torch.float16)
        pass_round(arrived, rank, 2)
        return [*seen, torch.ones(1).dtype]

    torch.set_default_dtype(torch.float64)
    try:
        results = Scheduler[list[torch.dtype]](2).run(body)
    finally:
        torch.set_default_dtype(torch.float32)
    assert results == [[torch.float64] * 2, [torch.float64, torch.float16]]


@pytest.mark.gpu
def test_cuda_generators_belong_to_the_rank() -> None:
    torch.manual_seed(5)
    alone = [torch.rand(2, device="cuda").tolist() for _ in range(3)]
    arrived: dict[int, int] = {}

    def body(rank: int) -> list[list[float]]:
        torch.manual_seed(5)
        drawn = []
        for _ in range(3):
            drawn.append(torch.rand(2, device="cuda").tolist())
            pass_round(arrived, rank, 3)
        return drawn

    assert Scheduler[Any](3).run(body) == [alone] * 3
