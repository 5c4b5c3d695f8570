"""Meshes and groups that the program drops: what they had open goes, and nothing in use does."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch

import meshdist as md
from meshdist.groups import process_group
from meshdist.groups.communicators import get_registry
from tests.inner import SimulatedStore
from tests.mpi_job import job_of
from tests.pool import Pool

PRIVATE = md.AxisOptions(private=True)


@pytest.fixture(autouse=True)
def collecting_is_quick() -> None:
    """Simulated ranks lie in this process, of which only what is made from here on is looked at."""
    gc.freeze()


def make_mesh() -> md.DeviceMesh:
    ranks = [list(range(md.get_world_size()))]
    names, options = ("dp", "tp"), {"tp": PRIVATE}
    return md.DeviceMesh("cpu", ranks, mesh_dim_names=names, axis_options=options)


def make_and_drop() -> list[Callable[[], Any]]:
    """Weak references to a mesh, and its group, after collectives that wait and collectives in
    flight."""
    mesh = make_mesh()
    md.all_reduce(torch.ones(2), group=mesh["tp"])
    md.all_reduce(torch.ones(2), group=mesh["tp"], async_op=True).wait()
    return [ref(mesh), ref(mesh.get_group("tp"))]


def num_open() -> int:
    """Communicators of this rank."""
    return len(get_registry(md.group.WORLD.world).all_opened())


def num_held() -> tuple[int, int, int]:
    """Threads and descriptors of this process, and communicators of this rank."""
    found = [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")]
    return found[0], found[1], num_open()


def forty_meshes() -> tuple[tuple[int, int, int], tuple[int, int, int], bool]:
    """What is held after two meshes and after forty; whether the last is collected."""
    warnings.simplefilter("ignore", ResourceWarning)
    gc.freeze()  # what earlier tests have left in a worker is not looked through forty times
    kept, found = [], []
    for _ in range(40):
        found = make_and_drop()
        gc.collect()
        kept.append(num_held())
    return kept[1], kept[-1], all(refer() is None for refer in found)


def on_simulated_ranks(pool: Pool, fn: Callable[..., Any], size: int) -> list[Any]:
    return md.simulate(fn, size)


def on_mpi(pool: Pool, fn: Callable[..., Any], size: int) -> list[Any]:
    return job_of(pool, size).run_in_world(fn)


def on(backend: str, hosts: str = "") -> Callable[..., list[Any]]:
    return lambda pool, fn, size: pool.run(fn, size, backend=backend, hosts=hosts[:size])


BACKENDS: dict[str, Callable[..., list[Any]]] = {
    "simulated": on_simulated_ranks,
    "shm": on("shm"),
    "gloo": on("gloo"),
    "mpi": on_mpi,
    "gloo across hosts": on("gloo", "ABABA"),
}


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 3, 5))])
@pytest.mark.parametrize("backend", BACKENDS)
def test_forty_dropped_meshes_hold_no_more_than_two(backend: str, size: int, pool: Pool) -> None:
    for before, after, is_collected in BACKENDS[backend](pool, forty_meshes, size):
        assert is_collected
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


def test_what_one_rank_keeps_is_offered_by_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 keeps 30 meshes that the other drops; once it drops them, all go."""
    requests: list[str] = []
    add = SimulatedStore.add

    def counting(self: SimulatedStore, key: str, amount: int) -> int:
        requests.append(key)
        return add(self, key, amount)

    monkeypatch.setattr(SimulatedStore, "add", counting)

    def program() -> tuple[list[int], int, int]:
        warnings.simplefilter("ignore", ResourceWarning)
        kept, offers = [], []
        for _ in range(30):
            mesh: Any = make_mesh()
            offers.append(sum("/offer/" in key for key in requests))
            if md.get_rank() == 0:
                kept.append(mesh)
            del mesh
            gc.collect()
        num_kept = num_open()
        kept.clear()
        gc.collect()
        for _ in range(8):
            make_mesh()
            gc.collect()
        return offers, num_kept, num_open()

    for offers, num_kept, num_left in md.simulate(program, 2):
        assert num_kept > 30
        assert num_left <= 3
        assert offers[-1] - offers[-11] <= 10 * 8 + 8


def test_what_is_in_use_is_not_closed(pool: Pool) -> None:
    """Each of these lives on without its mesh; others are made and dropped meanwhile."""

    def program() -> list[float]:
        warnings.simplefilter("ignore", ResourceWarning)
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        leaf = torch.ones(1, requires_grad=True)
        group, part = make_mesh().get_group("tp"), make_mesh()["tp"]
        wrapper = md.DDP(model, process_group=make_mesh()["tp"])
        gathered = md.lax.all_gather(leaf, "tp", mesh=make_mesh())
        x, y, z, w = (torch.ones(1) for _ in range(4))
        work = md.all_reduce(x, group=make_mesh()["tp"], async_op=True)
        future = md.all_reduce(w, group=make_mesh()["tp"], async_op=True).get_future()
        for _ in range(3):
            gc.collect()
            make_and_drop()
        work.wait()
        future.wait()
        md.all_reduce(y, group=group)
        md.all_reduce(z, group=part)
        wrapper(torch.ones(1, 2)).sum().backward()
        gathered.sum().backward()
        assert model.weight.grad is not None and leaf.grad is not None
        grads = model.weight.grad.sum().item(), leaf.grad.item()
        return [x.item(), y.item(), z.item(), w.item(), *grads]

    for backend in ("gloo", "shm"):
        assert pool.run(program, 2, backend=backend) == [[2.0] * 6] * 2


@pytest.mark.parametrize("backend", ["simulated", "gloo", "shm", "gloo across hosts"])
def test_what_one_rank_drops_stays_for_the_others(backend: str, pool: Pool) -> None:
    """Also their messages, and what it has in flight there; when all have dropped it, it goes."""

    def program() -> tuple[float, list[int]]:
        warnings.simplefilter("ignore")
        first = md.get_rank() == 0
        group: Any = md.new_group()
        x = torch.ones(1)
        work = md.all_reduce(x, group=group, async_op=True) if first else None
        message = md.isend(torch.full((1,), 5.0), 1, group=group) if first else None
        if first:
            del work, message, group
        gc.collect()
        small = md.new_group()
        md.barrier(group=small)
        kept = num_open()
        if not first:
            md.all_reduce(x, group=group)
        if md.get_rank() == 1:
            y = torch.zeros(1)
            md.recv(y, 0, group=group)
            x += y
        if not first:
            del group
        gc.collect()
        md.barrier(group=small)
        last = md.new_group()
        md.barrier(group=last)
        return x.item(), [kept, num_open()]

    _, second, third = BACKENDS[backend](pool, program, 3)
    assert (second[0], third[0]) == (8.0, 3.0)
    assert second[1][0] == second[1][1] == third[1][0] == third[1][1]


def test_equal_groups_are_made_again_while_others_are_dropped(pool: Pool) -> None:
    """One rank keeps each second mesh: what is shared stays right, and all goes in the end."""

    def program() -> tuple[list[float], int]:
        warnings.simplefilter("ignore")
        kept, sums = [], []
        for number in range(6):
            mesh = md.DeviceMesh("cpu", [1, 0])
            other = make_mesh()
            if md.get_rank() == number % 2:
                kept.append((mesh, other))
            else:
                del mesh, other
                gc.collect()
            again = md.DeviceMesh("cpu", [1, 0])
            x = torch.ones(1)
            md.all_reduce(x, group=again)
            sums.append(x.item())
        kept.clear()
        mesh = other = again = None
        gc.collect()
        make_mesh()
        return sums, num_open()

    of_mesh = 2
    assert md.simulate(program, 2) == [([2.0] * 6, of_mesh)] * 2
    of_world = 1  # which processes open at once
    assert pool.run(program, 2, backend="shm") == [([2.0] * 6, of_mesh + of_world)] * 2


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
private = {"tp": md.AxisOptions(private=True)}
for _ in range(3):
    mesh = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"), axis_options=private)
    del mesh
    gc.collect()
group = md.new_group()
del group
"""
    for rank, said in enumerate(pool.run(warnings_of, 2, text)):
        mesh, group = said
        assert mesh == (
            "axis 'dp' of DeviceMesh(dp=1, tp=2) was dropped without being closed\n"
            f"  where:    rank {rank}, made at train.py:4\n"
            "  found:    its communicator, which stays open until all ranks have dropped the group "
            "and create another\n"
            "  fix:      call mesh.close() or destroy_process_group(group), or keep a reference "
            "to it"
        )
        assert "made at train.py:7" in group


@pytest.mark.parametrize(
    "text",
    [
        'mesh = md.init_device_mesh("cpu", (1, 2)); mesh.close(); del mesh',
        "group = md.new_group(); md.destroy_process_group(group); del group",
        'mesh = md.init_device_mesh("cpu", (1, 2)); group = mesh.get_all_groups(); del mesh',
        'mesh = md.DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a", "b")); mesh = mesh["a"]',
        'kept = md.DeviceMesh("cpu", [0, 1]); md.DeviceMesh("cpu", [0, 1])',
        'md.DeviceMesh("cpu", [0, 1], open_groups=False)',
        'mesh = md.DeviceMesh("cpu", [0, 1]); md.destroy_process_group(); del mesh',
    ],
)
def test_nothing_is_said_of_what_was_closed_or_is_used(text: str, pool: Pool) -> None:
    assert pool.run(warnings_of, 2, text) == [[], []]


def test_a_forked_child_says_and_closes_nothing(pool: Pool) -> None:
    def program() -> tuple[int, float]:
        group: Any = md.new_group()
        child = os.fork()
        if child == 0:
            warnings.simplefilter("error")
            try:
                del group
                gc.collect()
            finally:
                os._exit(7)
        _, status = os.waitpid(child, 0)
        x = torch.ones(1)
        md.all_reduce(x, group=group)
        md.destroy_process_group(group)
        return os.waitstatus_to_exitcode(status), x.item()

    assert pool.run(program, 2, backend="shm") == [(7, 2.0)] * 2


def test_an_exception_keeps_what_its_frames_hold(pool: Pool) -> None:
    def program() -> tuple[float, int, int]:
        warnings.simplefilter("ignore")

        def fail() -> None:
            group = md.new_group()
            raise ValueError(group)

        x = torch.ones(1)
        try:
            fail()
        except ValueError as error:
            gc.collect()
            md.new_group()
            md.all_reduce(x, group=error.args[0])
        kept = num_open()
        gc.collect()
        md.new_group()
        return x.item(), kept, num_open()

    for total, kept, after in pool.run(program, 2, backend="shm"):
        assert (total, after) == (2.0, kept - 1)


def test_an_interrupt_while_a_group_is_opened_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def program() -> tuple[int, int]:
        with monkeypatch.context() as patched:
            patched.setattr(process_group, "DeviceGroup", mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                make_mesh()
        after = num_open()
        make_mesh().close()
        return after, num_open()

    assert md.simulate(program, 1) == [(0, 0)]
