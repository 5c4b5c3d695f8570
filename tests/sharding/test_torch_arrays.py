"""DTensors and sharded arrays, there and back, on processes over Gloo."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch

import meshdist as md
from tests.pool import Pool


def test_there_and_back(pool: Pool) -> None:
    def program() -> int:
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        theirs = mesh.to_torch()
        whole = torch.arange(70.0).reshape(10, 7)
        cases = [
            [Shard(0), Shard(1)],
            [Shard(1), Shard(1)],
            [Shard(-1), Replicate()],
            [Replicate(), Replicate()],
        ]
        for placements in cases:
            dtensor = distribute_tensor(whole, theirs, placements)
            ours = md.from_dtensor(dtensor, mesh)
            assert ours.local.data_ptr() == dtensor.to_local().data_ptr()
            assert ours.shape == (10, 7)
            box = ours.sharding.box(md.get_rank(), (10, 7))
            assert ours.local.equal(whole[tuple(slice(*one) for one in box)])
            back = md.to_dtensor(ours, theirs)
            assert back.to_local().data_ptr() == ours.local.data_ptr()
            assert back.full_tensor().equal(whole)
            assert back.placements == tuple(
                Shard(one.dim % 2) if isinstance(one, Shard) else one for one in placements
            )
            assert back.stride() == (7, 1)
        part = whole.chunk(2)[mesh.get_local_rank("dp")] / 2
        partial_sums = DTensor.from_local(part, theirs, [Shard(0), Partial()])
        ours = md.from_dtensor(partial_sums, mesh)
        assert ours.sharding.spec == md.P("dp", None, unreduced={"tp"})
        assert ours.full().equal(whole)
        assert md.to_dtensor(ours, theirs).full_tensor().equal(whole)
        mine = torch.full((4,), float(md.get_rank()))
        average = DTensor.from_local(mine, theirs, [Partial("avg"), Partial("avg")])
        assert md.from_dtensor(average, mesh).full().tolist() == [1.5] * 4
        scalar = distribute_tensor(whole.sum(), theirs, [Replicate(), Replicate()])
        assert md.to_dtensor(md.from_dtensor(scalar, mesh)).full_tensor() == whole.sum()
        return len(cases)

    assert pool.run(program, 4) == [4] * 4


def test_sizes_of_torch(pool: Pool) -> None:
    def program() -> list[Any]:
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        theirs = distribute_tensor(torch.arange(9.0), mesh.to_torch(), [Shard(0)])
        ours = md.from_dtensor(theirs)  # the mesh is made from torch's
        assert ours.sharding.shard_sizes == {0: (3, 3, 3, 0)}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert md.to_dtensor(ours).full_tensor().tolist() == list(range(9))
        balanced = ours.reshard(md.P("dp"))
        others = balanced * 2, md.zeros(7, sharding=balanced.sharding), balanced
        with pytest.warns(UserWarning, match="to_dtensor reshards") as caught:
            *_, again = [md.to_dtensor(array) for array in others]
        assert len(caught) == 1  # of a place
        with pytest.warns(UserWarning, match="to_dtensor reshards"):
            md.to_dtensor(balanced)
        assert again.full_tensor().tolist() == list(range(9))
        text = str(caught[0].message)
        assert "to_dtensor reshards this array, because torch shards it differently" in text
        assert "expected: dim 0 in 3, 3, 3, 0 along dp" in text
        assert "found:    dim 0 in 3, 2, 2, 2 along dp" in text
        assert caught[0].filename == __file__
        return [balanced.local.tolist(), again.to_local().tolist()]

    assert pool.run(program, 4) == [
        [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]],
        [[3.0, 4.0], [3.0, 4.0, 5.0]],
        [[5.0, 6.0], [6.0, 7.0, 8.0]],
        [[7.0, 8.0], []],
    ]


def test_the_order_of_axes(pool: Pool) -> None:
    def program() -> list[str]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found = []
        for size in (8, 7):
            whole = torch.arange(float(size))
            minor_first = md.NamedSharding(mesh, md.P(("tp", "dp")))
            ours = md.shard(whole, "s@(tp,dp)", mesh)
            ours = md.ShardedArray(ours, minor_first, (size,))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if size == 7 else "error")
                dtensor = md.to_dtensor(ours)
            assert dtensor.full_tensor().equal(whole)
            found.append(str(dtensor.placements))
            assert md.from_dtensor(dtensor, mesh).full().equal(whole)
        return found

    first = "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
    assert pool.run(program, 4) == [[first, "(Shard(dim=0), Shard(dim=0))"]] * 4


def test_gradients_pass(pool: Pool) -> None:
    def program() -> list[Any]:
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        theirs = mesh.to_torch()
        weight = distribute_tensor(torch.ones(4, 2), theirs, [Shard(0)]).requires_grad_()
        ours = md.from_dtensor(weight, mesh)
        (3 * ours.local).sum().backward()
        assert weight.grad is not None
        local = torch.full((3,), 2.0, requires_grad=True)
        reduced = md.ShardedArray(local, md.NamedSharding(mesh, md.P(reduced={"dp"})))
        with torch.no_grad():
            assert md.to_dtensor(reduced, theirs).to_local().equal(local)
        if "grad_placements" not in inspect.signature(DTensor.from_local).parameters:
            with pytest.raises(md.GradientError, match="would sum the gradient") as caught:
                md.to_dtensor(reduced, theirs)
            assert "expected: torch 2.12 or newer" in str(caught.value)
            return [weight.grad.full_tensor().tolist(), [0.0, 1.0, 2.0]]
        dtensor = md.to_dtensor(reduced, theirs)
        factor = distribute_tensor(torch.arange(3.0), theirs, [Replicate()])
        (dtensor * factor).sum().backward()
        assert local.grad is not None
        md.all_reduce(local.grad)  # its partial sums, one on each rank
        return [weight.grad.full_tensor().tolist(), local.grad.tolist()]

    assert pool.run(program, 2) == [[[[3.0, 3.0]] * 4, [0.0, 1.0, 2.0]]] * 2


def test_refusals(pool: Pool) -> None:
    def program() -> list[str]:
        from torch.distributed.tensor import DTensor, Partial, Shard

        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        other = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        theirs = mesh.to_torch()
        array = md.ShardedArray(torch.ones(2), md.NamedSharding(mesh, md.P("dp")))
        whole = torch.ones(2, dtype=torch.int64)
        cases: list[tuple[type[md.MeshdistError], Any]] = [
            (md.KindError, lambda: md.from_dtensor(torch.ones(2))),
            (md.KindError, lambda: md.to_dtensor(torch.ones(2))),
            (md.MeshError, lambda: md.from_dtensor(md.to_dtensor(array, theirs), other)),
            (md.MeshError, lambda: md.to_dtensor(array, other.to_torch())),
            (
                md.DtypeError,
                lambda: md.from_dtensor(DTensor.from_local(whole, theirs, [Partial("avg")]), mesh),
            ),
            (
                md.ArgumentError,
                lambda: md.from_dtensor(DTensor.from_local(whole, theirs, [Partial("max")]), mesh),
            ),
            (
                md.ShapeError,
                lambda: md.from_dtensor(
                    DTensor.from_local(
                        torch.ones(1), theirs, [Shard(0)], shape=torch.Size([4]), stride=(1,)
                    ),
                    mesh,
                ),
            ),
        ]
        texts = []
        for kind, wrong in cases:
            with pytest.raises(kind) as caught:
                wrong()
            texts.append(str(caught.value))
        return texts

    for texts in pool.run(program, 2):
        assert texts[0] == "from_dtensor takes a DTensor\n  found:    a Tensor"
        assert texts[1] == "to_dtensor takes a ShardedArray\n  found:    a Tensor"
        assert texts[2].startswith("from_dtensor: torch's mesh and the meshdist mesh differ\n")
        assert "fix:      make one from the other" in texts[3]
        assert "an average of integers" in texts[4]
        assert "Partial('max') is not supported" in texts[5]
        assert "shard" in texts[6]
        assert "(1,)" in texts[6]
