"""Loops with unequally many steps do what the same loops padded by neutral elements do."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import meshdist as md
from meshdist.joining.shadow import find_shadow
from tests.inner import get_world
from tests.joining.uneven_programs import MOVING, OBJECTS, OTHERS, REDUCING, Step, plans, run_plan
from tests.load import is_within
from tests.pool import Failure, Pool


@settings(max_examples=60)
@given(st.data())
def test_a_random_loop_equals_the_padded_one(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 4))
    num_steps, body = data.draw(plans(size))
    uneven = md.simulate(lambda: run_plan(num_steps, body, padded=False), size)
    assert uneven == md.simulate(lambda: run_plan(num_steps, body, padded=True), size)


def every_verb() -> tuple[list[int], list[Step]]:
    """Each verb once, over all ranks and over some, on four ranks of which one has no data."""
    chosen = random.Random(0)
    body = []
    for seed, verb in enumerate((*REDUCING, *MOVING, *OBJECTS, *OTHERS)):
        for members, root in (((0, 1, 2, 3), 3), ((0, 3), 1), ((1, 2), 0)):
            counts = tuple(chosen.randrange(1, 4) for _ in members)
            body.append(Step(verb, members, counts=counts, root=root, seed=seed))
    return [1, 2, 0, 3], body


@pytest.mark.parametrize(("backend", "hosts"), [("shm", ""), ("gloo", ""), ("gloo", "AABB")])
def test_every_verb_is_answered_on_processes(pool: Pool, backend: str, hosts: str) -> None:
    num_steps, body = every_verb()
    if hosts:  # a group of several hosts beyond the main one is not seen; all here lie in it
        body = body[::2]

    def both() -> Any:
        found = run_plan(num_steps, body, padded=False)
        return found, run_plan(num_steps, body, padded=True)

    for uneven, padded in pool.run(both, 4, backend=backend, hosts=hosts):
        assert uneven == padded


def test_calls_of_groups_that_cross_are_answered_in_any_order() -> None:
    """Ranks 1 and 2 need rank 0 on different groups before they meet on a third."""

    def program() -> list[float]:
        rank = md.get_rank()
        pairs = {one: md.new_group([0, one]) for one in (1, 2)}
        sums = []
        for _ in md.uneven(range(0 if rank == 0 else 2)):
            for group in (pairs[rank], None) if rank == 2 else (None, pairs[rank]):
                x = torch.ones(1)
                md.all_reduce(x, group=group)
                sums.append(x.item())
        return sums

    # Rank 1 meets rank 2 on the world first, rank 2 rank 0 on their pair.
    assert md.simulate(program, 3) == [[], [2.0, 1.0] * 2, [1.0, 2.0] * 2]


def test_axes_of_a_mesh_end_apart() -> None:
    def program() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        sums = []
        for _ in md.uneven(range(1 + 2 * mesh.get_local_rank("dp")), mesh["dp"]):
            for axis in ("dp", "tp"):
                x = torch.ones(1)
                md.all_reduce(x, group=mesh[axis])
                sums.append(x.item())
        return sums

    few, many = [2.0, 2.0], [2.0, 2.0, 1.0, 2.0, 1.0, 2.0]
    assert md.simulate(program, 4) == [few, few, many, many]


def test_groups_work_as_before_behind_a_context() -> None:
    def program() -> tuple[bool, list[float]]:
        before = md.group.WORLD.fast_path
        sums = []
        for _ in range(2):
            for _ in md.uneven(range(md.get_rank())):
                x = torch.ones(1)
                md.all_reduce(x)
                sums.append(x.item())
        md.barrier()
        return md.group.WORLD.fast_path is before, sums

    assert md.simulate(program, 2) == [(True, []), (True, [1.0, 1.0])]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_fast_path_is_back_behind_a_context(pool: Pool, backend: str) -> None:
    def program() -> bool:
        md.barrier()
        before = md.group.WORLD.fast_path
        for _ in md.uneven(range(md.get_rank())):
            assert md.group.WORLD.fast_path is None
            md.all_reduce(torch.ones(1))
        return md.group.WORLD.fast_path is before

    assert pool.run(program, 2, backend=backend) == [True, True]


def test_layouts_need_not_be_equal_inside_a_context() -> None:
    """Where verbs are enqueued they must be; a rank without data does not know them."""

    def program() -> list[bool]:
        channel = md.group.WORLD.open_channel("cpu")
        channel.opened.sees_all_calls = True
        found = [channel.demands_layouts for _ in md.uneven([1])]
        return [*found, channel.demands_layouts]

    assert md.simulate(program, 2) == [[False, True]] * 2


@pytest.mark.parametrize("wire", ["simulated", "shm"])
def test_no_object_of_a_context_has_more_than_twelve_attributes(
    wire: str, request: pytest.FixtureRequest
) -> None:
    def program() -> dict[str, int]:
        with md.uneven([1]):
            md.all_reduce(torch.ones(1))
            shadow = find_shadow(get_world())
            assert shadow is not None
            places = list(shadow._communicators.values())
            parts: list[Any] = [shadow, shadow._waits, shadow._whereabouts, *places]
            parts += [place.words for place in places if place.words is not None]
            return {type(part).__name__: len(vars(part)) for part in parts}

    if wire == "simulated":
        found = md.simulate(program, 2)
    else:
        found = request.getfixturevalue("pool").run(program, 2, backend=wire)
    for counts in found:
        assert ("CallWords" in counts) is (wire != "simulated")
        assert {name: number for name, number in counts.items() if number > 12} == {}


# -- what cannot be answered ----------------------------------------------------------------------


def text_on_each_rank(run: Callable[..., list[Any]], size: int, program: Callable[[], Any]) -> Any:
    """The text of the JoinError that each rank raises."""

    def caught() -> str:
        try:
            program()
        except md.JoinError as error:
            return str(error)
        return "no error"

    return run(caught, size)


def simulated(fn: Callable[[], Any], size: int) -> list[Any]:
    return md.simulate(fn, size)


def test_a_broadcast_from_a_joined_rank_is_refused_everywhere() -> None:
    def program() -> None:
        for _ in md.uneven(range(md.get_rank())):
            md.broadcast(torch.ones(3), src=0)

    texts = text_on_each_rank(simulated, 3, program)
    for text in texts:
        assert "broadcast((3,) float32) cannot come from rank 0, which has no data left" in text
        assert "let another rank be the source" in text


@pytest.mark.parametrize("verb", ["scatter", "broadcast_object_list", "scatter_object_list"])
def test_other_verbs_with_a_joined_source_are_refused_everywhere(verb: str) -> None:
    def program() -> None:
        calls: dict[str, Callable[[], Any]] = {
            "scatter": lambda: md.scatter(torch.ones(3), src=0),
            "broadcast_object_list": lambda: md.broadcast_object_list([None], src=0),
            "scatter_object_list": lambda: md.scatter_object_list([None], src=0),
        }
        for _ in md.uneven(range(md.get_rank())):
            calls[verb]()

    for text in text_on_each_rank(simulated, 2, program):
        assert f"{verb}(" in text
        assert "cannot come from rank 0, which has no data left" in text


@pytest.mark.parametrize("wire", ["simulated", "shm", "gloo"])
@pytest.mark.parametrize("verb", ["send", "recv"])
def test_a_message_to_or_from_a_joined_rank_is_refused_everywhere(
    wire: str, verb: str, request: pytest.FixtureRequest
) -> None:
    def program() -> None:
        for _ in md.uneven(range(3 * md.get_rank())):
            md.all_reduce(torch.ones(1))
            if md.get_rank() == 2:
                getattr(md, verb)(torch.ones(5), 0)

    run: Callable[..., list[Any]] = simulated
    if wire != "simulated":
        pool: Pool = request.getfixturevalue("pool")

        def run(fn: Callable[[], Any], size: int) -> list[Any]:
            return pool.run(fn, size, backend=wire)

    texts = text_on_each_rank(run, 3, program)
    for text in texts:
        assert f"{verb}((5,) float32): rank 0 has no data left" in text
    assert "rank 2 has left the join context by an exception" in texts[0]
    assert "look at rank 2; the group is broken now" in texts[1]


def test_a_context_inside_another_is_refused() -> None:
    def program() -> str:
        with md.uneven([1]), pytest.raises(md.errors.ArgumentError) as caught:
            next(iter(md.uneven([2])))
        return str(caught.value)

    for text in md.simulate(program, 2):
        assert "uneven() was called inside a join context" in text


def test_ranks_that_differ_in_their_calls_all_learn_it() -> None:
    def program() -> str:
        try:
            for _ in md.uneven(range(md.get_rank())):
                md.all_reduce(torch.ones(md.get_rank()))
        except md.AgreementError as error:
            return error.found or ""
        return "no error"

    for text in md.simulate(program, 3):
        assert "all_reduce((1,) float32, SUM)" in text
        assert "rank 2: all_reduce((2,) float32, SUM)" in text


def test_a_rank_outside_of_a_context_is_found() -> None:
    def program() -> str:
        try:
            if md.get_rank():
                md.all_reduce(torch.ones(1))
            else:
                for _ in md.uneven([1]):
                    md.all_reduce(torch.ones(1))
        except md.AgreementError as error:
            return error.found or ""
        return "no error"

    for text in md.simulate(program, 2):
        assert "rank 0: Join((256,) uint8)" in text
        assert "rank 1: all_reduce((1,) float32, SUM)" in text


# -- exceptions and ends --------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["simulated", "shm", "gloo"])
def test_an_exception_leaves_no_rank_waiting(wire: str, request: pytest.FixtureRequest) -> None:
    """Rank 0 has joined, rank 1 raises, rank 2 waits for rank 1 in a call."""

    def program() -> str:
        with md.uneven(range(2 * md.get_rank())) as turns:
            for turn in turns:
                md.all_reduce(torch.ones(1))
                if turn == 1 and md.get_rank() == 1:
                    raise ValueError("no batch")
        return "no error"

    def caught() -> str:
        try:
            return program()
        except (md.JoinError, ValueError) as error:
            return str(error)

    if wire == "simulated":
        first, second, third = md.simulate(caught, 3)
    else:
        begin = time.monotonic()
        first, second, third = request.getfixturevalue("pool").run(caught, 3, backend=wire)
        assert is_within(time.monotonic() - begin, 5.0)
    assert second == "no batch"
    for text in (first, third):
        assert "rank 1 has left the join context by an exception" in text
        assert "ValueError: no batch" in text


def test_an_exception_is_told_where_some_ranks_have_been_in_more_contexts() -> None:
    def program() -> str:
        half = [md.new_group([0, 1]), md.new_group([2, 3])][md.get_rank() // 2]
        for _ in range(2 if md.get_rank() < 2 else 0):
            for _ in md.uneven(range(2), half):
                md.all_reduce(torch.ones(1), group=half)
        with pytest.raises(RuntimeError) as error:
            loop()
        return str(error.value)

    def loop() -> None:
        with md.uneven(range(3 + md.get_rank())) as steps:
            for number in steps:
                if md.get_rank() == 0 and number == 1:
                    raise RuntimeError("no more")
                md.all_reduce(torch.ones(1))

    first, *others = md.simulate(program, 4)
    assert first == "no more"
    for text in others:
        assert "rank 0 has left the join context by an exception" in text


def test_ranks_that_all_leave_by_an_exception_can_go_on() -> None:
    def epoch(sums: list[float]) -> None:
        with md.uneven(range(3)) as turns:
            for turn in turns:
                x = torch.ones(1)
                md.all_reduce(x)
                sums.append(x.item())
                if turn:
                    raise KeyError

    def program() -> list[float]:
        sums: list[float] = []
        for _ in range(2):
            with pytest.raises(KeyError):
                epoch(sums)
        return sums

    assert md.simulate(program, 2) == [[2.0] * 4] * 2


def test_a_break_ends_the_data_of_a_context() -> None:
    def program() -> list[float]:
        sums = []
        with md.uneven(range(3)) as turns:
            for turn in turns:
                x = torch.ones(1)
                md.all_reduce(x)
                sums.append(x.item())
                if turn == md.get_rank():
                    break
        return sums

    assert md.simulate(program, 2) == [[2.0], [2.0, 1.0]]


def test_a_break_without_a_context_is_told_to_the_others() -> None:
    def program() -> str:
        try:
            for _ in md.uneven(range(3)):
                md.all_reduce(torch.ones(1))
                if md.get_rank() == 0:
                    break
        except md.JoinError as error:
            return str(error)
        return "no error"

    first, second = md.simulate(program, 2)
    assert first == "no error"
    assert "the loop over uneven(...) was left before its data had ended" in second


def test_an_exception_of_the_data_is_told_to_the_others() -> None:
    def batches() -> Any:
        yield 1
        if md.get_rank() == 0:
            raise OSError("the disk is gone")
        yield 2

    def program() -> str:
        try:
            for _ in md.uneven(batches()):
                md.all_reduce(torch.ones(1))
        except (md.JoinError, OSError) as error:
            return str(error)
        return "no error"

    first, second = md.simulate(program, 2)
    assert first == "the disk is gone"
    assert "OSError: the disk is gone" in second


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("dies_in_a_call", [True, False])
def test_a_killed_rank_frees_the_others(pool: Pool, backend: str, dies_in_a_call: bool) -> None:
    """Rank 0 has joined; rank 1 waits in a call, or has joined too."""

    def program() -> str:
        rank = md.get_rank()
        try:
            for turn in md.uneven(range([1, 1 + dies_in_a_call, 4][rank])):
                if rank == 2 and turn == 1:
                    time.sleep(0.3)
                    os.kill(os.getpid(), signal.SIGKILL)
                md.all_reduce(torch.ones(1))
        except md.MeshdistError as error:
            return str(error)
        return "no error"

    begin = time.monotonic()
    first, second, third = pool.outcomes(program, 3, backend=backend)
    assert is_within(time.monotonic() - begin, 8.0)
    assert isinstance(third, Failure)
    for text in (first, second):
        assert "rank 2" in text
        assert "no error" not in text
