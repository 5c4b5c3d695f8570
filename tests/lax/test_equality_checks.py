"""``md.assert_equal``: equal trees pass, and every rank names the leaves that differ."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.errors import ArgumentError, AxisError, KindError, MeshError, UnequalError
from tests.pool import Pool

Step = namedtuple("Step", "count loss")


def mesh_of_two_axes() -> md.DeviceMesh:
    return md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def found(tree: Any, axis: Any, **options: Any) -> str | None:
    """What ``assert_equal`` found; None where it returned."""
    try:
        md.assert_equal(tree, axis, **options)
    except UnequalError as error:
        return error.found
    return None


def test_each_axis_is_compared_by_itself() -> None:
    def program() -> Any:
        mesh = mesh_of_two_axes()
        along_tp = torch.full((3,), 1.0 + mesh.get_local_rank("tp"))
        with mesh:
            return [found(along_tp, axis) for axis in ("dp", "tp", ("dp", "tp"), mesh["dp"])]

    line = "tree, shape (3,), float32: {} from {}, by up to 1 of its largest value"
    for rank, (of_dp, of_tp, of_both, of_slice) in enumerate(md.simulate(program, 4)):
        assert of_dp is None and of_slice is None
        first = rank // 2 * 2
        assert of_tp == line.format(f"rank {first + 1} differs", f"rank {first}")
        assert of_both == line.format("ranks 1, 3 differ", "ranks 0, 2")


def test_the_whole_text() -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        tree = {"weight": torch.tensor([4.0, 4.0 + 2 * (md.get_rank() == 1)]), "step": 3}
        with pytest.raises(AssertionError) as caught:
            md.assert_equal(tree, "tp", mesh=mesh)
        assert [entry.name for entry in caught.traceback][1:] == ["assert_equal"]
        return str(caught.value)

    texts = md.simulate(program, 3)
    assert len(set(texts)) == 1
    lines = texts[0].splitlines()
    assert lines[0] == (
        "assert_equal: values are not the same on every rank over axis 'tp' of DeviceMesh(tp=3)"
    )
    assert "test_equality_checks.py:" in lines[1] and lines[1].startswith("  where:")
    assert lines[2:4] == [
        "  expected: equal leaves; for floating dtypes, equal in half of the digits",
        "  found:    tree['weight'], shape (2,), float32: rank 1 differs from ranks 0, 2, by up to "
        "0.5 of its largest value",
    ]
    assert "lax.pvary(x, axis)" in lines[4]


def test_leaves_of_every_kind_are_named() -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        rank = md.get_rank()
        tree = {
            "arrays": [np.arange(3) + rank, np.float32(rank)],
            "step": Step(rank, torch.ones(2) * (1 + rank)),
            "equal": (np.arange(3), 1.5, "text", None, b"bytes", torch.tensor(True)),
            "text": f"on {rank}",
        }
        return found(tree, "tp", mesh=mesh), found(tree["equal"], "tp", mesh=mesh)

    differ = "rank 1 differs from rank 0, by up to"
    for different, equal in md.simulate(program, 2):
        assert equal is None
        # What is no array is compared with shapes and dtypes, before anything large is sent.
        assert different == (
            "tree['step'].count: rank 0: 0; rank 1: 1\ntree['text']: rank 0: 'on 0'; rank 1: 'on 1'"
        )

    def arrays() -> Any:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        rank = md.get_rank()
        return found([np.arange(3) + rank, Step(0, torch.ones(2) * (1 + rank))], "tp", mesh=mesh)

    assert md.simulate(arrays, 2)[1] == (
        f"tree[0], shape (3,), int64: {differ} 0.5 of its largest value\n"
        f"tree[1].loss, shape (2,), float32: {differ} 1 of its largest value"
    )


def test_a_module_stands_for_its_parameters_and_buffers() -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        same = found(model, "dp", mesh=mesh)
        with torch.no_grad():
            model[0].bias[1] += md.get_rank()
        model[1].running_mean[0] = md.get_rank() + 1
        grads = {name: p.grad for name, p in model.named_parameters()}  # None on every rank
        return same, found(model, "dp", mesh=mesh), found(grads, "dp", mesh=mesh)

    for same, parted, grads in md.simulate(program, 2):
        assert same is None and grads is None
        assert [line.partition(",")[0] for line in parted.splitlines()] == [
            "0.bias",
            "1.running_mean",
        ]


def test_other_trees_are_named_before_values_are_compared() -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        rank = md.get_rank()
        trees: list[Any] = [
            {"a": torch.ones(3), **({"b": torch.ones(1)} if rank == 2 else {})},
            torch.ones(2 + rank // 2),
            torch.ones(2, dtype=torch.float64 if rank == 1 else torch.float32),
            {"a": None if rank == 0 else torch.ones(2)},
        ]
        reverse = nn.ParameterDict(
            OrderedDict((name, torch.ones(2)) for name in ("ab" if rank else "ba"))
        )
        return [found(tree, "dp", mesh=mesh) for tree in [*trees, reverse]]

    for texts in md.simulate(program, 3):
        assert texts == [
            "tree['b']: ranks 0-1: missing; rank 2: shape (1,), float32",
            "tree: ranks 0-1: shape (2,), float32; rank 2: shape (3,), float32",
            "tree: ranks 0, 2: shape (2,), float32; rank 1: shape (2,), float64",
            "tree['a']: rank 0: None; ranks 1-2: shape (2,), float32",
            "the same entries, in another order",
        ]


def test_many_differences_are_counted() -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        return found([torch.tensor(md.get_rank())] * 11, "dp", mesh=mesh) or ""

    lines = md.simulate(program, 2)[0].splitlines()
    assert len(lines) == 9 and lines[-1] == "and 3 more"


def test_only_half_of_the_digits_count() -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        near, far = (torch.tensor([1.0, 1.0 + md.get_rank() * gap]) for gap in (1e-5, 1e-2))
        return found(near, "dp", mesh=mesh), found(far, "dp", mesh=mesh)

    for near, far in md.simulate(program, 2):
        assert near is None and far is not None and far.endswith("up to 0.01 of its largest value")


def test_the_argument_is_left_as_it_is() -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        weight = torch.ones(2, requires_grad=True)
        product = weight * (1 + md.get_rank())
        version = product._version
        found(product, "dp", mesh=mesh)
        with md.typed(mesh):
            md.assert_equal([weight, np.ones(2)], "dp")
        product.sum().backward()
        return product._version - version, weight.grad.tolist(), str(md.typeof(weight))

    assert md.simulate(program, 2) == [
        (0, [1.0, 1.0], "float32[2]"),
        (0, [2.0, 2.0], "float32[2]"),
    ]


def test_bad_arguments_are_rejected() -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        texts = []
        for kind, tree, axis, mesh_given in (
            (MeshError, torch.ones(1), "dp", None),
            (AxisError, torch.ones(1), "tp", mesh),
            (KindError, torch.ones(1), 3, mesh),
            (KindError, {"a": [object()]}, "dp", mesh),
            (ArgumentError, torch.eye(2).to_sparse(), "dp", mesh),
        ):
            with pytest.raises(kind) as caught:
                md.assert_equal(tree, axis, mesh=mesh_given)
            texts.append(str(caught.value))
        with pytest.raises(ArgumentError) as caught:
            torch.func.vmap(lambda x: md.assert_equal(x, "dp", mesh=mesh))(torch.ones(2))
        return [*texts, str(caught.value)]

    no_mesh, no_axis, no_name, no_array, sparse, transform = md.simulate(program, 2)[0]
    assert no_mesh.startswith("assert_equal over axis 'dp': there is no current mesh")
    assert "'tp'" in no_axis
    assert no_name.startswith("assert_equal cannot use 3 as axis\n")
    assert "tree['a'][0]" in no_array
    assert "assert_equal" in sparse
    assert transform.startswith("assert_equal cannot compare inside a transform of torch.func")


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_processes_name_the_same_leaf(pool: Pool, backend: str) -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        rank = md.get_rank()
        tree = {"equal": torch.arange(4), "parted": np.ones(2) * (1 + rank // 2)}
        texts = []
        for one in (tree, {"a": torch.ones(1 + rank)}, tree["equal"]):
            try:
                md.assert_equal(one, "dp", mesh=mesh)
            except md.UnequalError as error:
                texts.append(error.found)
        return texts

    found_by_all = pool.run(program, 3, backend=backend)
    assert found_by_all[0] == found_by_all[1] == found_by_all[2]
    assert found_by_all[0] == [
        "tree['parted'], shape (2,), float64: rank 2 differs from ranks 0-1, by up to 1 of its "
        "largest value",
        "tree['a']: rank 0: shape (1,), float32; rank 1: shape (2,), float32; "
        "rank 2: shape (3,), float32",
    ]
