"""Every way in which the ranks of a world meet, in real processes."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import meshdist as md
from meshdist.bootstrap import init_methods
from meshdist.bootstrap.rendezvous_rounds import Rendezvous
from meshdist.bootstrap.world import get_world
from tests.few_files import room_for
from tests.pool import Pool

ROOT = Path(__file__).resolve().parents[2]
LONG = timedelta(seconds=60)
SHORT = timedelta(seconds=0.3)


def meet(init_method: str | None = None, **given: Any) -> Rendezvous:
    return init_methods.meet(init_methods.InitArguments(init_method, **given))


@pytest.fixture
def port() -> Iterator[int]:
    """A port that is free: it stays bound, so that nobody else is given it."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def rounds(rank: int, url: str, size: int, count: int, is_named: bool) -> list[int]:
    """Make and end a world again and again; return the rank in each."""
    import torch

    found = []
    for number in range(count):
        named = {"rank": rank} if is_named else {}
        md.init_process_group("gloo", url, timeout=LONG, world_size=size, **named)
        x = torch.tensor([md.get_rank() + number])
        md.all_reduce(x)
        assert x.item() == sum(range(size)) + size * number
        found.append(md.get_rank())
        md.destroy_process_group()
        assert not md.is_initialized()
    return found


# -- tcp:// -------------------------------------------------------------------------------------


def test_a_hundred_worlds_at_one_tcp_address(pool: Pool, port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    assert pool.call(rounds, 2, url, 2, 100, True) == [[0] * 100, [1] * 100]


def test_ranks_by_order_of_arrival_at_a_tcp_address(pool: Pool, port: int) -> None:
    found = pool.call(rounds, 3, f"tcp://localhost:{port}", 3, 10, False)
    assert all(sorted(ranks) == [0, 1, 2] for ranks in zip(*found, strict=True))


def test_rank_and_size_in_the_url(pool: Pool, port: int) -> None:
    def program(rank: int) -> tuple[int, int]:
        md.init_process_group("gloo", f"tcp://127.0.0.1:{port}?rank={rank}&world_size=2")
        answer = md.get_rank(), md.get_world_size()
        md.destroy_process_group()
        return answer

    assert pool.call(program, 2) == [(0, 2), (1, 2)]


def test_workers_change_their_ranks_from_world_to_world(pool: Pool, port: int) -> None:
    def program(rank: int) -> list[int]:
        url = f"tcp://127.0.0.1:{port}"
        found = []
        for shift in range(3):
            # The address is served by the process that was rank 0 first, and stays so.
            mine = (rank + shift) % 2
            md.init_process_group("gloo", url, LONG, 2, mine)
            found.append(md.get_rank())
            md.destroy_process_group()
        return found

    assert pool.call(program, 2) == [[0, 1, 0], [1, 0, 1]]


def test_two_jobs_share_an_address_by_name(pool: Pool, port: int) -> None:
    def program(rank: int) -> tuple[int, int]:
        import torch

        job = "even" if rank % 2 == 0 else "odd"
        md.init_process_group("gloo", f"tcp://127.0.0.1:{port}", LONG, 2, rank // 2, group_name=job)
        x = torch.tensor([rank])
        md.all_reduce(x)
        answer = md.get_rank(), int(x.item())
        get_world().store.set("done", "1")
        md.destroy_process_group()
        return answer

    assert pool.call(program, 4) == [(0, 2), (0, 4), (1, 2), (1, 4)]


# -- file:// ------------------------------------------------------------------------------------


def test_a_hundred_worlds_in_one_file(pool: Pool, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meeting"
    assert pool.call(rounds, 2, url, 2, 100, True) == [[0] * 100, [1] * 100]


def test_ranks_by_order_of_arrival_in_a_file(pool: Pool, tmp_path: Path) -> None:
    found = pool.call(rounds, 3, f"file://{tmp_path}/meeting", 3, 10, False)
    assert all(sorted(ranks) == [0, 1, 2] for ranks in zip(*found, strict=True))


def test_a_missing_rank_at_a_file(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meeting"
    for _ in range(2):
        with pytest.raises(md.RendezvousError, match="rank 1 has not joined the world of 2"):
            meet(url, rank=0, world_size=2, timeout=SHORT)
    assert meet(url, rank=0, world_size=1).size == 1


def killed(rank: int, url: str, size: int, is_named: bool) -> int:
    """Join a world of ``size`` in a child that is killed in it, or after a second while it waits.

    Return the signal that has ended the child.
    """
    child = os.fork()
    if child == 0:
        kill = partial(os.kill, os.getpid(), signal.SIGKILL)
        threading.Timer(2.0, kill).start()
        try:
            named = {"rank": rank} if is_named else {}
            md.init_process_group("gloo", url, timeout=LONG, world_size=size, **named)
            md.barrier()
        finally:
            kill()
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("is_named", [True, pytest.param(False, marks=pytest.mark.soak)])
@pytest.mark.parametrize("num_absent", [0, 1])
def test_the_file_of_a_crashed_job_is_good_for_the_next(
    pool: Pool, tmp_path: Path, num_absent: int, is_named: bool
) -> None:
    """Ranks are killed in a world of three, or as two of them wait for the third."""
    url = f"file://{tmp_path}/meeting"
    for size in (3, 2, 5, 1):
        ended = pool.call(killed, 3 - num_absent, url, 3, is_named)
        assert ended == [signal.SIGKILL] * (3 - num_absent)
        for ranks in zip(*pool.call(rounds, size, url, size, 2, is_named), strict=True):
            assert sorted(ranks) == list(range(size))


def test_a_job_begins_in_the_file_of_a_world_that_lives(pool: Pool, tmp_path: Path) -> None:
    def program(rank: int) -> tuple[int, int]:
        import torch

        path, size = tmp_path / "meeting", 2 if rank < 2 else 3
        late, own = (tmp_path / "first", rank - 2) if rank >= 2 else (tmp_path / "second", rank)
        while rank >= 2 and not late.exists():
            time.sleep(0.01)
        md.init_process_group("gloo", f"file://{path}", LONG, size, own)
        if rank < 2:
            (tmp_path / "first").touch()
            while not late.exists():
                time.sleep(0.01)
        x = torch.tensor([rank])
        md.all_reduce(x)
        (tmp_path / "second").touch()
        answer = md.get_world_size(), int(x)
        md.destroy_process_group()
        return answer

    assert pool.call(program, 5) == [(2, 1), (2, 1), (3, 9), (3, 9), (3, 9)]


def test_one_rank_of_two_jobs_in_one_file_raises_in_both(pool: Pool, tmp_path: Path) -> None:
    def program(_: int) -> str:
        with pytest.raises(md.RendezvousError) as caught:
            md.init_process_group("gloo", f"file://{tmp_path}/meeting", LONG, 3, 0)
        return str(caught.value)

    for text in pool.call(program, 2):
        assert text.startswith("rank 0 was claimed by two processes\n"), text
        assert "fix:      pass a different rank in each process; or, if a crashed job" in text


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("junk", "it is damaged"),
        ("folder", "Is a directory"),
        ("absent folder", "No such file or directory"),
        ("pipe", "it is not a regular file"),
        ("read-only folder", "Permission denied|Read-only file system|No such file"),
    ],
)
def test_a_path_that_cannot_hold_a_store_is_explained(
    tmp_path: Path, made: str, reason: str
) -> None:
    path = tmp_path / "meeting"
    if made == "junk":
        path.write_bytes(b"junk " * 99)
    elif made == "folder":
        path.mkdir()
    elif made == "absent folder":
        path /= "file"
    elif made == "pipe":
        os.mkfifo(path)
    else:
        path = Path("/proc/meeting")  # root, too, may not write there
    with pytest.raises(md.RendezvousError) as caught:
        meet(f"file://{path}", rank=0, world_size=1)
    summary, where, *_, fix = str(caught.value).splitlines()
    assert re.search(f"cannot use the store's file: .*({reason})", summary), summary
    assert str(path) in where
    assert fix == "  fix:      pass another path, or remove the file if no other job uses it"


# -- a given store, an own scheme, torch's world ------------------------------------------------


def test_a_given_store(pool: Pool, tmp_path: Path) -> None:
    def program(rank: int) -> list[int]:
        import torch

        store = md.FileStore(str(tmp_path / "store"), 2)
        found = []
        for _ in range(5):
            md.init_process_group("gloo", store=store, rank=rank, world_size=2)
            x = torch.ones(1)
            md.all_reduce(x)
            found.append(int(x.item()))
            md.destroy_process_group()
        return found

    assert pool.call(program, 2) == [[2] * 5] * 2


def test_a_world_of_one_in_a_hash_store() -> None:
    joined = meet(store=md.HashStore(), rank=0, world_size=1)
    assert (joined.rank, joined.size, joined.origin) == (0, 1, "a given store")


def test_an_own_scheme(pool: Pool, tmp_path: Path) -> None:
    def program(rank: int) -> tuple[int, int, list[str]]:
        import torch

        calls = []

        def handler(url: str, **settings: Any) -> Iterator[tuple[md.Store, int, int]]:
            calls.append(url)
            try:
                yield md.FileStore(str(tmp_path / "store"), 2), rank, 2
            finally:
                calls.append("closed")

        scheme = f"own{random.getrandbits(32)}"
        md.register_rendezvous_handler(scheme, handler)
        md.init_process_group("gloo", f"{scheme}://somewhere", timeout=LONG)
        x = torch.ones(1)
        md.all_reduce(x)
        assert calls == [f"{scheme}://somewhere"]
        md.destroy_process_group()
        return md.is_initialized(), int(x.item()), [call[:3] for call in calls]

    assert pool.call(program, 2) == [(False, 2, ["own", "clo"])] * 2


def test_the_rendezvous_of_a_file_does_not_wait_for_other_ranks(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meeting"
    first = next(md.rendezvous(f"{url}?rank=0&world_size=2", timeout=LONG))
    second = next(md.rendezvous(url, 1, 2, timeout=LONG))
    assert (first[1:], second[1:]) == ((0, 2), (1, 2))
    first[0].set("key", "value")
    assert second[0].get("key") == b"value"
    del first
    assert (tmp_path / "meeting").exists()
    del second
    assert not (tmp_path / "meeting").exists()


@pytest.mark.parametrize(
    ("url", "size", "text"),
    [
        ("file://meeting", 2, "file:// needs an absolute path"),
        ("file:///{}/meeting", -1, "file:// needs world_size"),
        ("file:///{}/absent/meeting", 2, "cannot use the store's file"),
        ("file:///{}/meeting?rank=0", 2, "rank is given both in the URL and in the call"),
    ],
)
def test_a_wrong_rendezvous_of_a_file(tmp_path: Path, url: str, size: int, text: str) -> None:
    with pytest.raises(md.MeshdistError, match=re.escape(text)):
        next(md.rendezvous(url.format(tmp_path), 0, size, timeout=timedelta(seconds=2)))


def test_the_rendezvous_function_hands_its_arguments_to_an_own_scheme() -> None:
    told = {}

    def handler(url: str, **settings: Any) -> Iterator[tuple[md.Store, int, int]]:
        told.update(settings)
        yield md.HashStore(), 0, 1

    scheme = f"own{random.getrandbits(32)}"
    md.register_rendezvous_handler(scheme, handler)
    _, rank, size = next(md.rendezvous(f"{scheme}://x", timeout=LONG, color="red"))
    assert (rank, size, told) == (0, 1, {"timeout": LONG, "color": "red"})


def test_an_unknown_scheme() -> None:
    with pytest.raises(
        md.RendezvousError, match="no rendezvous handler is registered for nowhere://"
    ) as caught:
        meet("nowhere://x", rank=0, world_size=1)
    assert "or call register_rendezvous_handler before init_process_group" in str(caught.value)


def test_a_path_without_a_scheme() -> None:
    with pytest.raises(md.RendezvousError) as caught:
        md.init_process_group(init_method="/tmp/meet", rank=0, world_size=1)
    assert str(caught.value) == (
        "init_method has no scheme\n"
        "  where:    init_method='/tmp/meet'\n"
        "  expected: env://, tcp://host:port, file:///path, or the scheme of a registered handler\n"
        "  fix:      pass init_method='file:///tmp/meet'"
    )


def test_a_world_of_torch_s_fake_backend_raises_an_error_that_names_it(pool: Pool) -> None:
    def program(_: int) -> list[str]:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
        texts = []
        for call in (
            md.init_process_group,
            lambda: md.init_device_mesh("cpu", (4,)),
            lambda: md.init_device_mesh("cpu", (1,)),
            lambda: md.DeviceMesh.from_torch(dist.init_device_mesh("cpu", (4,))),
        ):
            with pytest.raises(md.BackendError) as caught:
                call()
            texts.append(str(caught.value))
        dist.destroy_process_group()
        return texts

    for text in pool.call(program, 1)[0]:
        *lines, found, fix = text.splitlines()
        assert lines == [
            "cannot reuse the process group of torch.distributed: its backend 'fake' has no "
            "other ranks",
            "  where:    rank 1 of 4",
            "  expected: a torch.distributed process group with one process per rank",
        ]
        assert found.startswith("  found:    backend 'cpu:fake")
        assert fix == (
            "  fix:      simulate the ranks: meshdist.simulate(program, 4); or plan without "
            "processes: meshdist.Layout.from_shape((4,), ('dp',))"
        )


def test_a_world_of_torch_is_adopted(pool: Pool, tmp_path: Path) -> None:
    def program(rank: int) -> tuple[Any, ...]:
        import torch
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", f"file://{tmp_path}/torch", rank=1 - rank, world_size=2, timeout=LONG
        )
        for _ in range(2):
            md.init_process_group()
            x = torch.tensor([float(md.get_rank())])
            md.all_reduce(x)
            answer = (md.get_rank(), md.get_world_size(), md.get_backend_config(), x.item())
            md.destroy_process_group()
        assert dist.is_initialized()
        try:
            md.init_process_group(world_size=3)
        except md.ArgumentError as error:
            text = error.summary
        dist.destroy_process_group()
        return *answer, text

    text = "torch.distributed is already initialized with world_size 2, not 3"
    first, second = pool.call(program, 2)
    assert first[0], second[0] == (1, 0)
    for found in (first, second):
        assert found[1] == 2
        assert found[2].startswith("cpu:gloo")
        assert found[3:] == (1.0, text)


def test_the_rendezvous_function(pool: Pool, port: int) -> None:
    def program(rank: int) -> tuple[int, int, bytes, str]:
        meetings = md.rendezvous(f"tcp://127.0.0.1:{port}", rank, 2, timeout=LONG)
        store, mine, size = next(meetings)
        store.set(str(rank), "here")
        value = store.get(str(1 - rank))
        try:
            next(meetings)
        except md.RendezvousError as error:
            return mine, size, value, error.summary
        raise AssertionError("a second world")

    text = "this rendezvous has already returned its store"
    assert pool.call(program, 2) == [(0, 2, b"here", text), (1, 2, b"here", text)]


# -- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "given", "text"),
    [
        (
            "tcp://127.0.0.1:1?rank=0",
            {"rank": 0, "world_size": 1},
            "rank is given both in the URL and in",
        ),
        (
            "tcp://h:1?world_size=2",
            {"rank": 0, "world_size": 2},
            "world_size is given both in the URL",
        ),
        ("tcp://h:1?rank=x", {"world_size": 2}, "rank='x' in the URL is not an integer"),
        ("tcp://127.0.0.1:1", {"rank": 0}, "tcp:// needs world_size"),
        ("tcp://127.0.0.1:1", {"rank": 2, "world_size": 2}, "rank 2 does not exist in a world of"),
        ("tcp://127.0.0.1:1", {"rank": -2, "world_size": 2}, "rank is -2"),
        ("env://", {"world_size": -4}, "world_size is -4"),
        ("tcp://127.0.0.1", {"rank": 0, "world_size": 1}, "tcp:// needs a host and a port"),
        ("tcp://:7", {"rank": 0, "world_size": 1}, "tcp:// needs a host and a port"),
        ("tcp://h:99999", {"rank": 0, "world_size": 1}, "the URL has no valid port"),
        ("tcp://239.1.2.3:5", {"world_size": 2}, "239.1.2.3 is a multicast address"),
        ("file://", {"rank": 0, "world_size": 1}, "file:// needs an absolute path"),
        ("file://x/y", {"rank": 0, "world_size": 1}, "file:// needs an absolute path"),
        ("file:///tmp/x", {"rank": 0}, "file:// needs world_size"),
        ("tcp://h:1?rank=²", {"world_size": 2}, "rank='²' in the URL is not an integer"),
        ("tcp://127.0.0.1:1", {"rank": 0, "world_size": 10**15}, "a world of 1000000000000000 ran"),
    ],
)
def test_bad_urls(url: str, given: Mapping[str, int], text: str) -> None:
    with pytest.raises(md.ArgumentError) as caught:
        meet(url, **given)
    assert text in str(caught.value)


def test_a_multicast_address_is_told_what_replaced_it() -> None:
    with pytest.raises(md.ArgumentError) as caught:
        meet("tcp://224.66.41.62:23456", world_size=4)
    assert "which only old torch.distributed supports" in str(caught.value)
    assert "fix:      pass tcp://HOST_OF_RANK_0:PORT and world_size=...; without rank=" in (
        str(caught.value)
    )


def test_store_and_init_method_exclude_each_other() -> None:
    with pytest.raises(md.ArgumentError, match="init_method and store cannot be combined"):
        meet("env://", store=md.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize(
    "given", [{}, {"rank": 0}, {"world_size": 1}, {"rank": 1, "world_size": 0}]
)
def test_a_store_needs_rank_and_size(given: Mapping[str, int]) -> None:
    with pytest.raises(md.ArgumentError, match="store= needs rank and world_size"):
        meet(store=md.HashStore(), **given)


def test_kinds_of_arguments() -> None:
    with pytest.raises(md.KindError, match="rank must be an integer"):
        meet(rank="0")
    with pytest.raises(md.KindError, match="timeout must be a"):
        next(md.rendezvous("tcp://127.0.0.1:1", 0, 1, timeout=5))
    with pytest.raises(md.KindError, match="init_method must be a str"):
        meet(29500)  # type: ignore[arg-type]
    with pytest.raises(md.KindError, match="store must be a store"):
        meet(store={}, rank=0, world_size=1)


def test_missing_ranks_at_a_tcp_address(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    with pytest.raises(md.RendezvousError, match="cannot reach rank 0: no process listens on"):
        meet(url, rank=1, world_size=4, timeout=SHORT)
    with pytest.raises(md.RendezvousError, match=r"ranks 1-3 have not joined the world of 4"):
        meet(url, rank=0, world_size=4, timeout=SHORT)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(md.RendezvousError, match=r"rank 0 cannot listen on 127\.0\.0\.1"):
            meet(url, rank=0, world_size=1)


# -- hosts --------------------------------------------------------------------------------------


def test_too_few_files_are_told_before_anything_is_opened(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    with room_for(8), pytest.raises(md.RendezvousError) as caught:
        meet(url, rank=1, world_size=2)
    assert "cannot open enough files and sockets to join a world" in str(caught.value)
    found = r"found:    \d+ more files can be opened of about 16 needed; the limit is "
    assert re.search(found, str(caught.value))  # this process may close some at the same time
    assert "fix:      raise the hard limit before the program starts: ulimit -n 65536, as root" in (
        str(caught.value)
    )
    with room_for(24), pytest.raises(md.RendezvousError, match="to host the store of 2 ranks"):
        meet(url, rank=0, world_size=2)


def test_hosts_are_exchanged(pool: Pool, tmp_path: Path) -> None:
    def program(rank: int) -> tuple[Any, ...]:
        os.environ["MESHDIST_HOST_ID"] = "ab"[rank % 2]
        md.init_process_group("gloo", f"file://{tmp_path}/meeting", LONG, 3, rank)
        world = get_world()
        answer = (world.is_one_host, world.local_rank, world.local_size, world.hosts)
        md.destroy_process_group()
        return answer

    assert pool.call(program, 3) == [
        (False, 0, 2, (0, 1, 0)),
        (False, 0, 1, (0, 1, 0)),
        (False, 1, 2, (0, 1, 0)),
    ]


def addresses_where_this_process_listens() -> set[str]:
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for kind in ("tcp", "tcp6"):
        with open(f"/proc/net/{kind}") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    found.add(fields[1].rpartition(":")[0])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("method", ["tcp", "file", "env"])
def test_on_one_host_nothing_listens_beyond_loopback(
    pool: Pool, port: int, tmp_path: Path, method: str
) -> None:
    def program(rank: int) -> set[str]:
        import torch

        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE="2",
            # Not a loopback name; on one host it makes no difference.
            MASTER_ADDR=socket.gethostname(),
            MASTER_PORT=str(port),
        )
        urls = {"tcp": f"tcp://localhost:{port}", "file": f"file://{tmp_path}/meeting"}
        named = {} if method == "env" else {"rank": rank, "world_size": 2}
        md.init_process_group("gloo", urls.get(method), LONG, **named)
        md.all_reduce(torch.ones(1))
        found = addresses_where_this_process_listens()
        md.barrier()
        md.destroy_process_group()
        return found

    for found in pool.call(program, 2):
        assert found  # Gloo's own, at least
        assert found <= {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}


# -- launchers ----------------------------------------------------------------------------------

PROGRAM = """
    import os
    import torch
    import meshdist as md
    from meshdist.bootstrap.world import get_world
    for _ in range(2):
        md.init_process_group("gloo")
        x = torch.tensor([md.get_rank() + 1])
        md.all_reduce(x)
        world = get_world()
        line = (md.get_rank(), md.get_world_size(), x.item(), world.local_rank, world.origin)
        md.destroy_process_group()
    os.write(1, (" ".join(map(str, line)) + "\\n").encode())  # one write: lines stay whole
"""


def clean_environment(**more: str) -> dict[str, str]:
    """This process's variables without what a launcher may have set."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "MESHDIST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def test_slurm(pool: Pool) -> None:
    job = str(random.randrange(10**9))
    told = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_NNODES": "1"}
    done = pool.start(
        textwrap.dedent(PROGRAM),
        [{**told, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)],
    )
    for rank, one in enumerate(done):
        assert one.returncode == 0, one.stderr
        assert one.stdout.startswith(f"{rank} 2 3 {rank} env://, started by Slurm, store at 127.0.")


def test_hydra(pool: Pool, tmp_path: Path) -> None:
    told = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "TMPDIR": str(tmp_path)}
    done = pool.start(
        textwrap.dedent(PROGRAM),
        [{**told, "PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)} for rank in range(2)],
    )
    for rank, one in enumerate(done):
        assert one.returncode == 0, one.stderr
        assert one.stdout == f"{rank} 2 3 {rank} env://, started by Hydra\n"
    end = time.monotonic() + 30  # the directory goes with the process that has started them
    while any(tmp_path.iterdir()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(tmp_path.iterdir())


def test_rank_0_may_lack_the_address(pool: Pool, port: int) -> None:
    def program(rank: int) -> str:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=str(port))
        if rank == 1:
            os.environ["MASTER_ADDR"] = "127.0.0.1"
        md.init_process_group("gloo")
        origin = get_world().origin
        md.destroy_process_group()
        return origin

    assert pool.call(program, 2) == [
        f"env://, store at rank 0, port {port}",
        f"env://, store at 127.0.0.1, port {port}",
    ]


def run_torchrun(tmp_path: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(code))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, *options, script],
        capture_output=True,
        text=True,
        timeout=150,
        env=clean_environment(TMPDIR=str(tmp_path)),
        check=False,
    )


@pytest.mark.soak
def test_torchrun_and_its_restarts(tmp_path: Path) -> None:
    # In the first attempt rank 1 dies while rank 0 waits for it, in the second within a world.
    begin = """
        import os, sys
        import meshdist as md
        rendezvous_round = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if os.environ["RANK"] == "1" and rendezvous_round == 0:
            os._exit(3)
        assert md.is_torchelastic_launched()
        if rendezvous_round == 1:
            md.init_process_group("gloo")
            if md.get_rank() == 1:
                os._exit(4)
            md.barrier()
"""
    code = textwrap.dedent(begin) + textwrap.dedent(PROGRAM)
    done = run_torchrun(tmp_path, code, "--standalone", "--max-restarts", "2")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert line.startswith(f"{rank} 2 3 {rank} env://, started by torchrun, store at ")


def test_our_own_launcher(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [sys.executable, "-m", "meshdist", "run", "-n", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank, line in enumerate(sorted(done.stdout.splitlines())):
        start = f"{rank} 2 3 {rank} env://, started by meshdist run"
        assert line.startswith(start)
