"""A barrier that names who does not come: every case on processes; then on simulated ranks."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import meshdist as md
from tests.pool import Failure, Pool

SHORT = timedelta(milliseconds=400)
LATE_S = 1.0


def raised(body: Callable[[], Any]) -> tuple[str, str]:
    """Call ``body``, which must raise, and return the class and text of its error."""
    with pytest.raises(Exception) as failure:  # noqa: PT011 - the caller looks at it
        body()
    return type(failure.value).__name__, str(failure.value)


def usable() -> int:
    """Use the world, to show that it is whole."""
    x = torch.ones(1)
    md.all_reduce(x)
    return int(x)


def test_all_come(pool: Pool) -> None:
    def program() -> list[float]:
        me = md.get_rank()
        mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        done = []
        for turn in range(4):
            time.sleep(0.05 * ((me + turn) % 3))
            before = time.time()
            md.monitored_barrier(mesh["tp"] if turn % 2 else None, wait_all_ranks=turn > 2)
            done.append((before, time.time()))
        assert usable() == 3
        return done

    for turn in zip(*pool.run(program, 3), strict=True):
        last_in = max(before for before, _ in turn)
        first_out = min(after for _, after in turn)
        assert first_out >= last_in


def test_an_absent_rank_is_named(pool: Pool) -> None:
    def program(wait_all_ranks: bool, absent: set[int]) -> Any:
        usable()  # the last call of all
        if md.get_rank() in absent:
            time.sleep(LATE_S)
            answer = None
        else:
            answer = raised(
                lambda: md.monitored_barrier(timeout=SHORT, wait_all_ranks=wait_all_ranks)
            )
        assert usable() == md.get_world_size()
        return answer

    leader, _, other = pool.run(program, 3, False, {1})
    assert leader[0] == other[0] == "CollectiveTimeoutError"
    assert re.fullmatch(
        r"Rank 1 failed to pass monitoredBarrier in 400 ms\n"
        r"  where:    rank 0, call 1 on the world: monitored_barrier\(\) at \S+:\d+ in <lambda>\n"
        r"  expected: the same call on ranks 0, 1, 2\n"
        r"  found:    rank 1: last call 1 on the world: all_reduce\(\(1,\) float32, SUM\) at "
        r"\S+test_monitored_barrier.py:\d+ in usable"
        r"(; now at \S+test_monitored_barrier.py:\d+ in program)?\n"
        r"  fix:      check why these ranks did not make this call, or pass a longer timeout",
        leader[1],
    )
    assert re.fullmatch(
        r"rank 2 successfully reached monitoredBarrier, but received errors while waiting for "
        r"send/recv from rank 0\n"
        r"  where:    rank 2, call 1 on the world: monitored_barrier\(\) at \S+:\d+ in <lambda>\n"
        r"  expected: the same call on ranks 0, 1, 2\n"
        r"  found:    rank 0: Rank 1 failed to pass monitoredBarrier in 400 ms\n"
        r"  fix:      read the error of rank 0, which lists the missing ranks",
        other[1],
    )
    first_alone = pool.run(program, 3, False, {1, 2})[0][1]
    assert first_alone.startswith("Rank 1 failed to pass monitoredBarrier in 400 ms\n")
    assert "rank 2:" not in first_alone
    both = pool.run(program, 3, True, {1, 2})[0][1]
    assert both.startswith("Ranks 1, 2 failed to pass monitoredBarrier in 400 ms\n")
    assert "rank 1: last call 1" in both
    assert "rank 2: last call 1" in both


def test_rank_0_is_absent(pool: Pool) -> None:
    def program() -> Any:
        if md.get_rank() == 0:
            time.sleep(LATE_S)
            late = raised(lambda: md.monitored_barrier(timeout=SHORT))
            md.monitored_barrier()  # all are in step again
            return late
        answer = raised(lambda: md.monitored_barrier(timeout=SHORT))
        md.monitored_barrier()
        return answer

    late, one, two = pool.run(program, 3)
    assert "reached monitoredBarrier after rank" in late[1]
    assert re.search(
        r"found:    rank [12]: Rank 0 failed to pass monitoredBarrier in 400 ms", late[1]
    )
    assert "check what delayed rank 0, or pass a longer timeout" in late[1]
    for rank, (kind, text) in enumerate((one, two), 1):
        assert kind == "CollectiveTimeoutError"
        assert text.startswith(
            f"rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
            "for send/recv from rank 0\n"
        )
        assert "rank 0: is running and has called no collective" in text
        assert "fix:      check why rank 0 did not make this call, or pass a longer timeout" in text


def test_a_rank_that_comes_too_late_is_told_and_in_step_again(pool: Pool) -> None:
    def program() -> tuple[str, str] | None:
        answer = None
        if md.get_rank() == 1:
            time.sleep(LATE_S)
        answer = raised(lambda: md.monitored_barrier(timeout=SHORT))
        for _ in range(3):
            md.monitored_barrier()
        return answer

    _, late, _ = pool.run(program, 3)
    assert late[0] == "CollectiveTimeoutError"
    assert late[1].startswith("rank 1 reached monitoredBarrier after rank 0 had timed out\n")
    assert "found:    rank 0: Rank 1 failed to pass monitoredBarrier in 400 ms" in late[1]


def test_a_rank_that_ended_is_named(pool: Pool) -> None:
    def program() -> Any:
        usable()  # both are connected now
        if md.get_rank() == 1:
            import os

            os._exit(0)
        return raised(lambda: md.monitored_barrier(timeout=SHORT))

    leader, lost = pool.outcomes(program, 2)
    assert isinstance(lost, Failure)
    assert "Rank 1 failed to pass monitoredBarrier in 400 ms" in leader[1]
    assert "found:    rank 1: does not respond: it has exited or is stopped" in leader[1]


def test_a_barrier_against_a_collective_tells_both(pool: Pool) -> None:
    def program() -> tuple[str, str] | None:
        usable()
        if md.get_rank() == 0:
            answer = raised(lambda: md.monitored_barrier(timeout=SHORT))
            usable()  # which the other waits for
            return answer
        usable()
        return None

    told = pool.run(program, 2)[0][1]
    assert "rank 0, call 1 on the world: monitored_barrier()" in told
    assert "rank 1: last call 2 on the world: all_reduce((1,) float32, SUM)" in told


def test_a_collective_against_a_barrier_tells_both(pool: Pool) -> None:
    def program() -> str:
        group = md.new_group([0, 1], timeout=SHORT)
        text = ""
        if md.get_rank() == 1:
            text = raised(lambda: md.all_reduce(torch.ones(1), group=group))[1]
        md.monitored_barrier()  # where rank 0 waits all the time
        return text

    _, told = pool.run(program, 2)
    assert "all_reduce on group of ranks 0-1 timed out after 0.4 s" in told
    last = "last call 1 on the world: monitored_barrier() at"
    assert f"rank 0: did not reach this call; {last}" in told


def test_groups_have_barriers_of_their_own(pool: Pool) -> None:
    def program() -> Any:
        me = md.get_rank()
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        pair = md.new_group([0, 1])
        if me == 3:
            return None
        answer = None
        if me in (0, 1):
            md.monitored_barrier(mesh["tp"])  # ranks 0 and 1
            answer = None if me else raised(lambda: md.monitored_barrier(pair, SHORT))
            time.sleep(LATE_S * me)
            if me:
                answer = raised(lambda: md.monitored_barrier(pair, SHORT))
            md.monitored_barrier(mesh["tp"])
        else:
            answer = raised(lambda: md.monitored_barrier(mesh["tp"], SHORT))  # ranks 2 and 3
        return answer

    zero, one, two, _ = pool.run(program, 4)
    assert "Rank 1 failed" in zero[1]
    assert "call 1 on group of ranks 0-1: monitored_barrier()" in zero[1]
    assert one[1].startswith("rank 1 reached monitoredBarrier after rank 0 had timed out\n")
    assert two[1].startswith("Rank 3 failed to pass monitoredBarrier in 400 ms\n")
    assert "axis 'tp' of DeviceMesh(dp=2, tp=2)" in two[1]


def test_the_default_timeout_is_the_groups(pool: Pool) -> None:
    def program() -> Any:
        group = md.new_group([0, 1], timeout=SHORT)
        if md.get_rank() == 1:
            time.sleep(LATE_S)
            return None
        return raised(lambda: md.monitored_barrier(group))

    assert "in 400 ms" in pool.run(program, 2)[0][1]


def test_an_abort_frees_who_waits(pool: Pool) -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        if md.get_rank() == 1:
            time.sleep(0.3)
            mesh.abort("enough")
            return None
        return raised(lambda: md.monitored_barrier(mesh["tp"]))

    kind, text = pool.run(program, 2, timeout_s=20)[0]
    assert kind == "AbortedError"
    assert "monitored_barrier on axis 'tp' of DeviceMesh(tp=2) was aborted" in text
    assert "found:    rank 1: enough" in text


def test_the_store_does_not_fill(pool: Pool) -> None:
    def program() -> int:
        store = md.group.WORLD.world.make_torch_store()
        md.monitored_barrier()
        md.all_reduce(torch.ones(1))
        before = store.num_keys()
        for _ in range(20):
            md.monitored_barrier()
        return int(store.num_keys()) - before

    assert max(pool.run(program, 2)) < 5  # for twenty; other keys may still come


def test_wrong_timeouts() -> None:
    def program() -> None:
        with pytest.raises(md.KindError, match=r"timeout must be a datetime\.timedelta, not 5"):
            md.monitored_barrier(timeout=5)  # type: ignore[arg-type]
        with pytest.raises(md.ArgumentError, match="timeout must be positive"):
            md.monitored_barrier(timeout=timedelta(0))
        with pytest.raises(md.KindError, match="'tp' is not a group"):
            md.monitored_barrier("tp")

    md.simulate(program, 1)


def test_outside_and_closed() -> None:
    def program() -> None:
        group = md.new_group([0])
        if md.get_rank() == 1:
            with pytest.raises(md.NotInGroupError):
                md.monitored_barrier(group)
        else:
            md.monitored_barrier(group)
            md.destroy_process_group(group)
            with pytest.raises(md.GroupClosedError):
                md.monitored_barrier(group)

    md.simulate(program, 2)


def test_simulated_ranks_meet() -> None:
    order = []

    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for turn in range(3):
            order.append((turn, "in"))
            md.monitored_barrier(mesh["dp", "tp"] if turn == 1 else None, SHORT)
            order.append((turn, "out"))

    md.simulate(program, 4)
    for turn in range(3):
        places = [i for i, what in enumerate(order) if what == (turn, "in")]
        assert max(places) < order.index((turn, "out"))


def test_a_simulated_rank_that_cannot_come() -> None:
    def program() -> None:
        if md.get_rank() != 1:
            md.monitored_barrier()
        else:
            md.all_reduce(torch.ones(2))

    with pytest.raises(RuntimeError) as failure:
        md.simulate(program, 3)
    assert isinstance(failure.value, md.DeadlockError)
    text = str(failure.value)
    assert "ranks 0, 2: waits in monitored_barrier on the world, called at" in text
    assert "Rank 1 failed to pass monitoredBarrier" in text
    assert re.search(r"rank 1: waits in .*all_reduce", text)


def test_a_simulated_rank_goes_on_after_a_failed_barrier() -> None:
    def program() -> None:
        if md.get_rank() == 0:
            with pytest.raises(md.DeadlockError):
                md.monitored_barrier()
        else:
            with pytest.raises(md.DeadlockError):
                md.all_reduce(torch.ones(2))
        md.monitored_barrier()

    md.simulate(program, 2)


def test_a_thread_of_a_simulated_rank() -> None:
    def program() -> list[tuple[str, str]]:
        group = md.group.WORLD
        answers: list[tuple[str, str]] = []
        thread = threading.Thread(
            target=lambda: answers.append(raised(lambda: md.monitored_barrier(group)))
        )
        thread.start()
        thread.join()
        return answers

    ((kind, text),) = md.simulate(program, 2)[1]
    assert kind == "WorldError"
    assert "monitored_barrier of simulated rank 1 was called from another thread" in text
