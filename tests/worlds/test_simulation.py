"""``simulate``: what a rank has of its own, what ends a run, and whole programs on it."""

from __future__ import annotations

import _thread
import io
import pdb  # noqa: T100 - a debugger inside a rank is what one test is about
import random
import sys
import threading
import time
import traceback
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.checkpoint import checkpoint

import meshdist as md
from meshdist.errors import (
    ArgumentError,
    DeadlockError,
    GroupClosedError,
    KindError,
    MismatchError,
    NotInitializedError,
    WorldError,
)
from tests.inner import find_world, get_world, registry
from tests.load import is_within


def sum_of_all(value: float) -> float:
    x = torch.tensor([value])
    md.all_reduce(x)
    return x.item()


# ---- the call ----------------------------------------------------------------------------------


def test_results_come_by_rank() -> None:
    def program(*args: Any, **kwargs: Any) -> Any:
        world = get_world()
        return world.rank, world.size, args, kwargs

    assert md.simulate(program, 3, ("a",), {"b": 1}) == [
        (rank, 3, ("a",), {"b": 1}) for rank in range(3)
    ]
    assert [rank for rank, *_ in md.simulate(program, (2, 3))] == list(range(6))
    assert md.simulate(program, ()) == [(0, 1, (), {})]


def test_the_world_of_a_rank() -> None:
    def program() -> None:
        world = get_world()
        assert (world.local_rank, world.local_size) == (world.rank, 2)
        assert (world.origin, world.is_one_host) == ("simulated", True)
        assert {world.backends[device] for device in ("cpu", "cuda", "mps")} == {"simulated"}

    md.simulate(program, 2)
    assert find_world() is None


@pytest.mark.parametrize(("ranks", "wrong"), [(0, 0), (-1, -1), ((2, 0), 0)])
def test_no_ranks_are_rejected(ranks: Any, wrong: int) -> None:
    with pytest.raises(ArgumentError) as caught:
        md.simulate(int, ranks)
    assert str(caught.value) == (
        f"the number of ranks of simulate is {wrong}\n"
        "  expected: an integer of 1 or more\n"
        "  fix:      call for example simulate(fn, 4) or simulate(fn, (2, 2))"
    )


@pytest.mark.parametrize(
    ("ranks", "wrong"),
    [
        (2.0, "2.0, a float"),
        ("2", "'2', a str"),
        (True, "True, a bool"),
        ([2, 2], "[2, 2], a list"),
        ((2, None), "None, a NoneType"),
    ],
)
def test_ranks_of_another_kind_are_rejected(ranks: Any, wrong: str) -> None:
    with pytest.raises(KindError) as caught:
        md.simulate(int, ranks)
    assert str(caught.value) == (
        "the number of ranks of simulate must be an integer\n"
        f"  found:    {wrong}\n"
        "  fix:      call for example simulate(fn, 4) or simulate(fn, (2, 2))"
    )


def test_a_result_in_place_of_the_function_is_rejected() -> None:
    with pytest.raises(KindError, match="simulate needs a function") as caught:
        md.simulate(3, 2)  # type: ignore[arg-type]
    assert caught.value.found == "3"


def test_arguments_are_copied_and_what_is_closed_over_is_shared() -> None:
    shared: list[int] = []
    tensor, nested = torch.zeros(2), {"list": [torch.zeros(1)]}

    def program(x: torch.Tensor, tree: Any, again: Any = None) -> int:
        assert again is tree["list"]  # objects given twice stay one object
        x += 1 + get_world().rank
        tree["list"].append(x)
        shared.append(get_world().rank)
        return int(x[0])

    assert md.simulate(program, 3, (tensor, nested), {"again": nested["list"]}) == [1, 2, 3]
    assert tensor.tolist() == [0.0, 0.0]
    assert nested == {"list": [torch.zeros(1)]}
    assert shared == [0, 1, 2]


def test_arguments_that_cannot_be_copied_are_told() -> None:
    x = torch.ones(1, requires_grad=True) * 2
    with pytest.raises(ArgumentError) as caught:
        md.simulate(lambda x: None, 2, (x,))
    text = str(caught.value)
    assert text.startswith("simulate() cannot copy its arguments for rank 0 of 2\n")
    assert "found:    RuntimeError: Only Tensors created explicitly by the user" in text
    assert text.endswith("or use a closure for objects that all ranks may share")


# ---- exceptions --------------------------------------------------------------------------------


def test_the_first_exception_is_raised_itself() -> None:
    class Mine(Exception):
        pass

    def program() -> None:
        if md.get_rank() == 2:
            raise Mine("no data")
        sum_of_all(1.0)

    with pytest.raises(Mine, match="no data") as caught:
        md.simulate(program, 4)
    assert caught.value.rank == 2  # type: ignore[attr-defined]
    text = "".join(traceback.format_exception(caught.value))
    assert "raised on simulated rank 2 of 4" in text
    assert 'raise Mine("no data")' in text


@pytest.mark.parametrize(("code", "call"), [(0, "sys.exit(0)"), (None, "sys.exit()")])
def test_a_rank_that_exits_in_good_order_has_returned(code: int | None, call: str) -> None:
    def alone() -> int:
        if md.get_rank() == 1:
            sys.exit(code)
        return md.get_rank()

    assert md.simulate(alone, 3) == [0, None, 2]
    assert md.simulate(lambda: sys.exit(code), 2) == [None, None]

    def missed() -> None:
        alone()
        sum_of_all(1.0)

    with pytest.raises(DeadlockError) as caught:
        md.simulate(missed, 3)
    assert f"rank 1: called {call}" in str(caught.value)
    assert "ranks 0, 2: waits in all_reduce((1,) float32, SUM) for rank 1;" in str(caught.value)


@pytest.mark.parametrize("code", [3, "no data"])
def test_a_rank_that_exits_with_a_code_ends_the_program_with_it(code: int | str) -> None:
    def program() -> None:
        if md.get_rank() == 1:
            sys.exit(code)
        sum_of_all(1.0)

    with pytest.raises(SystemExit) as caught:
        md.simulate(program, 2)
    assert caught.value.code == code
    assert caught.value.rank == 1  # type: ignore[attr-defined]


def test_an_exception_at_the_end_of_a_world_is_told_unless_the_program_failed() -> None:
    def program(fails: bool) -> None:
        def close() -> None:
            raise OSError("from a closer")

        get_world().closers.append(close)
        if fails:
            raise ValueError("from the program")

    with pytest.raises(OSError, match="from a closer"):
        md.simulate(program, 1, (False,))
    with pytest.raises(ValueError, match="from the program"):
        md.simulate(program, 1, (True,))


def test_the_world_of_a_rank_that_returned_is_closed() -> None:
    kept: list[Any] = []
    md.simulate(lambda: kept.append(get_world()), 2)
    assert [world.is_closed for world in kept] == [True, True]
    with pytest.raises(GroupClosedError):
        kept[0].check_usable()


def test_deadlock_of_collectives() -> None:
    def program() -> None:
        if md.get_rank() == 1:
            md.recv(torch.zeros(2), src=0)
        else:
            md.barrier()

    with pytest.raises(DeadlockError) as caught:
        md.simulate(program, 3)
    line = program.__code__.co_firstlineno
    assert caught.value.found == (
        f"ranks 0, 2: waits in barrier() for rank 1; call 1 on the world (ranks 0-2), "
        f"called at {__file__}:{line + 4} in program\n"
        f"rank 1: waits in recv((2,) float32, from rank 0) on the world (ranks 0-2), "
        f"called at {__file__}:{line + 2} in program"
    )


def test_a_forgotten_call_is_told_with_how_many_each_has_made() -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        for _ in range((3, 2, 3, 1)[md.get_rank()]):
            md.all_reduce(torch.ones(2), group=mesh["dp"])

    with pytest.raises(DeadlockError) as caught:
        md.simulate(program, 4)
    found = str(caught.value.found)
    assert "ranks 0-2: waits in all_reduce((2,) float32, SUM) for rank 3, which made 1;" in found
    assert "rank 3: returned" in found

    def forgets() -> None:
        for _ in range(2 if md.get_rank() == 1 else 3):
            md.barrier()

    with pytest.raises(DeadlockError) as caught:
        md.simulate(forgets, 4)
    assert caught.value.found.startswith(
        "ranks 0, 2-3: waits in barrier() for rank 1, which made 2; call 3 on the world"
    )


def test_collectives_in_different_orders_are_told_with_both_places() -> None:
    def program() -> None:
        x = torch.ones(2)
        if md.get_rank() == 0:
            md.broadcast(x, src=0)
        md.all_reduce(x)

    with pytest.raises(MismatchError) as caught:
        md.simulate(program, 2)
    line = program.__code__.co_firstlineno
    assert caught.value.found == (
        f"rank 0: broadcast((2,) float32, root rank 0) at {__file__}:{line + 3} in program\n"
        f"rank 1: all_reduce((2,) float32, SUM) at {__file__}:{line + 4} in program"
    )


def test_a_mesh_that_differs_is_told() -> None:
    def program() -> None:
        md.init_device_mesh("cpu", (2, 2) if md.get_rank() < 3 else (4, 1))

    with pytest.raises(MismatchError, match="do not define the same mesh"):
        md.simulate(program, 4)


def test_a_thread_of_the_program_that_calls_a_collective() -> None:
    def program() -> list[str]:
        group = md.new_group()
        texts = []

        def call(**kwargs: Any) -> None:
            try:
                md.barrier(**kwargs)
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")

        for kwargs in ({}, {"group": group}):
            thread = threading.Thread(target=call, kwargs=kwargs)
            thread.start()
            thread.join()
        return texts

    for rank, (without, given_group) in enumerate(md.simulate(program, 2)):
        assert without.startswith(
            f"{NotInitializedError.__name__}: the process group has not been initialized"
        )
        assert given_group.startswith(
            f"{WorldError.__name__}: simulated rank {rank} was used from another thread"
        )


@pytest.mark.parametrize("where", ["in a collective", "in a loop", "in an inner simulation"])
def test_ctrl_c_ends_all_ranks(where: str) -> None:
    ended: list[int] = []

    def program() -> None:
        rank = md.get_rank()
        try:
            if rank == 0:
                md.barrier()
            _thread.interrupt_main()  # what Ctrl-C does
            if where == "in an inner simulation":
                md.simulate(loop, 2)
            loop()
        finally:
            ended.append(rank)

    def loop() -> None:
        again = time.monotonic() + 10
        while True:
            if where == "in a collective":
                md.all_reduce(torch.ones(1), group=alone[0])
            if time.monotonic() > again:  # Python drops an interrupt inside a weakref's callback
                again += 10
                _thread.interrupt_main()

    def open_alone() -> None:
        alone.append(md.new_group([md.get_rank()]))
        program()

    alone: list[Any] = []
    before = threading.enumerate()
    with pytest.raises(KeyboardInterrupt):
        md.simulate(open_alone if where == "in a collective" else program, 3)
    assert set(ended) <= {0, 1, 2}
    assert {0, 1} <= set(ended)
    assert threading.enumerate() == before


# ---- what simulated ranks are for --------------------------------------------------------------


def test_runs_repeat_exactly() -> None:
    def run() -> tuple[list[Any], list[Any]]:
        trace: list[Any] = []

        def program() -> list[float]:
            rank = md.get_rank()
            x = torch.randn(3) + float(np.random.rand()) + random.random()
            for step in range(4):
                trace.append((rank, step, x[0].item()))
                if (rank + step) % 2:
                    md.all_reduce(torch.ones(1), group=md.group.WORLD)
                else:
                    md.all_reduce(torch.ones(1), async_op=True).wait()
                x += torch.randn(3)
            md.all_reduce(x)
            return x.tolist()

        return md.simulate(program, 4), trace

    assert run() == run()


def test_replicas_seeded_alike_stay_alike_between_collectives() -> None:
    def program() -> list[float]:
        torch.manual_seed(3)
        drawn = []
        for _ in range(5):
            drawn.append(torch.rand(1).item())
            md.barrier()
        return drawn

    torch.manual_seed(3)
    assert md.simulate(program, 3) == [[torch.rand(1).item() for _ in range(5)]] * 3


def test_unseeded_replicas_differ_as_processes_do() -> None:
    def program() -> tuple[float, float, float]:
        return torch.rand(1).item(), float(np.random.rand()), random.random()

    drawn = md.simulate(program, 3)
    assert len(set(drawn)) == 3


def test_the_backward_runs_and_communicates_on_the_thread_of_the_rank() -> None:
    threads: dict[int, list[int]] = {}

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            total = x.clone()
            md.all_reduce(total)
            return total

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            threads.setdefault(md.get_rank(), []).append(threading.get_ident())
            total = grads[0].clone()
            md.all_reduce(total)
            return total

    def program() -> list[float]:
        rank = md.get_rank()
        threads[rank] = [threading.get_ident()]
        x = torch.tensor([1.0 + rank], requires_grad=True)
        for reentrant in (False, True):
            y = checkpoint(Summed.apply, x, use_reentrant=reentrant)
            (y * (rank + 1)).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert md.simulate(program, 3) == [[12.0]] * 3  # twice 1 + 2 + 3
    for seen in threads.values():
        assert len(seen) == 3
        assert len(set(seen)) == 1


def test_grad_mode_and_contexts_belong_to_the_rank() -> None:
    def program() -> tuple[bool, bool]:
        before = torch.is_grad_enabled()
        with torch.set_grad_enabled(md.get_rank() == 0):
            md.barrier()
            return before, torch.is_grad_enabled()

    with torch.no_grad():
        assert md.simulate(program, 2) == [(True, True), (True, False)]


def test_sixty_four_ranks() -> None:
    def program() -> tuple[float, float]:
        rank, size = md.get_rank(), md.get_world_size()
        total = sum_of_all(float(rank))
        x = torch.tensor([float(rank)])
        for _ in range(3):  # a ring, receives started first
            y = torch.empty(1)
            receive = md.irecv(y, src=(rank - 1) % size)
            md.send(x, dst=(rank + 1) % size)
            receive.wait()
            x = y
        return total, x.item()

    started = time.perf_counter()
    results = md.simulate(program, (8, 8))
    assert results == [(2016.0, float((rank - 3) % 64)) for rank in range(64)]
    assert is_within(time.perf_counter() - started, 5)


def test_two_members_talk_while_the_third_is_busy() -> None:
    def program() -> float:
        rank = md.get_rank()
        x = torch.tensor([float(rank)])
        if rank < 2:
            other = torch.empty(1)
            receive = md.irecv(other, src=1 - rank)
            md.send(x, dst=1 - rank)
            receive.wait()
            x = other
        md.all_reduce(x)
        return x.item()

    assert md.simulate(program, 3) == [3.0] * 3


def test_meshes_and_their_axes() -> None:
    def program() -> tuple[float, float, float]:
        mesh = md.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        sums = []
        for axis in ("dp", "tp", ("dp", "tp")):
            x = torch.tensor([float(md.get_rank())])
            md.all_reduce(x, group=mesh[axis])
            sums.append(x.item())
        return tuple(sums)  # type: ignore[return-value]

    grid = np.arange(6.0).reshape(2, 3)
    assert md.simulate(program, (2, 3)) == [
        (grid[:, tp].sum(), grid[dp].sum(), 15.0) for dp in range(2) for tp in range(3)
    ]


def test_init_process_group_adopts_the_simulated_world() -> None:
    def program() -> float:
        md.init_process_group("nccl")
        total = sum_of_all(1.0)
        md.destroy_process_group()
        return total

    assert md.simulate(program, 2) == [2.0, 2.0]


def test_simulate_inside_a_simulated_rank() -> None:
    def inner(offset: float) -> float:
        return sum_of_all(offset + md.get_rank())

    def program() -> tuple[float, ...]:
        torch.manual_seed(0)
        before = torch.rand(1).item()
        results = md.simulate(inner, 2, (10.0 * md.get_rank(),))
        torch.manual_seed(0)
        assert torch.rand(1).item() == before
        return (*results, sum_of_all(float(md.get_rank())))

    assert md.simulate(program, 3) == [(1.0, 1.0, 3.0), (21.0, 21.0, 3.0), (41.0, 41.0, 3.0)]


def test_an_inner_rank_cannot_use_an_outer_group() -> None:
    def program() -> None:
        group = md.new_group()
        md.simulate(lambda: md.barrier(group=group), 2)

    with pytest.raises(WorldError, match="was used from another thread"):
        md.simulate(program, 2)


def test_breakpoint_stops_one_rank_and_nobody_else_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = io.StringIO()
    stops: list[int] = []
    others: list[int] = []

    def program() -> int:
        rank = md.get_rank()
        md.barrier()
        if rank == 1:
            breakpoint()  # noqa: T100
        others.append(rank)
        md.barrier()
        return rank

    def stop() -> None:
        stops.append(len(others))
        debugger = pdb.Pdb(stdin=io.StringIO("p rank * 111\ncontinue\n"), stdout=output)
        debugger.use_rawinput = False
        debugger.set_trace(sys._getframe(1))

    monkeypatch.setattr(sys, "breakpointhook", stop)
    traced = sys.gettrace()
    assert md.simulate(program, 3) == [0, 1, 2]
    assert sys.gettrace() is traced
    assert "111" in output.getvalue()
    assert len(stops) == 1


def test_no_thread_and_no_state_is_left() -> None:
    before = threading.enumerate()
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()

    def program() -> None:
        md.init_device_mesh("cpu", (2,))
        torch.rand(1), np.random.rand(), random.random()
        sum_of_all(1.0)

    md.simulate(program, 2)
    assert threading.enumerate() == before
    assert torch.equal(torch.get_rng_state(), state[0])
    assert np.random.get_state()[1].tolist() == state[1]
    assert random.getstate() == state[2]


@settings(max_examples=10)
@given(st.lists(st.integers(-100, 100), min_size=1, max_size=5))
def test_inside_hypothesis(values: list[int]) -> None:
    def program() -> int:
        x = torch.tensor(values[md.get_rank()])
        md.all_reduce(x)
        return int(x)

    assert md.simulate(program, len(values)) == [sum(values)] * len(values)


@pytest.mark.parametrize("wrong", [3, "ab", torch.ones(2)])
def test_args_are_a_tuple(wrong: object) -> None:
    with pytest.raises(md.KindError, match=r"args must be a tuple\n(.|\n)*pass args=\(x,\)"):
        md.simulate(print, 2, wrong)


def test_ranks_take_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "raise_descriptor_limit", lambda number: f"{number} are too many")

    def program() -> float:
        mesh = md.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        x = torch.ones(1)
        for group in (None, mesh["tp"], md.new_group([0, 2, 4])):
            if group is None or md.get_rank(group) >= 0:
                md.all_reduce(x, group=group)
        return x.item()

    assert len(md.simulate(program, 6)) == 6


def test_ranks_beside_others_are_rejected() -> None:
    told: list[str] = []

    def beside() -> None:
        try:
            md.simulate(print, 2)
        except WorldError as error:
            told.append(str(error))

    def program() -> None:
        if md.get_rank() == 0:
            thread = threading.Thread(target=beside, name="beside")
            thread.start()
            thread.join()

    md.simulate(program, 2)
    assert told == [
        "another thread simulates ranks in this process\n"
        "  where:    thread 'beside'\n"
        "  expected: one simulate() call at a time, because its ranks use the process's random "
        "generators\n"
        "  fix:      call simulate() after the other call has returned, inside one of its ranks, "
        "or in another process"
    ]
    assert md.simulate(md.get_rank, 2) == [0, 1]
