"""Device types of a mesh, and the device that a rank takes."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import meshdist as md
from meshdist.mesh.devices import select_device
from meshdist.runtime.world import get_world


def test_a_cuda_mesh_can_be_planned_without_a_gpu() -> None:
    def program():
        mesh = md.init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp", "tp"), open_groups=False)
        return mesh["tp"].get_group().ranks

    assert md.simulate(program, 16)[9] == tuple(range(8, 16))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
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
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.update({md.get_rank(): device})
    )

    def program():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            select_device("cuda", get_world())
        return [(str(one.message), Path(one.filename).name) for one in caught]

    told = md.simulate(program, 3)
    assert chosen == {0: 0, 1: 1, 2: 0}
    assert told[:2] == [[], []]
    ((text, file),) = told[2]
    assert text.startswith(
        "rank 2 has local rank 2 on a host with 2 CUDA devices and takes device 0"
    )
    assert file == "test_devices.py"


def test_a_device_that_was_chosen_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail("chosen anew"))
    md.simulate(lambda: select_device("cuda", get_world()), 1)
