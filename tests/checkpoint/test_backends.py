"""The same checkpoint over MPI and over two hosts, at once and beside the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import meshdist as md
from tests.mpi_job import job_of
from tests.pool import Pool
from tests.two_hosts import TwoHosts


def there_and_back(root: str) -> list[bool]:
    """Save by a mesh, plain and beside, load by another mesh; whether values are right."""
    size = md.get_world_size()
    wide, small = torch.arange(330.0 * 200).view(330, 200), torch.arange(7)
    with md.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)) as mesh:
        state: dict[str, Any] = {"wide": md.shard(wide, "a@dp b", mesh), "small": small, "n": 3}
        md.checkpoint.save(state, f"{root}/one")
        pending = md.checkpoint.save_async(state, f"{root}/two")
        state["wide"].zero_()
        pending.wait()
        found = []
        for name in ("one", "two"):
            target = {
                "wide": md.shard(torch.zeros(330, 200), "a b@dp", mesh),
                "small": torch.zeros(7, dtype=torch.int64),
                "n": 0,
            }
            md.checkpoint.load(target, f"{root}/{name}", verify=True)
            found += [
                torch.equal(target["wide"], md.shard(wide, "a b@dp", mesh)),
                torch.equal(target["small"], small) and target["n"] == 3,
            ]
        return found


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.soak)])
def test_over_mpi(pool: Pool, size: int, tmp_path: Path) -> None:
    found = job_of(pool, size).run_in_world(there_and_back, str(tmp_path))
    assert found == [[True] * 4] * size


@pytest.mark.parametrize(
    ("hosts", "backend"), [("AABB", None), pytest.param("ABA", "gloo", marks=pytest.mark.soak)]
)
def test_over_two_hosts(
    two_hosts: TwoHosts, hosts: str, backend: str | None, tmp_path: Path
) -> None:
    found = two_hosts.run(there_and_back, len(hosts), str(tmp_path), backend=backend, hosts=hosts)
    assert found == [[True] * 4] * len(hosts)
