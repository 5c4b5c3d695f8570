"""``unshard`` and ``shard`` with the sharding of an annotated tensor, and ``cut_dims``."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.annotations.axis_types import annotation_of
from meshdist.errors import ArgumentError, AxisError, KindError, MeshError, ShapeError
from tests.pool import Pool

WHOLE = torch.arange(35.0, dtype=torch.float64).view(7, 5)
SPECS = [md.P("tp"), md.P(None, "tp"), md.P("tp", None), md.P("dp", "tp"), md.P(("dp", "tp"))]


def part_of(whole: torch.Tensor, spec: md.P, mesh: md.DeviceMesh) -> torch.Tensor:
    """The oracle: balanced parts of one dim after the other."""
    for dim, entry in enumerate(spec.partitions):
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            pieces = np.array_split(np.arange(whole.shape[dim]), mesh.size(axis))
            whole = whole.index_select(dim, torch.tensor(pieces[mesh.get_local_rank(axis)]))
    return whole


def sizes_in(x: torch.Tensor) -> Any:
    return annotation_of(x).global_sizes


def round_trips(dp: int, tp: int, is_entered: bool) -> None:
    mesh = md.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    for spec in SPECS:
        mine = part_of(WHOLE, spec, mesh)
        p = md.annotate(nn.Parameter(mine.clone()), spec, mesh=mesh)
        if is_entered:
            with mesh:
                found = md.unshard(-mine, like=p), md.shard(WHOLE, like=p)
        else:
            found = md.unshard(-mine, like=p), md.shard(WHOLE, like=p)
        assert torch.equal(found[0], -WHOLE)
        assert torch.equal(found[1], mine)


@pytest.mark.parametrize("is_entered", [False, True])
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (1, 2), (1, 3), (2, 2), (1, 5)])
def test_parts_and_global_arrays(dp: int, tp: int, is_entered: bool) -> None:
    md.simulate(round_trips, dp * tp, args=(dp, tp, is_entered))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_over_processes(pool: Pool, backend: str) -> None:
    pool.run(round_trips, 3, 1, 3, False, backend=backend)


def test_the_sizes_are_exchanged_once_and_kept_with_the_annotation() -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        p = md.annotate(nn.Parameter(torch.ones(2, 2)), "f@tp d", mesh=mesh)
        md.unshard(p.detach(), like=p)
        kept = sizes_in(p)
        if md.get_rank() == 0:  # nothing is sent
            md.shard(torch.ones(4, 2), like=p, check=False)
        md.annotate(p, "f@tp d", mesh=mesh)
        return kept, sizes_in(p)

    assert md.simulate(program, 2) == [((4, 2), ())] * 2


def test_unbalanced_parts() -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        heads = md.shard(torch.arange(14.0), "(h k)@tp", mesh, k=2)  # parts of 6, 4 and 4
        for p in (heads, md.annotate(heads.clone(), "f@tp", mesh=mesh)):
            assert torch.equal(md.shard(torch.arange(14.0), like=p), heads)
            assert torch.equal(md.unshard(-p, like=p), -torch.arange(14.0))

    md.simulate(program, 3)


def test_layers_that_parallelize_splits_know_the_shape() -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        md.seed(0)
        model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4))
        wholes = {name: p.detach().clone() for name, p in model.named_parameters()}
        md.parallelize(model, mesh["tp"], {"0": "column", "1": "row"})
        for each in (model, copy.deepcopy(model)):
            for name, p in each.named_parameters():
                if md.typeof(p).cut_dims:
                    assert sizes_in(p) == wholes[name].shape
                    assert torch.equal(md.unshard(p.detach(), like=p), wholes[name])

    md.simulate(program, 3)


def test_cut_dims() -> None:
    weight = md.annotate(torch.zeros(8, 4), md.P("tp", ("dp", "ep"), unreduced={"pp"}))
    assert md.typeof(weight).cut_dims == {0: ("tp",), 1: ("dp", "ep")}
    assert md.typeof(torch.zeros(3)).cut_dims == {}
    assert md.typeof(md.annotate(torch.zeros(3), varying="tp")).cut_dims == {}


def test_gradients_are_those_of_the_pattern() -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        p = nn.Parameter(md.shard(WHOLE, "f@tp d", mesh))
        (md.unshard(p, like=p) * WHOLE).sum().backward()
        assert p.grad is not None
        assert torch.equal(p.grad, md.shard(WHOLE, "f@tp d", mesh))

    md.simulate(program, 2)


def test_an_annotation_with_its_sizes_is_loaded_without_pickled_code() -> None:
    def program() -> tuple[Any, ...]:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        file = io.BytesIO()
        torch.save(nn.Parameter(md.shard(WHOLE, "f@tp d", mesh)), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert torch.equal(md.unshard(loaded.detach(), like=loaded), WHOLE)
        return sizes_in(loaded)

    assert md.simulate(program, 2)[0] == (7, 5)


def errors_of(make: Any, num_ranks: int = 2) -> list[str]:
    """The text of the error on each rank."""

    def program() -> str:
        mesh = md.init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
        p = md.annotate(torch.zeros(3, 2), "f@tp d", mesh=mesh)
        with pytest.raises(md.MeshdistError) as raised:
            make(mesh, p)
        assert isinstance(
            raised.value, (ArgumentError, KindError, AxisError, ShapeError, MeshError)
        )
        return f"{type(raised.value).__name__}: {raised.value}"

    return md.simulate(program, num_ranks)


WRONG: dict[str, tuple[Any, str]] = {
    "no annotation": (
        lambda mesh, p: md.unshard(p, like=p.clone()),
        "ArgumentError: unshard: like= has no spec that states how it is sharded\n"
        "  expected: a tensor with a spec\n"
        "  found:    float32[3, 2]\n"
        "  fix:      if it is equal on all ranks, it is already complete; if it is a shard, "
        "annotate it, for example md.annotate(p, 'f@tp d', mesh=mesh)",
    ),
    "an outdated annotation": (
        lambda mesh, p: md.shard(p, like=p.resize_(2, 2)),
        "found:    float32[2, 2]{V:tp}, annotated as [3@tp, 2]",
    ),
    "no tensor": (
        lambda mesh, p: md.unshard(p, like="p"),
        "KindError: unshard takes an annotated tensor as like=\n  found:    a str",
    ),
    "a pattern, too": (
        lambda mesh, p: md.unshard(p, "f@tp d", mesh, like=p, shape=(6, 2)),
        "ArgumentError: unshard takes either like= or a pattern with sizes\n"
        "  found:    like= and 'f@tp d', shape=(6, 2)\n"
        "  fix:      leave them out: unshard(x, like=p)",
    ),
    "neither": (
        lambda mesh, p: md.shard(p),
        "KindError: shard requires a sharding\n"
        '  fix:      pass a pattern, shard(x, "b@dp d"), or an annotated tensor: shard(x, like=p)',
    ),
    "another local shape": (
        lambda mesh, p: md.unshard(p[:2], like=p),
        "ShapeError: unshard: the array does not have the shape of like\n"
        "  expected: shape (3, 2), as like\n"
        "  found:    shape (2, 2)",
    ),
    "another global shape": (
        lambda mesh, p: md.shard(torch.zeros(8, 2), like=p),
        "ShapeError: shard: the array does not have the shape of like\n"
        "  expected: shape (6, 2), the global shape of like\n"
        "  found:    shape (8, 2)",
    ),
    "a mesh without the axis": (
        lambda mesh, p: md.unshard(p, like=md.annotate(p, md.P("ep"), mesh=None), mesh=mesh),
        "AxisError: no axis 'ep' in the mesh\n  where:    unshard on DeviceMesh(tp=2)",
    ),
    "no mesh with the axis": (
        lambda mesh, p: md.unshard(p, like=md.annotate(p, md.P("ep"))),
        "MeshError: unshard: no open mesh has 'ep'\n"
        "  expected: a single mesh with the axes that shard the tensor\n"
        "  found:    float32[3, 2]{V:ep}\n"
        "  fix:      call it inside `with mesh:`, or pass the mesh: mesh=mesh",
    ),
    "parts that form no array": (
        lambda mesh, p: md.unshard(
            q := md.annotate(torch.zeros(3, 2 + md.get_rank()), "f@tp d", mesh=mesh), like=q
        ),
        "ShapeError: unshard: the parts of like do not form a global array\n"
        "  where:    DeviceMesh(tp=2), P('tp', None)\n"
        "  expected: rank 1: shape (3, 2)\n"
        "  found:    rank 1: shape (3, 3)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    make, text = WRONG[case]
    for found in errors_of(make):
        assert text in found


def test_two_meshes_of_one_axis_name() -> None:
    def program() -> None:
        rows = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        columns = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
        p = md.annotate(torch.full((1,), float(md.get_rank())), "f@tp", mesh=rows)
        with pytest.raises(MeshError) as raised:
            md.unshard(p, like=p)
        assert str(raised.value) == (
            "unshard: several open meshes have 'tp'\n"
            "  expected: a single mesh with the axes that shard the tensor\n"
            "  found:    float32[1]{V:tp}\n"
            "            DeviceMesh(dp=2, tp=2)\n"
            "            DeviceMesh(tp=2, dp=2)\n"
            "  fix:      call it inside `with mesh:`, or pass the mesh: mesh=mesh"
        )
        first = md.get_rank() // 2 * 2
        assert md.unshard(p, like=p, mesh=rows).tolist() == [first, first + 1]
        with columns:
            assert md.unshard(p, like=p).tolist() == [md.get_rank() % 2, md.get_rank() % 2 + 2]
        columns.close()
        assert md.unshard(p, like=p).tolist() == [first, first + 1]

    md.simulate(program, 4)
