"""Meshes of equal ranks share a communicator, whether they are kept or dropped."""

from __future__ import annotations

import gc
from typing import Any

import meshdist as md
from tests.pool import Pool


def make_mesh() -> md.DeviceMesh:
    ranks = [list(range(md.get_world_size()))]
    names, options = ("dp", "tp"), {"tp": md.AxisOptions(private=True)}
    return md.DeviceMesh("cpu", ranks, mesh_dim_names=names, axis_options=options)


def test_equal_meshes_share_a_communicator() -> None:
    """Of what a thread may call, as the page on meshes says, equal meshes are one."""

    def program() -> list[bool]:
        first, second = make_mesh(), make_mesh()
        groups = [(first[axis].get_group(), second[axis].get_group()) for axis in ("dp", "tp")]
        opened = [[group.open_device_group("cpu").opened for group in pair] for pair in groups]
        return [left is right for left, right in opened]

    for size in (1, 2):
        assert md.simulate(program, size) == [[True, False]] * size


def test_a_communicator_that_was_dropped_may_be_shared_again(pool: Pool) -> None:
    def program() -> list[str]:
        labels = []
        for _ in range(3):
            mesh: Any = md.DeviceMesh("cpu", [0, 1])
            labels.append(mesh.get_group().open_device_group("cpu").opened.label)
            del mesh
            gc.collect()
        return labels

    for labels in pool.run(program, 2):
        assert len(set(labels)) == 1
