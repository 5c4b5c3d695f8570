"""torch's DeviceMesh on our ranks, and torch's world adopted."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshdist as md
from tests.pool import Pool

KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters  # since torch 2.12


def test_torchs_mesh_has_the_same_ranks_in_the_same_order(pool: Pool) -> None:
    def program() -> list[float]:
        from torch.distributed.tensor import Shard, distribute_tensor

        ours = md.DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
        if not KEEPS_ORDER:
            with pytest.raises(md.MeshError, match="cannot keep the order of this mesh") as caught:
                ours.to_torch()
            assert "found:    ranks [3, 0] along an axis" in str(caught.value)
            assert "fix:      use torch 2.12 or newer" in str(caught.value)
            return []
        theirs = ours.to_torch()
        assert theirs.mesh.tolist() == [[3, 1], [0, 2]]
        assert theirs.mesh_dim_names == ("dp", "tp")
        assert tuple(theirs.get_coordinate()) == ours.get_coordinate()
        for axis in ("dp", "tp"):
            ranks = dist.get_process_group_ranks(theirs.get_group(axis))
            assert tuple(ranks) == ours.get_group(axis).ranks
        assert md.DeviceMesh.from_torch(theirs) == ours
        whole = torch.arange(8.0).reshape(4, 2)
        part = distribute_tensor(whole, theirs["tp"], [Shard(0)])
        assert part.full_tensor().equal(whole)
        return part.to_local().flatten().tolist()

    first, second = [0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]
    expected = [first, second, second, first] if KEEPS_ORDER else [[]] * 4
    assert pool.run(program, 4) == expected


def test_a_mesh_of_one_axis_and_one_smaller_than_the_world(pool: Pool) -> None:
    def program() -> list[int]:
        theirs = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)).to_torch()
        if md.get_rank() == 2:
            assert theirs.get_coordinate() is None
        return theirs.mesh.tolist()

    assert pool.run(program, 3) == [[0, 1]] * 3


def test_ranks_that_differ_are_told_before_torch_waits(pool: Pool) -> None:
    def program() -> str:
        shape = (1, 2) if md.get_rank() else (2, 1)
        first, second = (md.init_device_mesh("cpu", one) for one in ((1, 2), (2, 1)))
        with pytest.raises(md.MismatchError) as caught:
            (first if shape == (1, 2) else second).to_torch()
        return str(caught.value)

    for text in pool.run(program, 2):
        assert text.startswith("the ranks do not define the same mesh for torch")
        assert "rank 0: to_torch() of DeviceMesh(2, 1)" in text


@pytest.mark.parametrize("is_offered", [False, True])
def test_in_the_default_world(is_offered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # where the package is installed

    def program() -> tuple[str, float]:
        if is_offered:
            import meshdist.torch_backends  # noqa: F401

        theirs = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)).to_torch()
        x = torch.ones(1)
        dist.all_reduce(x, group=theirs.get_group())
        return dist.get_backend_config(), x.item()

    backend = "shm" if is_offered else "gloo"
    with Pool() as fresh:  # whose workers know only what this test offers
        assert fresh.run(program, 2, backend=None) == [(f"cpu:{backend}", 2.0)] * 2


def test_fully_sharded_training_on_our_mesh(pool: Pool) -> None:
    def program() -> float:
        from torch.distributed.fsdp import fully_shard

        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        fully_shard(model, mesh=mesh.to_torch())
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss.item()

    one, two = pool.run(program, 2)
    assert one == two


def test_torchs_world_that_is_there_already_is_adopted(pool: Pool, tmp_path) -> None:
    def program(rank: int) -> float:
        dist.init_process_group("gloo", f"file://{tmp_path}/world", rank=rank, world_size=2)
        try:
            mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            assert (md.get_rank(), md.get_world_size()) == (rank, 2)
            x = torch.ones(1)
            md.all_reduce(x, group=mesh["dp"])
            dist.all_reduce(x)
            mesh.to_torch()
            md.destroy_process_group()
            dist.all_reduce(x)
            return x.item()
        finally:
            dist.destroy_process_group()

    assert pool.call(program, 2) == [8.0, 8.0]


def test_a_mesh_of_simulated_ranks_is_torchs_too() -> None:
    def program() -> tuple[float, tuple[int, ...], bool]:
        ours = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        theirs = ours.to_torch()
        x = torch.full((1,), float(md.get_rank()))
        dist.all_reduce(x, group=theirs.get_group("tp"))
        back = md.DeviceMesh.from_torch(theirs)
        return x.item(), theirs.get_coordinate(), back == ours

    found = md.simulate(program, 4)
    assert found == [
        (1.0, (0, 0), True),
        (1.0, (0, 1), True),
        (5.0, (1, 0), True),
        (5.0, (1, 1), True),
    ]


def test_from_torch_wants_torchs_mesh() -> None:
    with pytest.raises(md.KindError, match="is not torch's DeviceMesh"):
        md.simulate(lambda: md.DeviceMesh.from_torch("mesh"), 2)


def test_torchs_world_ends_without_a_word(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import meshdist as md\n"
        "md.init_process_group('gloo')\n"
        "md.init_device_mesh('cpu', (2,), mesh_dim_names=('dp',)).to_torch()\n"
        "md.distributed.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "meshdist", "run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_call_that_is_given_torchs_mesh_says_how_to_make_ours() -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        theirs: Any = mesh.to_torch()
        x = torch.ones(2)
        for call in (
            lambda given: md.all_reduce(x, group=given),
            lambda given: md.lax.psum(x, "dp", mesh=given),
            lambda given: md.parallelize(torch.nn.Linear(2, 2), given, "column"),
            lambda given: md.reshard(x, "a -> a@dp", mesh=given),
            lambda given: md.NamedSharding(given, md.P("dp")),
            lambda given: md.typed(given).__enter__(),
            lambda given: md.seed(1, mesh=given),
        ):
            with pytest.raises(md.KindError) as caught:
                call(theirs)
            assert "torch.distributed.device_mesh.DeviceMesh" in str(caught.value.found)
            assert "DeviceMesh.from_torch(mesh)" in str(caught.value.fix)
        assert md.lax.psum(x, "dp", mesh=md.DeviceMesh.from_torch(theirs)).tolist() == [2.0, 2.0]

    md.simulate(program, 2)


def _ddp(mesh: Any) -> object:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(torch.nn.Linear(2, 2), device_mesh=mesh)


def _fully_shard(mesh: Any) -> object:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(torch.nn.Linear(4, 2), mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model


def _distribute_tensor(mesh: Any) -> object:
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)]).full_tensor()


def _from_local(mesh: Any) -> object:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False).full_tensor()


def _parallelize_module(mesh: Any) -> object:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = parallelize_module(torch.nn.Linear(4, 4), mesh, ColwiseParallel())
    return model(torch.ones(2, 4))


def _funcol(mesh: Any) -> object:
    import torch.distributed._functional_collectives as funcol

    return funcol.all_reduce(torch.ones(1), "sum", mesh) + 0


TORCHS = (_ddp, _fully_shard, _distribute_tensor, _from_local, _parallelize_module, _funcol)


def _given_to_torch() -> None:
    mesh = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    line = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torchs = mesh.to_torch()["dp"]
    for call in TORCHS:
        for ours, fix in ((mesh["dp"], "mesh.to_torch()['dp']"), (line, "mesh.to_torch()")):
            with pytest.raises(md.MeshError) as caught:
                call(ours)
            assert str(caught.value).startswith("torch received a mesh of meshdist\n")
            where = f"rank {md.get_rank()} of 2, DeviceMesh(dp=2); read by "
            assert str(caught.value.where).startswith(where)
            assert "of torch." in str(caught.value.where)
            assert (
                caught.value.fix
                == f"pass {fix} instead; call to_torch() on every rank of the world"
            )
        call(torchs)  # as the error says


def test_torchs_code_that_is_given_our_mesh_says_what_to_pass(pool: Pool) -> None:
    pool.run(_given_to_torch, 2)
    md.simulate(_given_to_torch, 2)


def test_a_name_that_torchs_mesh_has_and_ours_lacks_is_told() -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        with pytest.raises(md.errors.MeshAttributeError) as caught:
            mesh._flatten("all")  # type: ignore[attr-defined]
        assert str(caught.value).splitlines() == [
            "a mesh of meshdist has no _flatten, unlike torch's DeviceMesh",
            f"  where:    rank {md.get_rank()} of 2, DeviceMesh(dp=2, tp=1)",
            "  fix:      use mesh.flatten, or mesh.to_torch()._flatten; call to_torch() on every "
            "rank of the world",
        ]
        with pytest.raises(AttributeError) as caught:
            mesh["tp"]._get_root_mesh()  # type: ignore[attr-defined]
        assert "use mesh.to_torch()['tp']._get_root_mesh; call to_torch()" in str(caught.value)

    md.simulate(program, 2)


def test_what_a_mesh_lacks_is_absent_as_ever() -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        assert not hasattr(mesh, "_flatten_mapping")
        assert getattr(mesh, "_get_root_mesh", None) is None
        with pytest.raises(AttributeError, match="object has no attribute 'get_grup'"):
            mesh.get_grup  # type: ignore[attr-defined]  # noqa: B018
        assert not hasattr(object.__new__(md.DeviceMesh), "layout")  # nor does it ask for ever
        assert f"{mesh}" == str(mesh)
        for twin in (copy.copy(mesh), copy.deepcopy(mesh), pickle.loads(pickle.dumps(mesh))):
            assert twin == mesh

    md.simulate(program, 2)
