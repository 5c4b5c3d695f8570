"""``device_put``: shards against slices of the whole, what leaves the root, and its gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import meshdist as md
from meshdist import DeviceMesh
from meshdist.errors import ArgumentError, KindError, MismatchError, NotInGroupError, ShapeError
from meshdist.sharding import executor
from tests.sharding.array_cases import NAMES, assemble, error_on_mesh, held, on_mesh
from tests.stand_in_cupy import StandInCupy


@st.composite
def cases(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], Any, int]:
    """Sizes of a mesh, a shape, a spec with the sizes of its shards, and a root."""
    sizes = draw(st.sampled_from([(2,), (3,), (2, 2), (3, 2), (2, 1, 2)]))
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    entries: list[list[str]] = [[] for _ in shape]
    kinds: dict[str, set[str]] = {"unreduced": set(), "reduced": set()}
    for axis in draw(st.permutations(NAMES[: len(sizes)])):
        where = draw(st.sampled_from(["free", "unreduced", "reduced", "dim", "dim"]))
        if where in kinds:
            kinds[where].add(axis)
        elif where == "dim" and shape:
            entries[draw(st.integers(0, len(shape) - 1))].append(axis)
    spec = md.P(*map(tuple, entries), **kinds)
    given_sizes = {}
    for dim, axes in enumerate(entries):
        if axes and draw(st.booleans()):
            count = math.prod(sizes[NAMES.index(axis)] for axis in axes)
            ends = st.lists(st.integers(0, shape[dim]), min_size=count - 1, max_size=count - 1)
            given_sizes[dim] = tuple(np.diff([0, *sorted(draw(ends)), shape[dim]]).tolist())
    return sizes, shape, (spec, given_sizes), draw(st.integers(0, math.prod(sizes) - 1))


@given(cases())
def test_from_one_rank_and_from_all(case: Any) -> None:
    sizes, shape, (spec, given_sizes), root = case
    whole = np.arange(math.prod(shape), dtype=np.float64).reshape(shape)
    weights = np.asarray(np.cos(whole))

    def program(mesh: DeviceMesh) -> Any:
        sharding = md.NamedSharding(mesh, spec, shard_sizes=given_sizes)
        x = torch.from_numpy(whole.copy()).requires_grad_()
        everywhere = md.device_put(x, sharding)
        is_root = md.get_rank() == root
        from_one = md.device_put(x if is_root else None, sharding, root=root)
        assert torch.equal(everywhere.local, from_one.local)
        assert from_one.local.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        arrays = md.device_put(whole if is_root else None, sharding, root=root)
        assert isinstance(arrays.local, np.ndarray)
        assert np.array_equal(arrays.local, from_one.local.detach())
        (from_one.full() * torch.from_numpy(weights)).sum().backward()
        gradient = x.grad
        x.grad = None
        (everywhere.full() * torch.from_numpy(weights)).sum().backward()
        assert np.allclose(x.grad, weights)
        return held(from_one), gradient

    results = on_mesh(program, sizes)
    assert np.array_equal(assemble([one for one, _ in results]), whole)
    for rank, (_, gradient) in enumerate(results):
        assert np.allclose(gradient, weights) if rank == root else gradient is None


@pytest.mark.parametrize(
    "spec", [md.P(), md.P("dp"), md.P("dp", "tp"), md.P("tp", unreduced={"dp"}), md.P("tp", None)]
)
def test_each_element_leaves_the_root_once(spec: md.P, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to the one rank that gets it, once more as the root's own part to its replicas."""
    sent: dict[int, int] = {}
    run = executor.run_named

    def counted(operation: str, group: Any, title: str, *given: Any) -> Any:
        if operation == "all_to_all_single" and title.startswith("device_put"):
            *_, sizes = given
            sent[group.rank()] = sum(sizes) - sizes[group.rank()]
        return run(operation, group, title, *given)

    monkeypatch.setattr(executor, "run_named", counted)

    def program(mesh: DeviceMesh) -> Any:
        x = torch.zeros(8, 4) if md.get_rank() == 1 else None
        local = md.device_put(x, md.NamedSharding(mesh, spec), root=1).local
        return local.numel()

    on_mesh(program)
    partial_sums = 2 if spec.unreduced else 1
    others = 32 if spec.unreduced and spec != md.P() else 32 - 32 * partial_sums // 4
    assert sent == {0: 0, 1: sent[1], 2: 0, 3: 0}
    assert sent[1] in (others, 32 - 32 * partial_sums // 4)


def test_second_derivatives_from_a_root() -> None:
    def program(mesh: DeviceMesh) -> Any:
        is_root = md.get_rank() == 0
        x = torch.arange(1.0, 7.0, dtype=torch.float64).requires_grad_() if is_root else None
        y = md.device_put(x, md.NamedSharding(mesh, md.P("dp")), root=0)
        loss = (y * y * y).sum().full()
        if is_root:
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            return first.detach()
        loss.backward()
        return None

    found = on_mesh(program, (2,))
    assert torch.allclose(found[0], 3 * torch.arange(1.0, 7.0, dtype=torch.float64) ** 2)


def test_arrays_keep_their_library_and_a_sharded_array_is_resharded() -> None:
    def program(mesh: DeviceMesh) -> Any:
        whole = np.arange(6.0)
        x = md.device_put(whole, md.NamedSharding(mesh, md.P("dp")))
        x.local[:] = -1  # new memory
        assert whole.min() == 0
        replicated = md.device_put(whole, md.NamedSharding(mesh, md.P()))
        replicated.local[:] = -1
        assert whole.min() == 0
        y = md.device_put(x, md.NamedSharding(mesh, md.P("tp")))
        with mesh:
            assert md.device_put(x, md.P("dp")) is x
        return held(y)

    assert np.array_equal(assemble(on_mesh(program)), np.full(6, -1.0))


def test_arrays_of_cupy() -> None:
    with StandInCupy().installed() as cupy:
        whole = cupy.array(np.arange(5.0))

        def program(mesh: DeviceMesh) -> Any:
            rows = md.NamedSharding(mesh, md.P("dp"))
            x = md.device_put(whole, rows)
            y = md.device_put(whole if md.get_rank() == 1 else None, rows, root=1)
            z = md.zeros((5,), like=whole, sharding=rows)
            assert all(isinstance(one.local, cupy.ndarray) for one in (x, y, z))
            return x.full().host, y.full().host, z.full().host

        for found in on_mesh(program, (2,)):
            assert [one.tolist() for one in found] == [[0, 1, 2, 3, 4]] * 2 + [[0.0] * 5]


@pytest.mark.parametrize(
    ("x", "root", "kind", "words"),
    [
        (
            None,
            1,
            KindError,
            ["the root passed no global array", "rank 1 (dp=0, tp=1)", "root=..."],
        ),
        ([1, 2], 2, KindError, ["cannot take a list as x"]),
        (torch.zeros(()), 2, ShapeError, ["entries for 1 dims"]),
        (
            torch.zeros(4),
            4,
            NotInGroupError,
            ["does not contain the root, rank 4", "one of ranks 0-3"],
        ),
        (torch.zeros(4), -1, NotInGroupError, ["does not contain the root, rank -1"]),
        (torch.zeros(4), "1", KindError, ["root must be an integer", "'1'"]),
        (torch.zeros(()), None, ShapeError, ["entries for 1 dims"]),
        (None, None, KindError, ["device_put cannot take a NoneType as x"]),
    ],
)
def test_what_is_rejected_on_every_rank(
    x: Any, root: Any, kind: type[Exception], words: list[str]
) -> None:
    def program(mesh: DeviceMesh) -> None:
        md.device_put(x, md.NamedSharding(mesh, md.P("dp")), root=root)

    text = error_on_mesh(program, kind)
    for word in words:
        assert word in text, text


def test_bool_partial_sums_and_sharded_arrays_on_the_root_are_rejected() -> None:
    def bools(mesh: DeviceMesh) -> None:
        md.device_put(torch.ones(4).bool(), md.NamedSharding(mesh, md.P(unreduced={"dp"})), root=0)

    assert "bool values cannot be partial sums" in error_on_mesh(bools, ArgumentError)

    def sharded(mesh: DeviceMesh) -> None:
        rows = md.NamedSharding(mesh, md.P("dp"))
        md.device_put(md.zeros(4, sharding=rows), rows, root=0)

    assert "leave root= out" in error_on_mesh(sharded, KindError)


def test_ranks_that_name_different_roots_all_raise() -> None:
    def program(mesh: DeviceMesh) -> None:
        root = 1 if md.get_rank() == 3 else 0
        md.device_put(torch.zeros(4), md.NamedSharding(mesh, md.P("dp")), root=root)

    assert "root" in error_on_mesh(program, MismatchError)


def test_a_rank_outside_the_mesh_is_rejected() -> None:
    def program() -> str:
        mesh = md.DeviceMesh("cpu", [1], mesh_dim_names=("dp",))
        sharding = md.NamedSharding(mesh, md.P("dp"))
        if md.get_rank() == 1:
            return str(md.device_put(torch.zeros(2), sharding, root=1).shape)
        with pytest.raises(NotInGroupError) as caught:
            md.device_put(torch.zeros(2), sharding, root=1)
        return str(caught.value)

    rejected, made = md.simulate(program, 2)
    assert made == "(2,)" and "device_put on a mesh that does not contain this rank" in rejected
