"""Meshes in torch's form and in JAX's."""

from __future__ import annotations

from datetime import timedelta

import meshdist as md


def test_make_mesh_in_jax_form_infers_one_size() -> None:
    def program():
        return md.make_mesh((2, -1), ("x", "y"), device_type="cpu").axis_sizes

    assert md.simulate(program, 6) == [{"x": 2, "y": 3}] * 6


def test_axis_timeouts() -> None:
    def program():
        mesh = md.init_device_mesh(
            "cpu",
            (2, 2),
            mesh_dim_names=("dp", "tp"),
            axis_options={"tp": md.AxisOptions(timeout=timedelta(seconds=7))},
            timeout=timedelta(seconds=90),
        )
        return [group.timeout.total_seconds() for group in mesh.get_all_groups()]

    assert md.simulate(program, 4)[0] == [90.0, 7.0]
