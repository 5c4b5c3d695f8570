"""What users do every day comes to what one device with the whole batch comes to.

The programs run on simulated ranks; ``test_torch_second_opinion`` runs them on processes. What has
no counterpart on one device, since ranks differ on purpose, is told there or below.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import optree
import pytest
import torch
from torch import nn

import meshdist as md
from tests.ddp.everyday_programs import PROGRAMS, run_quietly

# Ranks differ on purpose, or gradients that are not averaged are looked at.
BY_RANK = {
    "a_backward_outside_of_no_sync",
    "a_functional_call",
    "accumulation_by_an_attribute",
    "accumulation_under_no_sync",
    "buffers",
    "buffers_alone",
    "buffers_by_the_older_name",
    "buffers_once",
    "evaluation_between_steps",
    "ignored_parameters_and_buffers",
    "inputs_without_rows",
    "unused_by_rank_and_step",
    "unused_with_copies",
}
ROUGH = {"autocast_and_a_scaler": 2e-2, "mixed_dtypes": 2e-2}  # low precision, other sums


class Wrap:
    """Ours."""

    type = md.DDP

    def __call__(self, module: nn.Module, **options: Any) -> nn.Module:
        return md.DDP(module, **options)

    def settle(self) -> None:
        """Gradients are averages when the backward has returned."""


class Alone(nn.Module):
    """The wrapper of one device: it does nothing."""

    require_backward_grad_sync = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    def _set_static_graph(self) -> None:
        """Nothing is reduced."""


class WrapAlone(Wrap):
    def __call__(self, module: nn.Module, **_: Any) -> nn.Module:
        return Alone(module)


NAMES = [name for name in PROGRAMS if name not in BY_RANK]


def run_ours() -> dict[str, Any]:
    rank, size = md.get_rank(), md.get_world_size()
    return {name: run_quietly(PROGRAMS[name], Wrap(), rank, size) for name in NAMES}


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return {name: run_quietly(PROGRAMS[name], WrapAlone(), 0, 1) for name in NAMES}


@pytest.fixture(scope="module", params=[1, 2, 4])
def by_rank(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return md.simulate(run_ours, request.param)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_come_to_what_one_device_does(
    by_rank: list[dict[str, Any]], whole: dict[str, Any], name: str
) -> None:
    tolerance = ROUGH.get(name, 1e-10)
    expected, form = optree.tree_flatten(whole[name], none_is_leaf=True)
    for outcomes in by_rank:
        found, found_form = optree.tree_flatten(outcomes[name], none_is_leaf=True)
        assert found_form == form
        for mine, other in zip(found, expected, strict=True):
            if isinstance(mine, torch.Tensor):
                torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
            else:
                assert mine == other
