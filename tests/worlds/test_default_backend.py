"""The backend that a world takes where none is named: shared memory, or Gloo where it is
rejected."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import meshdist as md
from meshdist.backends import native
from tests.pool import Failure, Pool

ROOT = Path(__file__).resolve().parents[2]
LIMIT = timedelta(seconds=20)


def backend_of(group: Any = None) -> str:
    """The backend that moves the tensors of a group, which is used to see that it does."""
    from tests.inner import resolve_group

    found = resolve_group(group)
    x = torch.arange(1000.0)
    md.all_reduce(x, group=group)
    assert torch.equal(x, torch.arange(1000.0) * found.size())
    return found.open_device_group("cpu").communicator.backend


def raising(error: Exception) -> Any:
    def reject(*args: Any) -> Any:
        raise error

    return reject


@contextmanager
def limited(what: int, soft: int) -> Iterator[None]:
    usual = resource.getrlimit(what)
    resource.setrlimit(what, (soft, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, usual)


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def without_room(make: Any) -> Any:
    def make_it(*args: Any) -> Any:
        with limited(resource.RLIMIT_AS, address_space() + (1 << 20)):
            return make(*args)

    return make_it


def trouble(kind: str) -> Any:
    """What keeps this process from sharing memory, as a context manager."""
    if kind == "no memory":
        return limited(resource.RLIMIT_FSIZE, 1 << 20)
    if kind == "no room for it":
        return patch.object(native, "Communicator", without_room(native.Communicator))
    if kind == "no process handles":
        return patch.object(os, "pidfd_open", raising(OSError(38, "Function not implemented")))
    assert kind == "another user"
    return patch.object(os, "getuid", lambda: 12345)


TROUBLES = {
    # kind: the rank that has it, and what all ranks tell
    "no memory": (0, "rank 0: reserving shared memory: File too large"),
    "no room for it": (2, "rank 2: mmap: Cannot allocate memory"),
    "no process handles": (3, "rank 3: [Errno 38] Function not implemented"),
    "another user": (1, "rank 1: rank 0 runs as another user"),
}


def worlds_in_trouble(rank: int, size: int, folder: str) -> list[Any]:
    """For each trouble: the default's backend, and what naming shm tells."""
    found = []
    for number, (kind, (culprit, _)) in enumerate(TROUBLES.items()):
        for backend in (None, "shm"):
            with ExitStack() as stack:
                if rank == culprit:
                    stack.enter_context(trouble(kind))
                url = f"file://{folder}/{number}{backend}"
                try:
                    md.init_process_group(backend, url, LIMIT, size, rank)
                except md.BackendError as error:
                    found.append(str(error))
                    continue
            found.append((backend_of(), md.get_backend(), md.get_backend_config()[:8]))
            md.destroy_process_group()
    return found


def test_any_member_s_refusal_leads_all_to_gloo_or_is_one_error(pool: Pool, tmp_path: Path) -> None:
    by_rank = pool.call(worlds_in_trouble, 4, 4, str(tmp_path))
    for rank, found in enumerate(by_rank):
        for kind, (_, told) in TROUBLES.items():
            usual, named = found.pop(0), found.pop(0)
            assert usual == ("gloo", "gloo", "cpu:gloo"), kind
            assert named == textwrap.dedent(
                f"""\
                the world could not be opened on backend 'shm'
                  where:    rank {rank}, among ranks 0-3
                  found:    {told}
                  fix:      name another backend, for example 'gloo'"""
            )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shared_memory_is_the_default_on_one_host(size: int, pool: Pool) -> None:
    def program() -> Any:
        maps = Path("/proc/self/maps").read_text()
        # An earlier test in this process may have used torch's shared tensors or Python's locks.
        named = re.findall(r"/dev/shm/(?!torch_|sem\.).*", maps)
        return backend_of(), md.get_backend(), "memfd:meshdist" in maps, named

    assert pool.run(program, size, backend=None) == [("shm", "shm", True, [])] * size


def test_one_axis_may_be_rejected_where_the_others_are_not(pool: Pool) -> None:
    def program() -> Any:
        with ExitStack() as stack:
            if md.get_rank() == 2:  # the first of its axis 'tp', and no other's
                stack.enter_context(trouble("no memory"))
            mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return backend_of(), backend_of(mesh["dp"]), backend_of(mesh["tp"])

    found = pool.run(program, 4, backend=None)
    assert found == [("shm", "shm", "shm" if rank < 2 else "gloo") for rank in range(4)]


@pytest.mark.parametrize("is_one_host", [True, False])
def test_a_rank_without_the_native_core_leads_all_to_gloo(
    is_one_host: bool, pool: Pool, tmp_path: Path
) -> None:
    def program(rank: int, path: str) -> Any:
        from tests.inner import ShmBackend

        with ExitStack() as stack:
            if not is_one_host:
                host = {"MESHDIST_HOST_ID": f"host {rank // 2}"}
                stack.enter_context(patch.dict(os.environ, host))
            if rank == 3:
                stack.enter_context(patch.object(ShmBackend, "is_available", lambda _: False))
            md.init_process_group(None, f"file://{path}", LIMIT, 4, rank)
            mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            groups = (None, mesh["dp"], mesh["tp"], md.new_group())
            found = {backend_of(group) for group in groups}, md.get_backend()
            md.destroy_process_group()
        return found

    assert pool.call(program, 4, str(tmp_path / "meeting")) == [({"gloo"}, "gloo")] * 4


def test_a_group_that_names_shared_memory_gets_it_or_an_error(pool: Pool) -> None:
    def program() -> Any:
        told = []
        own = {"dp": md.AxisOptions(backend="shm", private=True)}
        with ExitStack() as stack:
            if md.get_rank() == 0:
                stack.enter_context(trouble("no memory"))
            for call in (
                lambda: md.new_group(backend="shm"),
                lambda: md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), axis_options=own),
            ):
                with pytest.raises(md.BackendError) as caught:
                    call()
                told.append(str(caught.value))
        return [*told, backend_of(md.new_group(backend="shm"))]

    for group, axis, backend in pool.run(program, 2, backend=None):
        assert group.startswith("group of ranks 0-1 could not be opened on backend 'shm'")
        assert axis.startswith("axis 'dp' of DeviceMesh(dp=2) could not be opened on backend 'shm'")
        assert "rank 0: reserving shared memory: File too large" in group
        assert backend == "shm"


def test_ranks_of_several_hosts_do_not_share_memory(pool: Pool, tmp_path: Path) -> None:
    def program(rank: int, path: str) -> Any:
        os.environ["MESHDIST_HOST_ID"] = f"host {rank // 2}"
        md.init_process_group(None, f"file://{path}", LIMIT, 4, rank)
        pair = md.new_group([rank // 2 * 2, rank // 2 * 2 + 1])
        across = md.new_group([0, 2] if rank % 2 == 0 else [1, 3])
        found = (backend_of(), backend_of(pair), backend_of(across))
        with pytest.raises(md.BackendError) as caught:
            md.new_group(backend="shm")
        md.destroy_process_group()
        return found, str(caught.value)

    for found, told in pool.call(program, 4, str(tmp_path / "meeting")):
        assert found[1] == "shm"
        assert {found[0], found[2]} <= {"gloo"}
        assert "group of ranks 0-3 could not be opened on backend 'shm'" in told
        assert "its ranks run on several hosts" in told


def test_a_rank_that_ends_while_memory_is_shared_is_named_by_all(
    pool: Pool, tmp_path: Path
) -> None:
    def program(rank: int, path: str) -> str:
        if rank == 1:
            native.Communicator = lambda *args: os._exit(3)
        with pytest.raises(md.BackendError) as caught:
            md.init_process_group(None, f"file://{path}", LIMIT, 3, rank)
        return str(caught.value)

    found = pool.outcomes(program, 3, str(tmp_path / "meeting"), has_world=False)
    assert isinstance(found[1], Failure)
    for rank in (0, 2):
        assert found[rank].startswith("the world could not be opened on backend 'shm'")
        assert "found:    rank 1 disconnected while setting up shared memory" in found[rank]


def holdings() -> tuple[int, int, int]:
    """How many files and shared mappings this process has, and threads."""
    maps = Path("/proc/self/maps").read_text()
    threads = len(os.listdir("/proc/self/task"))
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:meshdist"), threads


def leftovers() -> set[str]:
    folders = {tempfile.gettempdir(), "/tmp", "/dev/shm"}
    return {f"{folder}/{name}" for folder in folders for name in os.listdir(folder)}


def test_a_hundred_groups_leave_nothing_behind(pool: Pool) -> None:
    def program() -> Any:
        def use(is_async: bool) -> None:
            group = md.new_group()
            x = torch.ones(5)
            work = md.all_reduce(x, group=group, async_op=is_async)
            if is_async:
                work.wait()
                receive = md.irecv(torch.ones(1), src=1 - md.get_rank(), group=group)
                md.send(torch.ones(1), dst=1 - md.get_rank(), group=group)
                receive.wait()
            group.close()

        use(True)
        md.barrier()
        before = holdings()
        for number in range(100):
            use(number % 10 == 0)
        md.barrier()
        for _ in range(200):  # native threads go on for a moment
            if all(now <= then for now, then in zip(holdings(), before, strict=True)):
                break
            time.sleep(0.01)
        return before, holdings()

    # The signal thread may open its connection meanwhile, and find another rank's words late.
    spare = (2, 1, 0)

    there = leftovers()
    for before, after in pool.run(program, 2, backend="shm"):
        more = [now - then for now, then in zip(after, before, strict=True)]
        assert all(n <= m for n, m in zip(more, spare, strict=True)), (before, after)
    of_others = ("meshdist-launch-", "meshdist-pool", "meshdist-mpi-", f"meshdist-{os.getuid()}-")
    left = {name for name in leftovers() - there if "meshdist" in name}
    assert {one for one in left if not os.path.basename(one).startswith(of_others)} == set()


def test_worlds_come_and_go(pool: Pool, tmp_path: Path) -> None:
    def program(rank: int, folder: str) -> Any:
        seen = []
        for number in range(20):
            md.init_process_group(None, f"file://{folder}/{number}", LIMIT, 2, rank)
            x = torch.ones(3)
            md.all_reduce(x)
            md.all_reduce(x, async_op=True).wait()
            md.destroy_process_group()
            assert x.tolist() == [4.0] * 3
            seen.append(holdings())
        return seen

    for seen in pool.call(program, 2, str(tmp_path)):
        # What the last world had open may be closed a moment later: the least tells of a leak.
        assert min(files for files, _, _ in seen[10:]) <= min(files for files, _, _ in seen[:10])
        assert seen[-1][1] <= seen[0][1]


def test_few_file_numbers_are_enough_for_a_world(pool: Pool, tmp_path: Path) -> None:
    def program(rank: int, path: str) -> Any:
        with limited(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + 48):
            md.init_process_group(None, f"file://{path}", LIMIT, 4, rank)
            mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            found = backend_of(), backend_of(mesh["dp"]), backend_of(mesh["tp"])
            md.destroy_process_group()
        return found

    assert pool.call(program, 4, str(tmp_path / "meeting")) == [("shm",) * 3] * 4


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs the rights of root")
def test_a_small_dev_shm_is_no_obstacle(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, torch, meshdist as md
            md.init_process_group()
            x = torch.ones(4_000_000)
            md.all_reduce(x)
            assert x[-1] == 2
            blocks = os.statvfs("/dev/shm").f_blocks
            os.write(1, f"{md.get_backend()} {blocks}\\n".encode())
            md.destroy_process_group()
"""
        )
    )
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} {sys.executable} -m meshdist run -n 2 "{script}"'],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.count("shm 16\n") == 2, done.stdout + done.stderr
