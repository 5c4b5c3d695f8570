"""Processes that a launcher started join at their first collective or mesh, and answer before
that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import meshdist as md
from tests.pool import Pool, places

OPENING = """
import json, os, torch
import meshdist as md
def say(*what): print(json.dumps(what))
def refusal(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return type(error).__name__, str(error)
"""


def said(pool: Pool, text: str, size: int = 2, **more: str) -> list[list[Any]]:
    """What each of ``size`` launched processes said, one list a line."""
    found = []
    environments = [{**place, **more} for place in places(size)] if size else [{}]
    for done in pool.start(OPENING + text, environments, is_strict=True, has_teardown=False):
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        found.append([json.loads(line) for line in done.stdout.splitlines()])
    return found


# -- launched -----------------------------------------------------------------------------------

FIRST_OPERATIONS = {
    "all_reduce": "x = torch.ones(1); md.all_reduce(x); answer = x.item()",
    "barrier": "md.barrier(); answer = 2",
    "monitored_barrier": "md.monitored_barrier(); answer = 2",
    "all_gather_object": (
        "found = [None] * md.get_world_size(); md.all_gather_object(found, 1); answer = sum(found)"
    ),
    "batch_isend_irecv": (
        "x = torch.zeros(1); me = md.get_rank()\n"
        "for work in md.batch_isend_irecv([md.P2POp(md.isend, torch.ones(1) * 2, 1 - me),"
        " md.P2POp(md.irecv, x, 1 - me)]): work.wait()\n"
        "answer = x.item()"
    ),
    "new_group": "group = md.new_group([0, 1]); answer = group.size()",
    "mesh": "answer = md.init_device_mesh('cpu', (-1,)).size()",
    "DDP": "answer = md.DDP(torch.nn.Linear(2, 2)).process_group.size()",
}


@pytest.mark.parametrize("first", FIRST_OPERATIONS)
def test_the_first_touch_joins(pool: Pool, first: str) -> None:
    text = f"say(md.is_initialized())\n{FIRST_OPERATIONS[first]}\nsay(md.is_initialized(), answer)"
    assert said(pool, text) == [[[False], [True, 2]]] * 2


def test_rank_and_size_are_answered_before_and_nothing_is_sent(pool: Pool) -> None:
    # Rank 1 of 3 is alone: had it looked for the others, it would wait.
    text = """
say(md.get_rank(), md.get_world_size(), md.is_initialized())
say(list(md.DistributedSampler(range(6), shuffle=False)))
say(*refusal(md.get_backend))
"""
    environment = places(3)[1]
    (done,) = pool.start(OPENING + text, [environment])
    ranks, share, (kind, rejected) = map(json.loads, done.stdout.splitlines())
    assert (ranks, share, kind) == ([1, 3, False], [[1, 4]], "NotInitializedError")
    assert "a process that a launcher started and that is not initialized yet" in rejected
    assert "call init_process_group() or a collective, or create a mesh" in rejected


def test_two_threads_join_once(pool: Pool) -> None:
    text = """
import threading
meshes = []
def touch():
    meshes.append(md.init_device_mesh("cpu", (1,), open_groups=False).world)
threads = [threading.Thread(target=touch) for _ in range(2)]
for one in threads: one.start()
for one in threads: one.join()
say(meshes[0] is meshes[1])
"""
    assert said(pool, text) == [[[True]]] * 2


def test_a_world_that_was_closed_is_not_joined_again_by_a_collective(pool: Pool) -> None:
    text = """
md.barrier()
md.destroy_process_group()
say(*refusal(md.barrier))
say(*refusal(md.get_rank))
md.init_process_group()
md.barrier()
say(md.get_rank())
"""
    for rank, (operation, ask, again) in enumerate(said(pool, text)):
        for kind, rejected in (operation, ask):
            assert kind == "NotInitializedError"
            assert "the world of this process was closed" in rejected
            assert "call init_process_group() again before the next collective" in rejected
        assert again == [rank]


def test_a_loaders_worker_does_not_join(pool: Pool) -> None:
    text = """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 1
    def __getitem__(self, index):
        return md.get_rank(), *refusal(md.all_reduce, torch.ones(1))
say(*next(iter(torch.utils.data.DataLoader(Data(), batch_size=None, num_workers=1))))
"""
    (((rank, kind, rejected),),) = said(pool, text, 1)
    assert (rank, kind) == (0, "WorldError")
    assert rejected.startswith(
        "a DataLoader worker cannot join the process group in place of its rank"
    )
    assert "call only get_rank() and get_world_size() in a worker" in rejected


def test_a_world_of_torch_is_adopted_by_the_program_alone(pool: Pool, tmp_path: Path) -> None:
    text = """
import torch.distributed as dist
me = 1 - int(os.environ["RANK"])
dist.init_process_group("gloo", f"file://{os.environ['MEETING']}", rank=me, world_size=2)
say(md.get_rank() == me, md.get_world_size())
say(*refusal(md.all_reduce, torch.ones(1)))
md.init_process_group("cpu:gloo")
x = torch.ones(1)
md.all_reduce(x)
say(x.item())
dist.barrier()
md.destroy_process_group()
dist.destroy_process_group()
"""
    answers = said(pool, text, MEETING=f"{tmp_path}/meeting")
    for place, (kind, rejected), total in answers:
        assert (place, kind, total) == ([True, 2], "NotInitializedError", [2.0])
        assert (
            "a process group of torch.distributed, which collectives do not reuse by themselves"
            in rejected
        )
        assert "call meshdist.init_process_group() on every rank" in rejected


def test_variables_without_a_meeting_place_are_told_with_the_way_to_name_one(pool: Pool) -> None:
    text = "try: md.barrier()\nexcept md.RendezvousError as error: say(str(error))"
    (done,) = pool.start(OPENING + text, [{"RANK": "1", "WORLD_SIZE": "2"}])
    (rejected,) = json.loads(done.stdout)
    assert rejected.startswith(
        "cannot initialize from the environment: MASTER_PORT, MASTER_ADDR are"
    )
    assert "init_process_group(init_method='tcp://HOST_OF_RANK_0:PORT', rank=..., " in rejected


# -- not launched -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mesh",
    [
        "md.init_device_mesh('cpu', (1,), mesh_dim_names=('dp',))",
        "md.make_mesh((1, 1), ('dp', 'tp'), device_type='cpu')['dp']",
        "md.DeviceMesh('cpu', [0], mesh_dim_names=['dp'])",
    ],
)
def test_a_mesh_of_one_is_a_world_of_one(pool: Pool, mesh: str) -> None:
    text = f"""
mesh = {mesh}
x = torch.ones(1)
md.all_reduce(x)
say(md.get_rank(), md.get_world_size(), mesh.axis_sizes, md.lax.psum(x, "dp", mesh=mesh).item())
md.init_process_group()
"""
    assert said(pool, text, 0) == [[[0, 1, {"dp": 1}, 1.0]]]


@pytest.mark.parametrize("shape", [(2,), (-1,), (1, -1), (2, -1)])
def test_a_mesh_that_counts_on_others_needs_a_launcher(shape: tuple[int, ...]) -> None:
    with pytest.raises(md.RendezvousError, match="RANK, WORLD_SIZE, MASTER_PORT are missing"):
        md.init_device_mesh("cpu", shape)
    assert not md.is_initialized()


def test_with_neither_world_nor_launcher_all_raise_as_torch_does(pool: Pool) -> None:
    text = """
say(*map(refusal, (md.get_rank, md.get_world_size, md.barrier, md.new_group)))
say(*map(refusal, (torch.distributed.get_rank, torch.distributed.barrier)))
"""
    ((ours, theirs),) = said(pool, text, 0)
    for kind, told in ours:
        assert kind == "NotInitializedError"
        assert "the process group has not been initialized" in told
        assert "init_process_group(...) before this call" in told
        assert "a launcher, whose processes initialize at their first collective or mesh" in told
        assert "neither a process group nor a launcher's variables" in told
        assert "call it under meshdist.simulate(fn, 4), on the thread of a rank" in told
    for _, told in theirs:
        assert "has not been initialized" in told
