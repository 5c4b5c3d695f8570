"""Meshes and groups that the program drops: what they had open goes, and nothing in use does."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.groups.registry import get_registry
from tests.mpi_job import job_of
from tests.pool import Pool

PRIVATE = md.AxisOptions(private=True)


def make_mesh() -> md.DeviceMesh:
    ranks = [list(range(md.get_world_size()))]
    names, options = ("dp", "tp"), {"tp": PRIVATE}
    return md.DeviceMesh("cpu", ranks, mesh_dim_names=names, axis_options=options)


def make_and_drop() -> None:
    """A mesh of which both verbs that wait and verbs in flight have ended."""
    mesh = make_mesh()
    md.all_reduce(torch.ones(2), group=mesh["tp"])
    md.all_reduce(torch.ones(2), group=mesh["tp"], async_op=True).wait()


def num_held() -> tuple[int, int, int]:
    """Threads and descriptors of this process, and communicators of this rank."""
    world = md.group.WORLD.world
    found = [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")]
    return found[0], found[1], len(get_registry(world).all_opened())


def forty_meshes() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    warnings.simplefilter("ignore", ResourceWarning)
    kept = []
    for number in range(42):
        make_and_drop()
        gc.collect()
        if number > 1:
            kept.append(num_held())
    return kept[0], kept[-1]


def on_simulated_ranks(pool: Pool, fn: Callable[..., Any], size: int) -> list[Any]:
    return md.simulate(fn, size)


def on_mpi(pool: Pool, fn: Callable[..., Any], size: int) -> list[Any]:
    return job_of(pool, size).run_in_world(fn)


def on(wire: str) -> Callable[..., list[Any]]:
    return lambda pool, fn, size: pool.run(fn, size, backend=wire)


WIRES: dict[str, Callable[..., list[Any]]] = {
    "simulated": on_simulated_ranks,
    "shm": on("shm"),
    "gloo": on("gloo"),
    "mpi": on_mpi,
}


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 3, 5))])
@pytest.mark.parametrize("wire", WIRES)
def test_forty_dropped_meshes_hold_no_more_than_one(wire: str, size: int, pool: Pool) -> None:
    for before, after in WIRES[wire](pool, forty_meshes, size):
        assert after[-1] == before[-1]
        assert after[0] <= before[0] + 5 and after[1] <= before[1] + 5, (before, after)


def test_meshes_that_are_dropped_together_are_closed_at_the_next(pool: Pool) -> None:
    def program() -> list[tuple[int, int, int]]:
        warnings.simplefilter("ignore", ResourceWarning)
        make_and_drop()
        before = num_held()
        meshes = [make_mesh() for _ in range(5)]
        among = num_held()
        del meshes
        gc.collect()
        make_mesh()
        return [before, among, num_held()]

    for before, among, after in pool.run(program, 2):
        assert after[-1] == before[-1]
        assert after[0] <= before[0] + 2 and after[1] <= before[1] + 5, (before, among, after)
        assert among > before


def test_what_is_in_use_is_not_closed(pool: Pool) -> None:
    """Each of these lives on without its mesh; others are made and dropped meanwhile."""

    def program() -> list[float]:
        warnings.simplefilter("ignore", ResourceWarning)
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        leaf = torch.ones(1, requires_grad=True)
        group = make_mesh().get_group("tp")
        wrapper = md.DDP(model, process_group=make_mesh()["tp"])
        gathered = md.lax.all_gather(leaf, "tp", mesh=make_mesh())
        x = torch.ones(1)
        work = md.all_reduce(x, group=make_mesh()["tp"], async_op=True)
        for _ in range(3):
            gc.collect()
            make_and_drop()
        work.wait()
        y = torch.ones(1)
        md.all_reduce(y, group=group)
        wrapper(torch.ones(1, 2)).sum().backward()
        gathered.sum().backward()
        assert model.weight.grad is not None and leaf.grad is not None
        return [x.item(), y.item(), model.weight.grad.sum().item(), leaf.grad.item()]

    for wire in ("gloo", "shm"):
        assert pool.run(program, 2, backend=wire) == [[2.0, 2.0, 2.0, 2.0]] * 2


def test_a_verb_in_flight_goes_on_when_one_rank_drops_its_work_and_its_group(pool: Pool) -> None:
    def program() -> tuple[float, int]:
        warnings.simplefilter("ignore")
        first = md.get_rank() == 0
        group = md.new_group()
        x = torch.ones(1)
        work = md.all_reduce(x, group=group, async_op=True) if first else None
        message = md.isend(torch.full((1,), 5.0), 1, group=group) if first else None
        if first:
            del work, message, group
        gc.collect()
        small = md.new_group()  # past which what was dropped may be closed
        md.barrier(group=small)
        if not first:
            md.all_reduce(x, group=group)
            y = torch.zeros(1)
            md.recv(y, 0, group=group)
            x += y
        md.barrier(group=small)
        return x.item(), len(get_registry(md.group.WORLD.world).all_opened())

    for wire in ("gloo", "shm"):
        first, second = pool.run(program, 2, backend=wire)
        assert second[0] == 7.0
        assert first[1] == second[1]  # it stays open


@pytest.mark.parametrize("wire", ["gloo", "shm"])
def test_other_members_go_on_with_messages_after_one_has_dropped_its_part(
    wire: str, pool: Pool
) -> None:
    """Rank 0 closes its part as all of them make a mesh; ranks 1 and 2 use theirs after that."""

    def program() -> tuple[float, float]:
        warnings.simplefilter("ignore", ResourceWarning)
        mesh: Any = make_mesh()
        x = torch.ones(1)
        md.all_reduce(x, group=mesh["tp"])
        rank, y = md.get_rank(), torch.full((1,), 5.0)
        if rank == 0:
            del mesh
            gc.collect()
        make_mesh()
        if rank:
            y += rank
            group = mesh["tp"]
            work = md.isend(y.clone(), 3 - rank, group=group)
            md.recv(y, 3 - rank, group=group)
            work.wait()
        return x.item(), y.item()

    assert pool.run(program, 3, backend=wire) == [(3.0, 5.0), (3.0, 7.0), (3.0, 6.0)]


def warnings_of(body: str) -> list[str]:
    """The ResourceWarnings of a program on each rank; its file has a new name each time."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = f"train-{time.monotonic_ns()}.py"
        kept = {"md": md, "gc": gc}
        exec(compile(body, path, "exec"), kept)
        gc.collect()
        return [str(one.message).replace(path, "train.py") for one in caught]


def test_one_warning_says_where_a_dropped_mesh_was_made(pool: Pool) -> None:
    text = """
for _ in range(3):
    mesh = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    del mesh
    gc.collect()
group = md.new_group()
del group
"""
    for rank, said in enumerate(pool.run(warnings_of, 2, text)):
        mesh, group = said
        assert mesh == (
            "axis 'dp' of DeviceMesh(dp=1, tp=2) was dropped, and not closed\n"
            f"  where:    rank {rank}, made at train.py:3\n"
            "  found:    its part here open, which the next mesh or group of its ranks closes\n"
            "  fix:      keep it while ranks use it; then mesh.close() or "
            "destroy_process_group(group)"
        )
        assert "made at train.py:6" in group


@pytest.mark.parametrize(
    "text",
    [
        'mesh = md.init_device_mesh("cpu", (1, 2)); mesh.close(); del mesh',
        "group = md.new_group(); md.destroy_process_group(group); del group",
        'mesh = md.init_device_mesh("cpu", (1, 2)); group = mesh.get_all_groups(); del mesh',
        'kept = md.DeviceMesh("cpu", [0, 1]); md.DeviceMesh("cpu", [0, 1])',
        'md.DeviceMesh("cpu", [0, 1], open_groups=False)',
        'mesh = md.DeviceMesh("cpu", [0, 1]); md.destroy_process_group(); del mesh',
    ],
)
def test_nothing_is_said_of_what_was_closed_or_is_used(text: str, pool: Pool) -> None:
    assert pool.run(warnings_of, 2, text) == [[], []]


def test_equal_meshes_share_a_communicator() -> None:
    """Of what a thread may call, as the page on meshes says, equal meshes are one."""

    def program() -> list[bool]:
        first, second = make_mesh(), make_mesh()
        groups = [(first[axis].get_group(), second[axis].get_group()) for axis in ("dp", "tp")]
        opened = [[group.open_channel("cpu").opened for group in pair] for pair in groups]
        return [left is right for left, right in opened]

    assert md.simulate(program, 2) == [[True, False]] * 2


def test_a_communicator_that_was_dropped_may_be_shared_again(pool: Pool) -> None:
    def program() -> list[str]:
        warnings.simplefilter("ignore", ResourceWarning)
        labels = []
        for _ in range(3):
            mesh: Any = md.DeviceMesh("cpu", [0, 1])
            labels.append(mesh.get_group().open_channel("cpu").opened.label)
            del mesh
            gc.collect()
        return labels

    for labels in pool.run(program, 2):
        assert len(set(labels)) == 1
