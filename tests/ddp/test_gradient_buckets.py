"""Gradients without modules: averages of what every rank wrote, in buckets that go in order."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
import torch
from hypothesis import given, strategies as st

import meshdist as md
from meshdist.errors import (
    ArgumentError,
    BackendError,
    DtypeError,
    GradientError,
    KindError,
    MismatchError,
)
from tests.inner import flat_sums
from tests.pool import Pool
from tests.stand_in_cupy import StandInCupy

ONE_EACH = 1e-6
"""A cap of one byte, in MiB."""


def value_of(rank: int, number: int, leaf: int) -> float:
    """What a rank writes into all of a leaf; sums of them over 2^k ranks have exact averages."""
    return float(1 + 3 * rank + 5 * number + 7 * leaf)


def average(size: int, number: int, leaf: int) -> float:
    return sum(value_of(rank, number, leaf) for rank in range(size)) / size


# -- averages -------------------------------------------------------------------------------------

SHAPES = st.sampled_from([(), (0,), (1,), (3,), (2, 5), (7, 1, 2)])
DTYPES = st.sampled_from([np.float32, np.float64, np.float16, np.complex64])
LEAVES = st.builds(lambda shape, dtype: np.ones(shape, dtype), SHAPES, DTYPES)
TREES = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, min_size=1, max_size=3),
        st.lists(parts, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.text("abc", min_size=1, max_size=2), parts, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


@given(
    tree=TREES,
    size=st.sampled_from([1, 2, 4]),
    cap=st.sampled_from([None, ONE_EACH, 40 / 2**20]),
    seed=st.integers(0, 1 << 20),
)
def test_every_rank_gets_the_average_of_what_all_wrote(
    tree: Any, size: int, cap: float | None, seed: int
) -> None:
    paths = optree.tree_paths(tree)

    def program() -> list[list[np.ndarray]]:
        draw = random.Random(seed + md.get_rank())  # another order, and another part, on each rank
        gradients = md.GradientBuckets(tree, bucket_cap_mb=cap)
        views = optree.tree_leaves(gradients.views)
        assert not any(view.any() for view in views)
        found = []
        for number in range(3):
            order = draw.sample(range(len(paths)), len(paths))
            marked = draw.choice([len(order), 0, draw.randrange(len(order) + 1)])
            for place, leaf in enumerate(order):
                views[leaf][...] = value_of(md.get_rank(), number, leaf)
                if place < marked:
                    gradients.ready(paths[leaf])
            averages = gradients.wait()
            assert averages is gradients.views
            found.append([view.copy() for view in optree.tree_leaves(averages)])
        return found

    leaves = optree.tree_leaves(tree)
    for rounds in md.simulate(program, size):
        for number, views in enumerate(rounds):
            for leaf, (view, original) in enumerate(zip(views, leaves, strict=True)):
                assert (view.shape, view.dtype) == (original.shape, original.dtype)
                assert (view == average(size, number, leaf)).all()


def test_the_axis_averages_and_the_other_axis_does_not() -> None:
    def program() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found = []
        for axis in (mesh["dp"], mesh["tp"], mesh["dp", "tp"], mesh["dp"].get_group()):
            gradients = md.GradientBuckets([np.zeros(1)], axis)
            gradients.views[0][:] = md.get_rank()
            found.append(float(gradients.wait()[0][0]))
        return found

    assert md.simulate(program, (2, 2)) == [
        [1.0, 0.5, 1.5, 1.0],
        [2.0, 0.5, 1.5, 2.0],
        [1.0, 2.5, 1.5, 1.0],
        [2.0, 2.5, 1.5, 2.0],
    ]


def test_a_part_of_the_tree_is_ready_at_once() -> None:
    def program() -> list[float]:
        gradients = md.GradientBuckets({"layers": [np.zeros(1), np.zeros(2)], "head": np.zeros(3)})
        gradients.views["layers"][0][:] = md.get_rank()
        gradients.views["layers"][1][:] = 10 + md.get_rank()
        gradients.ready("layers")
        gradients.views["head"][:] = 20 + md.get_rank()
        return [float(view[0]) for view in optree.tree_leaves(gradients.wait())]

    assert md.simulate(program, 2) == [[20.5, 0.5, 10.5]] * 2


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_averages_over_processes(pool: Pool, backend: str) -> None:
    """Here too the memory lies where the backend shares it."""

    def is_shared(array: np.ndarray) -> bool:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "memfd:meshdist-shared" in line:
                begin, end = (int(number, 16) for number in line.split()[0].split("-"))
                if begin <= array.ctypes.data < end:
                    return True
        return False

    def program() -> list[Any]:
        group = md.new_group(backend=backend)
        tree = [np.ones((300, 300), np.float32), np.ones(5), np.ones(1000, np.float32)]
        gradients = md.GradientBuckets(tree, group, bucket_cap_mb=0.1)
        rounds = []
        for number in range(3):
            for leaf, view in enumerate(gradients.views):
                view[...] = value_of(md.get_rank(), number, leaf)
                gradients.ready(leaf)
            rounds.append([np.unique(view).tolist() for view in gradients.wait()])
        shared = [is_shared(view) for view in gradients.views]
        group.close()
        return [rounds, shared]

    rounds = [[[average(2, number, leaf)] for leaf in range(3)] for number in range(3)]
    assert pool.run(program, 2) == [[rounds, [backend == "shm"] * 3]] * 2


# -- libraries ------------------------------------------------------------------------------------


def test_views_are_of_the_leafs_library_and_lie_as_it_does() -> None:
    def program() -> None:
        tree = {
            "parameter": torch.nn.Parameter(torch.ones(2, 3)),
            "channels last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "gaps": torch.ones(4, 6)[:, ::2],
            "bfloat16": torch.ones(3, dtype=torch.bfloat16),
            "array": np.ones((2, 3), np.float32),
            "fortran": np.ones((2, 3), np.float32, order="F"),
            "number": np.float32(1.0),
            "read only": np.broadcast_to(np.float32(1.0), (2, 2)),
        }
        views = md.GradientBuckets(tree).views
        assert list(views) == list(tree)
        for name, leaf in tree.items():
            view = views[name]
            kind = torch.Tensor if isinstance(leaf, torch.Tensor) else np.ndarray
            assert type(view) is kind, name
            assert (view.shape, view.dtype) == (leaf.shape, leaf.dtype), name
        assert not views["parameter"].requires_grad
        assert views["channels last"].stride() == tree["channels last"].stride()
        assert views["gaps"].stride() == (3, 1)
        assert views["fortran"].flags.f_contiguous
        assert views["read only"].flags.writeable

    md.simulate(program, 2)


def test_libraries_may_differ_between_ranks_and_within_a_bucket() -> None:
    def program() -> list[float]:
        libraries: list[Any] = [np, torch] if md.get_rank() == 0 else [torch, np]
        tree = [library.zeros(2, dtype=library.float32) for library in libraries]
        gradients = md.GradientBuckets(tree)
        for view in gradients.views:
            view[:] = md.get_rank() + 1.0
        return [float(view[0]) for view in gradients.wait()]

    assert md.simulate(program, 2) == [[1.5, 1.5]] * 2


def test_dataclasses_are_nodes_whose_fields_are_written() -> None:
    @dataclass
    class Layer:
        weight: Any
        bias: Any

    def program() -> tuple[list[float], list[float], list[float]]:
        layers = [Layer(np.ones(2), np.ones(1)), Layer(torch.ones(3), None)]
        gradients = md.GradientBuckets({"layers": layers})
        first, second = gradients.views["layers"]
        assert type(first) is Layer and second.bias is None
        second.weight[:] = 1.0 + md.get_rank()
        gradients.ready(("layers", 1, "weight"))
        first.weight[:], first.bias[:] = 10.0 * md.get_rank(), 3.0
        gradients.ready(("layers", 0))
        averages = gradients.wait()["layers"]
        return averages[0].weight.tolist(), averages[0].bias.tolist(), averages[1].weight.tolist()

    assert md.simulate(program, 2) == [([5.0] * 2, [3.0], [1.5] * 3)] * 2


def test_a_field_that_is_no_array_is_rejected_by_name() -> None:
    @dataclass
    class Layer:
        weight: Any
        size: int

    def program() -> str:
        with pytest.raises(KindError) as caught:
            md.GradientBuckets([Layer(np.ones(2), 2)])
        return str(caught.value)

    assert "tree[0].size" in md.simulate(program, 1)[0]


def test_autograd_adds_into_views_of_torchs() -> None:
    def program() -> list[float]:
        weight = torch.ones(2, requires_grad=True)
        gradients = md.GradientBuckets({"weight": weight})
        weight.grad = gradients.views["weight"]
        found = []
        for _ in range(2):
            weight.grad.zero_()
            (weight * (1.0 + md.get_rank())).sum().backward()
            assert weight.grad.data_ptr() == gradients.views["weight"].data_ptr()
            gradients.wait()
            found.append(weight.grad[0].item())
        return found

    assert md.simulate(program, 2) == [[1.5, 1.5]] * 2


def test_cupys_stream_goes_on_behind_the_averages() -> None:
    with StandInCupy().installed() as cupy:

        def program() -> None:
            tree = {"x": cupy.array(np.zeros(2)), "y": cupy.array(np.zeros(3, np.float32))}
            with cupy.streams(torchs=11, cupys=21):
                gradients = md.GradientBuckets(tree, bucket_cap_mb=ONE_EACH)
                views = gradients.views
                assert all(type(view) is type(tree["x"]) for view in views.values())
                for view in views.values():
                    view.host[:] = 1.0 + md.get_rank()
                before = len(cupy.handed_out)
                gradients.ready("y")
                gradients.ready("x")
                # torch waits for CuPy's stream where an array goes out, on the array's device.
                handed = cupy.handed_out[before:]
                assert len(handed) >= 2 and all(device == here for device, here in handed)
            with cupy.streams(torchs=12, cupys=22):
                gradients.wait()
            buckets = {device for device, _ in handed}
            mine = [one for one in cupy.waits if one.device in buckets]
            assert {(one.cupys, one.torchs) for one in mine} == {(22, 12)}
            assert sorted(one.values for one in mine) == [[1.5, 1.5], [1.5, 1.5, 1.5]]
            assert views["x"].host.tolist() == [1.5, 1.5]

        md.simulate(program, 2)


# -- buckets --------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens on rank 0."""
    told: list[str] = []
    all_reduce = flat_sums.all_reduce

    def telling(flat: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if md.get_rank() == 0:
            told.append(f"start of {flat.numel()}")
        return all_reduce(flat, *args, **kwargs)

    monkeypatch.setattr(flat_sums, "all_reduce", telling)
    return told


def test_a_bucket_starts_when_all_of_it_and_all_before_it_are_ready(started: list[str]) -> None:
    def program() -> None:
        def ready(leaf: int) -> None:
            gradients.ready(leaf)
            if md.get_rank() == 0:
                started.append(f"ready {leaf}")

        # From the last leaf on: those of 5 and 4 numbers, and those of 3, 2 and 1.
        tree = [np.zeros(n, np.float32) for n in (1, 2, 3, 4, 5)]
        gradients = md.GradientBuckets(tree, bucket_cap_mb=9 * 4 / 2**20)
        order = (3, 4, 0, 1, 2) if md.get_rank() == 0 else (0, 1, 2, 3, 4)
        for leaf in order:
            ready(leaf)
        gradients.wait()

    md.simulate(program, 2)
    assert started == [
        *("ready 3", "start of 9", "ready 4", "ready 0", "ready 1", "start of 6", "ready 2")
    ]


def test_waiting_starts_what_was_not_ready(started: list[str]) -> None:
    def program() -> None:
        gradients = md.GradientBuckets([np.zeros(n) for n in (1, 2, 3)], bucket_cap_mb=ONE_EACH)
        gradients.ready(2)
        gradients.ready(0)
        gradients.wait()

    md.simulate(program, 2)
    assert started == ["start of 3", "start of 2", "start of 1"]


def test_its_repr_tells_arrays_and_buckets() -> None:
    def program() -> str:
        return repr(md.GradientBuckets([np.zeros(1)] * 3, bucket_cap_mb=ONE_EACH))

    told = "<GradientBuckets: 3 arrays in 3 buckets on the world>"
    assert md.simulate(program, 2) == [told] * 2


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        (
            lambda rank: {"a": np.zeros(1 + rank)},
            "tree['a']: rank 0: (1,) float64; rank 1: (2,) float64",
        ),
        (
            lambda rank: {"ab"[rank]: np.zeros(1)},
            "tree['b']: rank 0: missing; rank 1: (1,) float64",
        ),
        (
            lambda rank: [np.zeros(1, [np.float32, np.float64][rank])],
            "tree[0]: rank 0: (1,) float32; rank 1: (1,) float64",
        ),
        (lambda rank: [np.zeros(1)] * (1 + rank), "tree[1]: rank 0: missing; rank 1: (1,) float64"),
        (
            lambda rank: [np.zeros((2, 3), order="CF"[rank])],
            "rank 1: (2, 3) float64 strides (1, 2)",
        ),
    ],
)
def test_trees_that_differ_are_rejected_on_every_rank(
    tree: Callable[[int], Any], found: str
) -> None:
    def program() -> str:
        with pytest.raises(MismatchError) as error:
            md.GradientBuckets(tree(md.get_rank()))
        return str(error.value)

    for text in md.simulate(program, 2):
        assert "GradientBuckets: the ranks' trees differ" in text
        assert found in text
        assert "arrays of the same paths, shapes and dtypes" in text


@pytest.mark.parametrize(
    ("tree", "options", "kind", "text"),
    [
        ({"w": np.zeros(2, np.int64)}, {}, DtypeError, "GradientBuckets cannot average tree['w']"),
        ([torch.zeros(2, dtype=torch.bool)], {}, DtypeError, "found:    shape (2,), bool"),
        ({}, {}, ArgumentError, "the tree has no leaves"),
        ([None], {}, ArgumentError, "the tree has no leaves"),
        ([1.0], {}, KindError, "GradientBuckets cannot take a float as tree[0]"),
        ([np.ma.zeros(2)], {}, KindError, "tree[0]"),
        ([torch.eye(2).to_sparse()], {}, ArgumentError, "sparse tensor as tree[0]"),
        ([np.zeros(2)], {"bucket_cap_mb": 0}, ArgumentError, "bucket_cap_mb is 0"),
        ([np.zeros(2)], {"bucket_cap_mb": "1"}, KindError, "bucket_cap_mb must be a number"),
    ],
)
def test_what_cannot_be_averaged_is_rejected_before_anything_is_sent(
    tree: Any, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    def program() -> str:
        if md.get_rank() == 1:  # would be waited for
            return text
        with pytest.raises(kind) as error:
            md.GradientBuckets(tree, **options)
        return str(error.value)

    for told in md.simulate(program, 2):
        assert text in told


def test_what_is_ready_already_is_rejected_and_changes_nothing() -> None:
    def program() -> list[float]:
        gradients = md.GradientBuckets({"layer": [np.zeros(1), np.zeros(1)]})
        gradients.views["layer"][1][:] = md.get_rank()
        gradients.ready(("layer", 1))
        for path in (("layer", 1), "layer"):
            with pytest.raises(GradientError) as error:
                gradients.ready(path)
            text = str(error.value)
            assert "the gradient tree['layer'][1] is already ready" in text
            assert f"rank {md.get_rank()}, GradientBuckets on the world" in text
            assert "between two calls of wait()" in text
        with pytest.raises(
            ArgumentError, match=r"ready: the tree has no leaf at path \('layer', 2\)"
        ):
            gradients.ready(("layer", 2))
        gradients.views["layer"][0][:] = md.get_rank()
        gradients.ready(("layer", 0))
        return [float(view[0]) for view in gradients.wait()["layer"]]

    assert md.simulate(program, 2) == [[0.5, 0.5]] * 2


def test_a_round_that_fails_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    all_reduce = flat_sums.all_reduce

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise BackendError("all_reduce on the world failed")

    def program() -> float:
        gradients = md.GradientBuckets([np.zeros(1)])
        monkeypatch.setattr(flat_sums, "all_reduce", failing)
        with pytest.raises(BackendError):
            gradients.wait()
        with pytest.raises(BackendError):
            gradients.ready(0)
        with pytest.raises(BackendError):
            gradients.wait()
        monkeypatch.setattr(flat_sums, "all_reduce", all_reduce)
        gradients.views[0][:] = 3.0
        gradients.ready(0)
        return float(gradients.wait()[0][0])

    assert md.simulate(program, 1) == [3.0]
