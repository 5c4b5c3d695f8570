"""Ranks that die, raise, differ or never come, over Gloo processes: everybody else gets out."""

from __future__ import annotations

import json
import os
import re
import signal
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.checking.calls import get_message
from meshdist.groups import communicators as registry_module
from tests.inner import deadlines, get_world
from tests.load import is_within
from tests.operations.cases import BACKENDS
from tests.pool import Pool, places

ROOT = Path(__file__).resolve().parents[2]


def error_of(call: Callable[[], Any]) -> str:
    """The kind and text of the error that ``call`` raises on this rank, or ""."""
    try:
        call()
    except md.MeshdistError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_never_comes_to_the_mesh_is_named(pool: Pool) -> None:
    def program() -> str:
        if md.get_rank() == 1:
            time.sleep(5)
            return ""
        limit = timedelta(seconds=1)
        text = error_of(lambda: md.init_device_mesh("cpu", (3,), timeout=limit))
        time.sleep(1)
        return text

    told = pool.run(program, 3)
    for rank in (0, 2):
        assert told[rank].startswith("CollectiveTimeoutError: rank 1 did not arrive within 1 s")
        assert f"rank {rank}, DeviceMesh(3), for ranks 0-2" in told[rank]
        assert "rank 1: is running and has called no collective" in told[rank]


def test_a_collective_that_one_rank_does_not_call_tells_who_and_where(pool: Pool) -> None:
    def program() -> str:
        mesh = md.init_device_mesh(
            "cpu", (3,), mesh_dim_names=("dp",), timeout=timedelta(seconds=1)
        )
        x = torch.ones(2, 3)
        md.all_reduce(x, group=mesh["dp"])
        text = ""
        if md.get_rank() != 1:
            text = error_of(lambda: md.all_reduce(x, group=mesh["dp"]))
        time.sleep(4)
        return text

    told = pool.run(program, 3)
    assert told[0] and told[2] and not told[1]
    text = "".join(told)
    assert "CollectiveTimeoutError: all_reduce on axis 'dp' of DeviceMesh(dp=3)" in text
    assert "call 2 on axis 'dp' of DeviceMesh(dp=3): all_reduce((2, 3) float32, SUM) at " in text
    assert "rank 1: did not reach this call; last call 1 on axis 'dp'" in text
    assert "test_failures.py" in text


def test_abort_frees_every_rank_and_tells_the_reason(pool: Pool) -> None:
    def program() -> tuple[str, float, float]:
        own = {"dp": md.AxisOptions(private=True)}  # else it would share the world's communicator
        mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",), axis_options=own)
        x = torch.ones(1)
        start = time.monotonic()
        if md.get_rank() == 3:
            time.sleep(0.5)
            mesh.abort("the data has ended")
        calls = [
            lambda: md.all_reduce(x, group=mesh["dp"]),
            lambda: md.recv(x, src=3, group=mesh["dp"]),
            lambda: md.recv(x, group=mesh["dp"]),
            lambda: md.all_reduce(x, group=mesh["dp"]),
        ]
        text = error_of(calls[md.get_rank()])
        took = time.monotonic() - start
        y = torch.ones(1)
        md.all_reduce(y)  # the world is another group, and lives
        return text, took, y.item()

    for text, took, total in pool.run(program, 4):
        assert text.startswith("AbortedError: ")
        assert "rank 3: the data has ended" in text
        assert is_within(took, 10)
        assert total == 4.0


def test_ranks_that_wait_in_different_agreements_are_shown_at_the_timeout(pool: Pool) -> None:
    def program() -> tuple[str, str]:
        limit, rank = timedelta(seconds=3), md.get_rank()

        def make_a_group() -> None:
            try:
                md.new_group([0, 1], timeout=limit)
            finally:
                time.sleep(2)  # the others may ask a little later where this rank is

        def make_a_mesh(size: int) -> None:
            try:
                md.init_device_mesh("cpu", (size,), timeout=limit)
            finally:
                time.sleep(2)

        md.barrier()
        crossed = error_of(make_a_group if rank else partial(make_a_mesh, 2)) if rank < 2 else ""
        md.barrier()
        return crossed, error_of(partial(make_a_mesh, 3 if rank else 2))

    def is_late(text: str, summary: str, where: str, place: str) -> bool:
        start = f"CollectiveTimeoutError: {summary}"
        return text.startswith(start) and where in text and re.search(place, text) is not None

    found = pool.run(program, 3)
    for rank, (here, there) in enumerate((("mesh", "group"), ("group", "mesh"))):
        other, (text, _) = 1 - rank, found[rank]
        summary = f"rank {other} did not arrive within 3 s to create a {here}"
        place = rf"rank {other}: .*; now at .*test_failures.py:\d+ in .*make_a_{there}"
        assert is_late(text, summary, "for ranks 0-1", place), text
    for rank, (_, text) in enumerate(found):
        size, others = ("3", "rank 0") if rank else ("2", "rank 1")
        summary = f"{others} did not arrive within 3 s to create a mesh"
        place = f"{others}: .*; now at .*in .*make_a_mesh"
        where = f"rank {rank}, DeviceMesh({size}), for ranks 0-{int(size) - 1}"
        assert is_late(text, summary, where, place), text


BY_WAY_OF_A_THIRD = """
from datetime import timedelta
import torch, meshdist as md
md.init_process_group("gloo")
x, rank, limit = torch.ones(1), md.get_rank(), timedelta(seconds=3)
md.barrier()
if rank == 0:
    md.recv(x, 1)
    md.recv(x, 2)
else:
    try:
        if rank == 1:
            md.init_device_mesh("cpu", (3,), timeout=limit)
        else:
            md.new_group([0, 2], timeout=limit)
    except md.MeshdistError as error:
        print(type(error).__name__, error)
    md.send(x, 0)
"""


def test_a_wait_for_others_goes_on_though_a_third_looks_how_it_does(pool: Pool) -> None:
    """Rank 1 looks how the group does for which rank 2 waits.

    Torch's server wakes those that wait for a key when another compares it, set or not.
    """
    for rank, ended in enumerate(
        pool.start(BY_WAY_OF_A_THIRD, places(3), has_teardown=False)[1:], 1
    ):
        awaited = "ranks 0, 2 did" if rank == 1 else "rank 0 did"
        start = f"CollectiveTimeoutError {awaited} not arrive within 3 s to create a"
        assert ended.stdout.startswith(start), ended.stdout + ended.stderr


def test_two_threads_of_one_rank_open_different_groups_at_once(pool: Pool) -> None:
    def program() -> dict[str, float]:
        found = {}

        def use(name: str, ranks: list[int]) -> None:
            group = md.new_group(ranks)
            x = torch.ones(1)
            if md.get_rank() in ranks:
                md.all_reduce(x, group=group)
            found[name] = x.item()

        orders = [("all", [0, 1, 2]), ("ends", [0, 2])]
        if md.get_rank() == 2:
            orders.reverse()
        threads = [threading.Thread(target=use, args=order) for order in orders]
        for thread in threads:
            thread.start()
            time.sleep(0.2)
        for thread in threads:
            thread.join()
        md.barrier()
        return found

    both, middle = {"all": 3.0, "ends": 2.0}, {"all": 3.0, "ends": 1.0}
    assert pool.run(program, 3) == [both, middle, both]


def test_a_forked_child_reads_its_rank_and_every_collective_raises(pool: Pool) -> None:
    def program() -> tuple[str, float]:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x = torch.ones(1)
        md.all_reduce(x, group=mesh["dp"])
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            calls = (
                lambda: md.all_reduce(x),
                lambda: md.all_reduce(x, group=mesh["dp"]),
                lambda: md.send(x, dst=1 - md.get_rank()),
                lambda: md.barrier(mesh["dp"]),
                lambda: md.init_device_mesh("cpu", (2,)),
            )
            rejected = sum("WorldError: a forked child cannot" in error_of(call) for call in calls)
            text = f"{md.get_rank()} of {md.get_world_size()}: {rejected} rejected"
            os.write(write, text.encode())
            os._exit(0)
        os.waitpid(child, 0)
        md.all_reduce(x, group=mesh["dp"])
        text = os.read(read, 1000).decode()
        os.close(read)
        os.close(write)
        return text, x.item()

    assert pool.run(program, 2) == [("0 of 2: 5 rejected", 4.0), ("1 of 2: 5 rejected", 4.0)]


HEADER = """
import os, signal, time
import torch
import meshdist as md

def say(text):
    os.write(1, f"{text}\\n".encode())  # one write: lines stay whole
"""


def run(pool: Pool, body: str, size: int) -> list[tuple[int, str, str]]:
    """Run ``body`` as ``size`` processes: of each the exit code, stdout and stderr."""
    ended = pool.start(HEADER + textwrap.dedent(body), places(size), has_teardown=False)
    return [(one.returncode, one.stdout, one.stderr) for one in ended]


def test_a_killed_rank_frees_the_others(pool: Pool) -> None:
    def program(operation: str) -> str:
        x = torch.ones(1)
        md.all_reduce(x)
        if md.get_rank() == 1:
            os.kill(os.getpid(), 9)
        calls = {
            "all_reduce": lambda: md.all_reduce(x),
            "recv": lambda: md.recv(x, src=1),
            "barrier": lambda: md.barrier(),
        }
        return error_of(calls[operation])

    for operation in ("all_reduce", "recv", "barrier"):
        start = time.monotonic()
        survivor, victim = pool.outcomes(program, 2, operation, grace_s=20)
        assert is_within(time.monotonic() - start, 20)
        assert f"BackendError: {operation} on the world failed on backend 'gloo'" in survivor
        assert "resolve the error of the rank that exited or failed first" in survivor
        assert not isinstance(victim, str)


@pytest.mark.parametrize("how", ["kill", "raise", "destroy"])
def test_a_rank_that_has_ended_is_not_waited_for_where_a_mesh_is_made(pool: Pool, how: str) -> None:
    def program() -> str:
        if md.get_rank() == 1:
            if how == "kill":
                os.kill(os.getpid(), 9)
            if how == "raise":
                raise KeyError("no data")
            md.destroy_process_group()
            return ""
        return error_of(lambda: md.init_device_mesh("cpu", (3,)))

    start = time.monotonic()
    told = pool.outcomes(program, 3, grace_s=20)
    assert is_within(time.monotonic() - start, 15)
    ended = {"kill": "has ended", "destroy": "destroyed its process group"}.get(how, "")
    for rank in (0, 2):
        assert told[rank].startswith("BackendError: rank 1 left before creating a mesh\n")
        assert f"rank {rank}, DeviceMesh(3), for ranks 0-2" in told[rank]
        assert f"found:    rank 1 {ended}" in told[rank]
        assert "check why rank 1 left, or create it with the remaining ranks" in told[rank]


@pytest.mark.parametrize(
    ("backend", "hosts"),
    [("shm", ""), ("gloo", ""), pytest.param("gloo", "aab", marks=pytest.mark.soak)],
)
def test_a_forgotten_call_is_told_with_how_many_each_has_made(
    pool: Pool, backend: str, hosts: str
) -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        for _ in range(2):
            md.all_reduce(torch.ones(2), group=mesh["dp"])
        if md.get_rank() == 1:
            md.destroy_process_group()
            return ""
        return error_of(lambda: md.all_reduce(torch.ones(2), group=mesh["dp"]))

    told = pool.outcomes(program, 3, backend=backend, hosts=hosts)
    for rank in (0, 2):
        assert f"rank {rank}, call 3 on axis 'dp' of DeviceMesh(dp=3)" in told[rank]
        ending = "rank 1:? destroyed its process group; it made 2 collectives on this group"
        assert re.search(ending, told[rank]), told[rank]


class Struck(Exception):
    pass


def raise_struck(*_: object) -> None:
    raise Struck("a handler has a fault")


def interrupted_in(how: str) -> str:
    """What ends a call on every rank where a signal's handler of rank 1 raises inside."""
    x = torch.ones(2)
    md.all_reduce(x)
    if md.get_rank() == 0:
        time.sleep(1.5)  # comes late
    elif md.get_rank() == 1:
        signal.signal(signal.SIGALRM, raise_struck)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        if how == "beside what is in flight":
            work = md.all_reduce(torch.ones(2), async_op=True)
        md.all_reduce(x, op=md.ReduceOp.SUM if how == "fast" else md.ReduceOp.MAX)
        if how == "beside what is in flight":
            work.wait()
    except (Struck, md.MeshdistError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("how", "hosts"),
    [("fast", ""), ("slow", ""), ("beside what is in flight", ""), ("fast", "AABB")],
)
def test_what_a_handler_raises_in_a_collective_is_told_to_the_others(
    pool: Pool, how: str, hosts: str
) -> None:
    backend = "gloo" if hosts else "shm"
    told = pool.run(interrupted_in, 4, how, backend=backend, hosts=hosts)
    assert told[1] == "Struck: a handler has a fault"
    for text in (told[0], *told[2:]):
        assert text.startswith("AbortedError: all_reduce on the world was aborted\n"), text
        assert "rank 1: gave up in call " in text
        assert "on the world: all_reduce((2,) float32" in text
        assert "test_failures.py" in text and ": Struck: a handler has a fault" in text


def left_by_a_handler(operation: str, raised: str) -> tuple[str, list[float], str]:
    """How rank 1's call ends in which a handler raises, its tensor later, and its next call."""
    rank, size = md.get_rank(), md.get_world_size()
    x = torch.ones(size << 15)
    md.barrier()
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: md.all_reduce(x),
        "all_reduce MAX": lambda: md.all_reduce(x, md.ReduceOp.MAX),
        "broadcast": lambda: md.broadcast(x, 0),
        "all_gather": lambda: md.all_gather(list(x.view(size, -1)), torch.ones(x.numel() // size)),
        "reduce_scatter": lambda: md.reduce_scatter_tensor(
            x[: x.numel() // size], torch.ones(x.numel())
        ),
        "all_to_all": lambda: md.all_to_all_single(x, torch.ones(x.numel())),
        "all_gather_object": lambda: md.all_gather_object([None] * size, rank),
    }
    if rank == 0:
        x *= 5
        time.sleep(1.2)  # comes late
    elif rank == 1:
        handler = raise_struck if raised == "Struck" else signal.default_int_handler
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    ended = ""
    try:
        calls[operation]()
    except (Struck, KeyboardInterrupt, md.MeshdistError) as error:
        ended = f"{type(error).__name__}: {error}"
    after = x.clone()
    time.sleep(2.0 if rank == 1 else 0.5)
    later = error_of(lambda: md.all_reduce(torch.ones(1)))
    return ended, [after.sum().item(), x.sum().item()], later


OPERATIONS_LEFT = ["all_reduce", "all_reduce MAX", "broadcast", "all_gather", "reduce_scatter"]


@pytest.mark.parametrize(
    ("backend", "operation", "raised"),
    [
        ("gloo", "all_reduce", "Struck"),
        ("gloo", "all_reduce MAX", "KeyboardInterrupt"),
        ("gloo across hosts", "all_reduce", "KeyboardInterrupt"),
        ("shm", "all_reduce", "KeyboardInterrupt"),
        *(
            pytest.param(backend, operation, raised, marks=pytest.mark.soak)
            for backend, operation, raised in product(
                ["gloo", "mpi", "gloo across hosts", "shm"],
                [*OPERATIONS_LEFT, "all_to_all", "all_gather_object"],
                ["Struck", "KeyboardInterrupt"],
            )
        ),
    ],
)
def test_a_collective_that_a_handler_leaves_breaks_its_group_on_every_backend(
    pool: Pool, backend: str, operation: str, raised: str
) -> None:
    told = BACKENDS[backend](pool, left_by_a_handler, 3, operation, raised)
    ended, sums, later = told[1]
    assert ended.startswith(raised)
    assert sums[0] == sums[1]  # nothing is written once the call has raised
    called = operation.split(" ")[0]
    for text in (later, told[0][0], told[0][2], told[2][0], told[2][2]):
        assert text.startswith("AbortedError: ") and called[:6] in text, text
        assert f"gave up in call 2 on the world: {called}" in text or "has given up" in text
        assert raised in text


def test_a_program_that_never_destroys_ends_at_once_and_silently(pool: Pool) -> None:
    ended = run(
        pool,
        """
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        md.all_reduce(torch.ones(1), group=mesh["tp"])
        time.sleep(0.15 * md.get_rank())  # rank 0, which hosts the store, ends first
""",
        size=4,
    )
    assert ended == [(0, "", "")] * 4


def test_a_mesh_that_is_closed_at_once_leaves_nobody_behind(pool: Pool) -> None:
    def program() -> str:
        for _ in range(10):
            md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).close()
        return "closed"

    assert pool.run(program, 4) == ["closed"] * 4


def test_two_groups_called_in_two_orders_tell_where_each_rank_is(pool: Pool) -> None:
    def program() -> str:
        limit = timedelta(seconds=1)
        mesh = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"), timeout=limit)
        other = md.new_group(timeout=limit)
        md.all_reduce(torch.ones(1), group=other)
        if md.get_rank() == 0:
            text = error_of(lambda: md.all_reduce(torch.ones(3), group=mesh["a"]))
        else:
            text = error_of(lambda: md.broadcast(torch.ones(2), 1, group=other))
        md.barrier(md.new_group())  # nobody leaves while it may be asked
        return text

    first, second = pool.run(program, 2)
    # A root may be done before its receivers come: Gloo then lets it go, and it waits elsewhere.
    assert first.startswith(
        "CollectiveTimeoutError: all_reduce on axis 'a' of DeviceMesh(a=2, b=1) timed out"
    )
    assert "rank 1: did not reach this call; last call " in first
    assert not second or second.startswith("CollectiveTimeoutError: broadcast on group of")


def test_two_groups_called_in_two_orders_by_collectives_that_wait(pool: Pool) -> None:
    def program() -> str:
        limit = timedelta(seconds=1)
        mesh = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"), timeout=limit)
        groups = [mesh["a"].get_group(), md.new_group(timeout=limit)]
        md.all_reduce(torch.ones(1), group=groups[1])
        if md.get_rank() == 1:
            groups.reverse()

        def both() -> None:
            for group in groups:
                md.all_reduce(torch.ones(2), group=group)

        text = error_of(both)
        md.barrier(md.new_group())  # nobody leaves while it may be asked
        return text

    first, second = pool.run(program, 2)
    axis, other = "axis 'a' of DeviceMesh(a=2, b=1)", "group of ranks 0-1"
    assert first.startswith(f"CollectiveTimeoutError: all_reduce on {axis} timed out")
    assert second.startswith(f"CollectiveTimeoutError: all_reduce on {other} timed out")
    call = "all_reduce((2,) float32, SUM) at "
    assert f"rank 0, call 1 on {axis}: {call}" in first
    assert f"rank 1: did not reach this call; last call 2 on {other}: {call}" in first
    assert f"rank 1, call 2 on {other}: {call}" in second
    assert f"rank 0: did not reach this call; last call 1 on {axis}: {call}" in second
    for text in (first, second):
        assert text.count("test_failures.py:") in (2, 3)  # the other may have gone on


def test_the_first_failure_is_quoted_by_the_later_ones(pool: Pool) -> None:
    def program() -> tuple[str, str, float]:
        group = md.new_group(timeout=timedelta(seconds=1 + 2 * (md.get_rank() == 2)))
        x = torch.ones(2)
        calls = [lambda: md.recv(x, 1, group), lambda: None, lambda: md.recv(x, 0, group)]
        text = error_of(calls[md.get_rank()])
        again = error_of(lambda: md.all_reduce(x, group=group)) if md.get_rank() == 0 else ""
        y = torch.ones(1)
        md.all_reduce(y)
        return text, again, y.item()

    outcomes = pool.run(program, 3)
    assert [y for _, _, y in outcomes] == [3.0] * 3
    first, last = outcomes[0][0], outcomes[2][0]
    assert first.startswith("CollectiveTimeoutError: recv on group of ranks 0-2 timed out")
    assert "fix:      pass the same tag, dtype and number of elements to send and recv" in first
    assert "expected: rank 1 to send (2,) float32 to this rank with tag 0\n" in first
    assert "where:    rank 0, recv((2,) float32, from rank 1) on group of ranks 0-2 at " in first
    # Rank 0 breaks the connection; where rank 2 is quicker to tell, rank 0 quotes it instead.
    quoted = "failed first, in recv((2,) float32, from rank {}) on group of ranks 0-2 at "
    quotes = [f"rank 2 {quoted.format(0)}" in first, f"rank 0 {quoted.format(1)}" in last]
    assert sorted(quotes) == [False, True]
    again = outcomes[0][1]
    assert again.startswith("AbortedError: all_reduce on group of ranks 0-2 was aborted")
    assert "rank 0: recv failed before: " in again


def test_a_rank_late_to_open_a_group_is_named_with_what_it_does(pool: Pool) -> None:
    def program() -> str:
        x = torch.ones(1)
        md.all_reduce(x)
        text = ""
        if md.get_rank() == 1:
            time.sleep(2)
        else:
            text = error_of(
                lambda: md.new_group(timeout=timedelta(seconds=1)).open_device_group("cpu")
            )
        md.barrier()
        return text

    told = pool.run(program, 3)
    for rank in (0, 2):
        assert "rank 1 did not arrive within 1 s to create a group" in told[rank]
        assert "rank 1: call 1 on the world: all_reduce((1,) float32, SUM) at " in told[rank]


def test_a_killed_rank_is_named_in_a_timeout_report_too(pool: Pool) -> None:
    def program() -> str:
        group = md.new_group(timeout=timedelta(seconds=1))
        md.barrier()
        if md.get_rank() == 2:
            os.kill(os.getpid(), 9)
        time.sleep(0.2)
        if md.get_rank() == 1:
            time.sleep(3.5)
            return ""
        # Its own connection to rank 1 is sound: rank 1 just does not send.
        return error_of(lambda: md.recv(torch.ones(1), 1, group))

    first, second, _ = pool.outcomes(program, 3, grace_s=20)
    assert second == ""
    assert first.startswith("CollectiveTimeoutError: recv on group of ranks 0-2"), first
    assert "rank 1: last call 1 on the world: barrier() at " in first
    assert "rank 2: has ended" in first


def test_a_forked_child_writes_no_headers(pool: Pool) -> None:
    """Rank 1 makes its second call before rank 0, and sees what rank 0's child has written."""

    def program() -> float:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        group, store = mesh["dp"].get_group(), get_world().store
        x = torch.ones(1)
        md.all_reduce(x, group=group)
        assert group.open_device_group("cpu").fingerprint_table is not None
        child = os.fork()
        if child == 0:
            error_of(lambda: md.all_reduce(torch.ones(7), group=group))
            error_of(lambda: md.broadcast(torch.ones(7), 0))
            error_of(md.destroy_process_group)
            os._exit(0)
        os.waitpid(child, 0)
        rank = md.get_rank()
        store.set(f"rank {rank} has no child", "")
        store.get("rank 0 has no child" if rank else "rank 1 has called")
        work = md.all_reduce(x, group=group, async_op=True)
        store.set(f"rank {rank} has called", "")
        assert work is not None
        work.wait()
        return x.item()

    assert pool.run(program, 2) == [4.0] * 2


def test_a_program_that_ends_in_the_midst_of_async_calls_ends_silently(pool: Pool) -> None:
    ended = run(
        pool,
        """
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        works = [md.all_reduce(torch.ones(4), group=mesh["dp"], async_op=True) for _ in range(50)]
        for work in works:
            work.wait()
        say(md.get_world_size())
""",
        size=2,
    )
    assert ended == [(0, "2\n", "")] * 2


def asked_too_early() -> str:
    """What is told of a message that is noted while somebody asks after it."""
    world = md.group.WORLD
    opened, registry = (
        world.open_device_group("cpu").opened,
        registry_module.get_registry(world.world),
    )
    about = {"label": opened.label, "message": [True, 0, 5, 1]}
    before = registry.answer(about)
    assert before["about"] is None

    def note(*_: float) -> None:
        facts = world.open_device_group("cpu").group
        opened.recorder.note(facts, get_message("send", torch.ones(3), 0, 5))

    with pytest.MonkeyPatch.context() as patch:
        slow_clock = SimpleNamespace(sleep=note, monotonic=time.monotonic)
        patch.setattr(deadlines, "time", slow_clock)
        patch.setattr(deadlines, "os", SimpleNamespace(sched_yield=note))
        return registry.answer(about)["about"]


def test_a_message_that_is_on_its_way_is_found_although_it_is_noted_late() -> None:
    (found,) = md.simulate(asked_too_early, 1)
    assert found.startswith("send((3,) float32, to rank 0, tag 5) at ")


def told_of_a_disagreement_before_its_signal() -> str:
    """A member that has read the others' error leaves before the first of them tells this one."""
    group = md.new_group(timeout=timedelta(seconds=20))
    opened, store = group.open_device_group("cpu").opened, md.group.WORLD.world.store
    md.barrier(group)
    if md.get_rank() == 1:
        names = ("summary", "where", "expected", "found", "fix")
        store.set(f"{opened.label}/disagreement", json.dumps(dict.fromkeys(names, "calls differ")))
        opened.communicator.abort()
        md.barrier()
        return ""
    first, second = (error_of(lambda: md.all_reduce(torch.ones(2), group=group)) for _ in range(2))
    md.barrier()
    return first + second


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_disagreement_is_told_though_its_signal_has_not_come(backend: str, pool: Pool) -> None:
    told, _ = pool.run(told_of_a_disagreement_before_its_signal, 2, backend=backend)
    assert told.count("MismatchError: calls differ") == told.count("raised on rank 0") == 2, told
