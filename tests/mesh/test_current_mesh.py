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
        with pytest.raises(md.MeshError, match="there is no current mesh"):
            md.get_current_mesh()
        outer = md.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        inner = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("b", "c"))
        with outer:
            with inner:
                assert md.get_current_mesh() is inner
            assert md.get_current_mesh() is outer
        with pytest.raises(md.MeshError, match="there is no current mesh"):
            md.get_current_mesh()

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
            "  found:    an outer `with mesh:` of DeviceMesh(tp=1, ep=2), which has axis 'ep', "
            "hidden by the innermost `with mesh:`",
            f"  fix:      pass the mesh: {fix}",
        ]
        for text in (given, alone):
            assert "hides" not in text and "did you mean" not in text


TYPOS: dict[str, Callable[[md.DeviceMesh, str], Any]] = {
    "lax": lambda mesh, axis: md.lax.psum(torch.ones(2), axis),
    "lax on several": lambda mesh, axis: md.lax.axis_size(("tp", axis)),
    "slice": lambda mesh, axis: mesh[axis],
    "slices": lambda mesh, axis: mesh["tp", axis],
    "group": lambda mesh, axis: mesh.get_group(axis),
    "size": lambda mesh, axis: mesh.size(axis),
    "local rank": lambda mesh, axis: mesh.get_local_rank(axis),
    "flatten": lambda mesh, axis: mesh.flatten((axis, "tp")),
    "pattern": lambda mesh, axis: md.shard(np.ones(2), f"b@{axis}"),
    "spec": lambda mesh, axis: md.NamedSharding(mesh, md.P(axis)),
    "annotate": lambda mesh, axis: md.annotate(torch.ones(2), varying=axis),
    "seed": lambda mesh, axis: md.seed(0, differ_over=axis),
    "assert_equal": lambda mesh, axis: md.assert_equal(1, axis),
    "options": lambda mesh, axis: md.init_device_mesh(
        "cpu",
        (2, 1),
        mesh_dim_names=("dp", "tp"),
        axis_options={axis: md.AxisOptions()},
    ),
}


@pytest.mark.parametrize("name", TYPOS)
def test_the_axis_that_a_typo_means_is_named_everywhere(name: str) -> None:
    def program() -> list[str]:
        texts = []
        with md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")) as mesh:
            for axis in ("dpp", "pd", "db", "Dp"):
                with pytest.raises(AxisError) as caught:
                    TYPOS[name](mesh, axis)
                texts.append(str(caught.value))
        return texts

    for texts in md.simulate(program, 2):
        assert [text.splitlines()[-1] for text in texts] == ["  fix:      did you mean 'dp'?"] * 4


@pytest.mark.parametrize("axis", ["ep", "pt", "etp", "td", "x", "modal", "p"])
def test_where_a_typo_may_mean_several_axes_or_none_no_axis_is_guessed(axis: str) -> None:
    with pytest.raises(AxisError) as caught:
        md.Layout.from_shape((2, 2, 2), ("dp", "tp", "tpp")).axis_index(axis)
    assert "did you mean" not in str(caught.value)
