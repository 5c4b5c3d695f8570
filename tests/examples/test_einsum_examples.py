"""Examples of split layers have the numbers of one device, and find it where they do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

import meshdist as md
from tests.pool import Pool, places

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("name", ["fsdp_in_einsum", "megatron_block", "sequence_parallel"])
def test_they_check_themselves(pool: Pool, name: str) -> None:
    ended = pool.start(
        EXAMPLES / f"{name}.py", places(4), "--check", is_strict=True, has_teardown=False
    )
    assert [one.returncode for one in ended] == [0] * 4, ended
    (said,) = [one.stdout for one in ended if one.stdout]
    assert said.startswith("dp=")
    assert float(said.split()[-1]) < 1e-12


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1)])
def test_the_block_by_position_on_other_meshes(
    load: Callable[[str], ModuleType], shape: tuple[int, int]
) -> None:
    example = load("megatron_block")

    def program() -> Any:
        mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        return example.difference(mesh, sequence=True)

    assert max(md.simulate(program, 4)) < 1e-12


def test_the_block_by_position_gathers_once_for_q_k_and_v(
    load: Callable[[str], ModuleType],
) -> None:
    example = load("megatron_block")

    def program() -> dict[str, int]:
        mesh = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        batch, wholes = example.draw()
        x = md.shard(batch, "b@dp s@tp d", mesh).requires_grad_()
        w = {name: md.shard(wholes[name], lies, mesh) for name, lies in example.LIES.items()}
        seen = profile(activities=[ProfilerActivity.CPU], acc_events=True)
        with mesh, seen if mesh.world.rank == 0 else nullcontext():
            example.block(
                x, {name: w[name].requires_grad_() for name in w}, "s@tp"
            ).sum().backward()
        events = seen.events() if mesh.world.rank == 0 else ()
        return Counter(e.name.split()[0] for e in events if e.name.startswith("meshdist::"))

    # Forward: a gather for q, k and v, and for up; for out, whose weight is small, that is gathered
    # and heads are exchanged for places; a scatter of the result of down. Backward: the reverse.
    assert md.simulate(program, 2)[0] == {
        "meshdist::all_gather_into_tensor": 4,
        "meshdist::all_to_all_single": 2,
        "meshdist::reduce_scatter_tensor": 4,
    }


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 2), (2, 4)])
def test_a_cut_sequence_on_other_meshes(
    load: Callable[[str], ModuleType], shape: tuple[int, int]
) -> None:
    example = load("sequence_parallel")

    def program() -> Any:
        mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        block, norms = example.train(mesh)
        right = example.difference(mesh, block, norms)
        return right, example.difference(mesh, block, [norms[0] + 1e-3, *norms[1:]])

    for right, wrong in md.simulate(program, shape[0] * shape[1]):
        assert right < 1e-12 < wrong


def test_heads_that_do_not_divide(load: Callable[[str], ModuleType]) -> None:
    example = load("sequence_parallel")

    def program() -> str:
        mesh = md.init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))
        with pytest.raises(md.errors.ShapeError) as raised:
            example.train(mesh)
        return str(raised.value)

    for text in md.simulate(program, 3):
        assert text.startswith("parallelize cannot split q inside an attention head")


def test_a_difference_is_told(load: Callable[[str], ModuleType]) -> None:
    example = load("fsdp_in_einsum")

    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model, _ = example.train(mesh, regather=False)
        right = example.difference(model, mesh)
        model.weights[0].data[0, 0] += 1
        return right, example.difference(model, mesh)

    for right, wrong in md.simulate(program, 2):
        assert right < 1e-12 < wrong
