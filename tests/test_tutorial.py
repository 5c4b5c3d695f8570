"""The programs of torch's tutorial on distributed applications: what they print, rank by rank.

They run on simulated ranks, and once as the processes that the tutorial's template starts.
"""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import meshdist as md
from tests.pool import Pool

# Written as torch's users write such programs: nothing but the import names meshdist.
PROGRAMS = """
import os
import sys

import torch
import torch.multiprocessing as mp

import meshdist.distributed as dist


def blocking(rank, size):
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    else:
        dist.recv(tensor=tensor, src=0)
    print("Rank ", rank, " has data ", tensor[0])


def immediate(rank, size):
    tensor = torch.zeros(1)
    req = None
    if rank == 0:
        tensor += 1
        req = dist.isend(tensor=tensor, dst=1)
        print("Rank 0 started sending")
    else:
        req = dist.irecv(tensor=tensor, src=0)
        print("Rank 1 started receiving")
    req.wait()
    print("Rank ", rank, " has data ", tensor[0])


def group_sum(rank, size):
    group = dist.new_group([0, 1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    print("Rank ", rank, " has data ", tensor[0])


def allreduce(send, recv):
    rank, size = dist.get_rank(), dist.get_world_size()
    send_buff, recv_buff, total = send.clone(), send.clone(), send.clone()
    left, right = (rank - 1) % size, (rank + 1) % size
    for step in range(size - 1):
        if step % 2 == 0:
            sending = dist.isend(send_buff, right)
            dist.recv(recv_buff, left)
            total[:] += recv_buff[:]
        else:
            sending = dist.isend(recv_buff, right)
            dist.recv(send_buff, left)
            total[:] += send_buff[:]
        sending.wait()
    recv[:] = total[:]


def ring(rank, size):
    total = torch.empty(3)
    allreduce(torch.tensor([1.0, rank, rank * rank]), total)
    print("Rank ", rank, " has ", total.tolist())


def everything(rank, size):
    blocking(rank, size)
    immediate(rank, size)
    group_sum(rank, size)
    ring(rank, size)


def init_process(rank, size, fn, backend="gloo"):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "{port}"
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size)


if __name__ == "__main__":
    world_size = 2
    processes = []
    mp.set_start_method("spawn")
    for rank in range(world_size):
        p = mp.Process(target=init_process, args=(rank, world_size, everything))
        p.start()
        processes.append(p)
    for p in processes:
        p.join()
    sys.exit(max(abs(p.exitcode) for p in processes))
"""

PRINTED = {
    "blocking": [["Rank  0  has data  tensor(1.)"], ["Rank  1  has data  tensor(1.)"]],
    "immediate": [
        ["Rank 0 started sending", "Rank  0  has data  tensor(1.)"],
        ["Rank 1 started receiving", "Rank  1  has data  tensor(1.)"],
    ],
    "group_sum": [["Rank  0  has data  tensor(2.)"], ["Rank  1  has data  tensor(2.)"]],
    "ring": [["Rank  0  has  [2.0, 1.0, 1.0]"], ["Rank  1  has  [2.0, 1.0, 1.0]"]],
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The programs in a file, with a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = tmp_path / "run.py"
    path.write_text(PROGRAMS.replace("{port}", str(port)), encoding="utf-8")
    return path


@pytest.fixture
def programs(script: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The programs, to be called in this process."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "restored after the test")
    spec = importlib.util.spec_from_file_location("tutorial_programs", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(programs: ModuleType, name: str, num_ranks: int) -> None:
    """Run one of the programs through the template's ``init_process`` on simulated ranks."""

    def init_process() -> None:
        program: Any = getattr(programs, name)
        programs.init_process(md.get_rank(), md.get_world_size(), program)

    md.simulate(init_process, num_ranks)


@pytest.mark.parametrize("name", PRINTED)
def test_what_two_simulated_ranks_print(
    programs: ModuleType, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    start(programs, name, 2)
    said = capsys.readouterr().out.splitlines()
    by_rank = [[line for line in said if line.split()[1] == str(rank)] for rank in (0, 1)]
    assert by_rank == PRINTED[name]
    assert len(said) == sum(map(len, by_rank))


def test_both_ranks_have_started_before_the_immediate_message_is_waited_for(
    programs: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    start(programs, "immediate", 2)
    said = capsys.readouterr().out.splitlines()
    # A simulated send is finished at once, so rank 0 goes on; a receive waits for its message.
    assert said.index("Rank 0 started sending") < said.index("Rank 1 started receiving")
    assert said.index("Rank 1 started receiving") < said.index("Rank  1  has data  tensor(1.)")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
def test_the_ring_sums_on_every_rank(programs: ModuleType, num_ranks: int) -> None:
    def program() -> list[float]:
        rank = md.get_rank()
        send, recv = torch.tensor([1.0, rank, rank * rank]), torch.empty(3)
        programs.allreduce(send, recv)
        assert send.tolist() == [1.0, rank, rank * rank]  # left as it was
        found: list[float] = recv.tolist()
        return found

    ranks = range(num_ranks)
    expected = [float(num_ranks), float(sum(ranks)), float(sum(r * r for r in ranks))]
    assert md.simulate(program, num_ranks) == [expected] * num_ranks


def test_the_template_with_processes(script: Path, pool: Pool) -> None:
    # As users run it: strict Python would tell of the groups that its functions drop.
    (done,) = pool.start(script, has_teardown=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # nobody calls destroy_process_group, and nobody complains
    said = done.stdout.splitlines()
    for rank in (0, 1):
        expected = [line for by_rank in PRINTED.values() for line in by_rank[rank]]
        assert [line for line in said if line.split()[1] == str(rank)] == expected
    assert len(said) == sum(len(lines) for by_rank in PRINTED.values() for lines in by_rank)
