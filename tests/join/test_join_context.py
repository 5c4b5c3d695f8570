"""Join contexts: hooks run as in torch, and a collective that no hook makes raises everywhere."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.errors import ArgumentError, BackendError, JoinError, KindError
from tests.load import is_within
from tests.pool import Failure, Pool

Run = Callable[..., list[Any]]


class Counter(md.Joinable):
    """Counts the inputs of all ranks, as the example of torch's documentation does."""

    def __init__(self, group: Any = None, device: str = "cpu") -> None:
        super().__init__()
        self.group = group
        self.device = torch.device(device)
        self.count = torch.zeros(1)
        self.most = 0.0
        self.is_last: bool | None = None
        self.num_main_hooks = 0
        self.given: dict[str, Any] = {}

    def step(self) -> None:
        work = md.Join.notify_join_context(self)
        if work is not None:
            assert work.wait()
        ones = torch.ones(1)
        md.all_reduce(ones, group=self.group)
        self.count += ones

    def join_hook(self, **kwargs: Any) -> md.JoinHook:
        self.given = kwargs
        return CounterHook(self, kwargs.get("sync_max_count", True))

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        return self.group


class CounterHook(md.JoinHook):
    def __init__(self, counter: Counter, sync: bool) -> None:
        self.counter = counter
        self.sync = sync

    def main_hook(self) -> None:
        self.counter.num_main_hooks += 1
        md.all_reduce(torch.zeros(1), group=self.counter.group)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.counter.is_last = is_last_joiner
        if self.sync:
            mine = torch.tensor([float(md.get_rank()) if is_last_joiner else -1.0])
            md.all_reduce(mine, md.ReduceOp.MAX, self.counter.group)
            most = self.counter.count.clone()
            md.broadcast(most, src=int(mine), group=self.counter.group)
            self.counter.most = most.item()


def counted(num_steps: list[int], num_joinables: int) -> list[tuple[Any, ...]]:
    counters = [Counter() for _ in range(num_joinables)]
    with md.Join(counters, sync_max_count=num_joinables == 1):
        for _ in range(num_steps[md.get_rank()]):
            for counter in counters:
                counter.step()
    total = torch.ones(1)
    md.all_reduce(total)
    assert total == len(num_steps)
    return [(c.count.item(), c.most, c.is_last, c.num_main_hooks) for c in counters]


@pytest.mark.parametrize("num_joinables", [1, 3])
@pytest.mark.parametrize("num_steps", [[2], [5, 6, 7], [0, 4], [0, 5, 2, 5, 1], [0, 0], [3, 3]])
def test_the_counter_of_torchs_documentation(
    run: Run, num_steps: list[int], num_joinables: int
) -> None:
    longest = max(num_steps)
    active = [sum(num > step for num in num_steps) for step in range(longest)]
    total = float(sum(num_steps)) if num_joinables == 1 else 0.0
    for num, found in zip(
        num_steps, run(counted, len(num_steps), num_steps, num_joinables), strict=True
    ):
        expected = (float(sum(active[:num])), total, num == longest, longest - num)
        assert found == [expected] * num_joinables


def test_arguments_are_passed_to_each_hook() -> None:
    def program() -> list[dict[str, Any]]:
        counters = [Counter(), Counter()]
        md.Join(counters, sync_max_count=False, anything=3)
        return [counter.given for counter in counters]

    assert md.simulate(program, 2) == [[{"sync_max_count": False, "anything": 3}] * 2] * 2


class Sharded(md.Joinable):
    """Steps as ZeroRedundancyOptimizer does: each rank updates one weight and broadcasts it."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.weights = weights

    def step(self) -> None:
        md.Join.notify_join_context(self)
        with torch.no_grad():
            mine = self.weights[md.get_rank()]
            mine.sub_(0.5 * mine.grad)
            for rank, weight in enumerate(self.weights):
                md.broadcast(weight.data, src=rank)

    def join_hook(self, **kwargs: Any) -> md.JoinHook:
        class Hook(md.JoinHook):
            def main_hook(hook) -> None:
                self.step()

        return Hook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return md.group.WORLD


def test_a_custom_optimizer_after_a_model(run: Run) -> None:
    """A rank that joined still updates its weight, by the averages of the other ranks."""

    def program() -> list[float]:
        layers = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        for layer in layers:
            nn.init.ones_(layer.weight)
        model = md.DDP(nn.Sequential(*layers))
        optimizer = Sharded([layer.weight for layer in layers])
        with md.Join([model, optimizer]):
            for _ in range(1 + md.get_rank()):
                model.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
        return [layer.weight.item() for layer in layers]

    # The first step makes both 0.5; then rank 1 alone brings gradients of 0.5, averaged 0.25.
    assert run(program, 2) == [[0.375, 0.375]] * 2


# -- throw_on_early_termination -------------------------------------------------------------------


def test_throwing_ends_the_loop_on_all_ranks(run: Run) -> None:
    def program() -> tuple[str, int, float]:
        counter, turns = Counter(), 0
        try:
            with md.Join([counter], throw_on_early_termination=True):
                for _ in range(2 + md.get_rank()):
                    counter.step()
                    turns += 1
        except RuntimeError as error:
            x = torch.ones(1)
            md.all_reduce(x)  # the group can still be used
            return str(error), turns, x.item()
        return "no error", turns, 0.0

    for rank, (text, turns, total) in enumerate(run(program, 3)):
        assert (turns, total) == (2, 3.0)
        assert text == (
            "rank 0 ran out of data before the other ranks\n"
            f"  where:    rank {rank}, the world\n"
            "  expected: the same number of steps on every rank, because "
            "throw_on_early_termination=True\n"
            "  fix:      give every rank the same number of batches, or drop the argument"
        )


def test_throwing_does_nothing_if_all_ranks_have_equally_many_steps(run: Run) -> None:
    def program() -> float:
        counter = Counter()
        with md.Join([counter], throw_on_early_termination=True):
            for _ in range(2):
                counter.step()
        return counter.count.item()

    assert run(program, 2) == [4.0, 4.0]


# -- calls that no hook makes ---------------------------------------------------------------------


def unserved(place: str) -> str:
    """Rank 0 joins; return the error of a call of the others that no hook makes."""
    counter, pair = Counter(), md.new_group([0, 1])
    me = md.get_rank()
    x = torch.ones(3)
    if me < 2:
        md.all_reduce(x, group=pair)
    try:
        with md.Join([counter]):
            for _ in range(2 if me else 1):
                if place == "before the step":
                    md.all_reduce(x)
                if place == "like the flags":
                    md.all_reduce(torch.ones(md.get_world_size(), dtype=torch.int32))
                if place == "on another group" and me < 2:
                    md.all_reduce(x, group=pair)
                counter.step()
                if place == "after the step":
                    md.broadcast(x, src=1)
                if place == "objects":
                    md.all_gather_object([None] * md.get_world_size(), me)
    except JoinError as error:
        return str(error)
    except BackendError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("before the step", "all_reduce((3,) float32, SUM) at"),
        ("like the flags", "int32, SUM) at"),
        ("on another group", "all_reduce((3,) float32, SUM)"),
        ("after the step", "broadcast((3,) float32, root rank 1)"),
        ("objects", "all_gather_object("),
    ],
)
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_a_call_that_no_hook_makes_raises_on_all_ranks(
    run: Run, size: int, place: str, call: str
) -> None:
    begin = time.monotonic()
    found = run(unserved, size, place)
    assert is_within(time.monotonic() - begin, 20.0)
    for text in found:
        assert text.startswith(
            "a rank that joined does not make this call, because no joinable of the context has a "
            "hook for it\n"
        )
        assert call in text
        assert "fix:      loop over md.uneven(loader, mesh) without Join; or make" in text


def test_a_hook_that_makes_too_many_calls_raises_on_all_ranks(run: Run) -> None:
    class Wrong(Counter):
        def step(self) -> None:
            md.Join.notify_join_context(self)

    def program() -> str:
        counter = Wrong()
        try:
            with md.Join([counter]):
                for _ in range(md.get_rank()):
                    counter.step()
        except JoinError as error:
            return str(error)
        return "no error"

    for text in run(program, 2):
        assert "all_reduce((1,) float32, SUM) at" in text
        assert "md.Join (which ranks have data)" in text


def test_ranks_that_differ_before_any_joins_raise_as_outside(run: Run) -> None:
    def program() -> str:
        counter = Counter()
        try:
            with md.Join([counter]):
                for _ in range(2):
                    counter.step()
                    md.all_reduce(torch.ones(1 + md.get_rank()))
        except md.errors.MismatchError as error:
            return str(error)
        return "no error"

    for text in run(program, 2):
        assert "all_reduce((2,) float32, SUM)" in text


# -- ranks that leave -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("joins", [False, True])
def test_a_killed_rank_frees_the_others(pool: Pool, backend: str, joins: bool) -> None:
    """Rank 1 ends after it joined, in a hook, or in its loop."""

    class Dying(Counter):
        def join_hook(self, **kwargs: Any) -> md.JoinHook:
            class Hook(md.JoinHook):
                def main_hook(hook) -> None:
                    os._exit(3)

            return Hook() if md.get_rank() == 1 else super().join_hook(**kwargs)

    def program() -> tuple[str, float]:
        counter = Dying()
        begin = time.monotonic()
        try:
            with md.Join([counter]):
                for turn in range(2 if md.get_rank() == 1 and joins else 5):
                    if turn == 3 and md.get_rank() == 1:
                        os._exit(3)
                    counter.step()
        except md.MeshdistError as error:
            return str(error), time.monotonic() - begin
        return "no error", 0.0

    first, died, third = pool.outcomes(program, 3, backend=backend)
    assert isinstance(died, Failure)
    for text, seconds in (first, third):
        assert "rank 1" in text
        assert is_within(seconds, 15.0)


def test_an_exception_passes_and_no_hook_runs(run: Run) -> None:
    def program() -> tuple[Any, ...]:
        counter = Counter()
        with suppress(KeyError), md.Join([counter]):
            counter.step()
            raise KeyError
        counter.step()  # outside of the context
        return counter.is_last, counter.count.item()

    assert run(program, 2) == [(None, 4.0)] * 2


def test_the_exception_of_one_rank_does_not_hang_the_others(run: Run) -> None:
    """Rank 1 leaves by an exception that it catches, and goes on with another call."""

    def program() -> str:
        counter = Counter()
        try:
            with md.Join([counter]):
                for turn in range(3 - md.get_rank()):
                    if turn == 1 and md.get_rank() == 1:
                        raise KeyError
                    counter.step()
        except KeyError:
            try:
                md.barrier()
            except md.MeshdistError as error:
                return str(error)
        except md.MeshdistError as error:
            return str(error)
        return "no error"

    for text in run(program, 3):
        assert "barrier()" in text


# -- arguments ------------------------------------------------------------------------------------


def test_an_object_serves_one_context_after_the_other(run: Run) -> None:
    def program() -> list[float]:
        counter = Counter()
        context = md.Join([counter])
        found = []
        for _ in range(3):
            with context:
                for _ in range(1 + md.get_rank()):
                    counter.step()
            found.append(counter.most)
        return found

    assert run(program, 2) == [[3.0, 6.0, 9.0]] * 2


def test_a_context_that_is_not_enabled_does_nothing() -> None:
    def program() -> tuple[Any, ...]:
        counter = Counter()
        with md.Join([counter], enable=False), md.Join([counter], enable=False):
            counter.step()
        return counter.count.item(), counter.is_last

    assert md.simulate(program, 2) == [(2.0, None)] * 2


def refusal(*joinables: Any) -> str:
    with pytest.raises(ArgumentError) as caught:
        md.Join(list(joinables))
    return str(caught.value)


def test_no_joinable_raises() -> None:
    text = md.simulate(refusal, 2)[0]
    assert "Join needs at least one joinable that uses a group of meshdist" in text
    assert "found:    an empty list" in text
    assert "pass the model, too: Join([model, optimizer]); for other loops use md.uneven" in text


@pytest.mark.parametrize(
    ("make", "found", "fix"),
    [
        (lambda: md.DDP(nn.Linear(1, 1)), "DistributedDataParallel", "Join([model])"),
        (lambda: None, "NoneType", "Join([model])"),
        (lambda: [nn.Linear(1, 1)], "Linear", "Join([DDP(module)])"),
    ],
)
def test_other_objects_than_joinables_raise(make: Any, found: str, fix: str) -> None:
    def program() -> str:
        with pytest.raises(KindError) as caught:
            md.Join(make())
        return str(caught.value)

    for text in md.simulate(program, 2):
        assert f"Join cannot use an object of type {found}\n  expected: " in text
        assert fix in text


def test_two_groups_raise() -> None:
    def program() -> str:
        return refusal(Counter(), Counter(md.new_group([0, 1], group_desc="another")))

    text = md.simulate(program, 2)[0]
    assert "Join cannot use joinables of different groups" in text
    assert "found:    the world and " in text


def test_two_devices_raise() -> None:
    text = md.simulate(lambda: refusal(Counter(), Counter(device="meta")), 2)[0]
    assert "Join cannot use joinables of different devices" in text
    assert "found:    cpu and meta" in text


def test_a_joinable_cannot_be_in_two_contexts() -> None:
    def program() -> str:
        counter = Counter()
        with pytest.raises(ArgumentError) as caught, md.Join([counter]), md.Join([counter]):
            pass
        return str(caught.value)

    for rank, text in enumerate(md.simulate(program, 2)):
        assert text == (
            "a joinable cannot be in two join contexts\n"
            f"  where:    rank {rank}, the world\n"
            "  expected: one join context at a time\n"
            "  fix:      pass all joinables to one context: Join([first, second])"
        )


def test_a_late_rank_is_not_taken_for_a_stuck_one(pool: Pool) -> None:
    """Rank 1 is slow while rank 0, which joined, waits; rank 2 waits for it on another group."""

    def program() -> float:
        counter, pair = Counter(), md.new_group([1, 2])
        with md.Join([counter]):
            for _ in range(0 if md.get_rank() == 0 else 2):
                if md.get_rank() == 1:
                    time.sleep(5.0)
                if md.get_rank():
                    md.all_reduce(torch.ones(1), group=pair)
                counter.step()
        return counter.count.item()

    assert pool.run(program, 3, timeout_s=timedelta(seconds=60).total_seconds()) == [0.0, 4.0, 4.0]


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.soak)])
def test_a_rank_that_left_the_context_is_not_taken_for_a_stuck_one(
    pool: Pool, backend: str
) -> None:
    """Rank 0 cannot answer till it has left, and then waits on another group for slow rank 1."""

    def program() -> float:
        counter, pair = Counter(), md.new_group([0, 1])
        total = torch.ones(1)
        with md.Join([counter]):
            if md.get_rank() == 0:
                counter.step()
                ctypes.PyDLL(None).usleep(4_300_000)  # no other thread runs
                counter.step()
        if md.get_rank() == 1:
            time.sleep(2.0)
        if md.get_rank() < 2:
            md.all_reduce(total, group=pair)
            md.destroy_process_group(pair)
        return total.item()

    assert pool.run(program, 3, backend=backend) == [2.0, 2.0, 1.0]
