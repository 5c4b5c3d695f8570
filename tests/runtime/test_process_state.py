"""Random generators, the default dtype and torch's hooks: each simulated rank has its own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

import meshdist as md
from tests.backends.simulated.waits import pass_round
from tests.inner import Scheduler


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


def hooked() -> list[list[str]]:
    """Return what global hooks and trackers of torch note on this rank, which uses one layer."""
    noted: list[str] = []
    layer = nn.Linear(2, 2)
    layer.rank = md.get_rank()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handles = [
        register_module_forward_pre_hook(lambda module, _: noted.append(f"to {module.rank}")),
        register_module_forward_hook(lambda module, *_: noted.append(f"from {module.rank}")),
        register_module_full_backward_pre_hook(lambda module, _: noted.append(f"in {module.rank}")),
        register_optimizer_step_post_hook(lambda *_: noted.append("stepped")),
    ]
    md.barrier()
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    optimizer.step()
    md.barrier()
    for handle in handles:
        handle.remove()
    layer(torch.ones(1, 2))
    with ModuleTracker() as tracker, FlopCounterMode(display=False) as flops:
        md.barrier()
        layer(torch.ones(1, 2))
        md.barrier()
    return [noted, sorted(tracker.parents), [str(flops.get_total_flops())]]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_global_hooks_belong_to_the_rank(size: int) -> None:
    noted: list[str] = []
    handle = register_module_forward_hook(lambda *_: noted.append("the caller's"))
    try:
        found = md.simulate(hooked, size)
    finally:
        handle.remove()
    for rank, (mine, parents, flops) in enumerate(found):
        assert mine == [f"to {rank}", f"from {rank}", f"in {rank}", "stepped"]
        assert (parents, flops) == (["Global"], ["8"])
    assert noted == ["the caller's"] * 3 * size


class Operators(TorchDispatchMode):
    """Notes the operators that pass it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_belong_to_the_rank() -> None:
    x, y = torch.ones(2), torch.ones(2)

    def program() -> list[str]:
        with Operators() as operators:
            x.add_(1) if md.get_rank() else x.mul_(1)
            md.barrier()  # which lets the other ranks run
            y.mul_(1)
        return operators.seen

    found = md.simulate(program, 3)
    assert found == [[f"aten.{name}_.Tensor", "aten.mul_.Tensor"] for name in ("mul", "add", "add")]


def test_hooks_that_a_rank_leaves_end_with_the_ranks() -> None:
    noted: list[str] = []

    def program() -> None:
        register_module_forward_hook(lambda *_: noted.append("left"))
        md.barrier()
        raise ValueError("no data here")

    with pytest.raises(ValueError, match="no data here"):
        md.simulate(program, 2)
    nn.Linear(1, 1)(torch.ones(1, 1))
    assert noted == []


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
