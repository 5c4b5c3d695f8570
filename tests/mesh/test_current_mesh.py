"""The mesh in force."""

from __future__ import annotations

import pytest

import meshdist as md


def test_the_mesh_in_force() -> None:
    def program():
        assert md.find_current_mesh() is None
        with pytest.raises(md.MeshError, match="no mesh is in force"):
            md.get_current_mesh()
        outer = md.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        inner = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("b", "c"))
        with outer:
            with inner:
                assert md.get_current_mesh() is inner
            assert md.get_current_mesh() is outer
        return md.find_current_mesh()

    assert md.simulate(program, 2) == [None, None]
