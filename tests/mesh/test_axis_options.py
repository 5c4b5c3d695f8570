"""What a mesh may choose per axis."""

from __future__ import annotations

from datetime import timedelta

import pytest

import meshdist as md
from meshdist.mesh.definition import options_of_axes

LAYOUT = md.Layout.from_shape((2, 4), ("dp", "tp"))
MINUTE = timedelta(minutes=1)


def test_one_per_axis_by_name_or_index() -> None:
    dp, tp = md.AxisOptions(timeout=MINUTE), md.AxisOptions(backend="gloo", private=True)
    assert options_of_axes(LAYOUT, {"tp": tp, 0: dp}, None, None) == (dp, tp)
    assert options_of_axes(LAYOUT, {-1: tp}, None, None) == (md.AxisOptions(), tp)


def test_the_meshs_timeout_is_for_axes_that_name_none() -> None:
    own = md.AxisOptions(backend="gloo", timeout=timedelta(seconds=5))
    first, second = options_of_axes(LAYOUT, {"tp": own}, None, MINUTE)
    assert (first.timeout, second.timeout) == (MINUTE, timedelta(seconds=5))
    (first, second) = options_of_axes(LAYOUT, {"tp": md.AxisOptions(private=True)}, None, MINUTE)
    assert second == md.AxisOptions(timeout=MINUTE, private=True)


def test_torchs_form_a_name_options_or_both() -> None:
    class Options:
        backend = "gloo"

    given = Options()
    assert options_of_axes(LAYOUT, None, {"dp": "GLOO", 1: given}, None) == (
        md.AxisOptions(backend="gloo"),
        md.AxisOptions(backend="gloo", options=given),
    )
    assert options_of_axes(LAYOUT, None, {"tp": ("gloo", given)}, None)[1] == md.AxisOptions(
        backend="gloo", options=given
    )


@pytest.mark.parametrize(
    ("axis_options", "override", "kind", "text"),
    [
        ({"pp": md.AxisOptions()}, None, md.AxisError, "no axis 'pp'"),
        ({"tp": "gloo"}, None, md.KindError, "axis_options={'tp': AxisOptions(backend='gloo')}"),
        ({"tp": md.AxisOptions()}, {1: "gloo"}, md.ArgumentError, "has options twice"),
        ({"tp": md.AxisOptions(backend="pigeon")}, None, md.BackendError, "'pigeon'"),
    ],
)
def test_rejected(axis_options, override, kind, text) -> None:
    with pytest.raises(kind) as caught:
        options_of_axes(LAYOUT, axis_options, override, None)
    assert text in str(caught.value)


def test_a_timeout_is_a_timedelta() -> None:
    with pytest.raises(md.KindError, match=r"timeout must be a datetime\.timedelta, not 5"):
        md.AxisOptions(timeout=5)


def test_a_mesh_tells_the_backend_that_an_axis_was_asked_to_take() -> None:
    def program():
        mesh = md.init_device_mesh(
            "cpu",
            (1, 2),
            mesh_dim_names=("dp", "tp"),
            axis_options={"tp": md.AxisOptions(backend="gloo")},
        )
        return mesh.backend_of("dp"), mesh.backend_of("tp"), mesh.backend_of(-1)

    assert md.simulate(program, 2) == [("simulated", "gloo", "gloo")] * 2
