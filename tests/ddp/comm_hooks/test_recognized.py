"""Which of torch's hooks ours take the place of, and when."""

from __future__ import annotations

from typing import Any

import torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks as debugging_hooks
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as default_hooks
import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook as local_sgd
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as power_sgd
import torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks as quantization

import meshdist as md
from meshdist.ddp.comm_hooks.registered_hooks import ours_for

OURS = md.comm_hooks
GROUP = object()  # any that is named


def test_torchs_plain_hooks_where_no_group_is_named() -> None:
    for module, name in (
        (default_hooks, "allreduce_hook"),
        (default_hooks, "fp16_compress_hook"),
        (default_hooks, "bf16_compress_hook"),
        (debugging_hooks, "noop_hook"),
    ):
        theirs = getattr(module, name)
        assert ours_for(theirs, None) is getattr(OURS, name) is not theirs
        assert ours_for(theirs, GROUP) is theirs


def test_a_mesh_names_none_for_torchs() -> None:
    def program() -> bool:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        named, not_named = (
            ours_for(default_hooks.allreduce_hook, state)
            for state in (mesh.get_group("dp"), mesh["dp"])
        )
        return named is default_hooks.allreduce_hook and not_named is OURS.allreduce_hook

    assert md.simulate(program, 2) == [True, True]


def test_states_that_name_only_some() -> None:
    def found(process_group: Any, subgroup: Any) -> Any:
        state = local_sgd.PostLocalSGDState(process_group, subgroup, 1)
        return ours_for(local_sgd.post_localSGD_hook, state)

    assert found(GROUP, GROUP) is local_sgd.post_localSGD_hook
    for groups in ((None, None), (None, GROUP), (GROUP, None)):
        assert found(*groups) is OURS.post_localSGD_hook


def test_those_that_fail_on_the_cpu_in_any_case() -> None:
    for module, name in (
        (quantization, "quantization_pertensor_hook"),
        (quantization, "quantization_perchannel_hook"),
        (power_sgd, "batched_powerSGD_hook"),
    ):
        for state in (None, GROUP):
            assert ours_for(getattr(module, name), state) is getattr(OURS, name)


def test_hooks_that_torchs_wrappers_hold() -> None:
    for wrapper in (default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper):
        theirs = wrapper(default_hooks.allreduce_hook)
        assert ours_for(theirs, GROUP) is theirs
        ours = ours_for(theirs, None)
        assert ours.__module__ == "meshdist.ddp.comm_hooks.compression"
        assert ours.__name__ == theirs.__name__ == f"{wrapper.__name__}_hook"
        assert ours_for(wrapper(quantization.quantization_pertensor_hook), GROUP) is not theirs
        low_rank = wrapper(power_sgd.powerSGD_hook)
        assert ours_for(low_rank, power_sgd.PowerSGDState(None)) is low_rank


def test_all_others_are_themselves() -> None:
    def hook(state: Any, bucket: Any) -> Any:
        raise NotImplementedError

    assert ours_for(hook, None) is hook
    assert ours_for(power_sgd.powerSGD_hook, None) is power_sgd.powerSGD_hook
    assert ours_for(OURS.allreduce_hook, None) is OURS.allreduce_hook
    assert OURS.powerSGD_hook is power_sgd.powerSGD_hook
