"""Calls that differ between members, over Gloo processes: one error on all that wait."""

from __future__ import annotations

import os
import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import meshdist as md
from tests.inner import TRACE
from tests.load import is_within
from tests.pool import Failure, Pool

SOON_S = 12.0
"""By when everybody knows; below one second, as a rule, where the machine is not busy."""
LONG = timedelta(seconds=30)


def error_of(call) -> md.MeshdistError | None:
    try:
        call()
    except md.MeshdistError as error:
        return error
    return None


def told(call) -> tuple[str, str, str, float]:
    """The kind, text and findings of the error that ``call`` raises, and how long it took."""
    start = time.monotonic()
    error = error_of(call)
    took = time.monotonic() - start
    return type(error).__name__, str(error), str(getattr(error, "found", "")), took


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def calls_of(case: str, rank: int, group: md.ProcessGroup):
    """What a rank calls in one of the cases of two ranks whose calls differ."""
    is_first = rank == 0
    low = ones(2, dtype=torch.int32 if is_first else torch.float32)
    op = md.ReduceOp.SUM if is_first else md.ReduceOp.MAX
    sent, taken = [[1, 2], [1, 4]] if is_first else [[3, 4], [3, 4]]
    return {
        "size": lambda: md.all_reduce(ones(6 if is_first else 4), group=group),
        "dtype": lambda: md.all_reduce(low, group=group),
        "op": lambda: md.all_reduce(ones(2), op, group=group),
        "root": lambda: md.broadcast(ones(2), rank, group=group),
        "operation": lambda: md.all_reduce(ones(2), group=group) if is_first else md.barrier(group),
        "rooted and not": lambda: (
            md.reduce(ones(2), 0, group=group) if is_first else md.all_reduce(ones(2), group=group)
        ),
        "factor or none": lambda: md.all_reduce(
            ones(2), md.ReduceOp.premul_sum(2.0) if is_first else md.ReduceOp.SUM, group=group
        ),
        "list": lambda: md.all_reduce_coalesced([ones(2), ones(3 if is_first else 2)], group=group),
        "splits": lambda: md.all_to_all_single(
            ones(sum(taken)), ones(sum(sent)), taken, sent, group=group
        ),
        "async": lambda: md.all_reduce(
            ones(6 if is_first else 4), group=group, async_op=True
        ).wait(),
        "message": lambda: (
            md.send(ones(3), 1, group, 5) if is_first else md.recv(ones(4), 0, group, 5)
        ),
        "message of another dtype": lambda: (
            md.isend(ones(4), 1, group).wait()
            if is_first
            else md.irecv(ones(4, dtype=torch.int32), 0, group).wait()
        ),
    }[case]


CASES = {
    "size": ("all_reduce((6,) float32, SUM)", "all_reduce((4,) float32, SUM)"),
    "dtype": ("all_reduce((2,) int32, SUM)", "all_reduce((2,) float32, SUM)"),
    "op": ("all_reduce((2,) float32, SUM)", "all_reduce((2,) float32, MAX)"),
    "root": ("broadcast((2,) float32, root rank 0)", "broadcast((2,) float32, root rank 1)"),
    "operation": ("all_reduce((2,) float32, SUM)", "barrier()"),
    "rooted and not": (
        "reduce((2,) float32, SUM, root rank 0)",
        "all_reduce((2,) float32, SUM)",
    ),
    "factor or none": ("all_reduce((2,) float32, PREMUL_SUM)", "all_reduce((2,) float32, SUM)"),
    "list": (
        "all_reduce_coalesced([(2,) float32, (3,) float32], SUM)",
        "all_reduce_coalesced([(2,) float32, (2,) float32], SUM)",
    ),
    "splits": (
        "all_to_all_single((3,) float32, sending [1, 2], receiving [1, 4] elements)",
        "all_to_all_single((7,) float32, sending [3, 4], receiving [3, 4] elements)",
    ),
    "async": ("all_reduce((6,) float32, SUM)", "all_reduce((4,) float32, SUM)"),
    "message": (
        "send((3,) float32, to rank 1, tag 5)",
        "recv((4,) float32, from rank 0, tag 5)",
    ),
    "message of another dtype": (
        "isend((4,) float32, to rank 1)",
        "irecv((4,) int32, from rank 0)",
    ),
}


@pytest.mark.parametrize(("late", "cases"), [(0, [*CASES]), (1, ["size", "root", "message"])])
def test_every_way_to_differ_is_told_on_both_members(
    pool: Pool, late: int, cases: list[str]
) -> None:
    def program(late: int, cases: list[str]) -> dict[str, tuple]:
        found = {}
        rank = md.get_rank()
        for place, case in enumerate(cases):
            group = md.new_group(timeout=LONG)
            call = calls_of(case, rank, group)
            if rank == late and (late or place % 6 == 0):
                time.sleep(0.3)
            first = told(call)
            again = told(lambda group=group: md.all_reduce(ones(1), group=group))
            x = ones(1)
            md.all_reduce(x)  # another group, which works on
            found[case] = (first, again, x.item())
        return found

    outcomes = pool.run(program, 2, late, cases)
    for case in cases:
        shown = CASES[case]
        results = [outcome[case] for outcome in outcomes]
        for first, again, total in results:
            assert first[0] == again[0] == "MismatchError", (case, first, again)
            assert first[2] == again[2] == results[0][0][2], case
            assert first[3] < SOON_S and again[3] < SOON_S, (case, first[3], again[3])
            assert total == 2.0
        lines = results[0][0][2].splitlines()
        for rank in (0, 1):
            assert lines[rank].startswith(f"rank {rank}: {shown[rank]} at "), case
            assert "test_device_group.py:" in lines[rank]
        is_message = case.startswith("message")
        summary = (
            "message mismatch: a send does not match its receive"
            if is_message
            else "collective mismatch: ranks made different calls as call 1"
        )
        text = results[0][0][1]
        assert text.startswith(summary)
        assert "group of ranks 0-1" in text
        assert "raised on rank 0, " in text and "raised on rank 1, " in results[1][0][1]


def test_what_is_expected_is_said(pool: Pool) -> None:
    def program() -> list[str]:
        rank = md.get_rank()
        cases = ("size", "splits", "message")
        return [told(calls_of(case, rank, md.new_group(timeout=LONG)))[1] for case in cases]

    for size, splits, message in pool.run(program, 2):
        common = (
            "expected: the same collective, dtype, number of elements, op and root on every rank"
        )
        assert common in size
        assert "fix:      call the same collectives in the same order" in size
        assert "the same sizes on both sides" in splits
        assert "expected: the same dtype and number of elements on both sides" in message
        assert "fix:      receive into a tensor like the one that is sent" in message


@pytest.mark.parametrize("size", [3, 5])
def test_one_of_several_differs_and_all_tell_the_same(pool: Pool, size: int) -> None:
    def program(size: int) -> list[tuple]:
        rank = md.get_rank()
        found = []
        for odd in (0, size - 1):
            group = md.new_group(timeout=LONG)
            md.all_reduce(ones(3), group=group)
            if odd:
                time.sleep(0.3 * (rank == odd))
            found.append(told(lambda g=group, n=5 + (rank == odd): md.all_reduce(ones(n), group=g)))
        return found

    outcomes = pool.run(program, size, size)
    for place, odd in enumerate((0, size - 1)):
        results = [outcome[place] for outcome in outcomes]
        assert {result[0] for result in results} == {"MismatchError"}
        assert len({result[2] for result in results}) == 1
        assert max(result[3] for result in results) < SOON_S
        assert "made different calls as call 2" in results[0][1]
        others = [rank for rank in range(size) if rank != odd]
        odd_line = f"rank {odd}: all_reduce((6,) float32, SUM)"
        assert odd_line in results[0][2]
        for rank in others:  # who had come by then is told, the others say that they had not
            assert f"{rank}" in results[0][2]


def test_an_axis_is_named_and_other_axes_work_on(pool: Pool) -> None:
    def program() -> tuple[tuple, float, float]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), timeout=LONG)
        rank = md.get_rank()
        result = ("", "", "", 0.0)
        if rank in (1, 3):  # one column of the mesh
            result = told(lambda: md.all_reduce(ones(rank), group=mesh["dp"]))
        elif rank in (0, 2):
            md.all_reduce(ones(4), group=mesh["dp"])
        x, y = ones(1), ones(1)
        md.all_reduce(x, group=mesh["tp"])
        md.all_reduce(y)
        return result, x.item(), y.item()

    outcomes = pool.run(program, 4)
    assert [outcome[1:] for outcome in outcomes] == [(2.0, 4.0)] * 4
    for rank in (1, 3):
        kind, text, found, _ = outcomes[rank][0]
        assert kind == "MismatchError"
        assert "where:    axis 'dp' of DeviceMesh(dp=2, tp=2), ranks 1, 3; rank " in text
        assert f"raised on rank {rank}, call 1 on axis 'dp' of DeviceMesh(dp=2, tp=2): " in text
        assert "rank 1: all_reduce((1,) float32, SUM)" in found
        assert "rank 3: all_reduce((3,) float32, SUM)" in found


def test_meshes_that_share_a_communicator_count_their_calls_together(pool: Pool) -> None:
    def program() -> tuple:
        first = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"), timeout=LONG)
        second = md.init_device_mesh("cpu", (2,), mesh_dim_names=("other",), timeout=LONG)
        for _ in range(3):
            md.all_reduce(ones(2), group=first["a"])
            md.all_reduce(ones(2), group=second)
        calls = [
            lambda: md.all_reduce(ones(2), group=first["a"]),
            lambda: md.broadcast(ones(2), 0, group=second),
        ]
        return told(calls[md.get_rank()])

    for kind, text, _, _ in pool.run(program, 2):
        assert kind == "MismatchError"
        assert "made different calls as call 7" in text


def test_overlapping_groups_in_one_order_work_and_in_two_orders_are_told(pool: Pool) -> None:
    def program() -> tuple[float, tuple]:
        rank = md.get_rank()
        mine = [md.new_group(ranks, timeout=LONG) for ranks in ([0, 1], [1, 2], [0, 1, 2])]
        total = 0.0
        for _ in range(20):
            for group in mine:
                if group != md.GroupMember.NON_GROUP_MEMBER:
                    x = ones(2)
                    md.all_reduce(x, group=group)
                    total += x[0].item()
        # One group, two calls in another order on one rank.
        first, second = (ones(2), ones(3))[:: -1 if rank == 1 else 1]

        def both() -> None:
            md.all_reduce(first, group=mine[2])
            md.all_reduce(second, group=mine[2])

        return total, told(both)

    outcomes = pool.run(program, 3)
    assert [total for total, _ in outcomes] == [100.0, 140.0, 100.0]
    assert {result[0] for _, result in outcomes} == {"MismatchError"}
    assert len({result[2] for _, result in outcomes}) == 1
    assert "made different calls as call 21" in outcomes[0][1][1]


def test_async_calls_that_differ_raise_where_the_later_one_starts(pool: Pool) -> None:
    def program() -> tuple:
        rank = md.get_rank()
        group = md.new_group(timeout=LONG)
        works = [md.all_reduce(ones(2), group=group, async_op=True) for _ in range(5)]

        def rest() -> None:
            time.sleep(0.3 * rank)
            work = md.all_reduce(ones(3 + rank), group=group, async_op=True)
            work.wait()

        for work in works:
            work.wait()
        return told(rest)

    first, second = pool.run(program, 2)
    assert first[0] == second[0] == "MismatchError"
    assert first[2] == second[2]
    assert "different calls as call 6" in first[1]


def test_a_rank_outside_the_group_raises_alone(pool: Pool) -> None:
    def program() -> tuple[tuple, float]:
        group = md.new_group([0, 2])
        x = ones(1)
        result = ("", "", "", 0.0)
        if md.get_rank() == 1:
            result = told(lambda: md.all_reduce(x, group=group))
        else:
            md.all_reduce(x, group=group)
        return result, x.item()

    outcomes = pool.run(program, 3)
    assert [x for _, x in outcomes] == [2.0, 1.0, 2.0]
    assert outcomes[1][0][0] == "NotInGroupError"
    assert "this rank is not a member of the group" in outcomes[1][0][1]


def test_a_root_far_ahead_of_a_sleeping_receiver_gives_right_results(pool: Pool) -> None:
    def program() -> float:
        tensors = [torch.full((2,), float(i)) for i in range(3000)]
        group = md.new_group(timeout=LONG)
        if md.get_rank():
            tensors = [torch.zeros(2) for _ in range(3000)]
            time.sleep(0.7)
        works = [md.broadcast(x, 0, group=group, async_op=True) for x in tensors]
        for work in works:
            work.wait()
        return sum(x.sum().item() for x in tensors)

    assert pool.run(program, 3) == [2.0 * 2999 * 3000 / 2] * 3


def test_a_root_far_ahead_of_one_that_never_comes_times_out(pool: Pool) -> None:
    def program() -> tuple:
        group = md.new_group(timeout=timedelta(seconds=1))
        result: tuple = ()
        if md.get_rank() == 0:
            result = told(
                lambda: [md.broadcast(ones(2), 0, group=group, async_op=True) for _ in range(3000)]
            )
        md.barrier()
        return result

    kind, text, found, took = pool.run(program, 2)[0]
    assert kind == "CollectiveTimeoutError"
    assert "broadcast on group of ranks 0-1 timed out after 1 s" in text
    assert "rank 1: did not reach this call; last call 1 on the world: barrier() at " in found
    assert took > 0.9
    assert is_within(took, 1 + SOON_S)


def test_a_root_far_ahead_of_one_that_died_does_not_wait_for_it(pool: Pool) -> None:
    def program() -> tuple:
        group = md.new_group(timeout=LONG)
        md.barrier(group)
        if md.get_rank():
            os.kill(os.getpid(), 9)

        def send() -> None:
            works = [md.broadcast(ones(2), 0, group=group, async_op=True) for _ in range(2000)]
            works[-1].wait()

        return told(send)

    survivor, victim = pool.outcomes(program, 2, grace_s=20)
    assert isinstance(victim, Failure) and not isinstance(survivor, Failure)
    kind, text, _, took = survivor
    assert kind == "BackendError", text
    assert "rank 1 has ended" in text
    assert is_within(took, 10)


def test_without_shared_memory_everything_works_and_a_timeout_still_tells(pool: Pool) -> None:
    def program() -> tuple:
        from meshdist.groups.communicators import get_registry
        from tests.inner import get_world

        registry = get_registry(get_world())
        registry.fingerprint_tables.close()
        group = md.new_group(timeout=timedelta(seconds=1))
        assert group.open_device_group("cpu").fingerprint_table is None
        x = ones(2)
        md.all_reduce(x, group=group)
        assert x.tolist() == [2.0, 2.0]
        calls = [
            lambda: md.all_reduce(x, group=group),
            lambda: md.recv(x, 0, group=group),
        ]
        result = told(calls[md.get_rank()])
        md.barrier()  # nobody leaves while it may be asked
        return result

    first, second = pool.run(program, 2)
    # Who gives up first breaks the connection, and may be quoted by the other; or has gone on to
    # the barrier when it is asked.
    kinds = {first[0], second[0]}
    assert "CollectiveTimeoutError" in kinds <= {"CollectiveTimeoutError", "BackendError"}
    if first[0] == "CollectiveTimeoutError":
        gone_on = r"recv\(.*\) on group of ranks 0-1|call 1 on the world: barrier\("
        assert re.search(rf"rank 1: did not reach this call; last ({gone_on})", first[2])
    if second[0] == "CollectiveTimeoutError":
        gone_on = r"2 on group of ranks 0-1: all_reduce|1 on the world: barrier"
        assert re.search(rf"rank 0: last call ({gone_on})\(", second[2])
    quotes = [
        re.search(r"rank 1 failed first, in recv\(.*\) on group of ranks 0-1 at ", first[2]),
        re.search(r"rank 0 failed first, in call 2 on group of ranks 0-1: all_reduce\(", second[2]),
    ]
    assert quotes.count(None) == 1  # whoever was the first to tell


def test_a_member_without_shared_words_is_asked_for_them_once(pool: Pool, tmp_path: Path) -> None:
    def program(rank: int, path: str) -> tuple[float, int, bool]:
        from meshdist.groups import host_comparison
        from tests.inner import TimeoutStore

        make_shared_words = host_comparison.make_shared_words
        if rank == 1:
            host_comparison.make_shared_words = lambda: None
        try:
            md.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
        finally:
            host_comparison.make_shared_words = make_shared_words
        x = ones(1)
        md.all_reduce(x)
        md.barrier()
        asked: list[str] = []
        ask = TimeoutStore.ask

        def counted(store: TimeoutStore, request: Any) -> Any:
            asked.append(threading.current_thread().name)
            return ask(store, request)

        with mock.patch.object(TimeoutStore, "ask", counted):
            for _ in range(100):
                md.all_reduce(x, md.ReduceOp.MAX)
        fingerprint_table = md.group.WORLD.open_device_group("cpu").fingerprint_table
        md.destroy_process_group()
        return x.item(), asked.count(threading.current_thread().name), fingerprint_table is None

    assert pool.call(program, 2, str(tmp_path / "store")) == [(2.0, 0, False), (2.0, 0, True)]


def test_full_shared_words_leave_a_group_without_headers_that_works(pool: Pool) -> None:
    def program() -> tuple[bool, float]:
        from tests.inner import shared_flags

        most = 0 if md.get_rank() == 1 else shared_flags.TOTAL_WORDS
        with mock.patch.object(shared_flags, "TOTAL_WORDS", most):
            group = md.new_group()
            x = ones(1)
            for _ in range(100):
                md.all_reduce(x, md.ReduceOp.MAX, group=group)
            md.all_reduce(x, group=group)
        return group.open_device_group("cpu").fingerprint_table is None, x.item()

    assert pool.run(program, 2) == [(False, 2.0), (True, 2.0)]


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_groups_that_come_and_go_keep_no_files_open(pool: Pool) -> None:
    def program() -> list[int]:
        counts = []
        for _ in range(4):
            for _ in range(50):
                group = md.new_group()
                md.all_reduce(ones(1), group=group)
                group.close()
            counts.append(num_files())
        return counts

    for counts in pool.run(program, 2):
        assert counts[-1] <= counts[0] + 2, counts


def test_worlds_that_come_and_go_keep_no_files_open(pool: Pool, tmp_path: Path) -> None:
    def program(rank: int, path: str) -> list[int]:
        import gc

        gc.collect()
        gc.disable()  # what is left to the collector would hide
        try:
            counts = []
            for number in range(100):
                md.init_process_group(
                    "gloo", init_method=f"file://{path}-{number}", rank=rank, world_size=2
                )
                md.all_reduce(ones(1))
                md.destroy_process_group()
                counts.append(num_files())
            return counts
        finally:
            gc.enable()

    for counts in pool.call(program, 2, str(tmp_path / "store")):
        assert counts[-1] <= counts[9] + 4, counts


def on_hosts(pool: Pool, path: Path, hosts: str, body, *args) -> list:
    """Run ``body(*args)`` on a rank for each letter of ``hosts``, the host that it is on."""

    def program(rank: int, path: str, hosts: str, body, args) -> object:
        os.environ["MESHDIST_HOST_ID"] = hosts[rank]
        size = len(hosts)
        md.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
        try:
            return body(*args)
        finally:
            torch.distributed.set_debug_level(torch.distributed.DebugLevel.OFF)
            md.destroy_process_group()

    return pool.call(program, len(hosts), str(path), hosts, body, args)


def test_ranks_of_one_host_share_memory_and_those_of_two_do_not(pool: Pool, tmp_path: Path) -> None:
    def body() -> list[tuple[bool | None, bool]]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("out", "in"), timeout=LONG)
        found = []
        for group in (mesh["in"].get_group(), mesh["out"].get_group(), md.group.WORLD):
            x = ones(1)
            md.all_reduce(x, group=group)
            assert x.item() == group.size()
            device_group = group.open_device_group("cpu")
            sees_all = (
                None
                if device_group.fingerprint_table is None
                else device_group.fingerprint_table.sees_all()
            )
            found.append((sees_all, device_group.spans_hosts))
        return found

    expected = [(True, False), (None, True), (False, True)]
    assert on_hosts(pool, tmp_path / "store", "ABAB", body) != [expected] * 4
    assert on_hosts(pool, tmp_path / "other", "AABB", body) == [expected] * 4


def test_across_hosts_calls_are_compared_by_a_round_at_detail(pool: Pool, tmp_path: Path) -> None:
    def body() -> list[tuple]:
        torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
        rank = md.get_rank()
        found = []
        for case in ("size", "dtype", "op", "root", "operation", "list", "splits"):
            group = md.new_group([0, 1], timeout=LONG)
            if rank < 2:
                assert group.open_device_group("cpu").fingerprint_table is None
                found.append((case, told(calls_of(case, rank, group))))
        # Equal calls, uneven ones among them, pass.
        x, y = ones(3), ones(1)
        md.all_reduce(x)
        sent = [rank * 3 + peer for peer in range(3)]
        taken = [peer * 3 + rank for peer in range(3)]
        out = torch.zeros(sum(taken))
        work = md.all_to_all_single(out, ones(sum(sent)), taken, sent, async_op=True)
        md.broadcast(y, 2)
        work.wait()
        return [found, x.tolist(), out.sum().item() == sum(taken)]

    outcomes = on_hosts(pool, tmp_path / "store", "ABA", body)
    assert [outcome[1:] for outcome in outcomes] == [[[3.0] * 3, True]] * 3
    first, second = outcomes[0][0], outcomes[1][0]
    for (case, mine), (_, theirs) in zip(first, second, strict=True):
        assert mine[0] == theirs[0] == "MismatchError", (case, mine, theirs)
        assert mine[2] == theirs[2]
        for rank, line in enumerate(mine[2].splitlines()):
            assert line.startswith(f"rank {rank}: {CASES[case][rank]} at ")
        assert mine[3] < SOON_S


def test_across_hosts_a_timeout_tells_who_called_what(pool: Pool, tmp_path: Path) -> None:
    def body() -> tuple:
        group = md.new_group(timeout=timedelta(seconds=1))
        md.all_reduce(ones(1), group=group)
        result: tuple = ()
        if md.get_rank() == 0:
            result = told(lambda: md.all_reduce(ones(2, 2), group=group))
        md.barrier()
        return result

    kind, text, found, _ = on_hosts(pool, tmp_path / "store", "AB", body)[0]
    assert kind == "CollectiveTimeoutError"
    assert "rank 0, call 2 on group of ranks 0-1: all_reduce((2, 2) float32, SUM) at " in text
    last = "last call 1 on the world: barrier() at "
    assert found.startswith(f"rank 1: did not reach this call; {last}")
    assert "test_device_group.py" in found


def test_a_member_that_destroys_its_world_leaves_the_others_their_own(pool: Pool) -> None:
    def program() -> str:
        x = ones(2)
        md.all_reduce(x)
        fingerprint_table = md.group.WORLD.open_device_group("cpu").fingerprint_table
        assert fingerprint_table is not None
        if md.get_rank() == 0:
            md.destroy_process_group()
            return ""
        time.sleep(0.3)
        assert (
            fingerprint_table.find_lagging(2048, False) is None
        )  # who has left is awaited by nobody
        error = error_of(lambda: md.all_reduce(ones(5)))
        return type(error).__name__

    assert pool.run(program, 2) == ["", "BackendError"]


def test_calls_of_many_threads_of_groups_of_their_own_agree(pool: Pool) -> None:
    def program() -> list[float]:
        import threading

        groups = [md.new_group(timeout=LONG) for _ in range(4)]
        totals = [0.0] * 4

        def use(place: int) -> None:
            for _ in range(100):
                x = ones(2)
                md.all_reduce(x, group=groups[place])
                totals[place] += x[0].item()

        threads = [threading.Thread(target=use, args=(place,)) for place in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return totals

    assert pool.run(program, 2) == [[200.0] * 4] * 2


def two_calls() -> None:
    md.all_reduce(torch.ones(2), md.ReduceOp.MAX)
    if md.get_rank() == 0:
        md.send(torch.ones(3), 1, tag=5)
    else:
        md.irecv(torch.ones(3), 0, tag=5).wait()


def test_every_call_is_logged_at_trace_level(caplog: pytest.LogCaptureFixture) -> None:
    md.simulate(two_calls, 2)
    assert caplog.records == []
    with caplog.at_level(TRACE, "meshdist.collectives"):
        md.simulate(two_calls, 2)
    line = two_calls.__code__.co_firstlineno
    said = sorted(record.getMessage() for record in caplog.records)
    assert said == sorted(
        [
            *(
                f"rank {rank}: call 1 on the world: all_reduce((2,) float32, MAX) at "
                f"{__file__}:{line + 1} in two_calls"
                for rank in range(2)
            ),
            "rank 0: send((3,) float32, to rank 1, tag 5) on the world at "
            f"{__file__}:{line + 3} in two_calls",
            "rank 1: irecv((3,) float32, from rank 0, tag 5) on the world at "
            f"{__file__}:{line + 5} in two_calls",
        ]
    )
    assert {(record.name, record.levelname) for record in caplog.records} == {
        ("meshdist.collectives", "TRACE")
    }
