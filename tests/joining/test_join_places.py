"""Calls of a context are shown in shared words where all members see each other's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import meshdist as md
from meshdist.checking import calls
from meshdist.joining import statements
from tests.inner import get_registry, get_world, shared_words
from tests.joining.uneven_programs import plans, run_plan
from tests.load import is_within
from tests.mpi_job import job_of
from tests.pool import Failure, Pool

NUM_BATCHES = 12


def run_both(drawn: list[Any]) -> list[Any]:
    """What each plan gives, in a join context and padded."""
    return [(run_plan(*plan, padded=False), run_plan(*plan, padded=True)) for plan in drawn if plan]


@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=pytest.mark.soak)])
def test_random_loops_equal_the_padded_ones_on_processes(pool: Pool, size: int) -> None:
    drawn: list[Any] = []

    @settings(max_examples=NUM_BATCHES, suppress_health_check=list(HealthCheck), database=None)
    @given(plans(size))
    def draw(plan: Any) -> None:
        drawn.append(plan)

    draw()
    for found in pool.run(run_both, size, drawn, backend="shm"):
        for uneven, padded in found:
            assert uneven == padded


@pytest.mark.mpi
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_random_loops_equal_the_padded_ones_over_mpi(pool: Pool, size: int) -> None:
    drawn: list[Any] = []

    @settings(max_examples=6, suppress_health_check=list(HealthCheck), database=None)
    @given(plans(size))
    def draw(plan: Any) -> None:
        drawn.append(plan)

    draw()
    for found in job_of(pool, size).run_in_world(run_both, drawn):
        for uneven, padded in found:
            assert uneven == padded


def sums_and_collectives(few: int, many: int) -> tuple[list[float], int]:
    """What a loop of sums gives, and how many collectives its group has made."""
    group = md.group.WORLD
    recorder = group.open_channel("cpu").recorder
    md.barrier()
    before, sums = recorder.sequence, []
    for _ in md.uneven(range(many if md.get_rank() else few)):
        x = torch.ones(1)
        md.all_reduce(x)
        sums.append(x.item())
    return sums, recorder.sequence - before


def assert_only_the_first_calls_had_a_round(found: list[Any]) -> None:
    (few, first), (many, second) = found
    assert (few, many) == ([2.0] * 2, [2.0] * 2 + [1.0] * 8)
    assert first == second
    # One round for the first call, two where a member looked before the other was there.
    assert 10 < first <= 12


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_all_calls_have_a_round_where_one_has_no_room_for_words(pool: Pool, backend: str) -> None:
    def program() -> tuple[list[float], int]:
        md.barrier()
        words = get_registry(get_world()).header_tables._words
        if md.get_rank() == 1 and words is not None:
            words.reserve(1, shared_words.TOTAL_WORDS - words._end)
        return sums_and_collectives(2, 10)

    for _, num_collectives in pool.run(program, 2, backend=backend):
        assert num_collectives == 10 + 10 + 1  # and the round of the end


def test_members_on_several_hosts_have_rounds(pool: Pool) -> None:
    for _, num_collectives in pool.run(sums_and_collectives, 2, 2, 10, backend="gloo", hosts="AB"):
        assert num_collectives == 10 + 10 + 1


def sums_of_many_kinds(num_kinds: int) -> list[float]:
    """Rank 0 has two steps, and the others ten; calls of as many kinds, each with its sizes."""
    sums = []
    group = md.new_group()
    for turn in md.uneven(range(10 if md.get_rank() else 2), group):
        x = torch.ones(1 + turn % num_kinds)
        md.all_reduce(x, group=group)
        many = [torch.ones(1 + turn % num_kinds), torch.ones(3)]
        md.all_reduce_coalesced(many, group=group)
        sums.append(x.sum().item() / x.numel())
        assert [len(one) for one in many] == [1 + turn % num_kinds, 3]
    group.close()
    return sums


def forget_calls() -> None:
    """Each call gets a fingerprint anew."""
    calls.calls.clear()
    statements.to_bytes.cache_clear()
    statements.from_bytes.cache_clear()


@pytest.mark.parametrize("wire", ["simulated", "shm"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_calls_of_one_fingerprint_are_told_apart(
    size: int, wire: str, request: pytest.FixtureRequest
) -> None:
    def program() -> list[float]:
        with pytest.MonkeyPatch.context() as patch:
            if wire == "simulated" and md.get_rank():  # one process, which rank 0 patches
                return sums_of_many_kinds(5)
            patch.setattr(calls, "fingerprint", lambda *_: 16)
            forget_calls()
            try:
                return sums_of_many_kinds(5)
            finally:
                forget_calls()

    few, many = [float(size)] * 2, [float(size)] * 2 + [size - 1.0] * 8
    if wire == "simulated":
        found = md.simulate(program, size)
    else:
        found = request.getfixturevalue("pool").run(program, size, backend=wire)
    assert found == [few] + [many] * (size - 1)


def test_more_calls_than_there_are_words_are_answered(pool: Pool) -> None:
    def program() -> float:
        x = torch.ones(1)
        for _ in md.uneven(range(3 + 1200 * md.get_rank())):
            md.all_reduce(x, md.ReduceOp.MAX)
            md.all_reduce(x.clone(), async_op=True).wait()
        return x.item()

    assert pool.run(program, 2, backend="shm") == [1.0, 1.0]


# -- beside the main group ------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_calls_in_flight_on_another_group_at_the_end_are_answered(pool: Pool, backend: str) -> None:
    def program() -> list[float]:
        group = md.new_group()
        found = []
        for _ in range(10):
            started = []
            for _ in md.uneven(range(1 + 3 * md.get_rank())):
                md.all_reduce(torch.ones(1))
                x = torch.ones(1)
                started.append((x, md.all_reduce(x, group=group, async_op=True)))
            for x, work in started:
                work.wait()
                found.append(x.item())
        return found

    assert pool.run(program, 2, backend=backend) == [[2.0] * 10, [2.0, 1.0, 1.0, 1.0] * 10]


def calls_on_two_groups(verb: str) -> list[Any]:
    """Ranks 0 and 1 have no data; ranks 2 and 3 call on groups of which both are members."""
    rank = md.get_rank()
    groups = [md.new_group([0, 1, 2]), md.new_group([0, 1, 3])]
    mine = [group for group in groups if isinstance(group, md.ProcessGroup)]
    found: list[Any] = []
    for turn in md.uneven(range(40 if rank > 1 else 0)):
        (group,) = mine
        if verb == "all_reduce":
            x = torch.ones(1)
            md.all_reduce(x, group=group)
            found.append(x.item())
        elif verb == "all_gather_object":
            objects = [0] * 3
            md.all_gather_object(objects, "x" * turn, group)
            found.append(objects)
        elif verb == "gather_object":
            objects = [0] * 3
            md.gather_object("x" * turn, objects, group=group, group_dst=2)
            md.gather_object("x", None, group=group, group_dst=turn % 2)
            found.append(objects)
        elif verb == "broadcast_object_list":
            objects = [turn, "x" * turn]
            md.broadcast_object_list(objects, group=group, group_src=2)
            found.append(objects)
        elif verb == "scatter_object_list":
            objects = [0]
            given = ["a", "b" * turn, turn]
            md.scatter_object_list(objects, given, group=group, group_src=2)
            found.append(objects)
        else:
            getattr(md, verb)(group)
            found.append(turn)
    return found


EXPECTED_ON_TWO_GROUPS: dict[str, list[Any]] = {
    "all_reduce": [1.0] * 40,
    "all_gather_object": [[None, None, "x" * turn] for turn in range(40)],
    "gather_object": [[None, None, "x" * turn] for turn in range(40)],
    "broadcast_object_list": [[turn, "x" * turn] for turn in range(40)],
    "scatter_object_list": [[turn] for turn in range(40)],
    "monitored_barrier": list(range(40)),
}


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("verb", EXPECTED_ON_TWO_GROUPS)
def test_joined_ranks_may_come_to_calls_on_two_groups_in_any_order(
    pool: Pool, backend: str, verb: str
) -> None:
    expected = EXPECTED_ON_TWO_GROUPS[verb]
    found = pool.run(calls_on_two_groups, 4, verb, backend=backend, timeout_s=20.0)
    assert found == [[], [], expected, expected]


@pytest.mark.soak
@pytest.mark.mpi
def test_joined_ranks_may_come_to_objects_on_two_groups_over_mpi(pool: Pool) -> None:
    verb = "all_gather_object"
    expected = EXPECTED_ON_TWO_GROUPS[verb]
    found = job_of(pool, 4).run_in_world(calls_on_two_groups, verb)
    assert found == [[], [], expected, expected]


@pytest.mark.parametrize("first", [0, 1])
def test_simulated_ranks_answer_objects_of_two_groups_in_different_order(first: int) -> None:
    """Each of the two that have joined comes first to what the other comes to last."""

    def program() -> list[Any]:
        rank = md.get_rank()
        groups = [md.new_group([0, 1, 2]), md.new_group([0, 1, 3])]
        if rank < 2:
            order = groups if (rank == first) else groups[::-1]
            registry = get_registry(get_world())
            labels = [one.open_channel("cpu").opened.label for one in order if one != -100]
            registry._by_label = dict(
                sorted(registry._by_label.items(), key=lambda one: one[0] in labels[1:])
            )
        found: list[Any] = []
        for turn in md.uneven(range(3 if rank > 1 else 0)):
            objects: list[Any] = [0] * 3
            md.all_gather_object(objects, turn, groups[rank - 2])
            found.append(objects)
        return found

    expected = [[None, None, turn] for turn in range(3)]
    assert md.simulate(program, 4) == [[], [], expected, expected]


# -- groups and members outside of the context ----------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_call_of_a_rank_outside_of_the_context_waits_for_its_end(
    pool: Pool, backend: str
) -> None:
    """Rank 2 has no part in the loop of ranks 0 and 1, and awaits them behind it."""

    def program() -> list[float]:
        rank = md.get_rank()
        md.barrier()
        pair = md.new_group([0, 1])
        sums = []
        if isinstance(pair, md.ProcessGroup):
            for _ in md.uneven(range(6 * rank), pair):
                time.sleep(0.05)  # rank 0 has joined, and sees that rank 2 waits
                x = torch.ones(1)
                md.all_reduce(x, group=pair)
                sums.append(x.item())
        x = torch.ones(1)
        md.all_reduce(x)
        return [*sums, x.item()]

    assert pool.run(program, 3, backend=backend) == [[3.0], [1.0] * 6 + [3.0], [3.0]]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_broken_group_that_the_context_does_not_use_is_left_alone(
    pool: Pool, is_late: bool
) -> None:
    """Members on several hosts begin rounds on all groups of theirs at once."""

    def program() -> list[float]:
        old = md.new_group()
        if md.get_rank() == 0 and not is_late:
            old.abort("it is broken")
        md.barrier()
        sums = []
        for turn in md.uneven(range(4 if md.get_rank() == 2 else 0)):
            if turn == 1 and is_late:
                old.abort("it is broken")
                time.sleep(0.2)
            x = torch.ones(1)
            md.all_reduce(x)
            sums.append(x.item())
        return sums

    found = pool.run(program, 3, backend="gloo", hosts="AAB", timeout_s=20.0)
    assert found == [[], [], [1.0] * 4]


@pytest.mark.parametrize("wire", ["simulated", "gloo"])
@pytest.mark.parametrize("kind", ["group", "mesh"])
def test_a_group_made_in_the_loop_with_a_joined_rank_is_refused_at_once(
    wire: str, kind: str, request: pytest.FixtureRequest
) -> None:
    def program() -> tuple[list[str], float]:
        texts = []
        for _ in md.uneven(range(2 * md.get_rank())):
            md.all_reduce(torch.ones(1))
            try:
                if kind == "group":
                    md.new_group(group_desc="late")
                else:
                    md.init_device_mesh("cpu", (3,), mesh_dim_names=("late",))
            except md.JoinError as error:
                texts.append(str(error))
        x = torch.ones(1)
        md.all_reduce(x, group=md.new_group(group_desc="late"))  # all count their calls alike
        return texts, x.item()

    begin = time.monotonic()
    if wire == "simulated":
        found = md.simulate(program, 3)
    else:
        pool: Pool = request.getfixturevalue("pool")
        found = pool.run(program, 3, backend=wire, timeout_s=20.0)
        assert is_within(time.monotonic() - begin, 5.0)
    what = "late" if kind == "group" else "DeviceMesh(late=3)"
    (none, first), (some, second), (more, third) = found
    assert (none, first, second, third) == ([], 3.0, 3.0, 3.0)
    assert [len(some), len(more)] == [2, 4]
    for text in (*some, *more):
        assert text.startswith(f"a {kind} cannot be made with rank")
        assert "no data left" in text
        assert what in text
        assert "fix:      make meshes and groups, and use each once, before the loop" in text
    assert "with rank 0, which has no data left" in some[0]
    assert "with ranks 0-1, which have no data left" in more[-1]


def call_behind_contexts() -> list[float]:
    """Contexts of another group than that of the calls behind them, which was open before."""
    md.barrier()
    group = md.new_group()
    sums = []
    for turn in range(30):
        for _ in md.uneven(range(turn % 3 if md.get_rank() else 0), group):
            md.all_reduce(torch.ones(1), group=group)
        x = torch.ones(1)
        md.all_reduce(x)
        sums.append(x.item())
    return sums


def end_apart() -> list[float]:
    """Ranks 2 and 3 have left their contexts, and call, while 0 or 1 has joined its own."""
    rank = md.get_rank()
    pair = [md.new_group([0, 1]), md.new_group([2, 3])][rank // 2]
    sums = []
    for turn in range(3):
        for _ in md.uneven(range([0, 3, 1, 1][rank]), pair):
            if turn:
                time.sleep(0.02)
            md.all_reduce(torch.ones(1), group=pair)
        x = torch.ones(1)
        md.all_reduce(x)
        sums.append(x.item())
    return sums


@pytest.mark.parametrize("backend", ["simulated", "shm", "gloo"])
def test_calls_behind_a_context_are_not_taken_for_calls_in_it(
    backend: str, request: pytest.FixtureRequest
) -> None:
    if backend == "simulated":
        behind, apart = md.simulate(call_behind_contexts, 3), md.simulate(end_apart, 4)
    else:
        pool: Pool = request.getfixturevalue("pool")
        behind = pool.run(call_behind_contexts, 3, backend=backend)
        apart = pool.run(end_apart, 4, backend=backend)
    assert behind == [[3.0] * 30] * 3
    assert apart == [[4.0] * 3] * 4


def loop_of_some_before_that_of_all(first: str) -> list[float]:
    """The last rank goes to the loop of all while the others are in one of theirs."""
    rank, size = md.get_rank(), md.get_world_size()
    some = md.new_group(list(range(size - 1)))
    md.barrier()
    found = []
    for _ in range(3):
        if isinstance(some, md.ProcessGroup):
            for _ in md.uneven(range(1 + rank), some):
                x = torch.ones(1)
                md.all_reduce(x, group=some)
                found.append(x.item())
                time.sleep(0.01)  # the last rank waits in the other loop
        for _ in md.uneven(range(2 + rank)):
            x = torch.ones(1)
            if first == "all_reduce":
                md.all_reduce(x)
            else:
                md.broadcast(x, src=size - 1)
            found.append(x.item())
    return found


@pytest.mark.parametrize("first", ["all_reduce", "broadcast"])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(
    "wire", ["simulated", "shm", "gloo", pytest.param("mpi", marks=pytest.mark.mpi)]
)
def test_a_rank_in_a_later_loop_is_not_answered_in_an_earlier_one(
    wire: str, size: int, first: str, request: pytest.FixtureRequest
) -> None:
    program = partial(loop_of_some_before_that_of_all, first)
    if wire == "simulated":
        found = md.simulate(program, size)
    elif wire == "mpi":
        found = job_of(request.getfixturevalue("pool"), size).run_in_world(program)
    else:
        found = request.getfixturevalue("pool").run(program, size, backend=wire)

    def going(turn: int, ranks: range, least: int) -> float:
        return float(sum(turn < least + rank for rank in ranks))

    for rank, mine in enumerate(found):
        inner = [going(turn, range(size - 1), 1) for turn in range(1 + rank)]
        outer = [going(turn, range(size), 2) for turn in range(2 + rank)]
        outer = outer if first == "all_reduce" else [1.0] * len(outer)
        assert mine == ((inner if rank < size - 1 else []) + outer) * 3


def test_long_announcements_arrive(pool: Pool) -> None:
    """Of a list that all know to be long, and of sizes of which some ranks' are short."""

    def program() -> list[Any]:
        rank = md.get_rank()
        found: list[Any] = []
        for turn in md.uneven(range(2 + rank)):
            many = [torch.ones(1000 + at) for at in range(40)]
            md.all_reduce_coalesced(many)
            found.append(many[-1][0].item())
            big = 10 ** (5 * rank)
            parts = [torch.empty(0, big // 10**4 + at) for at in range(3)]
            md.all_gather(parts, torch.empty(0, big // 10**4 + rank))
            found.append((turn, len(parts)))
        return found

    few, _, many = pool.run(program, 3, backend="shm")
    assert [x for x in few if isinstance(x, float)] == [3.0, 3.0]
    assert [x for x in many if isinstance(x, float)] == [3.0, 3.0, 2.0, 1.0]


# -- ends -----------------------------------------------------------------------------------------


def caught(program: Callable[[], Any]) -> Callable[[], str]:
    """``program``, with the text of the error that it raises."""

    def run() -> str:
        try:
            program()
        except (md.MeshdistError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    return run


def leave_while_others_are_in_a_call() -> None:
    """No rank has joined; rank 0 raises once the others wait for it in the third call."""
    with md.uneven(range(4)) as turns:
        for turn in turns:
            if turn == 2 and md.get_rank() == 0:
                time.sleep(0.3)
                raise ValueError("no batch")
            md.all_reduce(torch.ones(1))


def assert_told(first: str, *others: str) -> None:
    assert first == "ValueError: no batch"
    for text in others:
        assert text.startswith("JoinError: rank 0 has left the join context by an exception")
        assert "ValueError: no batch" in text
        assert "look at rank 0; the group is broken now" in text


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_an_exception_frees_ranks_that_wait_in_a_call(pool: Pool, backend: str) -> None:
    begin = time.monotonic()
    assert_told(*pool.run(caught(leave_while_others_are_in_a_call), 3, backend=backend))
    assert is_within(time.monotonic() - begin, 5.0)


@pytest.mark.mpi
@pytest.mark.soak
def test_an_exception_frees_ranks_that_wait_over_mpi(pool: Pool) -> None:
    job = job_of(pool, 3)
    job.run_in_world(md.get_rank)  # starts it
    begin = time.monotonic()
    assert_told(*job.run_in_world(caught(leave_while_others_are_in_a_call)))
    assert is_within(time.monotonic() - begin, 10.0)


def test_an_exception_is_told_to_ranks_that_come_later(pool: Pool) -> None:
    def program() -> None:
        with md.uneven(range(4)) as turns:
            for turn in turns:
                if turn == 2:
                    if md.get_rank() == 0:
                        raise ValueError("no batch")
                    time.sleep(0.3)
                md.all_reduce(torch.ones(1))

    begin = time.monotonic()
    assert_told(*pool.run(caught(program), 3, backend="shm"))
    assert is_within(time.monotonic() - begin, 5.0)


def test_ranks_that_leave_by_an_exception_in_one_step_can_go_on(pool: Pool) -> None:
    def epoch(sums: list[float]) -> None:
        with md.uneven(range(5)) as turns:
            for turn in turns:
                x = torch.ones(1)
                md.all_reduce(x)
                sums.append(x.item())
                if turn == 2:
                    time.sleep(0.1 * md.get_rank())
                    raise KeyError

    def program() -> list[float]:
        sums: list[float] = []
        for _ in range(3):
            with pytest.raises(KeyError):
                epoch(sums)
        return sums

    assert pool.run(program, 3, backend="shm") == [[3.0] * 9] * 3


def test_a_refused_call_leaves_the_group_usable(pool: Pool) -> None:
    def program() -> tuple[str, float]:
        def loop() -> None:
            for _ in md.uneven(range(3 * md.get_rank())):
                md.all_reduce(torch.ones(1))
                md.all_reduce(torch.ones(1))
                md.broadcast(torch.ones(3), src=0)

        text = caught(loop)()
        x = torch.ones(1)
        md.all_reduce(x)
        return text, x.item()

    for text, total in pool.run(program, 3, backend="shm"):
        assert "cannot come from rank 0, which has no data left" in text
        assert total == 3.0


@pytest.mark.parametrize("step", [1, 3])  # by the wire, and by words
def test_a_hook_that_raises_frees_ranks_that_wait_in_a_call(pool: Pool, step: int) -> None:
    class Counter(md.Joinable):
        def __init__(self) -> None:
            super().__init__()

        def join_hook(self, **kwargs: Any) -> md.JoinHook:
            return Hook()

        join_device = property(lambda self: torch.device("cpu"))
        join_process_group = property(lambda self: md.group.WORLD)

    class Hook(md.JoinHook):
        num_steps = 0

        def main_hook(self) -> None:
            self.num_steps += 1
            if self.num_steps == step:
                raise ValueError("no batch")

    def program() -> None:
        counter = Counter()
        with md.Join([counter]):
            for _ in range(6 * md.get_rank()):
                md.Join.notify_join_context(counter)
                md.all_reduce(torch.ones(1))

    begin = time.monotonic()
    assert_told(*pool.run(caught(program), 3, backend="shm"))
    assert is_within(time.monotonic() - begin, 5.0)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_hook_waits_for_ranks_with_data_up_to_the_timeout(pool: Pool, backend: str) -> None:
    """Rank 1 calls three times, and not in the fourth step, what the hook of rank 0 calls."""

    class Silent(md.Joinable):
        def __init__(self, group: Any) -> None:
            super().__init__()
            self.group = group

        def join_hook(self, **kwargs: Any) -> md.JoinHook:
            return Hook(self.group)

        join_device = property(lambda self: torch.device("cpu"))
        join_process_group = property(lambda self: self.group)

    class Hook(md.JoinHook):
        def __init__(self, group: Any) -> None:
            self.group = group

        def main_hook(self) -> None:
            md.all_reduce(torch.ones(1), group=self.group)

    def program() -> None:
        group = md.new_group(timeout=timedelta(seconds=2))
        silent, store = Silent(group), group.world.store
        try:
            with md.Join([silent]):
                for turn in range(4 * md.get_rank()):
                    md.Join.notify_join_context(silent)
                    if turn == 3:
                        store.wait(["it is over"])
                    md.all_reduce(torch.ones(1), group=group)
        finally:
            store.set("it is over", "")

    first, second = pool.run(caught(program), 2, backend=backend)
    assert first.startswith("CollectiveTimeoutError: all_reduce((1,) float32, SUM) on group of")
    assert "was not begun by all ranks within 2 s" in first
    assert "found:    rank 1 did not come to it" in first
    assert second.startswith("JoinError: rank 0 has left the join context by an exception")


def test_a_context_ignores_groups_that_broke_in_an_earlier_one(pool: Pool) -> None:
    def first(group: Any) -> None:
        with md.uneven(range(4), group) as turns:
            for turn in turns:
                if turn == 2 and md.get_rank() == 0:
                    time.sleep(0.2)
                    raise ValueError("no batch")
                md.all_reduce(torch.ones(1), group=group)

    def program() -> list[float]:
        broken, group = md.new_group(), md.new_group()
        with pytest.raises((ValueError, md.JoinError)):
            first(broken)
        time.sleep(0.5)
        sums = []
        for _ in md.uneven(range(3 * md.get_rank()), group):
            x = torch.ones(1)
            md.all_reduce(x, group=group)
            sums.append(x.item())
        return sums

    assert pool.run(program, 2, backend="shm") == [[], [1.0] * 3]


def test_a_context_that_members_of_a_group_leave_apart_is_refused(pool: Pool) -> None:
    """Ranks 0 and 1 leave theirs while ranks 2 and 3 need them on pairs across both."""

    def program() -> None:
        rank = md.get_rank()
        halves = [md.new_group([0, 1]), md.new_group([2, 3])]
        pairs = [md.new_group([0, 2]), md.new_group([1, 3])]
        for turn in md.uneven(range(3 if rank < 2 else 6), halves[rank // 2]):
            if turn == 3:
                time.sleep(0.3)
            md.all_reduce(torch.ones(1), group=pairs[rank % 2])
        time.sleep(0.5)

    begin = time.monotonic()
    first, second, third, fourth = pool.run(caught(program), 4, backend="shm")
    assert is_within(time.monotonic() - begin, 6.0)
    assert first == second == "no error"
    assert "JoinError: rank 0 has left its join context, which this rank is in still" in third
    assert "JoinError: rank 1 has left its join context, which this rank is in still" in fourth
    assert "all of them leave together" in third


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_end_of_all_ranks_that_had_data_frees_those_that_have_joined(
    pool: Pool, backend: str
) -> None:
    """It ends between calls, when no round is under way."""

    def program() -> None:
        for turn in md.uneven(range(4 if md.get_rank() == 2 else 0)):
            md.all_reduce(torch.ones(1))
            if turn == 2:
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)

    begin = time.monotonic()
    *texts, lost = pool.outcomes(caught(program), 3, backend=backend)
    assert is_within(time.monotonic() - begin, 8.0)
    assert isinstance(lost, Failure)
    for text in texts:
        # One may be told by the other, which leaves the context when it finds that.
        assert text.startswith(("BackendError", "JoinError: rank 0 has left", "JoinError: rank 1"))
        assert "rank 2 has ended" in text or "rank 2: has ended" in text


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_an_exception_is_told_where_its_rank_is_in_the_next_context(
    pool: Pool, backend: str
) -> None:
    def loop() -> None:
        with md.uneven(range(4)) as turns:
            for turn in turns:
                if turn == 2:
                    if md.get_rank() == 0:
                        raise ValueError("no batch")
                    time.sleep(0.3)
                md.all_reduce(torch.ones(1))

    def program() -> list[str]:
        return [caught(loop)() for _ in range(1 if md.get_rank() else 2)]

    (first, second), (third,) = pool.run(program, 2, backend=backend)
    assert_told(first, third)
    assert second.startswith(("AgreementError", "AbortedError"))


@pytest.mark.parametrize(  # rank 0 serves the store
    "victim", [0, pytest.param(2, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("where", ["joined", "in a call", "before a source's call"])
def test_a_killed_rank_frees_the_others_wherever_they_wait(
    pool: Pool, where: str, victim: int
) -> None:
    def program() -> None:
        place = (md.get_rank() - victim) % 3
        few = 3 if where == "joined" else 6
        for turn in md.uneven(range([6, 2, few][place])):
            if turn == 3:
                if place == 0:
                    time.sleep(0.3)
                    os.kill(os.getpid(), signal.SIGKILL)
                if where == "before a source's call":
                    md.broadcast(torch.ones(1), src=(victim + 2) % 3)
            md.all_reduce(torch.ones(1))

    begin = time.monotonic()
    outcomes = pool.outcomes(caught(program), 3, backend="shm")
    assert is_within(time.monotonic() - begin, 8.0)
    assert isinstance(outcomes.pop(victim), Failure)
    for text in outcomes:
        assert f"rank {victim}" in text
        assert "no error" not in text


def test_a_round_to_which_a_rank_does_not_come_ends_at_the_timeout(pool: Pool) -> None:
    def program() -> None:
        group = md.new_group(timeout=timedelta(seconds=2))
        store, is_first = group.world.store, md.get_rank() == 0
        try:
            for turn in md.uneven(range(3), group):
                md.all_reduce(torch.ones(1), group=group)
                if turn == 2 and not is_first:
                    store.wait(["it is over"])
                md.broadcast(torch.ones(2), src=0, group=group)
        finally:
            if is_first:
                store.set("it is over", "")

    first, second = pool.run(caught(program), 2, backend="shm")
    assert first.startswith("CollectiveTimeoutError: broadcast((2,) float32) on group of ranks 0-1")
    assert "was not begun by all ranks within 2 s" in first
    assert "expected: the same call, or the end of the data, on ranks 0-1" in first
    assert "found:    rank 1 did not come to it" in first
    assert second.startswith("JoinError: rank 0 has left the join context by an exception")
