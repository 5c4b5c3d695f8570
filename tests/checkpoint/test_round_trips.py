"""What was saved on a mesh loads on any other, and in tools that know nothing of us."""

from __future__ import annotations

import itertools
import json
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

import meshdist as md
from tests.pool import Pool

from .states import Case, Lying, cases

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have equal shapes, dtypes and bits."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    kind = BITS[first.dtype.itemsize]
    return torch.equal(first.contiguous().view(kind), second.contiguous().view(kind))


def mesh_of(shape: tuple[int, ...]) -> md.DeviceMesh:
    return md.init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))


def part(whole: torch.Tensor, sharding: md.NamedSharding) -> torch.Tensor:
    index = sharding.indices_map(tuple(whole.shape))[md.get_rank()]
    return whole[index].clone()


def saved(case: Case, path: str) -> None:
    mesh = mesh_of(case.saves)
    state: dict[str, Any] = {"arrays": {}, "step": 7, "names": ["a", None, 2.5]}
    for name, whole in case.wholes().items():
        sharding = case.arrays[name][2].sharding(mesh)
        state["arrays"][name] = md.ShardedArray(part(whole, sharding), sharding, whole.shape)
    md.checkpoint.save(state, path)


def loaded(case: Case, path: str, verify: bool = False) -> list[str]:
    """Load into zeros; return the names of arrays that have wrong values here."""
    mesh = mesh_of(case.loads)
    state: dict[str, Any] = {"arrays": {}, "step": 0, "names": None}
    wholes = case.wholes()
    for name, whole in wholes.items():
        sharding = case.arrays[name][3].sharding(mesh)
        zeros = torch.zeros_like(part(whole, sharding))
        state["arrays"][name] = md.ShardedArray(zeros, sharding, whole.shape)
    assert md.checkpoint.load(state, path, verify=verify) is state
    assert (state["step"], state["names"]) == (7, ["a", None, 2.5])
    return [
        name
        for name, array in state["arrays"].items()
        if not same(array.local, part(wholes[name], array.sharding))
    ]


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Any]:
    return map(str, (tmp_path / str(number) for number in itertools.count()))


@given(case=cases(max_ranks=8, max_loads=8, large=True))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mesh_loads_what_any_mesh_saved(case: Case, fresh: Iterator[str]) -> None:
    path = next(fresh)
    md.simulate(saved, math.prod(case.saves), args=(case, path))
    found = md.checkpoint.open(path)
    for name, whole in case.wholes().items():
        assert found.shape(f"arrays.{name}") == whole.shape
        assert found.dtype(f"arrays.{name}") == whole.dtype
        assert same(found.read(f"arrays.{name}"), whole)
    ranks = math.prod(case.loads)
    assert md.simulate(loaded, ranks, args=(case, path, True)) == [[]] * ranks


CASE = Case(
    (2, 2),
    (3,),
    {
        "embed": ((301, 160), "float32", Lying(((1,), ())), Lying(((), ()))),
        "wq": ((160, 320), "bfloat16", Lying(((), (1,))), Lying(((0,), ()))),
        "wo": ((320, 160), "float64", Lying(((1,), (0,))), Lying(((), (0,)))),
        "odd": ((7, 5, 3), "int64", Lying(((0,), (), ()), ((0, (5, 2)),)), Lying(((), (0,), ()))),
        "scale": ((), "float32", Lying(()), Lying(())),
        "none": ((0, 3), "float32", Lying(((), ())), Lying(((0,), ()))),
    },
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6])
def test_saved_on_four_and_loaded_on(ranks: int, tmp_path: Path) -> None:
    path = str(tmp_path / "four")
    md.simulate(saved, 4, args=(CASE, path))
    case = Case(CASE.saves, (ranks,), CASE.arrays)
    assert md.simulate(loaded, ranks, args=(case, path)) == [[]] * ranks


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_processes(pool: Pool, backend: str, tmp_path: Path) -> None:
    path = str(tmp_path / "four")
    pool.run(saved, 4, CASE, path, backend=backend)
    assert sorted(os.listdir(tmp_path)) == ["four"]
    assert pool.run(loaded, 3, CASE, path, True, backend=backend) == [[]] * 3
    alone = Case(CASE.saves, (1,), CASE.arrays)
    assert pool.run(loaded, 1, alone, path, backend=backend) == [[]]


def test_each_byte_is_written_once(tmp_path: Path) -> None:
    md.simulate(saved, 4, args=(CASE, str(tmp_path / "four")))
    files = [load_file(path) for path in sorted((tmp_path / "four").glob("rank-*.safetensors"))]
    assert len(files) == 4
    for name, whole in CASE.wholes().items():
        assert sum(
            file[f"arrays.{name}"].numel() for file in files if f"arrays.{name}" in file
        ) == (whole.numel())


def test_the_process_of_a_script_saves_a_plain_file(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(4, 3), "b": torch.ones(3)}, "lr": 0.1}
    md.checkpoint.save(state, tmp_path / "alone")
    found = load_file(tmp_path / "alone" / "rank-0.safetensors")
    assert {name: x.tolist() for name, x in found.items()} == {
        "model.w": state["model"]["w"].tolist(),
        "model.b": [1.0] * 3,
    }
    manifest = json.loads((tmp_path / "alone" / "manifest.json").read_text())
    assert manifest["tree"] == {"model": {"w": 1, "b": 1}, "lr": 0}
    assert manifest["leaves"] == {"lr": 0.1}


def test_torchs_reader_reads_our_folders(tmp_path: Path) -> None:
    path = tmp_path / "four"
    md.simulate(saved, 4, args=(CASE, str(path)))
    wholes = {f"arrays.{name}": whole for name, whole in CASE.wholes().items() if whole.numel()}
    target = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert all(same(target[name], whole) for name, whole in wholes.items())


def test_we_read_what_torchs_writer_wrote(tmp_path: Path) -> None:
    state = {"w": torch.randn(40, 30), "b": torch.ones(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = HuggingFaceStorageWriter(str(tmp_path / "hf"))
        dcp.save(dict(state), storage_writer=writer, no_dist=True)
    found = md.checkpoint.open(tmp_path / "hf")
    assert sorted(found.names) == ["b", "w"]
    assert same(found.read("w"), state["w"])

    def program() -> bool:
        mesh = mesh_of((3,))
        rows = md.NamedSharding(mesh, md.P("a"))
        target = {"w": md.zeros((40, 30), sharding=rows), "b": torch.zeros(3)}
        md.checkpoint.load(target, tmp_path / "hf")
        return same(target["w"].full(), state["w"]) and same(target["b"], state["b"])

    assert md.simulate(program, 3) == [True] * 3


def test_the_shards_that_torchs_writer_wrote(tmp_path: Path) -> None:
    """What DTensors of two ranks leave behind, with torch's offsets and without a manifest."""
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(30.0).view(5, 6)

    def program() -> None:
        mesh = mesh_of((2,)).to_torch()
        state = {"w": distribute_tensor(whole, mesh, [Shard(1)])}
        writer = HuggingFaceStorageWriter(str(tmp_path / "hf"), save_distributed=True)
        dcp.save(state, storage_writer=writer)

    md.simulate(program, 2)
    assert same(md.checkpoint.open(tmp_path / "hf").read("w"), whole)


def test_a_single_file(tmp_path: Path) -> None:
    save_file({"w": torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors")
    found = md.checkpoint.open(tmp_path / "model.safetensors")
    assert found.names == ["w"] and found.leaves == {}
    target = {"w": torch.zeros(2, 3)}
    assert md.checkpoint.load(target, tmp_path / "model.safetensors")["w"][1, 2] == 5
    with pytest.raises(md.errors.CheckpointError) as caught:
        md.checkpoint.load(target, tmp_path / "model.safetensors", verify=True)
    assert caught.value.summary == (
        "checkpoint.load: verify=True requires checksums, which the files lack"
    )


def test_marked_tensors_numpy_and_plain_arrays(tmp_path: Path) -> None:
    rows = torch.arange(70.0).view(7, 10)
    wide = torch.randn(300, 200)

    def save() -> None:
        with mesh_of((3, 2)) as mesh:
            state = {
                "rows": md.shard(rows, "f@(b,a) d", mesh),
                "uneven": md.annotate(torch.full((md.get_rank() // 2 + 1, 4), 1.0), "f@a d"),
                "wide": wide.clone(),
                "numpy": wide.numpy().astype(np.float64),
            }
            md.checkpoint.save(state, tmp_path / "one")

    def load() -> list[bool]:
        with mesh_of((2,)) as mesh:
            state = {
                "rows": md.shard(torch.zeros(7, 10), "f d@a", mesh),
                "uneven": torch.zeros(6, 4),
                "wide": md.shard(torch.zeros(300, 200), "f@a d", mesh),
                "numpy": np.zeros((300, 200)),
            }
            md.checkpoint.load(state, tmp_path / "one")
            return [
                same(state["rows"], md.shard(rows, "f d@a", mesh)),
                bool((state["uneven"] == 1).all()),
                same(state["wide"], md.shard(wide, "f@a d", mesh)),
                np.array_equal(state["numpy"], wide.numpy().astype(np.float64)),
            ]

    md.simulate(save, 6)
    assert md.checkpoint.open(tmp_path / "one").shape("uneven") == (6, 4)
    assert md.simulate(load, 2) == [[True] * 4] * 2


def test_arrays_on_an_axis_of_the_mesh_in_force(tmp_path: Path) -> None:
    def program() -> bool:
        with mesh_of((2, 2)) as mesh:
            part_of_mesh = md.NamedSharding(mesh["b"], md.P("b"))
            x = md.zeros((4,), sharding=part_of_mesh) + 2.0
            md.checkpoint.save({"x": x}, tmp_path / "one")
            y = md.zeros((4,), sharding=part_of_mesh)
            md.checkpoint.load({"x": y}, tmp_path / "one")
            return bool((y.local == 2).all())

    assert md.simulate(program, 4) == [True] * 4
    assert md.checkpoint.open(tmp_path / "one").shape("x") == (4,)


def test_dtensors(tmp_path: Path) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = torch.arange(35.0).view(5, 7)

    def save() -> None:
        mesh = mesh_of((2, 2)).to_torch()
        md.checkpoint.save(
            {"w": distribute_tensor(whole, mesh, [Shard(0), Shard(1)])}, tmp_path / "one"
        )

    def load() -> bool:
        mesh = mesh_of((3,)).to_torch()
        x = distribute_tensor(torch.zeros(5, 7), mesh, [Shard(0)])
        md.checkpoint.load({"w": x}, tmp_path / "one")
        return same(x.redistribute(mesh, [Replicate()]).to_local(), whole)

    md.simulate(save, 4)
    assert md.simulate(load, 3) == [True] * 3


def test_dtensors_on_axes_of_the_named_mesh_make_no_other_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(35.0).view(5, 7)

    def never(*_: object) -> None:
        raise AssertionError("a mesh was made")

    def program() -> None:
        mesh = mesh_of((2, 2))
        x = distribute_tensor(whole, mesh.to_torch()["b"], [Shard(0)])
        md.checkpoint.save({"w": x}, tmp_path / "one", mesh=mesh)

    monkeypatch.setattr(md.DeviceMesh, "from_torch", staticmethod(never))
    md.simulate(program, 4)
    assert same(md.checkpoint.open(tmp_path / "one").read("w"), whole)


def test_only_and_missing(tmp_path: Path) -> None:
    md.checkpoint.save({"a": {"x": torch.ones(2), "y": torch.ones(3)}, "n": 1}, tmp_path / "one")
    state = {"a": {"x": torch.zeros(2), "y": torch.zeros(3)}, "n": 0, "other": torch.zeros(1)}
    md.checkpoint.load(state, tmp_path / "one", only="a.x")
    assert state["a"]["x"].tolist() == [1, 1] and state["a"]["y"].tolist() == [0, 0, 0]
    assert state["n"] == 0
    md.checkpoint.load(state, tmp_path / "one", only=["n", "other"], missing="keep")
    assert state["n"] == 1 and state["other"].tolist() == [0]
    md.checkpoint.load(state, tmp_path / "one", missing="keep")
    assert state["a"]["y"].tolist() == [1, 1, 1]


def test_read_with_a_sharding_sends_nothing(tmp_path: Path) -> None:
    whole = torch.arange(40.0).view(8, 5)
    md.checkpoint.save({"w": whole}, tmp_path / "one")

    def program() -> bool:
        with mesh_of((3,)):
            if md.get_rank() == 2:
                return True
            found = md.checkpoint.open(tmp_path / "one").read("w", md.P("a"))
            return found.shape == (8, 5) and same(found.local, part(whole, found.sharding))

    assert md.simulate(program, 3) == [True] * 3


def test_tuples_numbers_of_numpy_and_tied_arrays(tmp_path: Path) -> None:
    tied = torch.randn(300, 300)
    state = {
        "a": tied,
        "b": tied,
        "c": tied[1:],
        "betas": (0.9, 0.99),
        "n": np.float32(2.5),
        3: True,
    }
    md.checkpoint.save(state, tmp_path / "one")
    target = {
        "a": torch.zeros(300, 300),
        "b": torch.zeros(300, 300).t(),
        "c": torch.zeros(299, 300),
        "betas": (0, 0),
        "n": np.float32(0),
        3: False,
    }
    md.checkpoint.load(target, tmp_path / "one")
    assert same(target["a"], tied) and same(target["b"], tied) and same(target["c"], tied[1:])
    assert (target["betas"], target["n"], target[3]) == ((0.9, 0.99), np.float32(2.5), True)
    assert type(target["n"]) is np.float32
