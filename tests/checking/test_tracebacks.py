"""Errors of ours leave one frame of ours in their traceback, the innermost."""

from __future__ import annotations

import io
import pdb  # noqa: T100 - what a user does after an error
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.checking.call_sites import end_here, enter_program, is_between

ONE = torch.ones(1)


def frames(error: BaseException) -> Iterator[TracebackType]:
    below = error.__traceback__
    while below is not None:
        yield below
        below = below.tb_next


def ours(error: BaseException) -> list[bool]:
    """For each frame from the first of this test on, whether it is of ours."""
    return [is_between[one.tb_frame.f_code.co_filename] for one in frames(error)]


def mesh() -> md.DeviceMesh:
    return md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def under_mesh(call: Callable[[], Any]) -> Any:
    with mesh():
        return call()


WRONG = {
    "kind": lambda: md.all_reduce("x"),  # type: ignore[arg-type]
    "list": lambda: md.all_gather([ONE] * 3, ONE),
    "root": lambda: md.broadcast(ONE, src=9),
    "peer": lambda: md.recv(ONE, src=9),
    "scatter": lambda: md.scatter(ONE, [ONE]),
    "object": lambda: md.broadcast_object_list("x"),  # type: ignore[arg-type]
    "group": lambda: md.new_group([9]),
    "shape": lambda: md.init_device_mesh("cpu", (3, 2)),
    "ranks": lambda: md.DeviceMesh("cpu", [[0, 9]]),
    "slice": lambda: mesh()["xx"],
    "pattern": lambda: md.reshard(ONE, "a@dp -> b", mesh()),
    "shard": lambda: md.shard(ONE, "a -> b", mesh()),
    "axis": lambda: under_mesh(lambda: md.lax.psum(ONE, "xx")),
    "pairs": lambda: under_mesh(lambda: md.lax.ppermute(ONE, "dp", [(0, 9)])),
    "index": lambda: under_mesh(lambda: md.lax.axis_index("xx")),
    "no mesh": lambda: md.lax.psum(ONE, "dp"),
    "world": lambda: md.init_process_group(timeout="soon"),  # type: ignore[arg-type]
    "work": lambda: md.all_reduce(ONE, async_op=True).wait(-1),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_frame_is_ours_and_the_innermost(name: str) -> None:
    def program() -> list[bool]:
        try:
            WRONG[name]()
        except md.errors.MeshdistError as error:
            return ours(error)
        raise AssertionError("no error")

    for found in md.simulate(program, 4):
        assert found[-1]
        assert found.count(True) == 1


def stuck() -> None:
    if md.get_rank() == 0:
        md.all_reduce(ONE)


def disagree() -> None:
    md.all_reduce(torch.ones(1 + md.get_rank()))


def own() -> None:
    raise ValueError("mine")


@pytest.mark.parametrize(
    ("program", "kind", "innermost"),
    [
        (stuck, md.errors.DeadlockError, "all_reduce"),
        (disagree, md.errors.MismatchError, "all_reduce"),
        (own, ValueError, "own"),
    ],
)
def test_simulate_shows_the_programs_frames_below_its_own(
    program: Callable[[], None], kind: type[Exception], innermost: str
) -> None:
    with pytest.raises(kind) as caught:
        md.simulate(program, 2)
    names = [one.tb_frame.f_code.co_name for one in frames(caught.value)][1:]
    assert names == list(dict.fromkeys(["simulate", program.__name__, innermost]))


def test_pytest_hides_our_frames() -> None:
    with pytest.raises(md.errors.DeadlockError) as caught:
        md.simulate(stuck, 2)
    shown = caught.traceback.filter(caught)
    assert [entry.name for entry in shown][1:] == ["stuck"]


def test_one_up_in_the_debugger_shows_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(md.errors.DeadlockError) as caught:
        md.simulate(stuck, 2)
    typed, shown = io.StringIO("up\nquit\n"), io.StringIO()
    debugger = pdb.Pdb(stdin=typed, stdout=shown, nosigint=True, readrc=False)
    debugger.use_rawinput = False
    monkeypatch.setattr(sys, "last_traceback", caught.value.__traceback__, raising=False)
    debugger.reset()
    debugger.interaction(None, caught.value.__traceback__)
    assert "-> md.all_reduce(ONE)" in shown.getvalue().split("up", 1)[-1]


def test_at_level_detail_all_frames_stay() -> None:
    md.set_debug_level(md.DebugLevel.DETAIL)
    with pytest.raises(md.errors.NotInGroupError) as caught:
        md.simulate(WRONG["root"], 2)
    assert ours(caught.value).count(True) > 3


def test_frames_of_the_program_below_ours_stay() -> None:
    def fails(index: Any) -> torch.Tensor:
        raise md.errors.ArgumentError("from a callback")

    def program() -> None:
        sharding = md.NamedSharding(mesh(), md.PartitionSpec("dp"))
        md.make_array_from_callback((4,), sharding, fails)

    with pytest.raises(md.errors.ArgumentError) as caught:
        md.simulate(program, 4)
    assert [one.tb_frame.f_code.co_name for one in frames(caught.value)][-1] == "fails"


def test_an_error_without_a_traceback_is_left_alone() -> None:
    error = ValueError()
    end_here(error)
    enter_program(error)
    assert error.__traceback__ is None
