"""The mesh in force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from meshdist.errors import AxisError


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


CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "psum": (lambda **m: md.lax.psum(torch.ones(2), "ep", **m), "psum(..., mesh=mesh)"),
    "axis_size": (lambda **m: md.lax.axis_size(("tp", "ep"), **m), "axis_size(..., mesh=mesh)"),
    "assert_equal": (lambda **m: md.assert_equal(1, "ep", **m), "assert_equal(..., mesh=mesh)"),
    "seed": (lambda **m: md.seed(0, differ_over="ep", **m), "mesh=..."),
    "annotate": (lambda **m: md.annotate(torch.ones(2), varying="ep", **m), "mesh=..."),
    "annotate by a pattern": (lambda **m: md.annotate(torch.ones(2), "b@ep", **m), "mesh=..."),
    "reshard": (lambda **m: md.reshard(torch.ones(2), "b@ep -> b", **m), "mesh=..."),
    "shard": (lambda **m: md.shard(np.ones(2), "b@ep", **m), "mesh=..."),
    "unshard": (lambda **m: md.unshard(np.ones(2), "b@ep", root=0, **m), "mesh=..."),
    "plan": (lambda **m: md.plan("b@ep -> b", shape=(4,), **m), "mesh=..."),
    "plan of specs": (lambda **m: md.plan(md.P("ep"), md.P(), shape=(4,), **m), "mesh=..."),
    "averager": (
        lambda mesh=None: md.HierarchicalModelAverager({"ep": 2}, 0, process_group=mesh),
        "process_group=mesh",
    ),
    "device_put": (
        lambda mesh=None: md.device_put(
            torch.ones(2), md.P("ep") if mesh is None else md.NamedSharding(mesh, md.P("ep"))
        ),
        "NamedSharding(mesh, spec)",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_hidden_mesh_that_has_the_axis_is_named(name: str) -> None:
    call, fix = CALLS[name]

    def program() -> tuple[str, str, str]:
        outer = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "ep"))
        inner = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        with outer, inner:
            with pytest.raises(AxisError) as hidden:
                call()
            call(mesh=outer)  # as the fix says
            with pytest.raises(AxisError) as given:
                call(mesh=inner)
        with inner, pytest.raises(AxisError) as alone:
            call()
        assert hidden.value.axis == "ep"
        return str(hidden.value), str(given.value), str(alone.value)

    for hidden, given, alone in md.simulate(program, 2):
        assert hidden.splitlines()[-2:] == [
            "  found:    an outer `with mesh:` is of DeviceMesh(tp=1, ep=2), which has 'ep'; "
            "the innermost one hides it",
            f"  fix:      name the mesh that is meant: {fix}",
        ]
        for text in (given, alone):
            assert "hides" not in text and "did you mean" not in text
