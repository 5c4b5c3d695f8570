"""The join context around joinables: hooks run as in torch, and bad input is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.errors import ArgumentError, KindError
from tests.mpi_job import job_of


class Counter(md.Joinable):
    """Counts the inputs of all ranks, as the example of torch's documentation does."""

    def __init__(self, group: Any = None, device: str = "cpu") -> None:
        super().__init__()
        self.group = group
        self.device = torch.device(device)
        self.count = torch.zeros(1)
        self.most = 0.0
        self.num_working: list[float] = []

    def step(self, between: Callable[[], object] = lambda: None) -> None:
        work = md.Join.notify_join_context(self)
        if work is not None:
            assert work.wait()
            self.num_working.append(work.result()[0].item())
        between()
        ones = torch.ones(1)
        md.all_reduce(ones, group=self.group)
        self.count += ones

    def join_hook(self, **kwargs: Any) -> md.JoinHook:
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
        self.is_last: bool | None = None

    def main_hook(self) -> None:
        md.all_reduce(torch.zeros(1), group=self.counter.group)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.counter.is_last = is_last_joiner  # type: ignore[attr-defined]
        if self.sync:
            mine = torch.tensor([float(md.get_rank()) if is_last_joiner else -1.0])
            md.all_reduce(mine, md.ReduceOp.MAX, self.counter.group)
            most = self.counter.count.clone()
            md.broadcast(most, src=int(mine), group=self.counter.group)
            self.counter.most = most.item()


def test_the_counter_of_torchs_documentation() -> None:
    def program() -> tuple[Any, ...]:
        counter = Counter()
        with md.Join([counter]):
            for _ in range(5 + md.get_rank()):
                counter.step()
        return counter.count.item(), counter.most, counter.is_last, counter.num_working[-1]

    found = md.simulate(program, 3)
    assert found == [(15.0, 18.0, False, 3.0), (17.0, 18.0, False, 2.0), (18.0, 18.0, True, 1.0)]


def averages(num_steps: list[int], *, sleeps: bool) -> tuple[list[float], list[float], bool | None]:
    """How many had data at each step; the averages over those; whether this rank was last."""
    rank = md.get_rank()
    counter, averages = Counter(), []
    with md.Join([counter], sync_max_count=False):
        for turn in range(num_steps[rank]):
            if sleeps and turn == rank:  # the others are there before it
                time.sleep(0.05)
            work = md.Join.notify_join_context(counter)
            assert work is not None
            work.wait()
            x = torch.tensor([rank + 1.0])
            md.all_reduce(x)
            counter.num_working.append(work.result()[0].item())
            averages.append(x.item() / counter.num_working[-1])
    return counter.num_working, averages, counter.is_last  # type: ignore[attr-defined]


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize(
    "wire", ["simulated", "shm", "gloo", pytest.param("mpi", marks=pytest.mark.mpi)]
)
@pytest.mark.parametrize("num_steps", [[1, 3], [4, 1, 2], [0, 5, 2, 5, 1]])
def test_members_with_data_know_who_has_joined_before_they_divide(
    wire: str, num_steps: list[int], sleeps: bool, request: pytest.FixtureRequest
) -> None:
    """Those that join later say so, too, in the first call that they answer."""
    size = len(num_steps)
    if wire == "simulated":
        found = md.simulate(lambda: averages(num_steps, sleeps=False), size)
    elif wire == "mpi":
        job = job_of(request.getfixturevalue("pool"), size)
        found = job.run_in_world(partial(averages, sleeps=sleeps), num_steps)
    else:
        program = partial(averages, sleeps=sleeps)
        found = request.getfixturevalue("pool").run(program, size, num_steps, backend=wire)
    going = [[rank for rank in range(size) if num_steps[rank] > turn] for turn in range(5)]
    for rank, (num_working, mine, is_last) in enumerate(found):
        turns = going[: num_steps[rank]]
        assert num_working == [float(len(those)) for those in turns]
        assert mine == [sum(one + 1.0 for one in those) / len(those) for those in turns]
        assert is_last is (num_steps[rank] == max(num_steps))


def test_a_notice_is_a_call_of_the_verb_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    handle = md.Join.handle

    def watched(self: md.Join, call: Any, at_work: Sequence[bool]) -> None:
        seen.append((call.verb, call.owner, call.data, list(at_work)))
        handle(self, call, at_work)

    monkeypatch.setattr(md.Join, "handle", watched)
    md.simulate(lambda: averages([2, 0], sleeps=False), 2)
    assert seen == [("notice", "0:iteration", None, [True, False])] * 2


def test_ranks_that_join_together_are_all_last() -> None:
    def program() -> Any:
        counter = Counter()
        with md.Join([counter], sync_max_count=False):
            for _ in range(3 if md.get_rank() else 2):
                counter.step()
        return counter.is_last, counter.most

    assert md.simulate(program, 3) == [(False, 0.0), (True, 0.0), (True, 0.0)]


@pytest.mark.parametrize("place", ["before", "between", "behind"])
@pytest.mark.parametrize("wire", ["simulated", "shm"])
def test_hooks_that_call_and_verbs_that_none_knows_mix(
    wire: str, place: str, request: pytest.FixtureRequest
) -> None:
    """A verb beside the joinable's own: a rank that has joined is in its hook or not."""

    def program() -> list[float]:
        counter, maxima = Counter(), []
        with md.Join([counter]):
            for turn in range(1 + md.get_rank()):
                biggest = torch.tensor([turn])

                def find_biggest(biggest: torch.Tensor = biggest) -> None:
                    md.all_reduce(biggest, md.ReduceOp.MAX)

                if place == "before":
                    find_biggest()
                counter.step(find_biggest if place == "between" else lambda: None)
                if place == "behind":
                    find_biggest()
                md.barrier()
                maxima.append(float(biggest))
        return [counter.count.item(), *maxima]

    if wire == "simulated":
        found = md.simulate(program, 3)
    else:
        found = request.getfixturevalue("pool").run(program, 3, backend=wire)
    assert found == [[3.0, 0.0], [5.0, 0.0, 1.0], [6.0, 0.0, 1.0, 2.0]]


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


def test_a_sharded_optimizer_beside_a_model() -> None:
    """A joined rank still owns its weight: its hook updates it by the gradient that it kept."""

    def program() -> list[float]:
        layers = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        for layer in layers:
            nn.init.ones_(layer.weight)
        model = md.DDP(nn.Sequential(*layers))
        weights = [layer.weight for layer in layers]
        optimizer = Sharded(weights)
        with md.Join([model, optimizer]):
            for _ in range(1 + md.get_rank()):
                model.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
        return [weight.item() for weight in weights]

    first, second = md.simulate(program, 2)
    assert first == second
    # The first step halves both. In the second rank 1's gradients are halved: rank 0 has none.
    assert second[1] == pytest.approx(0.5 - 0.5 * 0.5 * 0.5)
    assert second[0] == 0.0  # by the first step's gradient, 1


def test_a_hook_that_calls_what_no_rank_with_data_calls_is_refused() -> None:
    class Wrong(Counter):
        def step(self, between: Callable[[], object] = lambda: None) -> None:
            md.Join.notify_join_context(self)

    def program() -> str:
        counter = Wrong()
        try:
            with md.Join([counter]):
                for _ in range(md.get_rank()):
                    counter.step()
        except md.JoinError as error:
            return str(error)
        return "no error"

    for text in md.simulate(program, 2):
        assert "all_reduce((1,) float32, SUM) is called on ranks that have joined alone" in text
        assert "call in main_hook what the joinable calls in one step, in this order" in text


@pytest.mark.parametrize("wire", ["simulated", "gloo", "shm"])
def test_throwing_ends_the_loop_on_all_ranks(wire: str, request: pytest.FixtureRequest) -> None:
    def program() -> tuple[str, int]:
        counter, turns = Counter(), 0
        try:
            with md.Join([counter], throw_on_early_termination=True):
                for _ in range(2 + md.get_rank()):
                    counter.step()
                    turns += 1
        except RuntimeError as error:
            md.barrier()  # the group is good for more
            return str(error), turns
        return "no error", turns

    if wire == "simulated":
        found = md.simulate(program, 3)
    else:
        found = request.getfixturevalue("pool").run(program, 3, backend=wire)
    (first, _), (second, _), (third, _) = found
    assert [turns for _, turns in found] == [2, 2, 2]
    assert "rank 0 has no data left, and others have" in first
    for text in (second, third):
        assert "a rank has no data left, and this one has" in text
        assert "throw_on_early_termination" in text
        assert "rank 0 joined first" in text


def test_throwing_waits_for_a_call_of_all() -> None:
    """A call on another group is answered: the ranks that are not in it would not learn of it."""

    def program() -> str:
        pair, counter = md.new_group([0, 1]), Counter()
        try:
            with md.Join([counter], throw_on_early_termination=True):
                for _ in range(1 + md.get_rank()):
                    if md.get_rank() < 2:
                        md.all_reduce(torch.ones(1), group=pair)
                    counter.step()
        except md.JoinError as error:
            return error.summary
        return "no error"

    assert md.simulate(program, 3) == [
        "rank 0 has no data left, and others have",
        "a rank has no data left, and this one has",
        "a rank has no data left, and this one has",
    ]


def test_throwing_does_nothing_where_all_have_equally_many() -> None:
    def program() -> float:
        counter = Counter()
        with md.Join([counter], throw_on_early_termination=True):
            for _ in range(2):
                counter.step()
        return counter.count.item()

    assert md.simulate(program, 2) == [4.0, 4.0]


def test_an_object_serves_one_context_after_the_other() -> None:
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

    assert md.simulate(program, 2) == [[3.0, 6.0, 9.0]] * 2


def test_a_context_that_is_not_enabled_does_nothing() -> None:
    def program() -> tuple[Any, ...]:
        counter = Counter()
        with md.Join([counter], enable=False), md.Join([counter], enable=False):
            counter.step()
        return counter.count.item(), counter.num_working, hasattr(counter, "is_last")

    assert md.simulate(program, 2) == [(2.0, [], False)] * 2


def test_an_exception_passes_and_no_hook_runs() -> None:
    def program() -> bool:
        counter = Counter()
        with pytest.raises(KeyError), md.Join([counter]):
            raise KeyError
        counter.step()
        return hasattr(counter, "is_last")

    assert md.simulate(program, 2) == [False, False]


def refusal(*joinables: Any) -> str:
    with pytest.raises(ArgumentError) as caught:
        md.Join(list(joinables))
    return str(caught.value)


def test_no_joinable_is_refused() -> None:
    text = md.simulate(refusal, 2)[0]
    assert "Join needs at least one joinable" in text
    assert "pass the models: Join([model]); for a loop without one use uneven()" in text


@pytest.mark.parametrize(
    ("make", "found", "fix"),
    [
        (lambda: md.DDP(nn.Linear(1, 1)), "DistributedDataParallel", "Join([model])"),
        (lambda: None, "NoneType", "Join([model])"),
        (lambda: [nn.Linear(1, 1)], "Linear", "Join([DDP(module)])"),
    ],
)
def test_what_is_no_list_of_joinables_is_refused(make: Any, found: str, fix: str) -> None:
    def program() -> str:
        with pytest.raises(KindError) as caught:
            md.Join(make())
        return str(caught.value)

    for text in md.simulate(program, 2):
        assert f"Join was given an object of type {found}\n  expected: " in text
        assert fix in text


def test_two_groups_are_refused() -> None:
    def program() -> str:
        return refusal(Counter(), Counter(md.new_group([0, 1], group_desc="another")))

    text = md.simulate(program, 2)[0]
    assert "Join was given joinables of different groups" in text
    assert "found:    the world and " in text


def test_two_devices_are_refused() -> None:
    text = md.simulate(lambda: refusal(Counter(), Counter(device="meta")), 2)[0]
    assert "Join was given joinables of different devices" in text
    assert "found:    cpu and meta" in text


def test_contexts_cannot_be_nested() -> None:
    def program() -> str:
        first, second = Counter(), Counter()
        with pytest.raises(ArgumentError) as caught, md.Join([first]), md.Join([second]):
            pass
        return str(caught.value)

    for text in md.simulate(program, 2):
        assert "join contexts cannot be nested" in text
        assert "Join([first, second])" in text


def test_one_rank_alone_runs_its_loop() -> None:
    def program() -> tuple[Any, ...]:
        counter = Counter()
        with md.Join([counter]):
            counter.step()
        return counter.count.item(), counter.is_last, list(md.uneven([1, 2]))

    assert md.simulate(program, 1) == [(1.0, True, [1, 2])]
