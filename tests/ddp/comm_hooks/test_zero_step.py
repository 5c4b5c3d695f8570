"""torch's sharded optimizer, stepped by our hook inside the backward."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshdist as md
from tests.ddp.comm_hooks.training import BUCKET_MB, distance, make_model
from tests.pool import Pool, places

ROOT = Path(__file__).resolve().parents[3]
BLOCK = re.compile(
    r"<!-- not executed: [^>]*test_zero_step[^>]* -->\n```python\n(.*?)```", re.DOTALL
)
CHECKS = """
assert (net.weight - start).abs().sum() > 0
gathered = [torch.empty_like(net.weight) for _ in range(2)]
md.all_gather(gathered, net.weight.detach())
assert torch.equal(*gathered)
md.destroy_process_group()
torch.distributed.destroy_process_group()
"""
STEPS = 6
LEARNING = 2
"""How many backwards change nothing, as with torch's own."""
OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
}


def zero_optimizer(*args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():  # torch's module uses what torch has given up
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(*args, **options)


def backward(model: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + md.get_rank())
    model(torch.randn(4, 32, generator=generator)).square().mean().backward()


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def unsharded(mesh: md.DeviceMesh, kind: str, hook: Any = None) -> list[torch.Tensor]:
    """The oracle: averages by ``hook``, and the whole optimizer on every rank."""
    model = md.DDP(make_model(), device_mesh=mesh["dp"], bucket_cap_mb=BUCKET_MB)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer_class, options = OPTIMIZERS[kind]
    optimizer = optimizer_class(model.parameters(), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step)
        if step >= LEARNING:
            optimizer.step()
    return weights(model)


def sharded(
    mesh: md.DeviceMesh, make: Callable[..., Any], kind: str, inner: Any, **options: Any
) -> list[torch.Tensor]:
    model = md.DDP(make_model(), device_mesh=mesh["dp"], bucket_cap_mb=BUCKET_MB)
    group = mesh.to_torch().get_group("dp")
    optimizer_class, settings = OPTIMIZERS[kind]
    zero = zero_optimizer(
        model.parameters(), optimizer_class, group, overlap_with_ddp=True, **settings
    )
    model.register_comm_hook(None, make(inner, model, zero, **options))
    for step in range(STEPS):
        model.zero_grad()
        backward(model, step)
    num_states = sum(1 for state in zero.optim.state.values() if state)
    assert num_states < len(list(model.parameters()))  # of its own share alone
    return weights(model)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_weights_are_those_of_the_whole_optimizer(pool: Pool, num_ranks: int, backend: str) -> None:
    def program() -> float:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        mesh = md.init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
        hooks = md.comm_hooks
        plain, interleaved = hooks.hook_with_zero_step, hooks.hook_with_zero_step_interleaved
        expected = {kind: unsharded(mesh, kind) for kind in OPTIMIZERS}
        found = [
            ("Adam", sharded(mesh, plain, "Adam", hooks.allreduce_hook)),
            ("SGD", sharded(mesh, interleaved, "SGD", allreduce_hook)),
            ("SGD", sharded(mesh, plain, "SGD", hooks.allreduce_hook, shard_buckets=True)),
        ]
        return max(distance(one, expected[kind]) for kind, one in found)

    assert max(pool.run(program, num_ranks, backend=backend)) < 1e-6


def test_any_hook_averages(pool: Pool) -> None:
    def answered(group: Any, bucket: md.GradBucket) -> Any:
        work = md.all_reduce(bucket.buffer().clone(), md.ReduceOp.AVG, group, async_op=True)
        assert work is not None
        return work.get_future()

    def program() -> list[float]:
        from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as torchs

        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        hooks = md.comm_hooks
        inner = {
            "another tensor": answered,
            "another dtype": hooks.bf16_compress_wrapper(hooks.allreduce_hook),
            "torch's, which ours replaces": torchs.quantization_pertensor_hook,
        }
        return [
            distance(
                sharded(mesh, hooks.hook_with_zero_step, "SGD", hook), unsharded(mesh, "SGD", hook)
            )
            for hook in inner.values()
        ]

    for distances in pool.run(program, 2):
        assert max(distances) < 1e-7


def test_an_answer_of_another_shape_is_refused(pool: Pool) -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

        def shortened(_: Any, bucket: md.GradBucket) -> Any:
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer()[1:])
            return future

        def averaged_at_first(group: Any, bucket: md.GradBucket) -> Any:
            calls.append(bucket.index())
            hook = shortened if calls.count(0) > LEARNING else md.comm_hooks.allreduce_hook
            return hook(group, bucket)

        calls: list[int] = []
        with pytest.raises(md.errors.ShapeError) as caught:
            sharded(mesh, md.comm_hooks.hook_with_zero_step, "SGD", averaged_at_first)
        return str(caught.value)

    for text in pool.run(program, 2):
        assert "gave a tensor of another shape" in text


def test_an_axis_of_a_mesh_is_a_group_of_torchs(pool: Pool) -> None:
    def program() -> float:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        make = md.comm_hooks.hook_with_zero_step
        found = sharded(mesh, make, "Adam", md.comm_hooks.allreduce_hook)
        return distance(found, unsharded(mesh, "Adam"))

    assert max(pool.run(program, 4)) < 1e-6


def test_a_model_in_a_loop_with_uneven_data(pool: Pool) -> None:
    def program() -> list[torch.Tensor]:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = md.DDP(make_model(), device_mesh=mesh["dp"], bucket_cap_mb=BUCKET_MB)
        group = mesh.to_torch().get_group("dp")
        zero = zero_optimizer(
            model.parameters(), torch.optim.SGD, group, overlap_with_ddp=True, lr=0.1
        )
        hooks = md.comm_hooks
        model.register_comm_hook(None, hooks.hook_with_zero_step(hooks.allreduce_hook, model, zero))
        with model.join():
            for step in range(4 + md.get_rank()):
                model.zero_grad()
                backward(model, step)
        return weights(model)

    first, second = pool.run(program, 2)
    assert distance(first, second) == 0.0
    assert distance(first, weights(make_model())) > 0.0


def test_what_cannot_step_inside_the_backward_is_refused(pool: Pool) -> None:
    def program() -> list[str]:
        mesh = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        model = md.DDP(make_model(), device_mesh=mesh["dp"])
        hooks = md.comm_hooks
        theirs = mesh.to_torch()
        groups = [theirs["tp"].get_group(), theirs["dp"].get_group()]
        optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.1),
            zero_optimizer(model.parameters(), torch.optim.SGD, groups[1], lr=0.1),
            zero_optimizer(
                model.parameters(), torch.optim.SGD, groups[0], overlap_with_ddp=True, lr=0.1
            ),
        ]
        texts = []
        for optimizer in optimizers:
            with pytest.raises(md.errors.MeshdistError) as caught:
                hooks.hook_with_zero_step(hooks.allreduce_hook, model, optimizer)
            texts.append(str(caught.value))
        return texts

    other, without, elsewhere = pool.run(program, 2)[0]
    assert "zero is of type SGD" in other
    assert "expected: a ZeroRedundancyOptimizer of torch.distributed.optim" in other
    assert "mesh.to_torch() begins that beside ours" in other
    assert "does not step inside the backward" in without
    assert "expected: one that was made with overlap_with_ddp=True" in without
    assert "the wrapper are over different ranks" in elsewhere
    assert "found:    process_group of ranks [0]" in elsewhere
    assert "process_group=mesh.to_torch().get_group('dp')" in elsewhere


def test_buckets_that_are_laid_anew_are_refused(pool: Pool) -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = md.DDP(make_model(), device_mesh=mesh["dp"], bucket_cap_mb=BUCKET_MB)
        group = mesh.to_torch().get_group("dp")
        zero = zero_optimizer(
            model.parameters(), torch.optim.SGD, group, overlap_with_ddp=True, lr=0.1
        )
        hooks = md.comm_hooks
        model.register_comm_hook(None, hooks.hook_with_zero_step(hooks.allreduce_hook, model, zero))
        for step in range(3):
            backward(model, step)
        model._update_process_group(None)
        with pytest.raises(md.errors.GradientError) as caught:
            backward(model, 3)
        return str(caught.value)

    for text in pool.run(program, 2):
        assert re.search("no longer those that the ZeroRedundancyOptimizer has learned", text)
        assert "in place of _update_process_group" in text


def test_torchs_world_that_ours_adopts(pool: Pool) -> None:
    (script,) = BLOCK.findall((ROOT / "docs/ddp.md").read_text(encoding="utf-8"))
    for done in pool.start(script + CHECKS, places(2), has_teardown=False):
        assert done.returncode == 0, done.stderr


def test_on_simulated_ranks() -> None:
    def program() -> float:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        hooks = md.comm_hooks
        found = sharded(mesh, hooks.hook_with_zero_step, "Adam", hooks.allreduce_hook)
        return distance(found, unsharded(mesh, "Adam"))

    assert max(md.simulate(program, 2)) < 1e-6
