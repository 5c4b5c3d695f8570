"""The hosts made of namespaces: what the tests over two hosts stand on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import meshdist as md
from tests.inner import host_identity
from tests.pool import TESTS, WorkerLost
from tests.test_pool import is_running
from tests.two_hosts import TwoHosts, places_on


def test_each_host_is_one_of_its_own(two_hosts: TwoHosts) -> None:
    def leave(rank: int) -> None:
        for folder in ("/dev/shm", tempfile.gettempdir()):
            Path(folder, f"of-{rank}").touch()

    def look(rank: int) -> tuple[str, str, list[str], list[str]]:
        shared = [sorted(os.listdir(path)) for path in ("/dev/shm", tempfile.gettempdir())]
        return socket.gethostname(), host_identity(), shared[0], shared[1]

    two_hosts.call(leave, 3, hosts="ABA")
    found = two_hosts.call(look, 3, hosts="ABA")
    names, identities, memory, files = zip(*found, strict=True)
    assert names == ("host-a", "host-b", "host-a")
    assert identities[0] == identities[2] != identities[1]
    for shared in (memory, files):
        assert {"of-0", "of-2"} <= set(shared[0])
        assert "of-1" not in shared[0]
        assert "of-0" not in shared[1]


def test_ranks_lie_in_blocks_and_take_the_backend_for_hosts(two_hosts: TwoHosts) -> None:
    def program() -> tuple[str, str, float]:
        x = torch.full((100_000,), md.get_rank() + 1.0)
        md.all_reduce(x)
        backend = md.group.WORLD.open_device_group("cpu").communicator.backend
        return socket.gethostname(), backend, x.mean().item()

    found = two_hosts.run(program, 5)
    assert found == [(f"host-{x}", "gloo", 15.0) for x in "aaabb"]


def test_programs_start_there(two_hosts: TwoHosts) -> None:
    text = "import meshdist as md; md.barrier(); print(md.get_rank(), md.get_world_size())"
    done = two_hosts.start(text, places_on("AABB"), hosts="AABB")
    assert [one.stdout for one in done] == [f"{rank} 4\n" for rank in range(4)]


SESSION = """
import os
from tests.pool import Pool
from tests.two_hosts import two_hosts_of

def spin(rank):
    os.write(1, b"spinning\\n")
    while True:
        pass

two_hosts_of(Pool()).call(spin, 2)
"""


def process_tree_of(mark: str) -> list[int]:
    """The processes that live with this in their environment."""
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes() and is_running(pid):
                found.append(pid)
    return found


@pytest.mark.soak
def test_the_hosts_end_with_a_killed_test_session(two_hosts: TwoHosts, tmp_path: Path) -> None:
    mark = f"OF_THE_SESSION={tmp_path}"
    session = subprocess.Popen(
        [sys.executable, "-c", SESSION],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **dict([mark.split("=")]), "PYTHONPATH": str(TESTS.parent)},
    )
    try:
        assert session.stdout is not None
        assert [session.stdout.readline() for _ in range(2)] == ["spinning\n"] * 2
        assert len(process_tree_of(mark)) >= 9  # with the processes that make the hosts
    finally:
        session.kill()
        session.communicate()
    end = time.monotonic() + 20.0
    while process_tree_of(mark) and time.monotonic() < end:
        time.sleep(0.02)
    assert process_tree_of(mark) == []


def test_a_program_that_is_late_ends_with_all_it_has_started(two_hosts: TwoHosts) -> None:
    text = "import subprocess; subprocess.run(['sleep', 'inf'], start_new_session=True)"
    workers = [worker.pid for worker in two_hosts._team(2, "AB")]
    with pytest.raises(WorkerLost, match="did not end within"):
        two_hosts.start(text, [{}, {}], timeout_s=1.0)
    end = time.monotonic() + 20.0
    while any(map(is_running, workers)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(is_running, workers))


@pytest.mark.soak  # it runs a suite of its own
def test_where_there_can_be_no_hosts_the_last_lines_say_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not soak"]
    done = subprocess.run(
        [*command, f"{TESTS / 'test_two_hosts.py'}"],
        env={**os.environ, "PATH": str(tmp_path)},  # where there is no command ip
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    text = (
        "4 tests over two hosts did not run: Skipped: two hosts need namespaces, which this "
        "system rejects: there is no command ip"
    )
    assert text in done.stdout.splitlines(), done.stdout + done.stderr
