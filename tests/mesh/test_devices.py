"""Device types of a mesh, and the device that a rank takes."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch

import meshdist as md
from meshdist.mesh.definition import select_device
from tests.inner import get_world
from tests.pool import Pool


def test_a_cuda_mesh_can_be_planned_without_a_gpu() -> None:
    def program():
        mesh = md.init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp", "tp"), open_groups=False)
        return mesh["tp"].get_group().ranks

    assert md.simulate(program, 16)[9] == tuple(range(8, 16))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_what_is_derived_from_a_planned_mesh_is_planned() -> None:
    def program():
        mesh = md.init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"), open_groups=False)
        whole = mesh.flatten(name="all")
        parts = mesh.unflatten("tp", (2, 2), ("cp", "tp"))
        with pytest.raises(md.BackendError, match="needs a GPU") as error:
            md.barrier(mesh)
        assert "open a planned mesh on a machine with GPUs" in str(error.value)
        return whole.get_group().ranks, parts["cp"].get_group().ranks

    assert md.simulate(program, 8)[5] == (tuple(range(8)), (5, 7))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_rejected() -> None:
    with pytest.raises(md.BackendError) as caught:
        md.simulate(lambda: md.init_device_mesh("cuda", (2, 1)), 2)
    assert str(caught.value).startswith("a 'cuda' mesh needs a GPU, and torch sees none")
    assert "fix:" in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_planned_cuda_mesh_does_not_open_without_a_gpu() -> None:
    def program():
        mesh = md.init_device_mesh("cuda", (2,), open_groups=False)
        with pytest.raises(md.BackendError, match="needs a GPU"):
            mesh.warmup()

    md.simulate(program, 2)


def test_a_rank_takes_the_device_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[int, int] = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[md.get_rank()])
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.update({md.get_rank(): device})
    )

    def program():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            device = select_device("cuda", get_world())
            assert device == torch.device("cuda", chosen[md.get_rank()])
        return [(str(one.message), Path(one.filename).name) for one in caught]

    told = md.simulate(program, 3)
    assert chosen == {0: 0, 1: 1, 2: 0}
    assert told[:2] == [[], []]
    ((text, file),) = told[2]
    assert text.startswith(
        "rank 2 has local rank 2 on a host with 2 CUDA devices and uses device 0"
    )
    assert file == "test_devices.py"


@pytest.mark.gpu
def test_a_cuda_mesh_as_written() -> None:
    torch.cuda.init()  # the device is chosen: simulated ranks share it

    def program():
        mesh = md.init_device_mesh("cuda", (2, 8))
        x = torch.ones(1, device="cuda")
        md.all_reduce(x, group=mesh.get_group(1))
        y = torch.ones(1, device="cuda")
        md.all_reduce(y, group=mesh.get_group(0))
        return mesh.shape, x.item(), y.item()

    assert md.simulate(program, 16) == [((2, 8), 8.0, 2.0)] * 16


@pytest.mark.gpu
@pytest.mark.parametrize("is_chosen", [False, True])
def test_a_process_takes_the_device_of_local_rank_unless_it_chose(is_chosen: bool) -> None:
    def program(rank: int) -> tuple[int, int]:
        last = torch.cuda.device_count() - 1
        os.environ["LOCAL_RANK"] = "0" if is_chosen else str(last)
        if is_chosen:
            torch.cuda.set_device(last)
        md.init_process_group("gloo", store=md.HashStore(), rank=0, world_size=1)
        md.init_device_mesh("cuda", (1,))
        answer = torch.cuda.current_device(), last
        md.destroy_process_group()
        return answer

    with Pool() as fresh:  # a process that has not used CUDA yet
        ((found, last),) = fresh.call(program, 1)
    assert found == last


def test_a_device_that_was_chosen_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail("chosen anew"))
    found = md.simulate(lambda: select_device("cuda", get_world()), 1)
    assert found == [torch.device("cuda", 3)]
