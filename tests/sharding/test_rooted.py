"""The whole on one rank, against slices; how often each element leaves a rank."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import meshdist as md
from meshdist.errors import GradientError, KindError, NotInGroupError
from meshdist.sharding import executor
from tests.sharding.reshard_cases import Lie, lies, mesh_of, partial_sums, shards, transitions


def gathered(sizes: Any, shape: Any, source: Lie, root: int) -> Any:
    """On one rank: what ``unshard`` returns."""
    mesh = mesh_of(sizes)
    at = mesh.get_coordinate()
    assert at is not None
    local = shards(source, shape, sizes, partial_sums(source, shape, sizes, 3))[at]
    before = local.copy()
    whole = md.unshard(local, source.sharding(mesh), root=root, shape=shape)
    assert local.tobytes() == before.tobytes()
    return whole


@given(transitions(), st.data())
def test_the_root_alone_holds_the_whole(case: Any, data: Any) -> None:
    sizes, shape, source, _ = case
    size = math.prod(sizes)
    root = data.draw(st.integers(0, size - 1))
    results = md.simulate(gathered, size, args=(sizes, shape, source, root))
    expected = sum(partial_sums(source, shape, sizes, 3).values())
    for rank, whole in enumerate(results):
        assert (whole is None) == (rank != root)
    assert np.array_equal(results[root], expected)


@given(st.data())
def test_each_element_leaves_one_owner_once(data: Any) -> None:
    sizes, shape = (2, 3), (5, 4)
    source = data.draw(lies(sizes, shape).filter(lambda lie: not lie.unreduced))
    root = data.draw(st.integers(0, 5))
    sent = [0] * 6
    run = executor.run_named

    def count(operation: str, group: Any, title: str, *given: Any) -> None:
        if operation == "all_to_all_single":
            sent[md.get_rank()] += given[1].numel()
        run(operation, group, title, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "run_named", count)
        md.simulate(gathered, 6, args=(sizes, shape, source, root))
    own = shards(source, shape, sizes, partial_sums(source, shape, sizes, 3))
    held = own[tuple(map(int, np.unravel_index(root, sizes)))].size
    assert sum(sent) == math.prod(shape) - held
    assert sent[root] == 0


def test_libraries_and_meshes_in_force() -> None:
    def program() -> Any:
        with md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)):
            local = np.arange(2, dtype=np.int16) + 10 * md.get_rank()
            return md.unshard(local, "b@dp", root=1), md.unshard(np.float32(2), "", root=0)

    (nothing, scalar), (whole, none) = md.simulate(program, 2)
    assert nothing is none is None
    assert whole.dtype == np.int16 and whole.tolist() == [0, 1, 10, 11]
    assert scalar == np.float32(2) and type(scalar) is np.float32


def message(kind: type[Exception], root: Any, **more: Any) -> str:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        with pytest.raises(kind) as found:
            md.unshard(torch.zeros(2, **more), "b@dp", mesh, root)
        return str(found.value)

    return md.simulate(program, 2)[0]


def test_refusals() -> None:
    assert "unshard: root must be an integer" in message(KindError, "first")
    assert "found:    True" in message(KindError, True)
    text = message(NotInGroupError, 2)
    assert "unshard: the mesh does not contain the root, rank 2" in text
    assert "expected: one of ranks 0-1" in text
    text = message(GradientError, 0, requires_grad=True)
    assert "unshard with a root has no gradient" in text
    assert "fix:      pass local.detach(), or leave root= out" in text
