"""Collectives under a title do what the plain ones do, and members whose titles differ all
raise."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.collectives.normalize_args import run_named
from meshdist.distributed import DebugLevel, ProcessGroup, get_debug_level, set_debug_level
from meshdist.errors import CollectiveTimeoutError, MeshdistError, MismatchError
from tests.mpi_job import job_of
from tests.pool import Pool

TITLE = "reshard 'b@dp d -> b d@dp'"
SUM = md.ReduceOp.SUM
OTHER = "reshard 'b@dp d -> b d'"
OPERATIONS = (
    "all_reduce",
    "broadcast",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "all_to_all",
)
BACKENDS = [("shm", ""), ("gloo", ""), ("gloo", "AABB")]


def call(operation: str, op_name: str = "", group: ProcessGroup | None = None) -> Any:
    """One call, plain where it has no title, on parts of different sizes; its result."""
    group = group or md.group.WORLD
    rank, size = group.rank(), group.size()
    x = torch.arange(float(size)) + 10 * rank

    def run(*given: Any) -> None:
        if op_name:
            run_named(operation, group, op_name, *given)
        elif operation == "broadcast":
            md.broadcast(x, None, group, False, size - 1)
        else:
            getattr(md, operation)(*given, group=group)

    if operation == "all_reduce":
        run(x, md.ReduceOp.SUM)
        return x.tolist()
    if operation == "broadcast":
        run(x, size - 1)
        return x.tolist()
    if operation == "all_gather_into_tensor":
        run(whole := torch.zeros(size, size), x)
        return whole.tolist()
    if operation == "reduce_scatter_tensor":
        run(block := torch.zeros(1), x, md.ReduceOp.SUM)
        return block.tolist()
    given = [(rank + other) % 3 for other in range(size)]  # as many as the other gives back
    source = torch.arange(float(sum(given))) + 100 * rank
    result = torch.zeros(sum(given))
    if operation == "all_to_all_single":
        run(result, source, given, given)
    else:
        run(list(result.split(given)), list(source.split(given)))
    return result.tolist()


def both() -> list[tuple[Any, Any]]:
    return [(call(operation, TITLE), call(operation)) for operation in OPERATIONS]


def test_they_do_what_the_plain_collectives_do_on_simulated_ranks() -> None:
    for found in md.simulate(both, 4):
        assert all(one == plain for one, plain in found)


@pytest.mark.parametrize(("backend", "hosts"), BACKENDS)
def test_they_do_what_the_plain_collectives_do(backend: str, hosts: str, pool: Pool) -> None:
    def program() -> Any:
        by_fast_path = both(), both()  # the first of all calls opens the group
        md.group.WORLD.fast_path = None
        return [*by_fast_path[0], *by_fast_path[1], *both()]

    for found in pool.run(program, 4, backend=backend, hosts=hosts):
        assert all(one == plain for one, plain in found)


def rejected(operation: str, op_name: str, group: ProcessGroup | None = None) -> str:
    """The text of the error that a call raises."""
    try:
        call(operation, op_name, group)
    except MismatchError as error:
        return str(error)
    return "no error"


def check_texts(texts: Sequence[str], op_names: tuple[str, str]) -> None:
    assert len({text.split("raised on")[0] for text in texts}) == 1  # the same on all
    for text in texts:
        assert "collective mismatch: ranks made different calls as call" in text
        for op_name in filter(None, op_names):
            assert f") of {op_name} at " in text, text
        assert "with the same operation name" in text or not all(op_names)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_different_titles_raise_on_simulated_ranks(operation: str) -> None:
    def program() -> str:
        return rejected(operation, TITLE if md.get_rank() else OTHER)

    check_texts(md.simulate(program, 3), (TITLE, OTHER))


CASES = [
    (operation, op_names) for operation in OPERATIONS for op_names in ((TITLE, OTHER), (TITLE, ""))
]


@pytest.mark.parametrize("backend", ["shm", "shm, slow", "gloo"])
def test_different_titles_raise_before_data_move(backend: str, pool: Pool) -> None:
    cases = CASES if backend == "shm" else CASES[::3]
    if (
        backend == "gloo"
    ):  # a source of a broadcast may have gone on there, and raises at its next call
        cases = [one for one in cases if one[0] != "broadcast"]

    def program() -> list[str]:
        rank, texts = md.get_rank(), []
        for operation, op_names in cases:
            group = md.new_group()  # a group that has failed is broken
            md.all_reduce(torch.ones(1), group=group)
            if backend == "shm, slow" and rank == 1:
                group.fast_path = None
            texts.append(rejected(operation, op_names[rank % 2], group))
        return texts

    outcomes = pool.run(program, 3, backend=backend.split(",")[0])
    for texts, (_, op_names) in zip(zip(*outcomes, strict=True), cases, strict=True):
        check_texts(texts, op_names)


@pytest.mark.parametrize("backend", ["gloo"])
def test_different_titles_raise_across_hosts_at_debug_level_detail(
    backend: str, pool: Pool
) -> None:
    def program() -> str:
        md.all_reduce(torch.ones(1))
        before = get_debug_level()
        set_debug_level(DebugLevel.DETAIL)
        try:
            return rejected("all_to_all_single", OTHER if md.get_rank() == 3 else TITLE)
        finally:
            set_debug_level(before)

    texts = pool.run(program, 4, backend=backend, hosts="AABB")
    check_texts(texts, (TITLE, OTHER))


@pytest.mark.parametrize("backend", ["shm", "gloo", None])
def test_one_title_over_different_collectives_raises(backend: str | None, pool: Pool) -> None:
    def program() -> str:
        return rejected(OPERATIONS[2 * md.get_rank()], TITLE)

    texts = pool.run(program, 2, backend=backend) if backend else md.simulate(program, 2)
    for text in texts:
        assert "all_reduce((2,) float32, SUM) of reshard" in text
        assert "all_gather_into_tensor((2,) float32) of reshard" in text


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_report_of_a_call_that_is_late_names_the_title(backend: str, pool: Pool) -> None:
    def program() -> str:
        md.barrier()
        group = md.new_group(timeout=timedelta(seconds=0.5))
        md.all_reduce(torch.ones(1), group=group)
        if md.get_rank() == 0:
            with pytest.raises(MeshdistError) as caught:
                run_named("all_reduce", group, TITLE, torch.ones(2), SUM)
            assert isinstance(caught.value, CollectiveTimeoutError)
            md.barrier()
            return str(caught.value)
        md.barrier()
        return ""

    text = pool.run(program, 2, backend=backend)[0]
    assert f"all_reduce of {TITLE} on " in text
    assert f"all_reduce((2,) float32, SUM) of {TITLE} at " in text
    assert "timed out after 0.5 s" in text


def test_a_profiler_shows_the_title() -> None:
    def program() -> list[str]:
        with torch.profiler.profile() as profile:
            both()
        return [event.name for event in profile.events() if TITLE in event.name]

    for names in md.simulate(program, 1):
        assert [name.split(" of ")[0] for name in names] == [
            f"meshdist::{one}" for one in OPERATIONS
        ]
        assert names[0].endswith(" 4 bytes")


def test_both_paths_note_the_same(pool: Pool) -> None:
    def program() -> list[Any]:
        group = md.group.WORLD
        md.all_reduce(torch.ones(1))
        path, notes = group.fast_path, []
        recorder = group.open_device_group("cpu").recorder
        for chosen in (path, None):
            group.fast_path = chosen
            for operation in OPERATIONS:
                call(operation, TITLE)
                note = recorder.find_note()
                notes.append((note.call, note.called, note.sizes, note.where))
        return notes

    for notes in pool.run(program, 2, backend="shm"):
        assert notes[: len(OPERATIONS)] == notes[len(OPERATIONS) :]
        assert notes[0][1] == f"all_reduce((2,) float32, SUM) of {TITLE}"


def test_what_is_started_and_not_waited_for_is_compared_too(pool: Pool) -> None:
    def program() -> str:
        md.all_reduce(torch.ones(1))
        x = torch.ones(2)
        try:
            op_name = TITLE if md.get_rank() else OTHER
            work = run_named("all_reduce", md.group.WORLD, op_name, x, SUM, async_op=True)
            assert work is not None
            work.wait()
        except MismatchError as error:
            return str(error)
        return "no error"

    check_texts(pool.run(program, 2, backend="shm"), (TITLE, OTHER))


def two_names() -> str:
    """What a member is told whose title differs from the other's."""
    group = md.new_group()
    md.all_reduce(torch.ones(1), group=group)
    return rejected("all_reduce", TITLE if md.get_rank() else OTHER, group)


@pytest.mark.soak
@pytest.mark.mpi
def test_over_mpi(pool: Pool) -> None:
    job = job_of(pool, 2)
    for found in job.run_in_world(both):
        assert all(one == plain for one, plain in found)
    check_texts(job.run_in_world(two_names), (TITLE, OTHER))
