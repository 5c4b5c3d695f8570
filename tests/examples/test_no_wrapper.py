"""Plain modules on a mesh of two axes train as on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import meshdist as md
from meshdist.errors import GradientError
from tests.pool import Pool, places

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "no_wrapper.py"


def test_it_checks_itself(pool: Pool) -> None:
    ended = pool.start(SCRIPT, places(4), "--check", is_strict=True, has_teardown=False)
    assert [one.returncode for one in ended] == [0] * 4, ended
    (said,) = [one.stdout for one in ended if one.stdout]
    assert said.startswith("dp=2, tp=2: loss 0.0")
    assert float(said.split()[-1]) < 1e-12


@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (2, 3)])
def test_on_other_meshes(load: Callable[[str], ModuleType], dp: int, tp: int) -> None:
    example = load("no_wrapper")

    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        return example.difference(example.train(mesh)[0], mesh)

    assert max(md.simulate(program, dp * tp)) < 1e-12


def test_a_difference_is_told(load: Callable[[str], ModuleType]) -> None:
    example = load("no_wrapper")

    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return example.difference(example.train(mesh, is_typed=False)[0], mesh)

    # Without types each rank has its own share of the gradients alone.
    with pytest.raises(GradientError, match="the gradient that reaches psum over axis 'tp'"):
        md.simulate(program, 4)
