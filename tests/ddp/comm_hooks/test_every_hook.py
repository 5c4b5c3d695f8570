"""Every hook, ours and torch's own, on ranks that come late at random; torch's DDP's weights."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook as local_sgd,
    powerSGD_hook as power_sgd,
    quantization_hooks,
)
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)

import meshdist as md
from tests.ddp.comm_hooks.training import (
    BUCKET_MB,
    Registration,
    are_equal,
    distance,
    make_model,
    sleeping,
    steps_of,
    trained,
)
from tests.pool import Pool

Case = Callable[[Any], Registration]
HOOKS = md.comm_hooks


def low_rank(group: Any) -> Any:
    return HOOKS.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )


class Adder:
    """What torch's hook-then-optimizer asks of an optimizer: it keeps the gradients that it saw."""

    def step_param(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        assert gradient is not None
        with torch.no_grad():
            parameter.add_(gradient, alpha=-0.01)


# By name: the state and the hook, and how far from plain averages they may lead.
OURS: dict[str, tuple[Case, float]] = {
    "allreduce": (lambda _: (None, HOOKS.allreduce_hook), 1e-7),
    "fp16": (lambda _: (None, HOOKS.fp16_compress_hook), 1e-4),
    "bf16": (lambda _: (None, HOOKS.bf16_compress_hook), 1e-3),
    "fp16 wrapper": (lambda _: (None, HOOKS.fp16_compress_wrapper(HOOKS.allreduce_hook)), 1e-4),
    "bf16 wrapper": (lambda g: (g, HOOKS.bf16_compress_wrapper(HOOKS.allreduce_hook)), 1e-3),
    "per tensor": (lambda _: (None, HOOKS.quantization_pertensor_hook), 1e-3),
    "per channel": (lambda _: (None, HOOKS.quantization_perchannel_hook), 1e-3),
    "batched": (lambda _: (low_rank(None), HOOKS.batched_powerSGD_hook), 1e-2),
    "local SGD": (
        lambda _: (HOOKS.PostLocalSGDState(None, None, 2), HOOKS.post_localSGD_hook),
        1e-7,
    ),
}
TORCHS: dict[str, tuple[Case, float]] = {
    "allreduce": (lambda g: (g, default_hooks.allreduce_hook), 1e-7),
    "fp16": (lambda g: (g, default_hooks.fp16_compress_hook), 1e-4),
    "fp16 wrapper": (
        lambda g: (g, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        1e-4,
    ),
    "local SGD": (
        lambda g: (local_sgd.PostLocalSGDState(g, g, 2), local_sgd.post_localSGD_hook),
        1e-7,
    ),
    "bf16": (lambda g: (g, default_hooks.bf16_compress_hook), 1e-3),
    "bf16 wrapper": (
        lambda g: (g, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
        1e-3,
    ),
    "PowerSGD": (lambda g: (low_rank(g), power_sgd.powerSGD_hook), 1e-2),
    "PowerSGD in fp16": (
        lambda g: (low_rank(g), default_hooks.fp16_compress_wrapper(power_sgd.powerSGD_hook)),
        1e-2,
    ),
}
SAME_AS_TORCHS_WRAPPER = ("allreduce", "fp16", "fp16 wrapper", "local SGD")

# Torch's, as programs that have no group of torch's register them.
WITHOUT_A_GROUP: dict[str, tuple[Case, float]] = {
    "allreduce": (lambda _: (None, default_hooks.allreduce_hook), 1e-7),
    "bf16": (lambda _: (None, default_hooks.bf16_compress_hook), 1e-3),
    "fp16 wrapper": (
        lambda _: (None, default_hooks.fp16_compress_wrapper(default_hooks.fp16_compress_hook)),
        1e-4,
    ),
    "per tensor": (lambda _: (None, quantization_hooks.quantization_pertensor_hook), 1e-3),
    "per channel": (lambda g: (g, quantization_hooks.quantization_perchannel_hook), 1e-3),
    "PowerSGD": (lambda _: (low_rank(None), power_sgd.powerSGD_hook), 1e-2),
    "batched": (lambda g: (low_rank(g), power_sgd.batched_powerSGD_hook), 1e-2),
    "local SGD": (
        lambda _: (local_sgd.PostLocalSGDState(None, None, 2), local_sgd.post_localSGD_hook),
        1e-7,
    ),
}


@cache
def plain_weights(num_ranks: int) -> list[torch.Tensor]:
    return md.simulate(lambda: trained(None), num_ranks)[0]


def checked(case: Case, limit: float) -> None:
    plain = plain_weights(3)
    one, *others = md.simulate(lambda: trained(case), 3)
    assert all(are_equal(one, other) for other in others)
    assert distance(one, plain) <= limit
    assert limit < 1e-4 or distance(one, plain) > 0  # it did compress


@pytest.mark.parametrize("name", OURS)
def test_ours(name: str) -> None:
    checked(*OURS[name])


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_own_on_a_group_of_ours(name: str) -> None:
    checked(*TORCHS[name])


@pytest.mark.parametrize("name", WITHOUT_A_GROUP)
def test_torchs_names_without_a_group(name: str) -> None:
    checked(*WITHOUT_A_GROUP[name])


@pytest.mark.parametrize("hook", [HOOKS.noop_hook, debugging_hooks.noop_hook])
def test_the_hook_that_does_nothing_leaves_each_rank_its_own(hook: Callable[..., Any]) -> None:
    def program() -> float:
        model = md.DDP(torch.nn.Linear(1, 1, bias=False))
        model.register_comm_hook(None, hook)
        model(torch.tensor([[1.0 + md.get_rank()]])).sum().backward()
        return float(model.module.weight.grad.item())

    assert md.simulate(program, 3) == [1.0, 2.0, 3.0]


def test_torchs_optimizer_behind_a_hook() -> None:
    def program() -> list[torch.Tensor]:
        state = _OptimizerHookState(Adder())
        hook = _hook_then_optimizer(default_hooks.allreduce_hook, state)
        return trained(lambda group: (group, hook))

    one, other = md.simulate(program, 2)
    assert are_equal(one, other)
    assert distance(one, plain_weights(2)) > 1e-4  # it stepped as well


@pytest.mark.parametrize("kind", [kind.name for kind in HOOKS.DDPCommHookType])
@pytest.mark.parametrize("has_group", [False, True])
def test_torchs_enumeration(kind: str, has_group: bool) -> None:
    def program() -> list[torch.Tensor]:
        model = md.DDP(make_model(), bucket_cap_mb=BUCKET_MB)
        state = md.group.WORLD if has_group else None
        HOOKS.register_ddp_comm_hook(HOOKS.DDPCommHookType[kind], model, state)
        return steps_of(model, md.get_rank())

    one, other = md.simulate(program, 2)
    assert are_equal(one, other) == (kind != "NOOP")
    assert distance(one, plain_weights(2)) < 1e-2


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_ranks_that_sleep_at_random_stay_equal(backend: str, pool: Pool) -> None:
    def program() -> dict[str, list[torch.Tensor]]:
        found = {}
        for name, (case, _) in {**OURS, **{f"torch's {k}": v for k, v in TORCHS.items()}}.items():

            def sleepy(group: Any, case: Case = case) -> Registration:
                state, hook = case(group)
                return state, sleeping(hook, md.get_rank(), 0.002)

            found[name] = trained(sleepy)
        return found

    one, other = pool.run(program, 2, backend=backend)
    parted = [name for name in one if not are_equal(one[name], other[name])]
    assert parted == [] and len(one) == len(OURS) + len(TORCHS)


def test_torchs_wrapper_has_the_same_weights(pool: Pool, tmp_path: Path) -> None:
    def program(folder: str) -> dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]:
        found = {}
        rank = md.get_rank()
        ours = {name: trained(TORCHS[name][0]) for name in SAME_AS_TORCHS_WRAPPER}
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
        try:
            for name in SAME_AS_TORCHS_WRAPPER:
                model = torch.nn.parallel.DistributedDataParallel(
                    make_model(), bucket_cap_mb=BUCKET_MB
                )
                model.register_comm_hook(*TORCHS[name][0](dist.group.WORLD))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of torch's own making
                    found[name] = ours[name], steps_of(model, rank)
            del model
        finally:
            # Torch's reducer must not be what keeps torch's group alive, see test_data_parallel.
            gc.collect()
            dist.destroy_process_group()
        return found

    for found in pool.run(program, 2, str(tmp_path)):
        assert list(found) == list(SAME_AS_TORCHS_WRAPPER)
        for name, (ours, theirs) in found.items():
            assert are_equal(ours, theirs), name
