"""Steps made by hand: what is added in which order, what is received in place, what is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.sharding import executor
from meshdist.sharding.executor import PlanExecutor
from meshdist.sharding.steps import CollectiveStep, Exchange, Pad, Step, Take
from tests.sharding.reshard_cases import mesh_of


def carried(steps: list[tuple[Step, ...]], locals_: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each rank's steps make of its local array, on a mesh of one axis."""

    def program() -> torch.Tensor:
        rank = md.get_rank()
        x = locals_[rank].clone()
        found = PlanExecutor(steps[rank], tuple(x.shape), mesh_of((len(steps),)), "a plan")(x)
        assert torch.equal(x, locals_[rank])
        return found

    return md.simulate(program, len(steps))


def test_partial_sums_are_added_in_the_order_of_the_group() -> None:
    """Of 1e8, -1e8 and 1 in float32 the sum is 1 or 0: it must be the same on every rank."""
    values = [torch.tensor([value]) for value in (1e8, -1e8, 1.0)]
    box = ((0, 1),)
    steps = [
        (
            Exchange(
                (1,),
                (0,),
                3,
                rank,
                tuple((place, box) for place in range(3) if place != rank),
                tuple((place, box) for place in range(3) if place != rank),
                (box, box),
                is_summed=True,
            ),
        )
        for rank in range(3)
    ]
    in_order = (values[0] + values[1]) + values[2]
    assert in_order != (values[2] + values[1]) + values[0]
    assert carried(steps, values) == [in_order] * 3


def test_what_is_not_covered_is_zero() -> None:
    box, start = ((0, 1),), ((0, 1),)
    steps: list[tuple[Step, ...]] = [
        (Exchange((3,), (0,), 2, 0, ((1, box),), ((1, box),), None, is_covered=False),),
        (Exchange((3,), (0,), 2, 1, ((0, box),), ((0, start),), None, is_covered=False),),
    ]
    found = carried(steps, [torch.tensor([1.0]), torch.tensor([2.0])])
    assert [one.tolist() for one in found] == [[2, 0, 0], [1, 0, 0]]


def test_steps_follow_one_another() -> None:
    steps: tuple[Step, ...] = (
        Take((2, 2), ((1, 3), (0, 2))),
        CollectiveStep((2, 2), (0,), 2, 0, "all_reduce", (2, 2)),
        CollectiveStep((2, 2), (0,), 2, 0, "all_reduce", (2, 2)),
        Pad((2, 3), ((0, 2), (1, 3))),
        Take((1, 3), ((0, 1), (0, 3))),
    )
    x = torch.arange(8.0).view(4, 2)
    for found in carried([steps, steps], [x, x]):
        assert found.tolist() == [[0, 8, 12]] and found.is_contiguous()


def test_nothing_to_do_gives_a_copy() -> None:
    assert carried([(), ()], [torch.ones(2), torch.zeros(2)])[0].tolist() == [1, 1]
    assert carried([(Pad((2,), None),)], [torch.ones(2)])[0].tolist() == [0, 0]


def test_boxes_that_follow_each_other_are_received_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[bool, bool]] = []
    run = executor.run_named

    def noted(operation: str, group: Any, title: str, *given: Any) -> None:
        out, tensor, *_ = given
        is_in_place = out.untyped_storage().nbytes() > out.nbytes
        is_sent_as_it_lies = tensor.untyped_storage().nbytes() > tensor.nbytes
        found.append((is_in_place, is_sent_as_it_lies))
        run(operation, group, title, *given)

    monkeypatch.setattr(executor, "run_named", noted)

    def program() -> None:
        x = torch.zeros(2 - md.get_rank(), 4)
        md.reshard(x, "s@a d -> s d", mesh_of((2,)), s=3)  # in place: whole rows
        found.append((True, True))
        md.reshard(torch.zeros(4, 2 - md.get_rank()), "s d@a -> s d", mesh_of((2,)), d=3)

    md.simulate(program, 2)
    assert found.count((True, False)) == 2
    assert found.count((False, False)) == 2


def test_collectives_are_entered_under_the_title() -> None:
    def program() -> str:
        mesh = mesh_of((2,))
        md.reshard(torch.ones(2, 4), "s@a d -> s d@a", mesh)
        note = mesh.get_group("a").device_groups[0].recorder.find_note()
        assert note is not None
        return note.call.op_name

    assert md.simulate(program, 2) == ["s@a d -> s d@a of shape (4, 4)"] * 2
