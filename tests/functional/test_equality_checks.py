"""The check that a value is equal on all ranks of a group, and the text of its error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.errors import GradientError
from meshdist.functional.equality_checks import check_invariant


def group() -> Any:
    mesh = md.init_device_mesh("cpu", (md.get_world_size(),), mesh_dim_names=("tp",))
    return mesh.get_group("tp")


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float64])
def test_any_value_can_be_compared(dtype: torch.dtype) -> None:
    def program() -> str:
        words = {"where": "here", "expected": "equal ones", "fix": "make them equal"}
        along = group()
        check_invariant(torch.tensor([1, 0], dtype=dtype), along, "a mask", **words)
        mine = torch.tensor([1, md.get_rank()], dtype=dtype)
        with pytest.raises(GradientError) as caught:
            check_invariant(mine, along, "a mask", **words)
        return str(caught.value)

    assert (
        md.simulate(program, 2)
        == [
            "a mask over axis 'tp' of DeviceMesh(tp=2) is not the same on every rank\n"
            "  where:    here\n"
            "  expected: equal ones\n"
            "  found:    rank 1 differs from rank 0, by up to 1 of its largest value\n"
            "  fix:      make them equal"
        ]
        * 2
    )
