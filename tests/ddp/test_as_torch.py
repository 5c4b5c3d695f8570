"""The attributes of instances of torch's wrapper, and what asks whether ours is one."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.nn.parallel import DistributedDataParallel

import meshdist as md
from tests.ddp.models import Two
from tests.pool import Pool

# What instances of torch's have; those that are as in torch in a fresh wrapper, and the others.
EQUAL = {
    "batched_grad_copy",
    "broadcast_bucket_size",
    "broadcast_buffers",
    "bucket_bytes_cap",
    "bucket_bytes_cap_default",
    "bucket_bytes_cap_list",
    "device",
    "device_ids",
    "device_type",
    "dim",
    "find_unused_parameters",
    "forward_sync_buffers",
    "is_multi_device_module",
    "mixed_precision",
    "output_device",
    "parameters_to_ignore",
    "require_backward_grad_sync",
    "require_forward_param_sync",
    "skip_all_reduce_unused_params",
    "static_graph",
    "training",
}
DIFFERENT = {
    "gradient_as_bucket_view": "True by default",
    "logger": "what it logs lies elsewhere",
    "modules_buffers": "tensors, compared below",
    "named_module_buffers": "tensors, compared below",
    "process_group": "ours",
    "reducer": "ours",
    "use_side_stream_for_tensor_copies": "inputs are moved on the current stream",
}
# batched_grad_copy is of torch 2.12, forward_sync_buffers of 2.13; its older name means as much.
OF_THIS_TORCH = {*inspect.signature(DistributedDataParallel).parameters}


@pytest.fixture(scope="module")
def attributes_of_torchs(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> dict[str, Any]:
    """By options: the attributes of torch's instances, as far as they travel."""
    meeting = str(tmp_path_factory.mktemp("torch") / "meeting")

    def program() -> dict[str, Any]:
        torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=0, world_size=1)
        try:
            found = {}
            warnings.simplefilter("ignore", FutureWarning)  # torch's, of broadcast_buffers
            for name, options in OPTIONS.items():
                options = dict(options)
                if "forward_sync_buffers" in options.keys() - OF_THIS_TORCH:
                    options["broadcast_buffers"] = options.pop("forward_sync_buffers")
                options = {key: one for key, one in options.items() if key in OF_THIS_TORCH}
                model = DistributedDataParallel(batch_norm(), **options)
                public = {key for key in vars(model) if not key.startswith("_")}
                public -= {"lazy_bucket_allocation"}  # of torch 2.15; ours are always laid late
                public |= {"broadcast_buffers", "named_module_buffers", "modules_buffers"}
                values = {key: getattr(model, key) for key in public & EQUAL}
                found[name] = public, values, list(model.named_module_buffers)
            del model
            gc.collect()
            return found
        finally:
            torch.distributed.destroy_process_group()

    return pool.run(program, 1)[0]


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "cap": {"bucket_cap_mb": 2},
    "list": {"bucket_cap_mb_list": [1, 25]},
    "list over cap": {"bucket_cap_mb": 3, "bucket_cap_mb_list": [0.5, 7, 2]},
    "empty list": {"bucket_cap_mb_list": []},
    "switches": {
        "broadcast_buffers": False,
        "find_unused_parameters": True,
        "skip_all_reduce_unused_params": True,
        "batched_grad_copy": True,
        "dim": 0,
    },
    "static": {"static_graph": True, "forward_sync_buffers": False},
}


def batch_norm() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    md.DDP._set_params_and_buffers_to_ignore_for_model(module, ["1.running_var"])
    return module


@pytest.mark.parametrize("name", OPTIONS)
def test_instances_have_torchs_public_attributes(
    attributes_of_torchs: dict[str, Any], name: str
) -> None:
    public, values, buffers = attributes_of_torchs[name]
    assert public - EQUAL - DIFFERENT.keys() == set()

    def program() -> None:
        model = md.DDP(batch_norm(), **OPTIONS[name])
        assert {key: getattr(model, key) for key in values} == values
        assert public - {"logger"} <= set(dir(model))
        assert list(model.named_module_buffers) == buffers
        named = dict(model.module.named_buffers())
        assert [named[key] is model.named_module_buffers[key] for key in buffers] == [True, True]
        assert list(map(id, model.modules_buffers)) == [id(named[key]) for key in buffers]

    md.simulate(program, 1)


# -- an instance of torch's class -----------------------------------------------------------------


def unwrapped(model: nn.Module) -> nn.Module:
    """As trainers do it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def test_ours_counts_as_an_instance_of_torchs() -> None:
    def program() -> None:
        layer = nn.Linear(1, 1)
        model = md.DDP(layer)
        assert issubclass(md.DDP, DistributedDataParallel)
        assert unwrapped(model) is layer
        assert unwrapped(copy.deepcopy(model)) is not layer
        assert not isinstance(layer, DistributedDataParallel)

    md.simulate(program, 1)


def test_torchs_checkpoints_leave_out_the_wrapper() -> None:
    """``get_state_dict`` gives names without ``module.``, and takes them back."""

    def program() -> None:
        torch.manual_seed(md.get_rank())
        model = md.DDP(Two())
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 1)).backward()
        optimizer.step()
        mine, of_optimizer = states.get_state_dict(model, optimizer)
        assert list(mine) == list(of_optimizer["state"]) == ["left.weight", "right.weight"]
        other = md.DDP(Two())
        other_optimizer = torch.optim.AdamW(other.parameters())
        mine, of_optimizer = copy.deepcopy((mine, of_optimizer))
        bare = Two()
        states.set_model_state_dict(bare, mine)
        states.set_state_dict(
            other, other_optimizer, model_state_dict=mine, optim_state_dict=of_optimizer
        )
        for loaded in (other, bare):
            for one, two in zip(model.parameters(), loaded.parameters(), strict=True):
                assert torch.equal(one, two)
        (first, *_) = other_optimizer.state.values()
        assert first["step"].item() == 1

    md.simulate(program, 2)


def test_trainers_choose_the_backward_that_is_averaged() -> None:
    """As trainers with several losses do: by the reducer, behind forwards that were not to."""

    def program(tell: str) -> tuple[float, float]:
        layer = nn.Linear(1, 1, bias=False)
        model = md.DDP(layer)
        x = torch.full((1, 1), 1.0 + md.get_rank())
        for _ in range(3):
            model.zero_grad()
            model.require_backward_grad_sync = False
            first, second = model(x).sum(), model(2 * x).sum()
            first.backward()
            alone = layer.weight.grad.item()
            model.require_backward_grad_sync = True
            model.reducer._rebuild_buckets()
            given = {"outputs": (one for one in [second]), "one": second, "nothing": []}[tell]
            model.reducer.prepare_for_backward(given)
            second.backward()
        return alone, layer.weight.grad.item()

    for tell in ("outputs", "one", "nothing"):
        assert md.simulate(program, 2, (tell,)) == [(1.0, 4.5), (2.0, 4.5)]
