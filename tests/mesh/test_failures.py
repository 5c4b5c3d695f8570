"""Ranks that die, raise, differ or never come, over Gloo processes: everybody else gets out.

Each program is started as a user would start it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HEADER = """
import os, signal, sys, time
from datetime import timedelta
import torch
import meshdist as md

def say(text):
    os.write(1, f"[{md.get_rank()}] {text}\\n".encode())  # one write: lines stay whole

def tell(error):
    say(f"{type(error).__name__}: {error}")
"""


def run(
    tmp_path: Path, body: str, size: int = 3, timeout: float = 60
) -> tuple[int, str, str, float]:
    """Run ``body`` on ``size`` processes; returns exit code, stdout, stderr and seconds."""
    script = tmp_path / "program.py"
    script.write_text(HEADER + textwrap.dedent(body))
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "meshdist", "run", "-n", str(size), str(script)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    return done.returncode, done.stdout, done.stderr, time.monotonic() - start


def blocks_of(stdout: str) -> dict[int, str]:
    """What each rank told, by rank."""
    found: dict[int, str] = {}
    rank = -1
    for line in stdout.splitlines():
        if line.startswith("["):
            rank = int(line[1 : line.index("]")])
        found[rank] = found.get(rank, "") + line + "\n"
    return found


def test_a_rank_that_never_comes_to_the_mesh_is_named(tmp_path: Path) -> None:
    code, out, err, _ = run(
        tmp_path,
        """
        md.init_process_group()
        if md.get_rank() == 1:
            x = torch.ones(1)
            time.sleep(7)
        else:
            try:
                md.init_device_mesh("cpu", (3,), timeout=timedelta(seconds=2))
            except md.CollectiveTimeoutError as error:
                tell(error)
            time.sleep(3)
        """,
    )
    assert code == 0, err
    told = blocks_of(out)
    for rank in (0, 2):
        assert "rank 1 did not come within 2 s to make a mesh" in told[rank]
        assert f"rank {rank}, DeviceMesh(3), for ranks 0-2" in told[rank]
        assert "rank 1: runs, and has called no verb" in told[rank]


def test_a_verb_that_one_rank_does_not_call_tells_who_and_where(tmp_path: Path) -> None:
    code, out, err, _ = run(
        tmp_path,
        """
        mesh = md.init_device_mesh(
            "cpu", (3,), mesh_dim_names=("dp",), timeout=timedelta(seconds=2)
        )
        x = torch.ones(2, 3)
        md.all_reduce(x, group=mesh["dp"])
        if md.get_rank() != 1:
            try:
                md.broadcast(x, src=0, group=mesh["dp"])
                md.barrier(mesh["dp"])
            except md.BackendError as error:
                tell(error)
        time.sleep(5)
        """,
    )
    assert code == 0, err
    told = blocks_of(out)
    assert sorted(told) == [0, 2]
    text = "".join(told.values())
    assert "CollectiveTimeoutError" in text
    assert "axis 'dp' of DeviceMesh(dp=3)" in text
    assert (
        "rank 1: did not arrive; last call 1 on axis 'dp' of DeviceMesh(dp=3): all_reduce" in text
    )
    assert "program.py" in text


def test_abort_frees_every_rank_and_tells_the_reason(tmp_path: Path) -> None:
    code, out, err, took = run(
        tmp_path,
        """
        own = {"dp": md.AxisOptions(private=True)}  # else it would share the world's communicator
        mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",), axis_options=own)
        x = torch.ones(1)
        try:
            if md.get_rank() == 0:
                md.all_reduce(x, group=mesh["dp"])
            elif md.get_rank() == 1:
                md.recv(x, src=3, group=mesh["dp"])
            elif md.get_rank() == 2:
                md.recv(x, group=mesh["dp"])
            else:
                time.sleep(1)
                mesh.abort("the data has ended")
        except md.AbortedError as error:
            tell(error)
        md.barrier()  # the world is another group, and lives
        say("after")
        """,
        size=4,
    )
    assert code == 0, err
    told = blocks_of(out)
    for rank in range(3):
        assert "AbortedError" in told[rank] and "rank 3: the data has ended" in told[rank]
    assert all("after" in told[rank] for rank in range(4))
    assert took < 45


@pytest.mark.parametrize("verb", ["md.all_reduce(x)", "md.recv(x, src=1)", "md.barrier()"])
def test_a_killed_rank_frees_the_others_at_once(tmp_path: Path, verb: str) -> None:
    code, _, err, _ = run(
        tmp_path,
        f"""
        md.init_process_group()
        x = torch.ones(1)
        md.all_reduce(x)
        if md.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            {verb}
        except md.BackendError as error:
            tell(error)
            say(f"after {{time.monotonic() - start:.1f}} s")
        """,
        size=2,
    )
    assert code == 128 + 9
    assert "SIGKILL" in err


def test_a_mesh_that_differs_in_size_between_ranks_raises_on_every_rank(tmp_path: Path) -> None:
    code, out, err, _ = run(
        tmp_path,
        """
        md.init_process_group()
        try:
            md.init_device_mesh("cpu", (2,) if md.get_rank() == 0 else (3,))
        except md.AgreementError as error:
            tell(error)
            time.sleep(4)
        """,
    )
    assert code == 0, err
    told = blocks_of(out)
    for rank in range(3):
        assert "the ranks do not define the same mesh: they wait for each other" in told[rank]
        assert "DeviceMesh(3), for ranks 0-2" in told[rank]
        assert "DeviceMesh(2), for ranks 0-1" in told[rank]


def test_two_threads_of_one_rank_open_different_groups_at_once(tmp_path: Path) -> None:
    code, out, err, _ = run(
        tmp_path,
        """
        import threading
        md.init_process_group()
        found = {}
        def use(name, ranks):
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
        say(f"{found['all']} {found['ends']}")
        md.barrier()
        """,
    )
    assert code == 0, err
    assert sorted(out.split("\n"))[1:] == ["[0] 3.0 2.0", "[1] 3.0 1.0", "[2] 3.0 2.0"]


def test_a_forked_child_reads_its_rank_and_every_verb_raises(tmp_path: Path) -> None:
    code, out, err, _ = run(
        tmp_path,
        """
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x = torch.ones(1)
        md.all_reduce(x, group=mesh["dp"])
        child = os.fork()
        if child == 0:
            for call in (
                lambda: md.all_reduce(x),
                lambda: md.all_reduce(x, group=mesh["dp"]),
                lambda: md.send(x, dst=1 - md.get_rank()),
                lambda: md.barrier(mesh["dp"]),
                lambda: md.init_device_mesh("cpu", (2,)),
            ):
                try:
                    call()
                    say("no error")
                except md.WorldError as error:
                    assert "a forked child cannot communicate" in str(error)
            say(f"child of {md.get_world_size()}")
            os._exit(0)
        os.waitpid(child, 0)
        md.all_reduce(x, group=mesh["dp"])
        say(f"parent {x.item()}")
        """,
        size=2,
    )
    assert code == 0, err
    lines = sorted(out.splitlines())
    assert lines == ["[0] child of 2", "[0] parent 4.0", "[1] child of 2", "[1] parent 4.0"]


def test_a_program_that_never_destroys_ends_at_once_and_silently(tmp_path: Path) -> None:
    code, out, err, _ = run(
        tmp_path,
        """
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        md.all_reduce(torch.ones(1), group=mesh["tp"])
        time.sleep(0.15 * md.get_rank())  # rank 0, which serves the store, ends first
        """,
        size=4,
    )
    assert (code, out, err) == (0, "", "")


def test_torchs_mesh_has_the_same_ranks_in_the_same_order(tmp_path: Path) -> None:
    code, out, err, _ = run(
        tmp_path,
        """
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor, Shard, distribute_tensor
        ours = md.DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
        theirs = ours.to_torch()
        assert theirs.mesh.tolist() == [[3, 1], [0, 2]]
        assert theirs.mesh_dim_names == ("dp", "tp")
        assert tuple(theirs.get_coordinate()) == ours.get_coordinate()
        for axis in ("dp", "tp"):
            group = theirs.get_group(axis)
            assert tuple(dist.get_process_group_ranks(group)) == ours.get_group(axis).ranks
        whole = torch.arange(8.0).reshape(4, 2)
        part = distribute_tensor(whole, theirs["tp"], [Shard(0)]).to_local()
        assert md.DeviceMesh.from_torch(theirs) == ours
        say(f"{part.flatten().tolist()}")
        """,
        size=4,
    )
    assert code == 0, err
    told = sorted(out.splitlines())
    assert len(told) == 4


def test_torchs_world_that_is_there_already_is_adopted(tmp_path: Path) -> None:
    code, out, err, _ = run(
        tmp_path,
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x = torch.ones(1)
        md.all_reduce(x, group=mesh["dp"])
        dist.all_reduce(x)
        mesh.to_torch()
        md.destroy_process_group()
        dist.all_reduce(x)
        os.write(1, f"[{dist.get_rank()}] {x.item()}\\n".encode())
        dist.destroy_process_group()
        """,
        size=2,
    )
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[0] 8.0", "[1] 8.0"]
