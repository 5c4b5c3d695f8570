"""Start and end of a world, and what can be asked about it."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import meshdist as md
from tests.inner import get_world
from tests.pool import Failure, Pool, places

ROOT = Path(__file__).resolve().parents[2]


def alone(**settings: Any) -> None:
    """Make a world of one rank."""
    md.init_process_group("gloo", store=md.HashStore(), rank=0, world_size=1, **settings)


# -- questions ----------------------------------------------------------------------------------


def test_rank_size_and_backend(pool: Pool) -> None:
    def program() -> tuple[Any, ...]:
        assert md.is_initialized()
        return (md.get_rank(), md.get_world_size(), md.get_backend(), md.get_backend_config())

    assert pool.run(program, 2) == [(rank, 2, "gloo", "cpu:gloo,cuda:gloo") for rank in range(2)]


def test_a_store_gives_no_ranks_to_mpi_without_mpiexec() -> None:
    with (
        pytest.warns(UserWarning, match="are ignored with backend 'mpi'"),
        pytest.raises(md.RendezvousError, match="mpiexec did not start the program"),
    ):
        md.init_process_group("mpi", store=md.HashStore(), rank=0, world_size=1)


def test_groups_are_asked_like_the_world(pool: Pool) -> None:
    def program() -> tuple[Any, ...]:
        group = md.new_group([2, 0])
        member = md.get_rank() != 1
        answer: tuple[Any, ...] = (md.get_rank(group), md.get_world_size(group))
        if member:
            answer += (md.get_backend(group), md.get_backend_config(group))
            x = torch.ones(1)
            md.all_reduce(x, group=group)
            answer += (x.item(),)
        else:
            for ask in (md.get_backend, md.get_backend_config):
                with pytest.raises(ValueError, match="not a member of the group"):
                    ask(group)
        md.destroy_process_group(group)
        return answer

    found = pool.run(program, 3)
    assert found[0] == (0, 2, "gloo", "cpu:gloo,cuda:gloo", 2.0)
    assert found[1] == (-1, -1)
    assert found[2] == (1, 2, "gloo", "cpu:gloo,cuda:gloo", 2.0)


def test_a_destroyed_group_is_not_asked_and_not_destroyed_again() -> None:
    def program() -> list[str]:
        group = md.new_group([0, 1])
        md.destroy_process_group(group)
        told = []
        for call in (md.get_rank, md.get_backend, md.destroy_process_group):
            with pytest.raises(ValueError, match="was closed") as found:
                call(group)
            assert isinstance(found.value, md.GroupClosedError)
            told.append(str(found.value).splitlines()[0])
        return told

    assert md.simulate(program, 2) == [["group of ranks 0-1 was closed"] * 3] * 2


def test_a_mesh_axis_is_asked_like_a_group(pool: Pool) -> None:
    def program() -> tuple[int, int]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return md.get_rank(mesh["tp"]), md.get_world_size(mesh["tp"])

    assert pool.run(program, 4) == [(0, 2), (1, 2), (0, 2), (1, 2)]


def test_the_backend_where_none_is_named(pool: Pool) -> None:
    def program(rank: int) -> tuple[str, str]:
        md.init_process_group(store=md.HashStore(), rank=0, world_size=1)
        answer = md.get_backend(), md.get_backend_config()
        md.destroy_process_group()
        return answer

    (found,) = pool.call(program, 1)
    if torch.cuda.is_available():
        assert found == ("nccl", "cpu:shm,cuda:nccl")
    else:
        assert found == ("shm", "cpu:shm")


def test_pairs_of_device_type_and_backend(pool: Pool) -> None:
    def program(rank: int) -> tuple[str, str]:
        store = md.HashStore()
        md.init_process_group("cpu:gloo,cuda:gloo", store=store, rank=0, world_size=1)
        answer = md.get_backend(), md.get_backend_config()
        md.destroy_process_group()
        return answer

    assert pool.call(program, 1) == [("gloo", "cpu:gloo,cuda:gloo")]


def test_the_backend_that_an_axis_names_is_that_of_the_meshs_device_type(pool: Pool) -> None:
    def program(rank: int) -> list[tuple[str, str]]:
        md.init_process_group("gloo", store=md.HashStore(), rank=0, world_size=1)
        options = {"tp": md.AxisOptions(backend="shm")}
        mesh = md.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"), axis_options=options)
        groups = [mesh["dp"], mesh["tp"], mesh.get_group("tp")]
        answers = [(md.get_backend(group), md.get_backend_config(group)) for group in groups]
        md.destroy_process_group()
        return answers

    named = ("shm", "cpu:shm,cuda:gloo")
    assert pool.call(program, 1) == [[("gloo", "cpu:gloo,cuda:gloo"), named, named]]


WITHOUT_A_WORLD = """
import meshdist as md
assert not md.is_initialized()
for ask in (md.get_rank, md.get_world_size, md.get_backend, md.get_backend_config):
    try:
        ask()
    except md.NotInitializedError as error:
        assert isinstance(error, ValueError)
        assert "the process group has not been initialized" in str(error)
        assert "meshdist run -n 4 program.py" in str(error)
    else:
        raise SystemExit(f"{ask} has an answer")
"""


def test_without_a_world(pool: Pool) -> None:
    (done,) = pool.start(WITHOUT_A_WORLD, has_teardown=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_default_backends() -> None:
    assert md.get_default_backend_for_device("cpu") == "shm"
    assert md.get_default_backend_for_device("cuda:1") == "nccl"
    assert md.get_default_backend_for_device(torch.device("cpu")) == "shm"
    assert md.get_default_backend_for_device("xpu") == "xccl"
    with pytest.raises(ValueError, match="no backend is known for device type 'meta'"):
        md.get_default_backend_for_device("meta")
    with pytest.raises(ValueError, match="'abacus' is not a device"):
        md.get_default_backend_for_device("abacus")


def test_what_is_available() -> None:
    assert md.is_available()
    assert md.is_gloo_available()
    assert md.is_nccl_available() == torch.cuda.is_available()
    assert md.is_backend_available("cpu:gloo,cuda:gloo")
    assert not md.is_backend_available("pigeon")
    assert not md.is_backend_available("cpu:gloo,cuda:pigeon")
    assert md.is_ucc_available() == hasattr(torch.distributed, "ProcessGroupUCC")
    assert md.is_xccl_available() == hasattr(torch.distributed, "ProcessGroupXCCL")


def test_availability_is_that_of_our_backends_and_not_of_torchs_build(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("mpi", "gloo", "nccl", "ucc", "xccl")
    before = [getattr(md, f"is_{name}_available")() for name in names]
    for name in names:
        there = getattr(torch.distributed, f"is_{name}_available")()
        monkeypatch.setattr(
            torch.distributed, f"is_{name}_available", lambda there=there: not there
        )
    assert [getattr(md, f"is_{name}_available")() for name in names] == before

    def program(rank: int) -> bool:
        md.Backend.register_backend("mpi", print, devices="cpu")
        return md.is_mpi_available()

    assert pool.call(program, 1) == [True]


def test_torchelastic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not md.is_torchelastic_launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert md.is_torchelastic_launched()


def test_node_local_rank(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert md.get_node_local_rank() == md.get_node_local_rank(5) == 3
    monkeypatch.setenv("LOCAL_RANK", "²")
    with pytest.raises(md.RendezvousError, match="LOCAL_RANK='²' is not an integer of at least 0"):
        md.get_node_local_rank()
    monkeypatch.delenv("LOCAL_RANK")
    assert md.get_node_local_rank(5) == 5
    with pytest.raises(RuntimeError, match="cannot determine this rank's number on its host"):
        md.get_node_local_rank()

    def program() -> int:
        os.environ.pop("LOCAL_RANK", None)
        return md.get_node_local_rank()

    assert pool.run(program, 2) == [0, 1]


# -- start --------------------------------------------------------------------------------------


def test_a_second_init_is_an_error(pool: Pool) -> None:
    def program() -> None:
        alone()

    with pytest.raises(ValueError, match="the process group is already initialized"):
        pool.run(program, 1)


def test_arguments_are_checked_before_anything_is_sent() -> None:
    with pytest.raises(md.KindError, match=r"timeout must be a datetime\.timedelta"):
        alone(timeout=30)
    with pytest.raises(md.ArgumentError, match="timeout must be positive"):
        alone(timeout=timedelta(0))
    with pytest.raises(md.BackendError, match="backend 'pigeon' is not registered") as caught:
        md.init_process_group("pigeon", "tcp://192.0.2.1:1", rank=0, world_size=2)
    assert "gloo" in str(caught.value)
    with pytest.raises(md.KindError, match=r"device_id must be a torch\.device or an int"):
        alone(device_id="cuda:0")
    with pytest.raises(ValueError, match="existed in the old"):
        md.init_process_group("tcp", "tcp://192.0.2.1:1", rank=0, world_size=2)
    assert not md.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_accelerators_that_are_not_there() -> None:
    with pytest.raises(md.ArgumentError, match="device_id=0 needs an accelerator, but torch finds"):
        alone(device_id=0)
    with pytest.raises(md.ArgumentError, match="device_id=cuda:0 is not a device of this machine"):
        alone(device_id=torch.device("cuda", 0))
    with pytest.raises(md.BackendError, match="backend 'nccl' is not available on this machine"):
        md.init_process_group("nccl", store=md.HashStore(), rank=0, world_size=1)


def test_device_cpu(pool: Pool) -> None:
    def program(rank: int) -> Any:
        alone(device_id=torch.device("cpu"))
        device = get_world().device
        md.destroy_process_group()
        return str(device)

    assert pool.call(program, 1) == ["cpu"]


def test_arguments_by_position(pool: Pool, tmp_path: Path) -> None:
    def program(rank: int) -> tuple[int, int, timedelta | None]:
        md.init_process_group("gloo", f"file://{tmp_path}/m", timedelta(seconds=50), 2, rank)
        answer = md.get_rank(), md.get_world_size(), get_world().timeout
        md.destroy_process_group()
        return answer

    assert pool.call(program, 2) == [(rank, 2, timedelta(seconds=50)) for rank in range(2)]


def test_the_environment_alone_is_an_error_that_says_what_to_type(pool: Pool) -> None:
    (done,) = pool.start("import meshdist as md\nmd.init_process_group('gloo')")
    assert done.returncode == 1
    assert "RANK, WORLD_SIZE, MASTER_PORT are missing" in done.stderr
    assert "meshdist run -n 4 program.py" in done.stderr


def test_mpi_ignores_rank_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    monkeypatch.delenv("PMI_RANK", raising=False)
    with (
        pytest.warns(UserWarning, match="rank=0 and world_size=0 are ignored with backend 'mpi'"),
        pytest.raises((md.BackendError, md.RendezvousError), match="mpi"),
    ):
        md.init_process_group("mpi", rank=0, world_size=0)


# -- end ----------------------------------------------------------------------------------------


def test_destroy_twice(pool: Pool) -> None:
    def program() -> None:
        md.destroy_process_group()
        md.destroy_process_group()

    with pytest.raises(md.NotInitializedError, match="no process group to destroy") as caught:
        pool.run(program, 1)
    assert "none was initialized in this process, or it was destroyed before" in str(caught.value)


def test_a_collective_after_destroy(pool: Pool) -> None:
    def program() -> None:
        md.destroy_process_group()
        md.all_reduce(torch.ones(1))

    with pytest.raises(md.NotInitializedError, match="the process group has not been initialized"):
        pool.run(program, 2)


def test_a_group_after_the_end_of_its_world(pool: Pool) -> None:
    def program() -> list[str]:
        world = md.group.WORLD
        group = md.new_group([0, 1])
        md.destroy_process_group()
        kinds = []
        for one in (world, group):
            try:
                md.all_reduce(torch.ones(1), group=one)
            except Exception as error:
                kinds.append(type(error).__name__)
        return kinds

    assert pool.run(program, 2) == [["GroupClosedError"] * 2] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_closed_world_keeps_no_connection_open(pool: Pool) -> None:
    def program(rank: int, port: int) -> list[int]:
        gc.collect()
        gc.disable()
        files = []
        try:
            for _ in range(8):
                address = f"tcp://127.0.0.1:{port}"
                md.init_process_group("gloo", address, world_size=2, rank=rank)
                md.barrier()
                md.destroy_process_group()
                files.append(len(os.listdir("/proc/self/fd")))
        finally:
            gc.enable()
        return files

    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        _, files = pool.call(program, 2, reserved.getsockname()[1])
    # Of rank 1: rank 0 serves the store, and closes its side of a connection a little later.
    assert min(files[4:]) <= min(files[:4])


def test_destroying_one_group_leaves_the_others(pool: Pool) -> None:
    def program() -> tuple[float, str]:
        first, second = md.new_group(), md.new_group()
        md.destroy_process_group(first)
        x = torch.ones(1)
        md.all_reduce(x, group=second)
        md.all_reduce(x)
        try:
            md.all_reduce(x, group=first)
        except md.GroupClosedError as error:
            return x.item(), error.summary
        raise AssertionError("the group is closed")

    for value, text in pool.run(program, 2):
        assert value == 4.0
        assert "was closed" in text


def test_destroying_the_world_by_its_name(pool: Pool) -> None:
    def program() -> bool:
        md.destroy_process_group(md.group.WORLD)
        return md.is_initialized()

    assert pool.run(program, 2) == [False, False]


def test_destroying_a_group_one_is_not_in(pool: Pool) -> None:
    def program() -> bool:
        md.destroy_process_group(md.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]
        return md.is_initialized()

    assert pool.run(program, 1) == [True]


def test_a_world_is_a_context_manager(pool: Pool) -> None:
    def program() -> bool:
        with get_world():
            md.barrier()
        return md.is_initialized()

    assert pool.run(program, 2) == [False, False]


NO_DESTROY = """
import os, sys, time
import torch
import meshdist as md
rank = int(os.environ["RANK"])
md.init_process_group("gloo", sys.argv[1], rank=rank, world_size=2)
mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
x = torch.ones(1)
md.all_reduce(x, group=mesh["dp"])
assert x.item() == 2
pids = [None, None]
md.all_gather_object(pids, os.getpid())
while rank == 0 and os.path.exists(f"/proc/{pids[1]}"):
    time.sleep(0.01)
print(time.time())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_a_program_that_ends_without_destroy_ends_at_once_and_quietly(
    pool: Pool, tmp_path: Path, scheme: str
) -> None:
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        url = f"file://{tmp_path}/m" if scheme == "file" else f"tcp://127.0.0.1:{port}"
        first, second = pool.start(NO_DESTROY, places(2), url, is_strict=True)
        ended = time.time()
    for done in (first, second):
        assert (done.returncode, done.stderr) == (0, "")
    assert float(first.stdout) - float(second.stdout) < 10
    assert ended - float(first.stdout) < 5


def test_the_first_to_leave_may_be_the_one_that_serves_the_store(pool: Pool) -> None:
    program = """
import meshdist as md, time
md.init_process_group("gloo")
md.barrier()
if md.get_rank() == 1:
    time.sleep(1)
md.destroy_process_group()
"""
    for done in pool.start(program, places(2)):
        assert (done.returncode, done.stderr) == (0, "")


# -- forked children ----------------------------------------------------------------------------


def test_a_forked_child_may_read_rank_and_size_and_nothing_else(pool: Pool) -> None:
    def program() -> list[str]:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            lines = [f"{md.get_rank()} of {md.get_world_size()}"]
            for call in (
                lambda: md.all_reduce(torch.ones(1)),
                md.barrier,
                md.destroy_process_group,
                lambda: alone(),
            ):
                try:
                    call()
                except md.WorldError as error:
                    lines.append(error.summary)
                except BaseException as error:
                    lines.append(repr(error))
            os.write(writer, "\n".join(lines).encode())
            os._exit(0)
        os.close(writer)
        with open(reader) as pipe:
            text = pipe.read()
        os.waitpid(pid, 0)
        md.barrier()
        return text.splitlines()

    rejected = "a forked child cannot communicate in its parent's world"
    for rank, lines in enumerate(pool.run(program, 2)):
        assert lines == [f"{rank} of 2", rejected, rejected, rejected, rejected]


FORKS = """
import os, sys, time
import torch
import meshdist as md

md.init_process_group()
md.all_reduce(torch.ones(1))
child = os.fork()
if child == 0:
    sys.exit(7)  # runs what stands to be done at the end
deadline = time.monotonic() + 20
ended, status = os.waitpid(child, os.WNOHANG)
while not ended and time.monotonic() < deadline:
    time.sleep(0.05)
    ended, status = os.waitpid(child, os.WNOHANG)
if not ended:
    os.kill(child, 9)
    os.waitpid(child, 0)
x = torch.ones(1)
md.all_reduce(x)  # of the parents, whose connections are whole
told = os.waitstatus_to_exitcode(status) if ended else "hangs"
os.write(1, f"the child: {told}; the sum: {x.item()}\\n".encode())
"""


def test_a_forked_child_that_ends_as_programs_do_ends(pool: Pool) -> None:
    for done in pool.start(FORKS, places(2)):
        assert (done.returncode, done.stdout) == (0, "the child: 7; the sum: 2.0\n"), done.stderr


# -- simulated ranks ----------------------------------------------------------------------------


def test_a_simulated_rank_adopts_its_world() -> None:
    def program() -> tuple[Any, ...]:
        md.init_process_group("nccl", timeout=timedelta(seconds=5))
        x = torch.tensor([md.get_rank()])
        md.all_reduce(x)
        answer = (md.get_rank(), md.get_world_size(), x.item())
        md.destroy_process_group()
        return (*answer, md.is_initialized())

    assert md.simulate(program, 3) == [(rank, 3, 3, False) for rank in range(3)]
    assert not md.is_initialized()


def test_simulated_worlds_can_be_made_again() -> None:
    def program() -> list[float]:
        found = []
        for _ in range(3):
            md.init_process_group("gloo")
            mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            x = torch.ones(1)
            md.all_reduce(x, group=mesh["dp"])
            found.append(x.item())
            md.destroy_process_group()
        return found

    assert md.simulate(program, 2) == [[2.0] * 3] * 2


def test_what_belonged_to_a_closed_simulated_world_stays_closed() -> None:
    def program() -> list[str]:
        old = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        world = md.group.WORLD
        md.destroy_process_group()
        md.init_process_group()
        md.barrier()
        found = []
        for group in (old["dp"], world):
            with pytest.raises(md.GroupClosedError) as caught:
                md.all_reduce(torch.ones(1), group=group)
            found.append(caught.value.summary)
        return found

    assert md.simulate(program, 2) == [["the world was closed"] * 2] * 2


def test_a_second_init_in_a_simulated_rank() -> None:
    def program() -> None:
        md.init_process_group()
        md.init_process_group()

    with pytest.raises(md.WorldError, match="the process group is already initialized"):
        md.simulate(program, 2)


@pytest.mark.parametrize(("name", "value"), [("world_size", 3), ("rank", 5)])
def test_a_simulated_rank_is_not_another_one(name: str, value: int) -> None:
    def program() -> None:
        md.init_process_group(**{name: value})

    with pytest.raises(md.ArgumentError, match=rf"this simulated rank has {name} \d, not {value}"):
        md.simulate(program, 2)


def test_simulated_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")  # of the process, not of the simulated rank
    assert md.simulate(md.get_node_local_rank, 3) == [0, 1, 2]


# -- a rank that is missing ---------------------------------------------------------------------


def test_a_missing_rank_is_named_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    def program(rank: int) -> None:
        if rank != 1:
            timeout = timedelta(seconds=0.5)
            md.init_process_group("gloo", f"file://{tmp_path}/m", timeout, 3, rank)

    first, absent, third = pool.outcomes(program, 3, has_world=False)
    assert absent is None
    for outcome in (first, third):
        assert isinstance(outcome, Failure)
        assert isinstance(outcome.exception, md.RendezvousError)
        assert str(outcome.exception).startswith(
            "rank 1 has not joined the world of 3 within 0.5 s"
        )
    assert str(first.exception) == str(third.exception)
