"""The wire of groups that span hosts: choosing it, opening it, the background, and failures."""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

import meshdist as md
from meshdist.reduce_ops import ReduceOp
from meshdist.wires.hierarchical.communicator import HierarchicalWire
from tests.inner import Opening, WireFailure, WireRefused, get_wire
from tests.load import is_within
from tests.pool import QUICK_NAMES, TESTS, Failure, Pool
from tests.wires.direct import Direct
from tests.wires.samples import DTYPES
from tests.wires.verb_table import WAITING, waiting_times

SECONDS = timedelta(seconds=30)
SHORT = timedelta(seconds=1)


def test_it_is_the_default_of_groups_that_span_hosts(pool: Pool) -> None:
    def program() -> list[tuple[str, str]]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("out", "in"))
        groups = (md.group.WORLD, mesh["out"].get_group(), mesh["in"].get_group())
        for group in groups:
            x = torch.ones(2)
            md.all_reduce(x, group=group)
            assert x.tolist() == [group.size()] * 2
        return [
            (group.open_channel("cpu").communicator.wire, md.get_backend(group)) for group in groups
        ]

    two, one = ("hierarchical", "hierarchical"), ("shm", "shm")
    assert pool.run(program, 4, backend=None, hosts="AABB") == [[two, two, one]] * 4
    assert pool.run(program, 4, backend=None, hosts="ABAB") == [[two, one, two]] * 4
    assert pool.run(program, 4, backend=None) == [[one] * 3] * 4


@pytest.mark.parametrize("size", [1, 2, 8])
def test_on_one_host_it_needs_what_shared_memory_does(size: int) -> None:
    members = tuple(range(size))
    opening = Opening(HashStore(), HashStore, members, 0, "cpu", SECONDS, hosts=(0,) * size)
    assert HierarchicalWire().needs(opening) == get_wire("shm").needs(opening)
    two = dataclasses.replace(opening, is_one_host=False, hosts=(0,) * (size - 1) + (1,))
    if size > 1:
        assert HierarchicalWire().needs(two) == (2 * (size - 2) + 1 + size - 1, 4)


def test_it_is_refused_where_hosts_are_not_known() -> None:
    opening = Opening(HashStore(), HashStore, (0, 1), 0, "cpu", SECONDS, is_one_host=False)
    with pytest.raises(WireRefused, match="on which hosts"):
        HierarchicalWire().open(opening)


def test_a_named_wire_stays(pool: Pool) -> None:
    def program() -> list[str]:
        groups = [md.group.WORLD, md.new_group(backend="hierarchical")]
        return [group.open_channel("cpu").communicator.wire for group in groups]

    assert pool.run(program, 2, backend="gloo", hosts="AB") == [["gloo", "hierarchical"]] * 2
    # A group on one host is shared memory's own.
    assert pool.run(program, 2, backend="hierarchical") == [["shm", "shm"]] * 2
    assert pool.run(program, 1, backend="hierarchical") == [["shm", "shm"]]


def refuse_on(host: str) -> None:
    """Let shared memory refuse on one host."""
    if os.environ["MESHDIST_HOST_ID"] == host:
        wire = type(get_wire("shm"))

        def open_not(self: object, opening: object) -> None:
            raise WireRefused("rank 2: no memory here")

        wire.open, wire.opens = open_not, wire.open  # type: ignore[attr-defined, method-assign]


def test_where_one_host_refuses_all_take_gloo(pool: Pool) -> None:
    def program(rank: int, port: int) -> str:
        wire = type(get_wire("shm"))
        refuse_on("B")
        try:
            where = f"tcp://127.0.0.1:{port}"
            md.init_process_group(init_method=where, rank=rank, world_size=4, timeout=SECONDS)
            try:
                x = torch.ones(1)
                md.all_reduce(x)
                assert x.item() == 4
                return md.group.WORLD.open_channel("cpu").communicator.wire
            finally:
                md.destroy_process_group()
        finally:
            wire.open = getattr(wire, "opens", wire.open)

    assert pool.call(program, 4, free_port(), hosts="AABB") == ["gloo"] * 4


def test_where_it_was_named_and_one_host_refuses_all_raise(pool: Pool) -> None:
    def program(rank: int, port: int) -> str:
        wire = type(get_wire("shm"))
        refuse_on("B")
        where = f"tcp://127.0.0.1:{port}"
        try:
            with pytest.raises(md.BackendError) as caught:
                md.init_process_group(
                    "hierarchical", init_method=where, rank=rank, world_size=4, timeout=SECONDS
                )
            return str(caught.value)
        finally:
            wire.open = getattr(wire, "opens", wire.open)

    for rank, text in enumerate(pool.call(program, 4, free_port(), hosts="AABB")):
        assert text.splitlines() == [
            "the world could not be opened on wire 'hierarchical'",
            f"  where:    rank {rank}, among ranks 0-3",
            "  found:    rank 2: no memory here",
            "  fix:      name another backend, for example 'gloo'",
        ]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_what_is_started_goes_on_without_its_caller(pool: Pool) -> None:
    def program() -> list[float]:
        rank, numbers = md.get_rank(), [1.0, 2.0, 3.0]
        tensors = [torch.full((1000,), number) for number in numbers]
        if rank == 1:
            time.sleep(0.3)  # so that nothing of it can be done at once
        begin = time.monotonic()
        works = [md.all_reduce(x, async_op=True) for x in tensors]
        assert is_within(time.monotonic() - begin, 0.2)
        if rank == 0:
            while not works[-1].is_completed():
                time.sleep(0.001)
        elif rank == 2:
            time.sleep(1.0)  # the others need not wait for this wait
        y = torch.ones(2)
        md.all_reduce(y)  # one that waits comes after what was started
        assert y.tolist() == [4.0, 4.0]
        assert all(work.is_completed() for work in works)
        future = md.all_reduce(torch.ones(1), async_op=True).get_future()
        assert future.then(lambda done: done.value()[0].item()).wait() == 4.0
        for work in works:
            work.wait()
        return [x[-1].item() for x in tensors]

    outcomes = pool.run(program, 4, backend=None, hosts="ABBA")
    assert outcomes == [[4.0, 8.0, 12.0]] * 4


def test_messages_between_and_inside_hosts_and_from_anyone(pool: Pool) -> None:
    def program() -> list[float]:
        rank, found = md.get_rank(), []
        if rank == 0:
            x, sources = torch.empty(3), []
            for _ in range(3):
                sources.append(md.recv(x, tag=4))
                found.append((sources[-1], x[0].item()))
            return sorted(found)
        md.send(torch.full((3,), float(rank)), 0, tag=4)
        return []

    for hosts in ("AABB", "ABAB"):
        outcomes = pool.run(program, 4, backend=None, hosts=hosts)
        assert outcomes[0] == [(1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.parametrize(("ends", "how"), [("abort", "WireAborted"), ("timeout", "WireTimeout")])
def test_whoever_waits_is_freed_by_an_abort_and_when_the_time_is_up(
    pool: Pool, ends: str, how: str
) -> None:
    def program() -> list[tuple[str, str, float]]:
        return waiting_times(lambda wire: wire, WAITING, ends, "hierarchical", (0, 1))

    answers = pool.run(program, 2, hosts="AB")[0]
    assert [(verb, how) for verb, how, _ in answers] == [(verb, how) for verb in WAITING]
    for verb, _, seconds in answers:
        assert seconds > (0.1 if ends == "abort" else 0.5), (verb, seconds)
        assert is_within(seconds, 2.5), (verb, seconds)


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "in the background"])
@pytest.mark.parametrize("place", ["inside", "across"])
def test_an_abort_frees_all_levels(pool: Pool, place: str, waits: bool) -> None:
    def program() -> str:
        wire = md.group.WORLD.open_channel("cpu").communicator
        absent = 1 if place == "inside" else 2
        if wire.rank == absent:
            time.sleep(1.0)
            return "absent"
        threading.Timer(0.3, wire.abort).start()
        x = torch.ones(4)
        with pytest.raises(WireFailure) as caught:
            Direct(wire, SECONDS, waits=waits).all_reduce(x, ReduceOp.SUM).finish(SECONDS)
        with pytest.raises(WireFailure, match="before"):
            Direct(wire, SECONDS, waits=waits).barrier().finish(SECONDS)
        return type(caught.value).__name__

    outcomes = pool.run(program, 4, backend=None, hosts="AABB")
    assert set(outcomes) <= {"absent", "WireAborted", "WireFailure"}
    assert "WireAborted" in outcomes


@pytest.mark.parametrize("is_async", [False, True], ids=["waiting", "in the background"])
@pytest.mark.parametrize("victim", [0, 1, 4])
def test_a_killed_rank_is_an_error_on_all_others(pool: Pool, victim: int, is_async: bool) -> None:
    def program() -> tuple[str, float]:
        md.barrier()
        if md.get_rank() == victim:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.ones(1_000_000)
        begin = time.monotonic()

        def call_until_it_fails() -> None:
            while time.monotonic() < begin + 30:
                work = md.all_reduce(x, async_op=is_async)
                if work is not None:
                    work.wait()

        with pytest.raises(md.MeshdistError) as caught:
            call_until_it_fails()
        return str(caught.value), time.monotonic() - begin

    outcomes = pool.outcomes(program, 5, grace_s=20, backend=None, hosts="AABBB")
    assert isinstance(outcomes.pop(victim), Failure)
    for text, seconds in outcomes:
        assert "all_reduce on the world" in text
        assert is_within(seconds, 6), text
    assert any(f"rank {victim}" in text for text, _ in outcomes), outcomes


def call_what_others_do_not(x: torch.Tensor) -> None:
    if md.get_rank() == 1:
        md.broadcast(x, 0)
    else:
        md.all_reduce(x)


def test_members_of_one_host_that_call_different_verbs_are_told(pool: Pool) -> None:
    def program() -> str:
        x = torch.ones(4)
        with pytest.raises(md.AgreementError) as caught:
            call_what_others_do_not(x)
        return str(caught.value).splitlines()[0]

    outcomes = pool.run(program, 4, backend=None, hosts="AABB")
    assert outcomes == ["the members of a group disagree about their call 1"] * 4


def test_members_of_two_hosts_that_call_different_verbs_are_told_at_detail(pool: Pool) -> None:
    def program() -> str:
        torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
        x = torch.ones(4)
        try:
            with pytest.raises(md.AgreementError) as caught:
                call_what_others_do_not(x)
        finally:
            torch.distributed.set_debug_level(torch.distributed.DebugLevel.OFF)
        return str(caught.value).splitlines()[0]

    outcomes = pool.run(program, 3, backend=None, hosts="ABC")
    assert outcomes == ["the members of a group disagree about their call 1"] * 3


def test_a_timeout_tells_who_did_not_come(pool: Pool) -> None:
    def program() -> str:
        group = md.new_group(timeout=SHORT)
        if md.get_rank() == 3:
            time.sleep(2.5)
            return ""
        with pytest.raises(md.MeshdistError) as caught:
            md.all_reduce(torch.ones(4), group=group)
        time.sleep(0.5)
        return str(caught.value)

    outcomes = pool.run(program, 4, backend=None, hosts="AABB")
    assert any("was not finished within 1 s" in text for text in outcomes[:3]), outcomes
    assert any("rank 3: did not arrive" in text for text in outcomes[:3]), outcomes


def test_worlds_come_and_go(pool: Pool) -> None:
    def program() -> int:
        def num_threads() -> int:
            return [one.name for one in threading.enumerate()].count("meshdist-collectives")

        gc.collect()
        before, counts = num_threads(), []
        for _ in range(4):
            group = md.new_group()
            md.all_reduce(torch.ones(2), group=group)
            md.all_reduce(torch.ones(2), group=group, async_op=True).wait()
            md.destroy_process_group(group)
            counts.append(num_threads() - before)
        return max(counts)

    assert pool.run(program, 4, backend=None, hosts="AABB") == [0] * 4


def test_support_tells_what_it_does_itself() -> None:
    support = HierarchicalWire().support
    for verb in ("all_reduce", "all_reduce_list", "reduce", "reduce_scatter"):
        assert support(verb, "cpu", torch.float32) == "native"
        assert support(verb, "cpu", torch.float8_e4m3fn) == "built"
        assert support(verb, "cpu", torch.bool, ReduceOp.AVG) == ""
    for dtype in DTYPES:
        for verb in ("broadcast", "all_gather", "all_gather_list", "barrier", "gather", "send"):
            assert support(verb, "cpu", dtype) == "native"
        assert support("all_to_all_single", "cpu", dtype) == "built"
    assert support("all_reduce", "cuda", torch.float32) == ""


# Two hosts with a cable between them; each argument is a command line for one rank.
TWO_NAMESPACES = """
set -e
ip link set lo up
unshare --net sleep 300 & there=$!
while [ "$(readlink /proc/$there/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
ip link add here0 type veth peer name there0
ip link set there0 netns $there
ip addr add 10.77.0.1/24 dev here0
ip link set here0 up
nsenter -t $there -n sh -c \
    'ip link set lo up; ip addr add 10.77.0.2/24 dev there0; ip link set there0 up'
export WORLD_SIZE=4 MASTER_ADDR=10.77.0.1 MASTER_PORT=29500
RANK=0 GLOO_SOCKET_IFNAME=here0 "$@" & ranks="$!"
RANK=1 GLOO_SOCKET_IFNAME=here0 "$@" & ranks="$ranks $!"
RANK=2 GLOO_SOCKET_IFNAME=there0 nsenter -t $there -n "$@" & ranks="$ranks $!"
RANK=3 GLOO_SOCKET_IFNAME=there0 nsenter -t $there -n "$@" & ranks="$ranks $!"
for one in $ranks; do wait $one; done
"""
IN_A_NAMESPACE = """
import os
import torch
import meshdist as md

md.init_process_group()
x = torch.full((1_000_000,), md.get_rank() + 1.0)
md.all_reduce(x)
assert x.unique().tolist() == [10.0], x
mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("out", "in"))
md.all_reduce(torch.ones(4), group=mesh["in"])
work = md.all_reduce(x, group=mesh["out"], async_op=True)
md.all_reduce(torch.ones(4), group=mesh["in"])
work.wait()
assert x[-1].item() == 20.0, x
wires = [mesh[name].get_group().open_channel("cpu").communicator.wire for name in ("out", "in")]
line = " ".join([str(md.get_rank()), md.group.WORLD.open_channel("cpu").communicator.wire, *wires])
os.write(1, f"{line}\\n".encode())  # in one piece: ranks share the pipe
md.destroy_process_group()
"""
PRIVATE = ["unshare", "-Urnmp", "--mount-proc", "--fork", "--kill-child"]


@pytest.mark.soak
def test_hosts_made_of_network_namespaces() -> None:
    needed = all(shutil.which(name) for name in ("unshare", "nsenter", "ip"))
    if (
        not needed
        or subprocess.run([*PRIVATE, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs namespaces that a user may make")
    done = subprocess.run(
        [*PRIVATE, "sh", "-c", TWO_NAMESPACES, "sh", sys.executable, "-c", IN_A_NAMESPACE],
        env={**os.environ, **QUICK_NAMES, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = [f"{rank} hierarchical hierarchical shm" for rank in range(4)]
    assert sorted(done.stdout.splitlines()) == expected
