"""Arrays on a CUDA device: staged through pinned memory, loaded to where they lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import meshdist as md
from tests.pool import Pool


@pytest.mark.gpu
def test_there_and_back_on_a_device(pool: Pool, tmp_path: Path) -> None:
    def program(root: str) -> list[bool]:
        wide = torch.arange(330.0 * 200, device="cuda").view(330, 200)
        found = []
        with md.init_device_mesh("cuda", (2,), mesh_dim_names=("dp",)) as mesh:
            state = {"wide": md.shard(wide, "a@dp b", mesh), "plain": wide * 2}
            md.checkpoint.save(state, f"{root}/one")
            pending = md.checkpoint.save_async(state, f"{root}/two")
            state["wide"].zero_()
            pending.wait()
            for name in ("one", "two"):
                target = {
                    "wide": md.shard(torch.zeros_like(wide), "a b@dp", mesh),
                    "plain": torch.zeros_like(wide),
                }
                md.checkpoint.load(target, f"{root}/{name}")
                found += [
                    torch.equal(target["wide"], md.shard(wide, "a b@dp", mesh)),
                    torch.equal(target["plain"], wide * 2),
                ]
        return found

    assert pool.run(program, 2, str(tmp_path)) == [[True] * 4] * 2


@pytest.mark.gpu
def test_the_devices_generator_goes_on(tmp_path: Path) -> None:
    torch.cuda.manual_seed(3)
    md.checkpoint.save(md.checkpoint.State(), tmp_path / "one")
    wanted = torch.rand(4, device="cuda").tolist()
    md.checkpoint.load(md.checkpoint.State(), tmp_path / "one")
    assert torch.rand(4, device="cuda").tolist() == wanted
