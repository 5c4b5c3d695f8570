"""Torch's states: saved, copied, and filled with the wrapper's group while a hook runs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

import meshdist as md
from meshdist.ddp.comm_hooks.bucket import group_in_state
from tests.ddp.comm_hooks.training import STEPS, are_equal, make_model, steps_of

KEEPERS: list[Callable[[Any], Any]] = [
    lambda state: pickle.loads(pickle.dumps(state)),
    copy.copy,
    copy.deepcopy,
]


def test_they_are_torchs() -> None:
    assert md.comm_hooks.PowerSGDState is PowerSGDState
    assert md.comm_hooks.PostLocalSGDState is PostLocalSGDState


@pytest.mark.parametrize("keep", KEEPERS)
def test_a_state_is_kept_without_its_groups(keep: Callable[[Any], Any]) -> None:
    def program() -> None:
        group = md.group.WORLD
        state = PowerSGDState(group, matrix_approximation_rank=3, start_powerSGD_iter=7)
        state.iter, state.error_dict = 5, {0: torch.arange(3.0)}
        kept = keep(state)
        assert type(kept) is PowerSGDState and kept.process_group is None
        assert (kept.matrix_approximation_rank, kept.start_powerSGD_iter, kept.iter) == (3, 7, 5)
        assert kept.error_dict[0].tolist() == [0, 1, 2]
        assert kept.rng.randint(1 << 30) == copy.deepcopy(state).rng.randint(1 << 30) or (
            keep is copy.copy  # which draws from the same numbers
        )
        local = PostLocalSGDState(group, group, 4, False)
        local.iter = 9
        kept = keep(local)
        assert (
            type(kept) is PostLocalSGDState and (kept.process_group, kept.subgroup) == (None,) * 2
        )
        facts = kept.start_localSGD_iter, kept.post_local_gradient_allreduce, kept.iter
        assert facts == (4, False, 9)

    md.simulate(program, 1)


def test_training_goes_on_with_a_loaded_state() -> None:
    def program() -> tuple[list[torch.Tensor], int]:
        module = make_model()
        saved = pickle.dumps(PowerSGDState(None, 2, 2, min_compression_rate=0.5))
        for _ in range(2):  # each time with a wrapper of its own
            state = pickle.loads(saved)
            model = md.DDP(copy.deepcopy(module))
            model.register_comm_hook(state, md.comm_hooks.powerSGD_hook)
            weights = steps_of(model, md.get_rank())
            module, saved = model.module, pickle.dumps(state)
        return weights, pickle.loads(saved).iter

    (one, num_steps), (other, _) = md.simulate(program, 2)
    assert are_equal(one, other) and num_steps == 2 * STEPS


@pytest.mark.parametrize("kind", ["power", "local"])
def test_a_state_names_the_wrappers_group_while_a_hook_runs(kind: str) -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dp, tp = mesh.get_group("dp"), mesh.get_group("tp")

        def state_of(group: Any) -> Any:
            return PowerSGDState(group) if kind == "power" else PostLocalSGDState(group, None, 1)

        for given, meant in ((None, dp), (mesh["tp"], tp), (tp, tp)):
            state = state_of(given)
            with group_in_state(state, dp):
                assert state.process_group is meant
            assert state.process_group is given
            with pytest.raises(ZeroDivisionError), group_in_state(state, dp):
                1 / 0  # noqa: B018
            assert state.process_group is given

    md.simulate(program, 4)


def test_other_states_are_left_alone() -> None:
    class State:
        process_group = None

    def program() -> None:
        state = State()
        for one in (state, None, md.group.WORLD):
            with group_in_state(one, md.group.WORLD):
                assert state.process_group is None

    md.simulate(program, 1)
