"""Every collective as one pattern does what its collective does, and is shown with what it
costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import meshdist as md
from tests.pool import Pool, places

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "reshard.py"


def test_it_checks_itself(pool: Pool) -> None:
    ended = pool.start(SCRIPT, places(4), "--check", is_strict=True, has_teardown=False)
    assert [one.returncode for one in ended] == [0] * 4, ended
    (said,) = [one.stdout for one in ended if one.stdout]
    _, columns, *lines, last = said.splitlines()
    assert columns.split() == ["pattern", "forward", "bytes", "backward", "bytes"]
    assert last == "largest difference: 0.0e+00"
    shown = {line[:28].strip(): line[58:].split() for line in lines}
    # 96 x 48 float32 over (dp=2, tp=2): each of four ranks lacks half of it.
    half = f"{4 * 96 * 48 * 4 // 2:,}"
    assert shown["all-gather"] == ["all-gather", half, "take", "0"]
    assert shown["all-gather, used in p ways"] == ["all-gather", half, "reduce-scatter", half]
    assert shown["all-reduce"][0] == "all-reduce"
    assert shown["all-reduce"][2:] == ["-", "0"]
    assert shown["all-to-all"][::2] == ["all-to-all", "all-to-all"]
    assert shown["slice"][:2] == ["take", "0"]


@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (2, 3)])
def test_on_other_meshes(load: Callable[[str], ModuleType], dp: int, tp: int) -> None:
    example = load("reshard")

    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        whole = torch.arange(24.0 * 48).view(24, 48)
        return [example.difference(row, whole, mesh) for row in example.ROWS]

    assert max(map(max, md.simulate(program, dp * tp))) == 0.0


def test_a_difference_is_told(load: Callable[[str], ModuleType]) -> None:
    example = load("reshard")
    wrong = example.Row("wrong", "a@tp b -> a b", lambda x: md.lax.psum(torch.cat([x, x]), "tp"))

    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        return example.difference(wrong, torch.arange(24.0 * 48).view(24, 48), mesh)

    assert min(md.simulate(program, 2)) > 1
