"""Averages of parameters: which steps average, over which ranks, and what becomes of whom."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.distributed.algorithms.model_averaging import (
    averagers as torchs,
    hierarchical_model_averager as torchs_hierarchical,
)

import meshdist as md
from meshdist.ddp import model_averagers
from meshdist.errors import (
    ArgumentError,
    AxisError,
    KindError,
    MeshError,
    MismatchError,
    NotInGroupError,
)
from tests.inner import flat_sums
from tests.pool import Pool

# -- an oracle: one number for each rank, averaged by a loop over the ranks -----------------------


def walk(
    num_ranks: int, num_steps: int, groups_at: Callable[[int], list[list[int]]]
) -> list[list[float]]:
    """What each rank's weight is after each step, if rank r adds 2 ** r before the average."""
    values = [0.0] * num_ranks
    seen: list[list[float]] = [[] for _ in values]
    for step in range(num_steps):
        values = [value + 2.0**rank for rank, value in enumerate(values)]
        for members in groups_at(step):
            mean = sum(values[rank] for rank in members) / len(members)
            values = [mean if rank in members else value for rank, value in enumerate(values)]
        for rank, value in enumerate(values):
            seen[rank].append(value)
    return seen


def walked(averager: model_averagers.ModelAverager, num_steps: int) -> list[float]:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    seen = []
    for _ in range(num_steps):
        weight.data += 2.0 ** md.get_rank()
        averager.average_parameters([weight])
        seen.append(weight.item())
    assert averager.step == num_steps
    return seen


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.integers(2, 4), st.integers(0, 5))
def test_the_first_step_after_the_warmup_averages_then_each_of_a_period(
    num_ranks: int, period: int, warmup: int
) -> None:
    def groups_at(step: int) -> list[list[int]]:
        due = step >= warmup and (step - warmup) % period == 0
        return [list(range(num_ranks))] if due else []

    def program() -> list[float]:
        return walked(md.PeriodicModelAverager(period, warmup), 9)

    assert md.simulate(program, num_ranks) == walk(num_ranks, 9, groups_at)


@pytest.mark.parametrize("warmup", [0, 3])
def test_the_longest_period_that_divides_the_step_decides(warmup: int) -> None:
    def groups_at(step: int) -> list[list[int]]:
        if step < warmup or step % 2:
            return []
        size = 8 if step % 8 == 0 else 4 if step % 4 == 0 else 2
        return [list(range(start, start + size)) for start in range(0, 8, size)]

    def by_size() -> list[float]:
        sizes = OrderedDict([(2, 2), (4, 4), (8, 8)])
        return walked(md.HierarchicalModelAverager(sizes, warmup), 13)

    def by_axis() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pod", "host", "dp"))
        periods = {"dp": 2, "host": 4, "pod": 8}
        return walked(md.HierarchicalModelAverager(periods, warmup, mesh), 13)

    expected = walk(8, 13, groups_at)
    assert md.simulate(by_size, 8) == expected
    assert md.simulate(by_axis, 8) == expected


def test_axes_that_are_not_named_are_left_alone() -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("host", "tp", "dp"))
        with mesh:  # the current mesh stands in for process_group
            averager = md.HierarchicalModelAverager({"dp": 2, "host": 4})
        groups = averager.period_process_group_dict
        assert averager.process_group is groups[4]
        return [(period, group.ranks) for period, group in groups.items()]

    found = md.simulate(program, 8)
    assert found[0] == [(2, (0, 1)), (4, (0, 1, 4, 5))]
    assert found[7] == [(2, (6, 7)), (4, (2, 3, 6, 7))]


def test_an_inner_axis_that_lies_before_in_the_mesh() -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (2, 3), mesh_dim_names=("near", "far"))
        averager = md.HierarchicalModelAverager({"near": 2, "far": 6}, process_group=mesh)
        return [group.ranks for group in averager.period_process_group_dict.values()]

    assert md.simulate(program, 6)[4] == [(1, 4), (0, 1, 2, 3, 4, 5)]


def test_an_axis_or_several_or_a_group() -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("host", "dp", "tp"))
        seen = []
        for group in (mesh["dp"], mesh["host", "dp"], mesh.get_group("tp"), None):
            weight = nn.Parameter(torch.full((1,), float(md.get_rank())))
            weight.grad = torch.ones(1)
            md.PeriodicModelAverager(2, process_group=group).average_parameters([weight])
            seen.append(weight.item())
        return seen

    assert md.simulate(program, 8)[5] == [6.0, 4.0, 4.5, 3.5]


# -- which parameters -----------------------------------------------------------------------------


def test_one_collective_for_each_dtype_and_values_change_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operations: list[tuple[int, str]] = []
    original = flat_sums.all_reduce

    def noted(tensor: torch.Tensor, *how: Any) -> None:
        operations.append((tensor.numel(), str(tensor.dtype)))
        original(tensor, *how)

    monkeypatch.setattr(flat_sums, "all_reduce", noted)

    def program() -> Any:
        rank = md.get_rank()
        flat = torch.full((6,), 2.0 * rank)
        image = torch.arange(24.0).view(1, 2, 3, 4) + rank
        if rank:  # strides may differ
            image = image.to(memory_format=torch.channels_last)
        values = [flat[:2], flat[2:].view(2, 2), image, torch.full((3,), 3.0 * rank)]
        parameters = [nn.Parameter(value) for value in values]
        parameters.append(nn.Parameter(torch.full((2,), 4.0 * rank, dtype=torch.bfloat16)))
        parameters.append(nn.Parameter(torch.full((2,), 1j * rank)))
        for one in (*parameters[:3], *parameters[4:]):
            one.grad = torch.zeros_like(one)
        groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
        md.PeriodicModelAverager(2).average_parameters(groups)
        assert torch.equal(image, torch.arange(24.0).view(1, 2, 3, 4) + 0.5)
        return flat.tolist(), [one.flatten()[0].item() for one in parameters[3:]]

    first, second = md.simulate(program, 2)
    assert first == ([1.0] * 6, [0.0, 2.0, 0.5j])
    assert second == ([1.0] * 6, [3.0, 2.0, 0.5j])  # no gradient: as it was
    sent = [(30, "torch.float32"), (2, "torch.bfloat16"), (2, "torch.complex64")]
    assert sorted(operations) == sorted(2 * sent)


def test_gradients_on_some_ranks_alone_are_an_error_on_all() -> None:
    def program(num_with: int) -> str:
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        for one in parameters[: num_with if md.get_rank() == 1 else 2]:
            one.grad = torch.ones(2)
        with pytest.raises(MismatchError) as caught:
            md.PeriodicModelAverager(2).average_parameters(parameters)
        return str(caught.value)

    for text in md.simulate(program, 3, (1,)):
        assert text.startswith("the ranks would average different parameters")
        assert "parameter 1: ranks 0, 2: shape (2,), float32; rank 1: missing" in text
        assert "compute gradients of the same parameters on every rank" in text
    assert (
        "parameter 0: ranks 0, 2: shape (2,), float32; rank 1: missing"
        in (md.simulate(program, 3, (0,))[1])
    )


def test_without_any_gradient_nothing_changes_and_it_warns() -> None:
    def program() -> float:
        weight = nn.Parameter(torch.full((1,), float(md.get_rank())))
        averager = md.PeriodicModelAverager(2)
        averager.average_parameters([weight])
        averager.average_parameters([])
        averager.average_parameters([])
        return weight.item()

    with pytest.warns(UserWarning, match="found no parameter with a gradient") as caught:
        assert md.simulate(program, 2) == [0.0, 1.0]
    assert len(caught) == 4  # the first and the third call, on both ranks
    assert "after step() and before zero_grad(), with a list" in str(caught[0].message)


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "told"),
    [
        ((0,), ArgumentError, "a period is 0\n  expected: at least 1 step"),
        ((True,), KindError, "True, a bool"),
        ((2.0,), KindError, "2.0, a float"),
        ((2, -1), ArgumentError, "warmup_steps is -1"),
        ((2, 0, "dp"), KindError, "pass the axis of its mesh: group=mesh['dp']"),
        ((2, 0, -100), NotInGroupError, "this rank is not a member of the group"),
    ],
    ids=str,
)
def test_a_periodic_averager_rejects(arguments: Any, kind: type, told: str) -> None:
    def program() -> str:
        with pytest.raises(kind) as caught:
            md.PeriodicModelAverager(*arguments)
        return str(caught.value)

    assert told in md.simulate(program, 1)[0]


@pytest.mark.parametrize(
    ("entries", "kind", "told"),
    [
        (None, ArgumentError, "HierarchicalModelAverager has no periods"),
        ({}, ArgumentError, "a period for each axis, or a group size for each period"),
        ({0: 4}, ArgumentError, "a period is 0\n  expected: at least 1 step"),
        ({4: 2, 2: 4}, ArgumentError, "the periods [4, 2] do not increase"),
        ({2: 4, 4: 2}, ArgumentError, "the group sizes [4, 2] do not increase"),
        ({2: 2}, ArgumentError, "has only 2 ranks"),
        ({2: 3, 4: 4}, ArgumentError, "cannot split 4 ranks into groups of 3"),
        ({2: 0, 4: 4}, ArgumentError, "cannot split 4 ranks into groups of 0"),
        ({2: 2, "dp": 4}, KindError, "'dp', a str"),
        ({"dp": 2, "host": 2}, ArgumentError, "the periods [2, 2] do not increase"),
        ({"dp": 2, "tp": 4}, AxisError, "tp"),
    ],
    ids=str,
)
def test_a_hierarchical_averager_rejects(entries: Any, kind: type, told: str) -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "dp"))
        with pytest.raises(kind) as caught:
            md.HierarchicalModelAverager(entries, process_group=mesh)
        return str(caught.value)

    assert told in md.simulate(program, 4)[3]


def test_axes_without_a_mesh_are_rejected() -> None:
    def program() -> list[str]:
        texts = []
        for arguments in ({"process_group": md.group.WORLD}, {}):
            with pytest.raises(MeshError) as caught:
                md.HierarchicalModelAverager({"dp": 2}, **arguments)
            texts.append(str(caught.value))
        return texts

    ((of_group, without),) = md.simulate(program, 1)
    assert of_group.startswith("HierarchicalModelAverager over axes 'dp' requires a mesh\n")
    assert of_group.endswith("fix:      pass process_group=mesh")
    assert without.startswith(
        "HierarchicalModelAverager over axes 'dp': there is no current mesh\n"
    )
    assert without.endswith("call it inside `with mesh:`, or pass the mesh: process_group=mesh")


def test_what_is_no_parameter_is_rejected() -> None:
    def program() -> str:
        averager = md.PeriodicModelAverager(2)
        with pytest.raises(KindError) as caught:
            averager.average_parameters([torch.ones(1)])  # type: ignore[list-item]
        assert averager.step == 0
        return str(caught.value)

    (text,) = md.simulate(program, 1)
    assert "params contains an object of type Tensor" in text
    assert "pass model.parameters(), or optimizer.param_groups" in text


def test_a_period_of_one_is_warned_of() -> None:
    def program() -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            md.PeriodicModelAverager(1)
            md.HierarchicalModelAverager({1: 1})
            md.HierarchicalModelAverager({1: 1, 2: 1})
        assert {Path(one.filename).name for one in told} == {Path(__file__).name}
        return [str(one.message) for one in told]

    (texts,) = md.simulate(program, 1)
    assert len(texts) == 2
    assert "averaging parameters at every step sends as much as averaging gradients" in texts[0]


# -- a second opinion -----------------------------------------------------------------------------


def test_torchs_averagers_give_the_same_weights(pool: Pool, tmp_path: Path) -> None:
    def train(averager: Any) -> list[torch.Tensor]:
        torch.manual_seed(md.get_rank())
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        model[0].bias.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            averager.average_parameters(model.parameters())
        return [value.detach() for value in model.parameters()]

    def program(path: str) -> None:
        rank, size = md.get_rank(), md.get_world_size()
        torch.distributed.init_process_group(
            "gloo", f"file://{path}/meeting", rank=rank, world_size=size
        )
        try:
            sizes = OrderedDict([(2, 1), (4, 2)])
            pairs = [
                (md.PeriodicModelAverager(3, 1), torchs.PeriodicModelAverager(3, 1)),
                (
                    md.HierarchicalModelAverager(sizes, 2),
                    torchs_hierarchical.HierarchicalModelAverager(sizes, 2),
                ),
            ]
            for ours, theirs in pairs:
                for mine, other in zip(train(ours), train(theirs), strict=True):
                    torch.testing.assert_close(mine, other)
                assert ours.step == theirs.step
        finally:
            torch.distributed.destroy_process_group()

    pool.run(program, 2, str(tmp_path))
