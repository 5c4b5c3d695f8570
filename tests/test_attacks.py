"""What goes wrong between rooms: groups made anew after trouble, stores that end, late ranks."""

from __future__ import annotations

import os
import re
import signal
import textwrap
import time
from datetime import timedelta

import pytest
import torch

import meshdist as md

from .pool import Failure, Pool, places

SHORT = timedelta(seconds=20)

# What torch's client of the store writes where a request was under way as its server ended: no
# program can avoid it. A request that is made later is told in other words.
REQUEST_UNDER_WAY = re.compile(
    r"^\[W.* TCPStore\.cpp:\d+\] \[c10d\] recvValue failed .*\n"
    r"(?:(?:Exception raised from |frame #|<omitting ).*\n)*\n?",
    re.MULTILINE,
)


def mesh_of(*shape: int) -> md.DeviceMesh:
    names = ("dp", "tp", "pp")[: len(shape)]
    return md.init_device_mesh("cpu", shape, mesh_dim_names=names, timeout=SHORT)


def total(group: md.DeviceMesh) -> float:
    x = torch.ones(1)
    md.all_reduce(x, group=group)
    return float(x)


def test_a_mesh_made_after_an_abort_works_on_ranks_that_have_not_heard_of_it(pool: Pool) -> None:
    def program() -> float:
        mesh = mesh_of(3)
        if md.get_rank() == 0:
            mesh.abort("enough")  # its communicator is the world's, which the others have still
        return total(mesh_of(3)["dp"])

    assert pool.run(program, 3) == [3.0] * 3


def test_a_mesh_that_one_rank_has_closed_is_not_shared_by_the_next(pool: Pool) -> None:
    def program() -> list[float]:
        first = mesh_of(2, 2)
        if md.get_rank() == 0:
            first.close()
        second = mesh_of(2, 2)
        found = [total(second["dp"]), total(second["tp"])]
        if md.get_rank():
            first.close()
        return [*found, total(second["dp"])]

    assert pool.run(program, 4) == [[2.0] * 3] * 4


def test_a_mesh_made_after_a_failed_collective_has_communicators_of_its_own(pool: Pool) -> None:
    def program() -> float:
        mesh = md.init_device_mesh("cpu", (3,), timeout=timedelta(seconds=1))
        if md.get_rank():
            with pytest.raises(md.BackendError):
                md.barrier(mesh)
        return total(mesh_of(3))

    assert pool.run(program, 3) == [3.0] * 3


def test_a_group_opened_at_first_use_is_shared_where_its_members_agree(pool: Pool) -> None:
    def program() -> list[float]:
        first = mesh_of(2, 2)
        later = md.init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("dp", "tp"), open_groups=False, timeout=SHORT
        )
        if md.get_rank() in (0, 1):
            first.close()
        return [total(later["dp"]), total(later["tp"]), total(later["dp", "tp"])]

    assert pool.run(program, 4) == [[2.0, 2.0, 4.0]] * 4


def run(pool: Pool, body: str, size: int) -> tuple[str, str]:
    """Run ``body`` as processes that outlive each other; return what they wrote."""
    opening = "import os, signal, sys, time\nfrom datetime import timedelta\n"
    opening += "import torch\nimport meshdist as md\n"
    ended = pool.start(opening + textwrap.dedent(body), places(size), has_teardown=False)
    written = "".join(one.stderr for one in ended)
    return "".join(one.stdout for one in ended), REQUEST_UNDER_WAY.sub("", written)


def test_a_killed_server_of_the_store_is_told_in_words_and_nothing_else(pool: Pool) -> None:
    out, err = run(
        pool,
        """
        md.init_process_group(timeout=timedelta(seconds=20))
        x = torch.ones(1)
        md.all_reduce(x)
        if md.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        told = []
        for call in (
            lambda: md.all_reduce(x),
            lambda: md.init_device_mesh("cpu", (3,)),
            lambda: md.new_group([1, 2]),
        ):
            try:
                call()
            except md.MeshdistError as error:
                told.append(f"{type(error).__name__}: {error}")
        os.write(1, ("\\n".join(told) + "\\n").encode())
        md.destroy_process_group()
""",
        3,
    )
    assert err == ""
    assert out.count("BackendError: all_reduce on the world failed on backend 'shm'") == 2
    assert out.count("the store is lost: rank 0, which hosts the store, has ended") == 2
    lost = "StoreError: rank 0, which hosts the store, has ended\n  where:    rank {} of 3\n"
    for rank in (1, 2):
        assert out.count(lost.format(rank)) == 2
    assert "fix:      check that process's output for a failure, and whether it is stopped" in out


def test_a_collective_inside_backward_is_told_with_the_programs_own_line(pool: Pool) -> None:
    def program() -> None:
        mesh = md.init_device_mesh(
            "cpu", (2,), mesh_dim_names=("tp",), timeout=timedelta(seconds=1)
        )
        x = torch.ones(1, requires_grad=True)
        y = md.lax.pvary(x, "tp", mesh=mesh)
        if md.get_rank() == 0:
            y.backward()

    first = pool.outcomes(program, 2)[0]
    assert isinstance(first, Failure)
    assert isinstance(first.exception, md.BackendError)
    where = next(line for line in str(first.exception).splitlines() if "where:" in line)
    assert "test_attacks.py" in where and where.endswith(" in program")


def test_a_dead_member_is_named_by_all_others(pool: Pool) -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",), timeout=SHORT)
        md.barrier(mesh)
        if md.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        md.all_reduce(torch.ones(1), group=mesh["dp"])

    outcomes = pool.outcomes(program, 3)
    for outcome in outcomes[:2]:
        assert isinstance(outcome, Failure)
        assert isinstance(outcome.exception, md.BackendError)
        text = str(outcome.exception)
        assert "all_reduce on axis 'dp' of DeviceMesh(dp=3) failed on backend 'gloo'" in text
        assert "rank 2 has ended" in text


@pytest.mark.parametrize("victim", [2])
def test_a_dead_member_frees_all_others_though_they_live_on(pool: Pool, victim: int) -> None:
    def program(victim: int) -> float:
        mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",), timeout=SHORT)
        md.barrier(mesh)
        if md.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(md.BackendError):
            md.all_reduce(torch.ones(100_000), group=mesh["dp"])
        took = time.monotonic() - start
        time.sleep(max(0.0, 6 - took))  # its end must not be what frees the others
        return took

    outcomes = pool.outcomes(program, 4, victim)
    assert all(took < 6 for rank, took in enumerate(outcomes) if rank != victim), outcomes


def test_an_abort_by_the_rank_that_serves_the_store_and_leaves_is_heard(pool: Pool) -> None:
    out, err = run(
        pool,
        """
        md.init_process_group(timeout=timedelta(seconds=40))
        own = {0: md.AxisOptions(private=True)}
        mesh = md.init_device_mesh("cpu", (3,), axis_options=own)
        rank = md.get_rank()
        if rank == 0:
            time.sleep(0.5)
            mesh.abort("rank 0 has had enough")
            sys.exit()
        x, start = torch.ones(1), time.monotonic()
        try:
            md.recv(x, 3 - rank, mesh)  # nobody sends, and both connections to rank 0 are idle
        except md.AbortedError as error:
            took = time.monotonic() - start
            told = f"{rank} freed: {took < 20} {'rank 0: rank 0 has had enough' in str(error)}"
            os.write(1, f"{told}\\n".encode())
""",
        3,
    )
    assert err == ""
    assert sorted(out.splitlines()) == ["1 freed: True True", "2 freed: True True"]


def test_after_a_disagreement_a_new_mesh_works_and_the_old_one_stays_broken(pool: Pool) -> None:
    def program() -> list[object]:
        rank = md.get_rank()
        old = mesh_of(3)
        with pytest.raises(md.MismatchError) as first:
            md.all_reduce(torch.ones(2 + (rank == 1)), group=old["dp"])
        new = mesh_of(3)
        found = [total(new["dp"])]
        with pytest.raises(md.MismatchError) as second:
            md.barrier(old)
        return [*found, first.value.found == second.value.found, total(new["dp"])]

    assert pool.run(program, 3) == [[3.0, True, 3.0]] * 3


def later_operations_of_groups_that_disagreed(is_async: bool) -> list[str]:
    """What is wrong, if anything, with later collectives on six groups, each after a
    disagreement."""
    rank, wrong = md.get_rank(), []
    for number in range(6):
        group = md.new_group(timeout=SHORT)
        try:
            work = md.all_reduce(torch.ones(4 if rank else 6), group=group, async_op=is_async)
        except md.MismatchError:
            work = None
        for _ in range(2):
            x = torch.ones(1)
            try:
                md.all_reduce(x, group=group)
                wrong.append(f"group {number}: went through with {x.item()}")
            except md.MismatchError as error:
                if "collective mismatch: ranks made different calls as call 1\n" not in str(error):
                    wrong.append(str(error))
        if work is not None:
            with pytest.raises(md.MismatchError):
                work.wait()
    x = torch.ones(1)
    md.all_reduce(x)  # another group, which goes on
    return [*wrong, *([] if x.item() == md.get_world_size() else ["the world is wrong"])]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("backend", ["gloo", "simulated"])
def test_after_a_disagreement_no_collective_of_the_group_goes_through_on_any_member(
    backend: str, is_async: bool, pool: Pool
) -> None:
    if backend == "gloo":
        assert pool.run(later_operations_of_groups_that_disagreed, 4, is_async) == [[]] * 4
    else:
        assert (
            md.simulate(later_operations_of_groups_that_disagreed, 4, args=(is_async,)) == [[]] * 4
        )


def test_the_stacks_of_both_sides_are_shown_where_the_environment_asks(pool: Pool) -> None:
    def program() -> str:
        def reduce_losses(size: int) -> None:
            md.all_reduce(torch.ones(size))

        def train() -> None:
            reduce_losses(2 + md.get_rank())

        with pytest.raises(md.MismatchError) as caught:
            train()
        return str(caught.value.found)

    for value in ("1", "0"):
        first, second = pool.run(program, 2, env={"TORCH_SHOW_CPP_STACKTRACES": value})
        assert first == second
        for rank in range(2):
            _, _, told = first.partition(f"rank {rank}: all_reduce(({2 + rank},) float32, SUM) at ")
            here, *above = told.splitlines()
            assert here.endswith(" in reduce_losses")
            if value == "1":
                assert above[0].startswith("  called at ") and above[0].endswith(" in train")
                assert above[1].startswith("  called at ") and above[1].endswith(" in program")
        assert ("called at" in first) == (value == "1")


def test_a_disagreement_where_the_server_of_the_store_is_gone_hangs_nobody(pool: Pool) -> None:
    out, err = run(
        pool,
        """
        md.init_process_group(timeout=timedelta(seconds=20))
        group = md.new_group([1, 2])
        rank = md.get_rank()
        if rank:
            md.all_reduce(torch.ones(1), group=group)
        md.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        try:
            md.all_reduce(torch.ones(rank), group=group)
        except md.MeshdistError as error:
            summary = str(error).splitlines()[0]
            os.write(1, f"{rank}: {type(error).__name__}: {summary}\\n".encode())
""",
        3,
    )
    assert err == ""
    lines = sorted(out.splitlines())
    assert len(lines) == 2, lines
    told = "collective mismatch: ranks made different calls as call 2"
    assert any(line.endswith(f"MismatchError: {told}") for line in lines), lines
    assert all("MismatchError" in line or "BackendError" in line for line in lines), lines
