"""Torch's own wrapper over Gloo, in two processes, gives what ours gives: bit for bit.

One pair of processes runs every program with torch's; each test reads what came of one. A program
that torch's wrapper cannot run, or whose gradients it leaves unreduced, is compared with a program
that means the same.
"""

from __future__ import annotations

import gc
import inspect
import time
from typing import Any

import optree
import pytest
import torch
from torch import nn

import meshdist as md
from tests.ddp.everyday_programs import PROGRAMS, Program, run_quietly
from tests.pool import Pool

Outcomes = dict[str, Any]

# A program that torch's wrapper fails at, what it does, and a program that must come to the same.
TWINS = {
    "an_output_that_the_loss_leaves_out_static": (
        "RuntimeError: Expected to have finished reduction in the prior iteration",
        "an_output_that_the_loss_leaves_out",
    ),
    "dataclass_outputs_of_a_static_graph": ("no error, and no reduction", "dataclass_outputs"),
    "everything_is_delayed": ("ValueError: DistributedDataParallel's input", "nothing_is_delayed"),
    "reentrant_checkpoints_and_a_shared_weight": (
        "no error, and no reduction",
        "modern_checkpoints_and_a_shared_weight",
    ),
    "reentrant_checkpoints_twice_and_a_shared_weight": (
        "no error, and no reduction",
        "modern_checkpoints_twice_and_a_shared_weight",
    ),
} | {
    f"reentrant_checkpoints_{kind}": (
        "RuntimeError: Expected to mark a variable ready only once",
        f"modern_checkpoints_{kind}",
    )
    for kind in ("of_unused", "twice", "of_a_dynamic_module", "of_dynamic_sharing")
}

_OPTIONS = inspect.signature(nn.parallel.DistributedDataParallel).parameters
NOT_IN_THIS_TORCH: dict[str, str] = {}  # programs, and why torch's wrapper cannot run them
if "batched_grad_copy" not in _OPTIONS:
    NOT_IN_THIS_TORCH["batched_copies"] = "batched_grad_copy is of torch 2.12"
if "forward_sync_buffers" not in _OPTIONS:
    NOT_IN_THIS_TORCH |= dict.fromkeys(
        ("buffers", "buffers_once", "buffers_alone", "buffers_by_the_older_name"),
        "forward_sync_buffers is of torch 2.13",
    )
    NOT_IN_THIS_TORCH["two_forwards_with_batch_norm_before_a_backward"] = (
        "before torch 2.13 its second forward overwrites buffers that the first one saved"
    )


class Wrap:
    """Wraps modules in ours or in torch's."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self.type = kind

    def __call__(self, module: nn.Module, **options: Any) -> nn.Module:
        return self.type(module, **options)

    def settle(self) -> None:
        """Torch's delayed gradients change after the backward has returned."""
        if self.type is not md.DDP:
            time.sleep(0.5)  # on a busy machine, too


def outcome_of(function: Program, kind: type[nn.Module]) -> Any:
    """What came of a program, or the text of its error."""
    try:
        return run_quietly(function, Wrap(kind), md.get_rank(), md.get_world_size())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run_ours() -> Outcomes:
    return {name: outcome_of(function, md.DDP) for name, function in PROGRAMS.items()}


def run_torchs(meeting: str) -> Outcomes:
    rank, size = md.get_rank(), md.get_world_size()
    torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=size)
    kind = nn.parallel.DistributedDataParallel
    try:
        return {name: outcome_of(function, kind) for name, function in PROGRAMS.items()}
    finally:
        # torch's reducers must not be what keeps torch's group alive, see test_data_parallel.
        gc.collect()
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def theirs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[Outcomes]:
    return pool.run(run_torchs, 2, str(tmp_path_factory.mktemp("torch") / "meeting"))


@pytest.fixture(scope="module", params=["shm", "gloo"])
def ours(request: pytest.FixtureRequest, pool: Pool) -> list[Outcomes]:
    return pool.run(run_ours, 2, backend=request.param)


def assert_same(mine: Any, other: Any) -> None:
    """Equal trees, tensors bit for bit; an error equals nothing."""
    assert not isinstance(mine, str), mine
    assert not isinstance(other, str), other
    mine_leaves, mine_form = optree.tree_flatten(mine, none_is_leaf=True)
    other_leaves, other_form = optree.tree_flatten(other, none_is_leaf=True)
    assert mine_form == other_form
    for place, (one, two) in enumerate(zip(mine_leaves, other_leaves, strict=True)):
        if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
            assert torch.equal(one, two), (place, one, two)
        else:
            assert one == two, place


@pytest.mark.parametrize("name", PROGRAMS)
def test_torchs_wrapper_comes_to_the_same(
    ours: list[Outcomes], theirs: list[Outcomes], name: str
) -> None:
    _, twin = TWINS.get(name, ("", name))
    if name in NOT_IN_THIS_TORCH:
        pytest.skip(NOT_IN_THIS_TORCH[name])
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine[name], other[twin])


@pytest.mark.parametrize("name", TWINS)
def test_what_torchs_wrapper_fails_at(theirs: list[Outcomes], name: str) -> None:
    how, twin = TWINS[name]
    for other in theirs:
        if isinstance(other[name], str):
            assert other[name].startswith(how)
        else:
            assert how == "no error, and no reduction"
            with pytest.raises(AssertionError):
                assert_same(other[name], other[twin])
