"""Which bytes a rank reads: its own part on one host; a share of it where replicas span hosts."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

import meshdist as md
from meshdist.checkpoint.files import OpenFiles
from tests.pool import Pool

SHAPE = (512, 256)


def whole() -> torch.Tensor:
    return torch.arange(float(SHAPE[0] * SHAPE[1])).view(SHAPE)


def read_in_all_layouts(path: str) -> list[int]:
    """Save rows; load rows, columns and the whole; return how many files each load has opened."""
    mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    rows = md.NamedSharding(mesh, md.P("x"))
    mine = whole().chunk(4)[md.get_rank()].clone()
    md.checkpoint.save({"w": md.ShardedArray(mine, rows, SHAPE)}, path)
    counts = []
    for dim, spec in ((0, md.P("x")), (1, md.P(None, "x")), (None, None)):
        expected = whole() if dim is None else whole().chunk(4, dim)[md.get_rank()]
        target = torch.zeros_like(expected)
        given = target
        if spec is not None:
            given = md.ShardedArray(target, md.NamedSharding(mesh, spec), SHAPE)
        get = OpenFiles.get
        with mock.patch.object(OpenFiles, "get", autospec=True, side_effect=get) as opened:
            md.checkpoint.load({"w": given}, path, mesh=mesh)
        assert torch.equal(target, expected)
        counts.append(len({call.args[1] for call in opened.call_args_list}))
    return counts


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_on_one_host_each_rank_reads_all_that_it_needs(
    pool: Pool, backend: str, tmp_path: Path
) -> None:
    found = pool.run(read_in_all_layouts, 4, os.fspath(tmp_path / "w"), backend=backend)
    assert found == [[1, 4, 4]] * 4


def test_replicas_on_several_hosts_read_a_share_each(pool: Pool, tmp_path: Path) -> None:
    path = os.fspath(tmp_path / "w")
    found = pool.run(read_in_all_layouts, 4, path, backend="gloo", hosts="AABB")
    assert found == [[1, 4, 1]] * 4
